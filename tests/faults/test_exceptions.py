# SPDX-License-Identifier: Apache-2.0
"""Row 27: an exception that leaves a reader's block, anywhere in its work."""

import contextlib
import os
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from crash.survivors import PAGES, SLOTS, account, create
from harness import figures, payload
from harness.isolation import remove_left

from shmconn.directory import groups, remove_group
from shmconn.errors import OptionError, RingMissing
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.subscription import Subscription, subscribe

SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(31)


class Thrown(Exception):
    """What a reader's own code might raise."""


class Careless:
    """Readers of one group, each of which reads a little and raises amid its block."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.given: list[int] = []
        self.problems: list[str] = []
        self.with_leases = 0
        self.again = 0

    def read_and_raise(self, count: int, keep: int) -> None:
        """Reads so many, releases all but the last few, and raises."""
        held: list[Sample] = []
        with subscribe(self.producer.name, "group") as subscription:
            for _ in range(count):
                sample = subscription.next(0)
                if sample is None:
                    break
                slot = payload.slot_of(subscription, sample)
                self.problems += payload.problems(sample, slot)
                self.given.append(sample.seq)
                held.append(sample)
                if len(held) > keep:
                    held.pop(0).release()
                del sample
            self.with_leases += bool(held)
            # What was in use has to come again, as after a death.
            for sample in held:
                self.given.remove(sample.seq)
            self.again += len(held)
            raise Thrown

    def read_the_rest(self) -> None:
        """Reads what is left, leaves, and makes the account."""
        with subscribe(self.producer.name, "group") as subscription:
            while (sample := subscription.next(0)) is not None:
                self.given.append(sample.seq)
                sample.release()
                del sample
            self.producer.reclaim()
            if (self.producer.free_pages, self.producer.free_slots) != (PAGES, SLOTS):
                self.problems.append(f"not free: {self.producer.stall_text()}")
        self.problems += account("group", self.given, 1, self.producer.published)


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Waits for a condition; a hang is a failure that says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.005)


def any_alive(ring: str) -> bool:
    """Whether a ring has any live member."""
    try:
        return any(group.alive for group in groups(ring))
    except RingMissing:
        return False


def throw(ring: str, times: int) -> Careless:
    """So many exceptions, and the account."""
    print(f"SHMCONN_SEED={SEED}")
    dice = random.Random(SEED)
    careless = Careless(create(ring, ("group",)))
    for _ in range(times):
        while payload.put(careless.producer) is not None:
            if dice.random() < 0.2:
                break
        # Not by pytest.raises: it keeps the traceback, and so what was held.
        try:
            careless.read_and_raise(dice.randint(0, SLOTS), dice.randint(0, 3))
        except Thrown:
            continue
    careless.read_the_rest()
    careless.producer.close()
    # A member that came while the one before was still leaving has left a dead row behind.
    until(lambda: not any_alive(ring), "the members to leave")
    with contextlib.suppress(RingMissing, OptionError):
        remove_group(ring, "group")
    return careless


@pytest.mark.parametrize("times", [200, pytest.param(5000, marks=pytest.mark.long)])
def test_an_exception_anywhere_in_a_reader_costs_no_sample_and_no_page(
    ring: str, times: int
) -> None:
    careless = throw(ring, times)
    figures.record(
        "27",
        "exceptions that leave a reader's block",
        trials=times,
        exercised=careless.with_leases,
        failures=len(careless.problems),
        published=careless.producer.published,
        came_again=careless.again,
        seed=str(SEED),
    )
    assert careless.problems == []


def test_an_exception_that_counted_as_leaving_would_be_seen(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Subscription._close

    def always_clean(self: Subscription, *args: Any, **options: Any) -> None:
        close(self, clean=True)

    monkeypatch.setattr(Subscription, "_close", always_clean)
    careless = throw(ring, 50)
    remove_left(ring)
    missed = [] if careless.problems else ["an exception leaves cleanly"]
    figures.detected("27", "the account of exceptions", 1, missed)
    assert missed == []
