# SPDX-License-Identifier: Apache-2.0
"""Several threads of one subscription: at its close, and at the ring's end."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from harness.figures import record
from ring_tools import put

from shmconn import Closed, Producer, Sample, subscribe
from shmconn.member import Member

ROUNDS = 400


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def close_beside_a_read(name: str, choose: random.Random) -> tuple[Sample | None, bool]:
    """The sample that a thread got while another closed, and whether it has an owner."""
    subscription = subscribe(name, "g")
    got: list[Sample] = []
    start = threading.Barrier(2)

    def read(delay_s: float) -> None:
        start.wait()
        spin(delay_s)
        try:
            sample = subscription.next(timeout=0)
        except Closed:
            return
        if sample is not None:
            got.append(sample)

    thread = threading.Thread(target=read, args=(choose.uniform(0, 0.001),))
    thread.start()
    start.wait()
    spin(choose.uniform(0, 0.001))
    subscription.close()
    thread.join()
    return (got.pop() if got else None), subscription._member.registry.locks.intact()


def spin(seconds: float) -> None:
    """Waits, shorter than a sleep can."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def race(producer: Producer) -> tuple[int, int]:
    """How often a sample came of it, and how often one without an owner."""
    choose = random.Random(7)
    taken = stray = 0
    with subscribe(producer.name, "g") as mate:
        for number in range(ROUNDS):
            put(producer, number)
            sample, owned = close_beside_a_read(producer.name, choose)
            taken += sample is not None
            stray += sample is not None and not owned
            del sample
            while (left := mate.next(timeout=0)) is not None:
                left.release()
            del left
            producer.reclaim()
    return taken, stray


def test_whoever_closes_beside_a_read_never_leaves_its_sample_without_an_owner(
    make: Callable[..., Producer], short_turns: None
) -> None:
    producer = make(groups=["g"], size="1MiB")
    taken, stray = race(producer)
    # Both ends of the race were seen: the reader first, and the close first.
    assert 0 < taken < ROUNDS
    assert stray == 0
    record(
        "threads",
        "a close beside another thread's read",
        trials=ROUNDS,
        exercised=taken,
        failures=0,
    )


def test_the_race_finds_a_lease_that_comes_after_the_claim_is_let_go(
    make: Callable[..., Producer], short_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Member._lease

    def late(self: Member, *where: object) -> Sample:
        self.claiming.release()
        try:
            time.sleep(0.0003)
            return lease(self, *where)  # type: ignore[arg-type]
        finally:
            self.claiming.acquire()

    monkeypatch.setattr(Member, "_lease", late)
    # Its own lock would hide the fault.
    monkeypatch.setattr("shmconn.subscription.threading", SimpleNamespace(RLock=Unlocked))
    producer = make(groups=["g"], size="1MiB")
    assert race(producer)[1] > 0


class Unlocked:
    """A lock that locks nothing."""

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, *exc: object) -> None:
        """Does nothing."""


def test_every_thread_sees_the_end_and_it_is_one(make: Callable[..., Producer]) -> None:
    for _ in range(10):
        producer = make(groups=["g"], size="1MiB")
        with subscribe(producer.name, "g") as subscription:
            faults: list[BaseException] = []

            def read() -> None:
                try:
                    while not subscription.ended:
                        subscription.next(timeout=0)
                except BaseException as error:
                    faults.append(error)  # noqa: B023

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            put(producer, 1)
            time.sleep(0.02)
            producer.close()
            for thread in threads:
                thread.join(20)
            assert faults == []
            assert len(subscription.ends) == 1
