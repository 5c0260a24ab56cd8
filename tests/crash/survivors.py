# SPDX-License-Identifier: Apache-2.0
"""Readers that outlive a victim, and the account of what each of them was given."""

import time
from collections import defaultdict

from harness import payload

from shmconn.errors import ProducerDied
from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.subscription import Subscription

SLOTS = 4
PAGES = 6
SIZE = RingShape(65536, PAGES, SLOTS).size
# Longest time for anything that must come by itself; far above a second, which is the promise.
PATIENCE_S = 20.0


def create(name: str, groups: tuple[object, ...] = (), ttl_s: float = 600.0) -> Producer:
    """A ring of four slots and six pages, so that slots run out first."""
    return Producer.create(
        name,
        size=SIZE,
        layer_ids=[0],
        hidden_size=payload.HIDDEN,
        dtype="float32",
        slots=SLOTS,
        groups=groups,
        unclaimed_ttl_s=ttl_s,
    )


class Reader:
    """A subscription, what it got by generation, and what was wrong with it."""

    def __init__(self, subscription: Subscription, problems: list[str]) -> None:
        self.subscription = subscription
        self.problems = problems
        self.got: dict[str, list[int]] = defaultdict(list)
        self.died: ProducerDied | None = None

    @property
    def over(self) -> bool:
        """Whether it was told of the end."""
        return self.subscription.ended or self.died is not None

    def read(self, most: int = 1 << 30) -> int:
        """Takes, checks and releases what is there now; how many it was."""
        count = 0
        while count < most and not self.over:
            try:
                sample = self.subscription.next(0)
            except ProducerDied as error:
                self.died = error
                break
            if sample is None:
                break
            slot = payload.slot_of(self.subscription, sample)
            self.problems += payload.problems(sample, slot)
            self.got[sample.handle.generation].append(sample.seq)
            sample.release()
            count += 1
        return count

    def read_until(self, what: str, done: "object") -> None:
        """Reads until ``done()``; a hang is a problem, not a hang of the test."""
        give_up = time.monotonic() + PATIENCE_S
        while not done():  # type: ignore[operator]
            if time.monotonic() > give_up:
                self.problems.append(f"{self.subscription.group}: {what} did not come")
                return
            if not self.read():
                time.sleep(0.001)


def account(group: str, got: list[int], first: int, published: int) -> list[str]:
    """What is wrong with the sequence numbers that a group was given, each exactly once."""
    wrong = []
    if sorted(got) != list(range(first, published + 1)):
        wrong.append(f"group {group} was given {got}, published were {first} to {published}")
    if got != sorted(got):
        wrong.append(f"group {group} was given {got}, out of order")
    return wrong
