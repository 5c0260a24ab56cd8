# SPDX-License-Identifier: Apache-2.0
"""What is done for each request, or many times a second, looks at no sample one by one."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from ring_tools import give_up, put

from shmconn import Producer, subscribe, words
from shmconn.directory import groups
from shmconn.ledger import tombstones_of

Make = Callable[..., Producer]
SLOTS = 60


@pytest.fixture
def steps() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Counts the loads and stores of shared words, and the copies of many, in a call."""

    def count(call: Callable[[], object]) -> int:
        seen: Counter[str] = Counter()
        words.watch(lambda step: seen.update([step]))
        try:
            call()
        finally:
            words.watch(None)
        return seen.total()

    yield count


def lose(producer: Producer) -> None:
    """What the connector does for a request that finds no room."""
    number = producer.accepted + 1
    producer.accept(number)
    mask = sum(1 << blocker.row for blocker in producer.blockers())
    producer.bury(number, "lost", "no_reader", mask)


@pytest.mark.parametrize("what", ["loss", "held", "stall", "tick", "expiry", "stat", "get", "lost"])
def test_a_look_takes_as_many_steps_in_a_full_ring_as_in_one_of_two_samples(
    make: Make, ring_name: str, steps: Callable[[Callable[[], object]], int], what: str
) -> None:
    ttl_s = 0.0001 if what == "expiry" else 600.0
    named = ["a", "b", {"name": "h", "by_handle": True}]
    producer = make(slots=SLOTS, groups=named, size="8MiB", unclaimed_ttl_s=ttl_s)
    with subscribe(ring_name, "h", by_handle=True) as subscription:
        handles = [put(producer, 0), put(producer, 1)]
        calls: dict[str, Callable[[], object]] = {
            "loss": lambda: lose(producer),
            "held": producer.can_progress,
            "stall": producer.stall_text,
            "tick": producer.tick,
            "expiry": producer.expire,
            "stat": lambda: groups(ring_name),
            "get": lambda: subscription.get(handles.pop(), 5).release(),
            "lost": lambda: list(tombstones_of(producer._ring.words, 999)),
        }
        if what == "expiry":
            producer.expire()
        few = steps(calls[what])
        while (handle := put(producer, 7)) is not None:
            handles.append(handle)
        assert producer.free_slots == 0
        if what == "expiry":
            producer.expire()
        many = steps(calls[what])
        assert what != "lost" or many < 10, many
        assert many <= few + 2, f"{what}: {few} steps with 2 samples, {many} with {SLOTS}"
    give_up(producer)
