# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for room, and what is said meanwhile."""

import logging

import pytest

from shmconn.hold import FIRST_GAP_S, LONGEST_GAP_S, Hold, Throttle


class Ring:
    """A ring that does what a test says."""

    def __init__(self) -> None:
        self.published = 10
        self.free_slots = 0
        self.live = False

    def can_progress(self) -> bool:
        return self.live

    def stall_text(self) -> str:
        return "ring 'r' is full"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(ring: Ring, clock: Clock, on_full: str = "hold", timeout: float = 60.0) -> Hold:
    return Hold(ring, on_full=on_full, no_reader_timeout_s=timeout, clock=clock)


def test_a_live_reader_is_waited_for_without_limit(ring: Ring, clock: Clock) -> None:
    hold = make(ring, clock)
    ring.live = True
    for _ in range(1000):
        assert hold.full(1) is None
        clock.now += 3600
    assert hold.settled() == pytest.approx(1000 * 3600)


def test_without_a_live_reader_a_request_is_lost_when_the_timer_is_over(
    ring: Ring, clock: Clock
) -> None:
    hold = make(ring, clock)
    assert hold.full(1) is None
    clock.now += 59.9
    assert hold.full(1) is None
    clock.now += 0.1
    assert hold.full(1) == "no_reader"


def test_once_the_timer_is_over_every_further_request_is_lost_at_once(
    ring: Ring, clock: Clock
) -> None:
    hold = make(ring, clock)
    hold.full(1)
    clock.now += 60
    assert hold.full(1) == "no_reader"
    hold.settled()
    hold.drained()
    clock.now += 1000
    assert hold.full(1) == "no_reader"


def test_a_slot_that_comes_free_starts_the_timer_anew(ring: Ring, clock: Clock) -> None:
    hold = make(ring, clock)
    hold.full(1)
    clock.now += 60
    assert hold.full(1) == "no_reader"
    hold.settled()
    # One was released, and taken again by a sample that fitted.
    ring.published += 1
    assert hold.full(1) is None
    clock.now += 60
    assert hold.full(1) == "no_reader"


def test_a_sample_that_takes_a_spare_slot_does_not_start_the_timer_anew(
    ring: Ring, clock: Clock
) -> None:
    ring.free_slots = 1
    hold = make(ring, clock)
    hold.full(1)
    clock.now += 60
    assert hold.full(1) == "no_reader"
    hold.settled()
    ring.published, ring.free_slots = ring.published + 1, 0
    assert hold.full(1) == "no_reader"


def test_a_reader_that_comes_alive_ends_the_losses(ring: Ring, clock: Clock) -> None:
    hold = make(ring, clock)
    hold.full(1)
    clock.now += 60
    assert hold.full(1) == "no_reader"
    ring.live = True
    assert hold.full(1) is None
    ring.live = False
    assert hold.full(1) is None
    clock.now += 60
    assert hold.full(1) == "no_reader"


def test_no_timeout_loses_at_once_and_drop_never_holds(ring: Ring, clock: Clock) -> None:
    assert make(ring, clock, timeout=0).full(1) == "no_reader"
    ring.live = True
    assert make(ring, clock, on_full="drop").full(1) == "dropped"


def test_a_stall_is_told_after_ten_seconds_and_then_with_growing_gaps(
    ring: Ring, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hold = make(ring, clock)
    ring.live = True
    said = []
    with caplog.at_level(logging.INFO, "vllm.shmconn"):
        for second in range(1500):
            hold.full(3)
            if caplog.records:
                said.append(second)
                assert "3" in caplog.text and "ring 'r' is full" in caplog.text
                caplog.clear()
            clock.now += 1
        hold.settled()
        hold.drained()
        assert "holds no request any more" in caplog.text
    gaps = [later - earlier for earlier, later in zip(said, said[1:], strict=False)]
    assert said[0] == FIRST_GAP_S
    assert gaps == [20, 40, 80, 160, 300, 300, 300]
    assert LONGEST_GAP_S == 300


def test_steady_back_pressure_is_told_though_no_single_request_waits_long(
    ring: Ring, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hold = make(ring, clock)
    ring.live = True
    with caplog.at_level(logging.INFO, "vllm.shmconn"):
        for _ in range(6):
            hold.full(5)
            clock.now += 2
            hold.settled()
        hold.full(5)
    assert len(caplog.records) == 1


def test_a_short_hold_is_not_told(
    ring: Ring, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hold = make(ring, clock)
    ring.live = True
    with caplog.at_level(logging.INFO, "vllm.shmconn"):
        hold.full(1)
        clock.now += 9
        hold.full(1)
        hold.settled()
        hold.drained()
    assert caplog.records == []


def test_a_throttle_lets_one_line_of_a_kind_through_and_counts_the_rest(clock: Clock) -> None:
    throttle = Throttle(10, clock)
    assert throttle.admit("a") == 0
    assert throttle.admit("b") == 0
    assert [throttle.admit("a") for _ in range(5)] == [None] * 5
    clock.now += 10
    assert throttle.admit("a") == 5
    assert throttle.admit("b") == 0
