# SPDX-License-Identifier: Apache-2.0
"""The writers of one output, on a real ring, with sinks that do what a test wants."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import shmconn
from reader.lane import MAX_HELD, Lane, Limits
from reader.sinks import Stored
from shmconn.errors import ShmConnError

TOKENS = 10
STATES = TOKENS * 2 * 8 * 4  # bytes


class Sink:
    """Stores nothing; asks ``act`` about each sample first."""

    path = "nowhere"

    def __init__(self, act: Callable[[shmconn.Sample], None]) -> None:
        self._act = act
        self.stored: list[int] = []

    def write(self, sample: shmconn.Sample) -> Stored:
        self._act(sample)
        self.stored.append(sample.number)
        return Stored(f"f{sample.number}", sample.nbytes, fresh=True, new_file=True)

    def close(self) -> None:
        pass


@pytest.fixture
def producer() -> Iterator[shmconn.Producer]:
    made = shmconn.Producer.create(
        f"test-{secrets.token_hex(4)}",
        size="8MiB",
        layer_ids=[1, 2],
        hidden_size=8,
        dtype="float32",
    )
    yield made
    made.close()


@pytest.fixture
def subscription(producer: shmconn.Producer) -> Iterator[shmconn.Subscription]:
    with shmconn.subscribe(producer.name, group="g") as joined:
        yield joined


def put(producer: shmconn.Producer, count: int) -> None:
    for _ in range(count):
        producer.put(torch.zeros(TOKENS, 2, 8), torch.arange(TOKENS), request_id="r", timeout=30)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sample_is_released_only_after_the_sink_has_it(producer, subscription) -> None:
    go = threading.Event()
    lane = Lane(subscription, Sink(lambda sample: go.wait(60) and None), writers=1)
    put(producer, 1)
    lane.start()
    until(lambda: subscription.leases == 1)
    assert len(lane.unreleased()) == 1
    go.set()
    until(lambda: subscription.leases == 0)
    assert lane.unreleased() == []
    lane.stop()
    assert lane.join(60)


def test_a_rate_is_kept_by_waiting_before_the_next_sample(producer, subscription) -> None:
    now = [100.0]
    sink = Sink(lambda sample: None)
    limits = Limits(rate=STATES)  # one sample a second
    lane = Lane(subscription, sink, writers=3, limits=limits, clock=lambda: now[0])
    put(producer, 4)
    lane.start()
    for seconds in (0, 1, 2):
        until(lambda want=seconds + 1: len(sink.stored) == want)
        assert subscription.unread() == 3 - seconds
        now[0] += 1
    lane.stop()
    assert lane.join(60)


def test_a_sample_that_the_format_cannot_hold_ends_the_lane_and_is_kept(
    producer, subscription
) -> None:
    def refuse(sample: shmconn.Sample) -> None:
        raise ShmConnError(f"no loss mask for {sample.request_id}")

    lane = Lane(subscription, Sink(refuse), writers=1)
    put(producer, 2)
    lane.start()
    assert lane.join(60)
    assert lane.error == "no loss mask for r"
    assert len(lane.unreleased()) == 1
    assert subscription.leases == 1


def test_a_fault_of_a_sink_ends_the_lane_with_its_name(producer, subscription, caplog) -> None:
    def fail(sample: shmconn.Sample) -> None:
        raise RuntimeError("boom")

    lane = Lane(subscription, Sink(fail), writers=2)
    put(producer, 1)
    lane.start()
    assert lane.join(60)
    assert lane.error == "RuntimeError: boom"
    assert "a writer for nowhere failed" in caplog.text


def test_refused_samples_are_held_up_to_a_bound_and_the_rest_stays_in_the_ring(
    producer, subscription
) -> None:
    broken = [True]

    def refuse(sample: shmconn.Sample) -> None:
        if broken[0]:
            raise OSError(28, "No space left on device")

    sink = Sink(refuse)
    lane = Lane(subscription, sink, writers=2)
    put(producer, MAX_HELD + 5)
    lane.start()
    until(lambda: lane.held >= MAX_HELD)
    assert subscription.leases <= MAX_HELD + 2
    broken[0] = False
    until(lambda: len(sink.stored) == MAX_HELD + 5)
    assert lane.counts.refused >= MAX_HELD
    lane.stop()
    assert lane.join(60)


def test_giving_up_keeps_every_lease(producer, subscription) -> None:
    def refuse(sample: shmconn.Sample) -> None:
        raise OSError(28, "No space left on device")

    lane = Lane(subscription, Sink(refuse), writers=2, limits=Limits(give_up_s=0))
    put(producer, 1)
    lane.start()
    assert lane.join(60)
    assert lane.gave_up
    assert len(lane.unreleased()) == subscription.leases == 1


def test_bytes_are_limited_to_the_sample_that_crosses_the_line(producer, subscription) -> None:
    sink = Sink(lambda sample: None)
    lane = Lane(subscription, sink, writers=2, limits=Limits(bytes=STATES + 1))
    put(producer, 5)
    lane.start()
    assert lane.join(60)
    assert lane.limited
    assert len(sink.stored) == 2
