# SPDX-License-Identifier: Apache-2.0
"""Row 19: clocks that jump, and clocks that differ between processes."""

import re
import time

import pytest
import torch
from crash.survivors import SLOTS, Reader, create
from harness import figures, payload
from harness.processes import Shared

from places.namespaces import ended, in_time_namespace, reached, until
from reader.show import age
from shmconn.directory import groups, remove_group
from shmconn.errors import SampleLost
from shmconn.subscription import subscribe

YEAR_S = 365 * 86400
_time, _time_ns = time.time, time.time_ns


class Wall:
    """The wall clock of this process, that can be set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0
        patch.setattr(time, "time", lambda: _time() + self.offset_s)
        patch.setattr(time, "time_ns", lambda: _time_ns() + self.offset_s * 10**9)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


@pytest.mark.parametrize("jump", (-YEAR_S, YEAR_S), ids=("back", "ahead"))
def test_a_jump_of_the_wall_clock_lets_nothing_expire_and_nothing_stay(
    ring: str, wall: Wall, jump: int
) -> None:
    ttl_s = 0.3
    producer = create(ring, ({"name": "probe", "by_handle": True},), ttl_s=ttl_s)
    with subscribe(ring, "probe", by_handle=True) as subscription:
        early = late = 0
        for _ in range(4):
            began = time.monotonic()
            handle = payload.put(producer)
            assert handle is not None
            wall.offset_s += jump
            # Ages are of the monotonic clock: not before its time, in spite of a year.
            if producer.expire() and time.monotonic() - began < ttl_s:
                early += 1
            producer.reclaim()
            assert re.search(r" is \d s old", producer.stall_text()), producer.stall_text()
            give_up = time.monotonic() + 20
            while not producer.expire():
                if time.monotonic() > give_up:
                    late += 1
                    break
                time.sleep(0.01)
            with pytest.raises(SampleLost, match="expired|nobody asked"):
                subscription.get(handle, timeout=5)
            wall.offset_s -= jump // 2
        producer.close()
    figures.record(
        "19",
        "samples under jumps of the wall clock by a year",
        trials=4,
        exercised=4,
        failures=early + late,
        expired_early=early,
        never_expired=late,
    )
    assert (early, late) == (0, 0)


@pytest.mark.parametrize("jump", (-YEAR_S, YEAR_S), ids=("back", "ahead"))
def test_waits_end_in_their_time_while_the_wall_clock_jumps(
    ring: str, wall: Wall, jump: int
) -> None:
    problems: list[str] = []
    producer = create(ring, ("group",))
    reader = Reader(subscribe(ring, "group"), problems)
    for number in range(50):
        wall.offset_s += jump if number % 2 else -jump // 3
        began = time.monotonic()
        assert reader.subscription.next(0.02) is None
        # A jump ahead must not end a wait before its time.
        assert time.monotonic() - began >= 0.02
        payload.put(producer)
        reader.read_until("a sample", lambda: not reader.subscription.unread())
        assert len(reader.got[producer.generation]) == number + 1
    while payload.put(producer):
        pass
    wall.offset_s += jump
    with pytest.raises(TimeoutError, match="no room within 0.05 s"):
        producer.put(torch.zeros(1, 1, payload.HIDDEN), [1], request_id="x", timeout=0.05)
    producer.close()
    reader.read_until("the end", lambda: reader.over)
    reader.subscription.close()
    assert problems == []


def test_ages_that_people_see_are_never_negative(ring: str, wall: Wall) -> None:
    producer = create(ring, ("group",))
    payload.put(producer)
    wall.offset_s = -YEAR_S
    (group,) = groups(ring)
    assert age(group.oldest_ns) == "0 s"
    producer.close()
    remove_group(ring, "group")


def exchange(name: str, samples: int, shared: Shared) -> None:
    """Reads everything of a producer whose clocks are elsewhere."""
    problems: list[str] = []
    reader = Reader(subscribe(name, "group", wait_s=60), problems)
    shared.words[1] = int(time.monotonic())
    reader.read_until("the end", lambda: reader.over)
    shared.words[0] = sum(map(len, reader.got.values()))
    reader.subscription.close()
    assert problems == [] and shared.words[0] == samples


@pytest.mark.usefixtures("time_namespace")
def test_processes_whose_monotonic_clocks_differ_read_each_other(ring: str) -> None:
    ahead_s = 100_000
    producer = create(ring, ("group",))
    reader = in_time_namespace(ahead_s, exchange, ring, 200)
    with ended(reader):
        for _ in range(200):
            until(lambda: payload.put(producer), "room", reader)
        shift = reader.shared.words[1] - time.monotonic()
        producer.close()
        reader.finish()
    assert abs(shift - ahead_s) < 100, "its clock was not ahead"
    figures.record(
        "19",
        "samples to a reader whose monotonic clock is 100,000 s ahead",
        trials=200,
        exercised=200,
        failures=0,
    )


def put_and_wait(name: str, ttl_s: float, shared: Shared) -> None:
    """A producer whose clocks are ahead, with samples that expire by them."""
    with create(name, ({"name": "probe", "by_handle": True},), ttl_s=ttl_s) as producer:
        for _ in range(SLOTS):
            payload.put(producer)
        shared.words[1] = producer.expire()
        shared.words[0] = 1
        until(lambda: shared.words[2], "the word to go on")
        expired = 0

        def all_gone() -> bool:
            # Those put a moment later expire a moment later.
            nonlocal expired
            expired += producer.expire()
            producer.reclaim()
            return not producer._slots.stored

        until(all_gone, "expiry")
        shared.words[3] = expired


@pytest.mark.usefixtures("time_namespace")
def test_what_nobody_asks_for_expires_by_the_producers_own_clock(ring: str) -> None:
    producer = in_time_namespace(100_000, put_and_wait, ring, 0.5)
    with ended(producer):
        reached(producer, 1, "samples")
        assert producer.shared.words[1] == 0
        producer.shared.words[2] = 1
        producer.finish()
    assert producer.shared.words[3] == SLOTS
    remove_group(ring, "probe")
