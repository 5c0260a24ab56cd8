# SPDX-License-Identifier: Apache-2.0
"""asyncio: awaited samples are the right ones, nobody spins, and cancelling loses nothing."""

import asyncio
import gc
import random
import threading
from collections.abc import Callable

import pytest
from trainer_tools import check, give_up, ids, put, states, until

import shmconn
from shmconn import NotReady, OptionError, Producer, SampleLost, aio, subscribe


def test_iteration_gets_all_samples_and_ends(make: Callable[..., Producer]) -> None:
    producer = make(size="16MiB", groups=["g"])

    async def run() -> list[str]:
        seen = []
        with subscribe(producer.name, "g") as subscription:
            for number in range(20):
                put(producer, number)
            asyncio.get_running_loop().call_later(0.05, producer.close)
            async for sample in aio.aiter(subscription):
                seen.append(sample.request_id)
        return seen

    assert asyncio.run(run()) == [f"r{number}" for number in range(20)]


def test_several_tasks_share_the_samples(make: Callable[..., Producer]) -> None:
    producer = make(size="16MiB", groups=["g"])

    async def run() -> list[str]:
        with subscribe(producer.name, "g") as subscription:

            async def read() -> list[str]:
                return [sample.request_id async for sample in aio.aiter(subscription)]

            tasks = [asyncio.create_task(read()) for _ in range(4)]
            for number in range(60):
                put(producer, number)
                await asyncio.sleep(0)
            producer.close()
            return sum(await asyncio.gather(*tasks), [])

    assert sorted(asyncio.run(run())) == sorted(f"r{number}" for number in range(60))


def test_many_tasks_wait_for_their_own_sample_in_one_thread(
    make: Callable[..., Producer],
) -> None:
    producer = make(size="16MiB", groups=[{"name": "g", "by_handle": True}])
    count = 100
    handles = [
        shmconn.Handle.make(producer.name, producer.generation, number + 1, f"r{number}")
        for number in range(count)
    ]

    async def run() -> int:
        with subscribe(producer.name, "g", by_handle=True) as subscription:

            async def one(number: int) -> None:
                check(await aio.aget(subscription, str(handles[number]), timeout=60), number)

            tasks = [asyncio.create_task(one(number)) for number in range(count)]
            random.Random(1).shuffle(tasks)
            await asyncio.sleep(0.05)
            threads = sum(t.name == "shmconn-aio" for t in threading.enumerate())
            for number in range(count):
                put(producer, number)
            await asyncio.gather(*tasks)
            return threads

    assert asyncio.run(run()) == 1


def test_waiting_looks_ten_times_a_second_and_does_not_spin(
    make: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    looks = 0
    try_next = shmconn.Subscription._try_next

    def counted(subscription: shmconn.Subscription) -> shmconn.Sample | None:
        nonlocal looks
        looks += 1
        return try_next(subscription)

    monkeypatch.setattr(shmconn.Subscription, "_try_next", counted)

    async def run() -> None:
        with subscribe(producer.name, "g") as subscription:
            waiting = [asyncio.create_task(aio.anext(subscription, 1.0)) for _ in range(5)]
            assert await asyncio.gather(*waiting) == [None] * 5

    asyncio.run(run())
    # 5 tasks x 10 looks, and some for their beginnings and ends; a spin makes thousands.
    assert looks < 150


def test_the_loop_goes_on_while_a_task_waits(make: Callable[..., Producer]) -> None:
    producer = make()

    async def run() -> int:
        ticks = 0
        with subscribe(producer.name, "g") as subscription:
            task = asyncio.create_task(aio.anext(subscription))
            while ticks < 20:
                await asyncio.sleep(0.001)
                ticks += 1
            put(producer, 1)
            sample = await task
            assert sample is not None
            check(sample, 1)
            del sample, task
        return ticks

    assert asyncio.run(run()) == 20


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_at_any_moment_loses_no_sample(make: Callable[..., Producer], seed: int) -> None:
    producer = make(size="16MiB", groups=["g"])
    rng = random.Random(seed)
    count = 150

    async def run() -> list[str]:
        seen: list[str] = []
        with subscribe(producer.name, "g") as subscription:
            sender = threading.Thread(target=lambda: [put(producer, n) for n in range(count)])
            sender.start()
            cancelled = 0
            while len(seen) < count:
                task = asyncio.create_task(aio.anext(subscription, 30))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() / 500)
                task.cancel()
                try:
                    sample = await task
                    assert sample is not None
                    seen.append(sample.request_id)
                    del sample
                except asyncio.CancelledError:
                    cancelled += 1
                    if cancelled % 10 == 0:
                        taken = await aio.anext(subscription, 30)
                        assert taken is not None
                        seen.append(taken.request_id)
                        del taken
                del task
            sender.join()
            assert cancelled > 20
            assert subscription.next(timeout=0) is None
        return seen

    assert sorted(asyncio.run(run())) == sorted(f"r{number}" for number in range(count))
    producer.close()


def test_a_timeout_of_the_task_gives_back_what_comes_later(
    make: Callable[..., Producer],
) -> None:
    producer = make(size="16MiB", groups=["g"])

    async def run() -> None:
        with subscribe(producer.name, "g") as subscription:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(aio.anext(subscription), 0.05)
            put(producer, 1)
            check(await aio.anext(subscription, 30), 1)

    asyncio.run(run())


def test_a_loop_that_was_closed_gives_back_what_was_claimed_for_it(
    make: Callable[..., Producer],
) -> None:
    producer = make(size="16MiB", groups=["g"])
    with subscribe(producer.name, "g") as subscription:

        async def start() -> "asyncio.Task[object]":
            return asyncio.create_task(aio.anext(subscription))

        asyncio.run(start())
        put(producer, 1)
        sample = subscription.next(timeout=30)
        check(sample, 1)
        del sample


def test_errors_say_what_get_and_next_say(make: Callable[..., Producer]) -> None:
    producer = make(groups=["g", {"name": "h", "by_handle": True}])

    async def run() -> None:
        with subscribe(producer.name, "h", by_handle=True) as subscription:
            with pytest.raises(OptionError, match="by handle: use aget"):
                await aio.anext(subscription)
            with pytest.raises(OptionError, match="is not a handle"):
                await aio.aget(subscription, "nonsense")
            other = shmconn.Handle.make("other", producer.generation, 1, "r")
            with pytest.raises(OptionError, match="of ring 'other'"):
                await aio.aget(subscription, other)
            wanted = shmconn.Handle.make(producer.name, producer.generation, 1, "r1")
            with pytest.raises(NotReady, match=r"did not come within 0\.05 s, vLLM has not"):
                await aio.aget(subscription, wanted, timeout=0.05)
            producer.accept(1)
            producer.bury(1, "r1", "short")
            with pytest.raises(SampleLost, match="short"):
                await aio.aget(subscription, wanted, timeout=30)
            waiting = asyncio.create_task(
                aio.aget(subscription, wanted._replace(number=2), timeout=30)
            )
            await asyncio.sleep(0.01)
            subscription.close()
            with pytest.raises(shmconn.Closed):
                await waiting

    asyncio.run(run())
    producer.close()
    give_up(producer.name)


def test_a_death_ends_iteration_as_it_ends_the_subscription(ring_name: str) -> None:
    async def run() -> list[str]:
        seen = []
        with subscribe(ring_name, "g", wait_s=60) as subscription:
            producer = Producer.create(
                ring_name, size="1MiB", layer_ids=[2, 18, 30], hidden_size=8, dtype="float32"
            )
            for number in range(3):
                producer.put(states(number), ids(number), request_id=f"r{number}")
            del producer
            with pytest.raises(shmconn.ProducerDied):
                async for sample in aio.aiter(subscription):
                    seen.append(sample.request_id)
                    del sample
        return seen

    assert asyncio.run(run()) == ["r0", "r1", "r2"]


class Stopped:
    """A loop in which one task waits for a sample, and which is stopped at a chosen moment."""

    def __init__(self, subscription: shmconn.Subscription) -> None:
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(aio.anext(subscription))
        # What the loop says of tasks that it drops is what this is about.
        self.task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.run_once()

    def run_once(self) -> None:
        """One turn: what is ready runs, and what it makes ready does not."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def drop(self) -> None:
        """The loop ends without another turn."""
        self.loop.close()
        del self.loop, self.task
        gc.collect()


@pytest.mark.parametrize("turns", (0, 1), ids=("before the callback", "before the task's turn"))
def test_a_sample_for_a_loop_that_was_stopped_for_good_is_given_back(
    make: Callable[..., Producer], turns: int
) -> None:
    producer = make()
    with subscribe(producer.name, "g") as subscription:
        stopped = Stopped(subscription)
        put(producer, 1)
        until(lambda: subscription.leases == 1, "the claim")
        until(lambda: not any(t.name == "shmconn-aio" for t in threading.enumerate()), "its end")
        for _ in range(turns):
            stopped.run_once()
        assert not stopped.task.done() and subscription.leases == 1
        stopped.drop()
        assert subscription.leases == 0
        sample = subscription.next(5)
        check(sample, 1)
        del sample


def test_a_loop_that_is_stopped_and_runs_on_gets_its_sample(make: Callable[..., Producer]) -> None:
    producer = make()
    with subscribe(producer.name, "g") as subscription:
        stopped = Stopped(subscription)
        put(producer, 1)
        until(lambda: subscription.leases == 1, "the claim")
        gc.collect()
        sample = stopped.loop.run_until_complete(stopped.task)
        check(sample, 1)
        assert subscription.leases == 1
        del sample
        stopped.drop()
        assert subscription.leases == 0 and subscription.next(0) is None
