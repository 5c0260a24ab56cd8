# SPDX-License-Identifier: Apache-2.0
"""The copier on a real ring: order, holding, loss, faults, and one report for each request."""

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmconn
from shmconn import directory
from shmconn.capture import CacheView, HostCapture
from shmconn.copier import Copier
from shmconn.hold import Hold
from shmconn.intake import Work
from shmconn.ring import Producer
from shmconn.subscription import Subscription
from shmconn.tally import Tally

LAYERS, HIDDEN, BLOCK, BLOCKS = 2, 64, 16, 32
# Tokens whose sample takes two of the ring's 64 KiB pages, so that a ring of twelve holds six.
TOKENS = 240


class Rig:
    """A ring, a cache full of distinct numbers, and a copier between them."""

    def __init__(self, name: str, **options: Any) -> None:
        pages = options.pop("pages", 12)
        on_full = options.pop("on_full", "hold")
        timeout = options.pop("no_reader_timeout_s", 60.0)
        self.producer = Producer.create(
            name,
            size=(pages + 6) << 16,
            layer_ids=[1, 2],
            hidden_size=HIDDEN,
            dtype="float32",
            slots=16,
            **options,
        )
        count = BLOCKS * BLOCK * LAYERS * HIDDEN
        cache = torch.arange(count, dtype=torch.float32).view(BLOCKS, LAYERS, BLOCK, HIDDEN)
        self.states = cache.transpose(1, 2)
        self.capture = HostCapture(CacheView(self.states))
        self.hold = Hold(self.producer, on_full=on_full, no_reader_timeout_s=timeout)
        self.tally = Tally()
        self.copier = Copier(self.producer, self.capture, self.hold, self.tally)
        self.done: Counter[str] = Counter()
        self.number = 0

    def work(self, tokens: int = TOKENS, reason: str | None = None) -> Work:
        self.number += 1
        blocks = [(self.number * 7 + index * 3) % BLOCKS for index in range(-(-tokens // BLOCK))]
        request = f"r{self.number}"
        if reason is not None:
            return Work(self.number, request, reason)
        return Work(self.number, request, None, True, list(range(tokens)), blocks)

    def expected(self, work: Work) -> torch.Tensor:
        return self.states[work.blocks].reshape(-1, LAYERS, HIDDEN)[: len(work.token_ids)]

    def submit(self, *work: Work) -> None:
        self.copier.submit(work)

    def poll(self) -> Counter[str]:
        self.done.update(self.copier.take_done())
        return self.done

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            self.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.done} {self.producer.stall_text()}")
            time.sleep(0.002)
        self.poll()

    def wait_done(self, *work: Work) -> None:
        self.wait(lambda: all(self.done[one.request_id] for one in work))

    def close(self) -> None:
        self.copier.close(0)
        self.producer.close()
        # What no test has read is kept for a reader that never comes.
        with contextlib.suppress(shmconn.RingMissing):
            for group in directory.groups(self.producer.name):
                if group.name:
                    directory.remove_group(self.producer.name, group.name)
            directory.remove_rings(self.producer.name, force=True)


@pytest.fixture
def name() -> Iterator[str]:
    ring = f"t-{secrets.token_hex(6)}"
    yield ring
    left = [path.name for path in Path("/dev/shm").glob(f"*shmconn.{ring}*")]
    assert left == []


@pytest.fixture
def make(name: str) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def build(**options: Any) -> Rig:
        rigs.append(Rig(name, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


@pytest.fixture
def reader(rig: Rig) -> Iterator[Subscription]:
    with shmconn.subscribe(rig.producer.name, "g", background=True) as subscription:
        yield subscription
        drain(subscription)


def drain(subscription: Subscription) -> list[str]:
    seen = []
    while (sample := subscription.next(timeout=0)) is not None:
        seen.append(sample.request_id)
        sample.release()
    return seen


def lost_reason(subscription: Subscription, work: Work) -> str:
    handle = shmconn.Handle.make(
        subscription.name,
        shmconn.rings(subscription.name)[0].generation,
        work.number,
        work.request_id,
    )
    with pytest.raises(shmconn.SampleLost) as caught:
        subscription.get(handle, timeout=10)
    return caught.value.reason


def test_requests_are_published_in_order_and_whole(rig: Rig, reader: Subscription) -> None:
    works = [rig.work(tokens) for tokens in (1, 16, 17, 240)]
    works[2].tag, works[2].metadata = "a/../b", {"prompt_tokens": 17}
    rig.submit(*works)
    rig.wait_done(*works)
    for work in works:
        sample = reader.next(timeout=10)
        assert sample is not None and sample.request_id == work.request_id
        assert sample.tag == work.tag and sample.metadata == work.metadata
        assert torch.equal(sample.hidden_states, rig.expected(work))
        assert sample.token_ids.tolist() == work.token_ids
        sample.release()
    assert rig.done == Counter({work.request_id: 1 for work in works})
    assert rig.producer.accepted == rig.producer.settled == 4


def test_each_number_is_taken_once_in_whatever_order_they_come(
    rig: Rig, reader: Subscription
) -> None:
    works = [rig.work(16) for _ in range(6)]
    rig.submit(*works[3:])
    rig.wait_done(*works[3:])
    assert rig.producer.settled == 0 and rig.producer.accepted == 6
    rig.submit(*reversed(works))
    rig.wait_done(*works)
    assert rig.producer.settled == rig.producer.accepted == rig.producer.published == 6
    assert rig.done == Counter({work.request_id: 1 for work in works})


def test_blocks_are_given_back_only_when_the_sample_is_published(
    rig: Rig, reader: Subscription
) -> None:
    published_at_report: dict[str, int] = {}
    works = [rig.work() for _ in range(6)]
    rig.submit(*works)

    def all_done() -> bool:
        for request in rig.copier.take_done():
            rig.done[request] += 1
            published_at_report[request] = rig.producer.published
        return len(rig.done) == 6

    rig.wait(all_done)
    assert all(published_at_report[work.request_id] >= work.number for work in works)


def test_a_request_without_a_sample_leaves_a_tombstone_and_owes_no_report(
    rig: Rig, reader: Subscription
) -> None:
    works = [rig.work(reason="aborted"), rig.work(reason="short"), rig.work()]
    rig.submit(*works)
    rig.wait_done(works[2])
    assert [lost_reason(reader, work) for work in works[:2]] == ["aborted", "short"]
    assert set(rig.done) == {works[2].request_id}


def test_a_full_ring_holds_and_resumes_in_order_and_loses_nothing(
    rig: Rig, reader: Subscription
) -> None:
    works = [rig.work() for _ in range(20)]
    rig.submit(*works)
    rig.wait_done(*works[:6])
    rig.wait(lambda: rig.hold.since is not None)
    assert set(rig.done) == {work.request_id for work in works[:6]}
    assert shmconn.rings(rig.producer.name)[0].held_since_ns > 0
    for work in works:
        sample = reader.next(timeout=30)
        assert sample is not None and sample.request_id == work.request_id
        assert torch.equal(sample.hidden_states, rig.expected(work))
        sample.release()
    rig.wait_done(*works)
    assert set(rig.done.values()) == {1}
    assert rig.producer.published == 20 and sum(rig.producer.lost.values()) == 0
    rig.wait(lambda: rig.hold.since is None)
    assert shmconn.rings(rig.producer.name)[0].held_since_ns == 0


def test_an_abort_behind_a_held_request_fails_its_handle_at_once(
    rig: Rig, reader: Subscription
) -> None:
    held = [rig.work() for _ in range(8)]
    rig.submit(*held)
    rig.wait_done(*held[:6])
    rig.wait(lambda: rig.hold.since is not None)
    aborted = rig.work(reason="aborted")
    rig.submit(aborted)
    assert lost_reason(reader, aborted) == "aborted"
    assert len(rig.poll()) == 6


def test_without_a_live_reader_held_requests_are_lost_and_the_engine_gets_its_blocks(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(no_reader_timeout_s=0.2, groups=["gone"])
    works = [rig.work() for _ in range(9)]
    rig.submit(*works)
    rig.wait_done(*works)
    assert set(rig.done.values()) == {1}
    assert rig.producer.published == 6 and rig.producer.lost["no_reader"] == 3
    assert "'gone' needs 6 samples and has no live member" in caplog.text
    assert caplog.text.count("is lost") == 1
    with shmconn.subscribe(rig.producer.name, "gone") as reader:
        assert drain(reader) == [work.request_id for work in works[:6]]
        assert lost_reason(reader, works[8]) == "no_reader"


def test_the_tombstone_of_a_request_without_a_reader_names_the_groups_to_blame(
    make: Callable[..., Rig],
) -> None:
    rig = make(no_reader_timeout_s=0, groups=["gone"])
    works = [rig.work() for _ in range(7)]
    rig.submit(*works)
    rig.wait_done(*works)
    with shmconn.subscribe(rig.producer.name, "gone") as reader:
        handle = shmconn.Handle.make(rig.producer.name, rig.producer.generation, 7, "r7")
        with pytest.raises(shmconn.SampleLost, match="gone"):
            reader.get(handle, timeout=10)
        drain(reader)


def test_drop_loses_what_does_not_fit_at_once(make: Callable[..., Rig]) -> None:
    rig = make(on_full="drop")
    works = [rig.work() for _ in range(9)]
    rig.submit(*works)
    rig.wait_done(*works)
    assert rig.producer.published == 6 and rig.producer.lost["dropped"] == 3


def test_a_request_larger_than_a_third_of_the_ring_is_lost_as_oversized(
    rig: Rig, reader: Subscription, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = rig.work(BLOCK * BLOCKS), rig.work()
    large.blocks = list(range(BLOCKS))
    rig.submit(large, small)
    rig.wait_done(large, small)
    assert lost_reason(reader, large) == "oversized"
    assert "make the ring larger (ring_size)" in caplog.text


def test_a_number_that_comes_twice_is_settled_once(rig: Rig, reader: Subscription) -> None:
    works = [rig.work(), rig.work()]
    rig.submit(*works)
    rig.submit(*works)
    last = rig.work()
    rig.submit(last)
    rig.wait_done(last)
    assert rig.producer.published == 3 and set(rig.done.values()) == {1}


def boom(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


PLACES = ["allocate", "copy", "publish", "mark", "accept"]


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_costs_one_sample_and_the_next_one_is_whole(
    make: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    rig = make()
    owner = rig.capture if place in ("copy", "mark") else rig.producer
    with shmconn.subscribe(rig.producer.name, "g", background=True) as reader:
        bad, good = rig.work(), rig.work()
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, boom)
            rig.submit(bad)
            rig.wait_done(bad)
        rig.submit(good)
        rig.wait_done(good)
        sample = reader.next(timeout=10)
        assert sample is not None and sample.request_id == good.request_id
        assert torch.equal(sample.hidden_states, rig.expected(good))
        sample.release()
        assert lost_reason(reader, bad) == "fault"
    assert set(rig.done.values()) == {1}
    assert rig.producer.settled == 2
    assert "planted" in caplog.text


@pytest.mark.parametrize("place", ["published", "state", "lost", "waited"])
def test_a_fault_in_the_counts_costs_neither_sample_nor_report(
    rig: Rig, reader: Subscription, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(rig.tally, place, boom)
    works = [rig.work(), rig.work(reason="aborted"), rig.work()]
    rig.submit(*works)
    rig.wait_done(works[0], works[2])
    assert set(rig.done.values()) == {1}
    rig.wait(lambda: rig.producer.settled == 3)
    lost = rig.producer.lost
    assert rig.producer.published == 2 and (lost["aborted"], lost["fault"]) == (1, 0)


def test_a_fault_after_publishing_leaves_the_sample_to_its_readers(
    rig: Rig, reader: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rig.producer.publish

    def publish(fill: Any, **options: Any) -> None:
        real(fill)
        boom()

    first, second = rig.work(), rig.work()
    with monkeypatch.context() as patch:
        patch.setattr(rig.producer, "publish", publish)
        rig.submit(first)
        rig.wait_done(first)
    rig.submit(second)
    rig.wait_done(second)
    for work in (first, second):
        sample = reader.next(timeout=10)
        assert sample is not None
        assert torch.equal(sample.hidden_states, rig.expected(work))
        sample.release()
    assert sum(rig.producer.lost.values()) == 0


def test_a_fault_beside_the_counts_does_not_bury_what_was_published(
    rig: Rig, reader: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = rig.work()
    with monkeypatch.context() as patch:
        patch.setattr(rig.copier, "_count", boom)
        rig.submit(work)
        rig.wait_done(work)
    assert (rig.producer.published, rig.producer.settled) == (1, 1)
    assert sum(rig.producer.lost.values()) == 0 and rig.done == Counter({work.request_id: 1})


def test_a_fault_in_a_tombstone_costs_no_report(
    rig: Rig, reader: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.producer, "bury", boom)
        patch.setattr(rig.producer, "allocate", boom)
        work = rig.work()
        rig.submit(work)
        rig.wait_done(work)
    assert rig.done == Counter({work.request_id: 1})


@pytest.mark.parametrize("after", [False, True])
def test_a_tombstone_that_failed_once_is_written_once(
    rig: Rig, reader: Subscription, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    real = rig.producer.bury
    calls = 0

    def bury(*values: Any) -> None:
        nonlocal calls
        calls += 1
        if after or calls > 1:
            real(*values)
        if calls == 1:
            boom()

    monkeypatch.setattr(rig.producer, "bury", bury)
    rig.submit(rig.work(reason="aborted"))
    rig.wait(lambda: rig.producer.settled == 1)
    assert rig.producer.lost["aborted"] == 1 and calls == (1 if after else 2)


def test_a_shutdown_publishes_what_still_fits_and_buries_the_rest(
    rig: Rig, reader: Subscription
) -> None:
    works = [rig.work() for _ in range(9)]
    rig.submit(*works)
    rig.copier.close(0.2)
    rig.poll()
    assert rig.done == Counter({work.request_id: 1 for work in works})
    assert rig.producer.published == 6 and rig.producer.lost["shutdown"] == 3
    assert rig.producer.accepted == rig.producer.published + sum(rig.producer.lost.values())
    assert lost_reason(reader, works[8]) == "shutdown"
    rig.producer.close()


def test_a_shutdown_waits_its_grace_for_a_reader(rig: Rig, reader: Subscription) -> None:
    works = [rig.work() for _ in range(9)]
    rig.submit(*works)
    rig.wait_done(*works[:6])
    samples = [reader.next(timeout=10) for _ in range(6)]
    import threading

    def release() -> None:
        for sample in samples:
            assert sample is not None
            sample.release()

    timer = threading.Timer(0.3, release)
    timer.start()
    rig.copier.close(60)
    timer.join()
    rig.poll()
    assert rig.producer.published == 9
    assert rig.done == Counter({work.request_id: 1 for work in works})


def test_after_a_shutdown_blocks_are_given_back_at_once(rig: Rig) -> None:
    rig.copier.close(0)
    late = rig.work()
    rig.submit(late)
    assert rig.poll() == Counter({late.request_id: 1})
    rig.copier.close(0)


def test_the_counts_say_what_happened(rig: Rig, reader: Subscription) -> None:
    assert rig.tally.drain() is None
    works = [rig.work() for _ in range(7)] + [rig.work(reason="aborted")]
    rig.submit(*works)
    rig.wait_done(*works[:6])
    rig.wait(lambda: rig.hold.since is not None and rig.producer.lost["aborted"] == 1)
    time.sleep(0.2)
    data = rig.tally.drain()
    assert data is not None
    nbytes = TOKENS * LAYERS * HIDDEN * 4
    assert (data["samples"], data["bytes"], data["held"]) == (6, 6 * nbytes, 1)
    assert data["lost"] == {"aborted": 1} and len(data["copy_s"]) == 6
    assert data["oldest_held_s"] > 0 and data["ring_fill"] > 0.9 and data["hold_s"] == []
    assert rig.tally.drain() is not None, "the age of what is held moves on"
    drain(reader)
    rig.wait_done(works[6])
    rig.wait(lambda: rig.hold.since is None)
    later = [one for one in iter(rig.tally.drain, None)]
    assert len(later[-1]["hold_s"]) == 1 or any(one["hold_s"] for one in later)
    assert later[-1]["held"] == 0


def test_a_sample_that_no_handle_asked_for_is_released_and_counted(
    make: Callable[..., Rig],
) -> None:
    rig = make(unclaimed_ttl_s=0.05, groups=[{"name": "probe", "by_handle": True}])
    work = rig.work()
    rig.submit(work)
    rig.wait_done(work)
    rig.wait(lambda: rig.producer.free_slots == rig.producer.shape.slots)
    with shmconn.subscribe(rig.producer.name, "probe", by_handle=True) as reader:
        assert lost_reason(reader, work) == "expired"
    data = rig.tally.drain()
    assert data is not None and data["lost"] == {"expired": 1}


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_settles_each_number_once(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    import random
    import threading

    rng = random.Random(seed)
    rig = make()
    real = rig.capture.copy

    def copy(fill: Any, blocks: Any, ready: Any) -> None:
        if fill.number % 11 == 0:
            boom()
        real(fill, blocks, ready)

    monkeypatch.setattr(rig.capture, "copy", copy)
    seen: dict[str, torch.Tensor] = {}
    stop = threading.Event()
    with shmconn.subscribe(rig.producer.name, "g", background=True) as reader:

        def read() -> None:
            while not stop.is_set() or reader.unread():
                sample = reader.next(timeout=0.05)
                if sample is not None:
                    seen[sample.request_id] = sample.hidden_states.clone()
                    sample.release()
                    time.sleep(rng.choice([0, 0, 0.003]))

        thread = threading.Thread(target=read)
        thread.start()
        works = []
        for _ in range(120):
            reason = rng.choice([None] * 8 + ["aborted", "short"])
            tokens = rng.choice([1, 17, 100, TOKENS, BLOCK * BLOCKS])
            works.append(rig.work(tokens, reason))
            rig.submit(works[-1])
        owed = [work for work in works if work.report]
        rig.wait_done(*owed)
        rig.wait(lambda: rig.producer.settled == len(works))
        stop.set()
        thread.join()
    assert rig.done == Counter({work.request_id: 1 for work in owed})
    lost = rig.producer.lost
    assert rig.producer.published + sum(lost.values()) == len(works)
    assert lost["fault"] and lost["oversized"] and lost["aborted"]
    assert len(seen) == rig.producer.published
    for work in works:
        if work.request_id in seen:
            assert torch.equal(seen[work.request_id], rig.expected(work))


def test_a_request_that_comes_with_the_close_is_still_published(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, may_go = threading.Event(), threading.Event()
    tick = rig.copier._tick

    def slow_tick() -> None:
        # The inbox was empty; the copier has not asked yet whether it is closed.
        tick()
        looked.set()
        may_go.wait(10)

    first = rig.work()
    rig.submit(first)
    rig.wait(lambda: rig.done[first.request_id] == 1)
    monkeypatch.setattr(rig.copier, "_tick", slow_tick)
    assert looked.wait(10)
    last = rig.work()
    rig.submit(last)
    threading.Timer(0.1, may_go.set).start()
    rig.copier.close(5.0)
    assert rig.producer.published == 2
    assert rig.poll()[last.request_id] == 1
