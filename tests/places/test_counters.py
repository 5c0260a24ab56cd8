# SPDX-License-Identifier: Apache-2.0
"""Row 18: sequence and request numbers at 2**31, 2**32 and at the end of 48 bits."""

import os
import signal

import pytest
from crash.survivors import SLOTS, Reader, create
from harness import figures, payload
from harness.processes import Child, Shared

from places.namespaces import ended, reached, until
from shmconn import layout
from shmconn.directory import remove_group
from shmconn.errors import Closed, SampleGone, SampleLost
from shmconn.handle import Handle
from shmconn.ring import Producer
from shmconn.subscription import subscribe

RECORDS = 300


def start_at(producer: Producer, published: int, accepted: int) -> None:
    """Makes a fresh ring look as if so much had gone through it, all of it read."""
    producer._published = published
    producer._store(layout.PUBLISHED, published)
    producer._ledger._known.up_to = accepted
    producer._store(layout.SETTLED, accepted)
    producer.accept(accepted)


@pytest.mark.parametrize("behind", ("claims", "a kill"))
@pytest.mark.parametrize("start", (2**31 - 3, 2**32 - 3, 2**40 - 3), ids=("2^31", "2^32", "2^40"))
def test_sequence_and_request_numbers_pass_powers_of_two(
    ring: str, start: int, behind: str
) -> None:
    problems: list[str] = []
    producer = create(ring, ("pair", "single"))
    start_at(producer, start, start + 1)
    readers = [Reader(subscribe(ring, group), problems) for group in ("pair", "pair", "single")]
    count = SLOTS if behind == "a kill" else RECORDS

    def hold_and_die(shared: Shared) -> None:
        subscription = subscribe(ring, "pair")
        held = [subscription.next(60) for _ in range(3)]
        shared.words[0] = len(held)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(count):
        while payload.put(producer) is None:
            for reader in readers:
                reader.read(1)
    if behind == "a kill":
        # Holds numbers on both sides of the power of two.
        shared = Shared()
        Child(lambda: hold_and_die(shared), shared).wait()
        assert shared.words[0] == 3
    # A group that comes now starts behind what was published.
    late = Reader(subscribe(ring, "late"), problems)
    producer.close()
    for reader in (*readers, late):
        reader.read_until("the end", lambda reader=reader: reader.over)
    got = [reader.got[producer.generation] for reader in readers]
    want = list(range(start + 1, start + count + 1))
    if sorted(got[0] + got[1]) != want or got[2] != want or late.got[producer.generation]:
        problems.append(f"published {want[:3]} ... {want[-1]}, given {got[0][:9]}, {got[1][:9]}")
    if producer.accepted != start + 1 + count or producer.settled != producer.accepted:
        problems.append(f"accepted {producer.accepted}, settled {producer.settled}")
    for reader in (*readers, late):
        reader.subscription.close()
    if behind == "a kill":
        remove_group(ring, "pair")  # of the dead one, who never left
    figures.record(
        "18",
        "samples across 2**31, 2**32 and 2**40, sequence and request number",
        trials=count,
        exercised=count,
        failures=len(problems),
    )
    assert problems == []


@pytest.mark.parametrize("start", (2**31 - 2, 2**32 - 2), ids=("2^31", "2^32"))
def test_handles_across_a_power_of_two_find_their_samples_and_reasons(
    ring: str, start: int
) -> None:
    producer = create(ring, ({"name": "probe", "by_handle": True},), ttl_s=3600)
    start_at(producer, start, start)
    with subscribe(ring, "probe", by_handle=True) as subscription:
        handles = [payload.put(producer) for _ in range(3)]
        numbers = [handle.number for handle in handles if handle is not None]
        assert numbers == [start + 1, start + 2, start + 3]
        lost = [start + 4, start + 5]
        for number in lost:
            producer.accept(number)
            producer.bury(number, f"lost-{number}", "aborted")
        for handle in reversed(handles):
            assert handle is not None
            sample = subscription.get(str(handle), timeout=5)
            slot = payload.slot_of(subscription, sample)
            assert sample.number == handle.number and payload.problems(sample, slot) == []
            sample.release()
            with pytest.raises(SampleGone):
                subscription.get(handle, timeout=5)
        for number in lost:
            with pytest.raises(SampleLost, match="aborted"):
                subscription.get(
                    Handle.make(ring, producer.generation, number, f"lost-{number}"), timeout=5
                )
        # The low 32 bits alone name nothing.
        with pytest.raises(SampleGone):
            subscription.get(
                Handle.make(
                    ring,
                    producer.generation,
                    (start + 2) % 2**32,
                    payload.request_id(producer.generation, start + 2),
                ),
                timeout=5,
            )
        assert producer.settled == start + 5
        producer.close()
    figures.record("18", "handles across 2**31 and 2**32", trials=5, exercised=5, failures=0)


def test_the_last_sequence_number_is_used_and_then_the_ring_says_so(ring: str) -> None:
    problems: list[str] = []
    last = layout.MAX_SEQ
    assert last == 2**48 - 1
    producer = create(ring, ("group",))
    start_at(producer, last - 2, 7)
    reader = Reader(subscribe(ring, "group"), problems)
    for _ in range(2):
        assert payload.put(producer) is not None
    for _ in range(3):
        with pytest.raises(Closed, match=r"used up its 2\*\*48 sequence numbers: restart it"):
            payload.put(producer)
    # What was refused took no number, and what was published is read.
    assert producer.accepted == producer.settled == 9
    newcomer = Reader(subscribe(ring, "new"), problems)
    reader.read()
    assert reader.got[producer.generation] == [last - 1, last]
    assert producer.reclaim() == 2
    producer.close()
    for one in (reader, newcomer):
        one.read_until("the end", lambda one=one: one.over)
        one.subscription.close()
    figures.record("18", "the last sequence numbers", trials=2, exercised=2, failures=len(problems))
    assert problems == []


def test_a_lease_of_the_last_sequence_number_outlives_its_holder(ring: str) -> None:
    producer = create(ring, ("group",))
    start_at(producer, layout.MAX_SEQ - 1, 0)
    payload.put(producer)
    shared = Shared()

    def hold() -> None:
        held = subscribe(ring, "group").next(60)
        shared.words[0] = held is not None
        until(lambda: False, "the kill")

    child = Child(hold, shared)
    with ended(child):
        reached(child, 1, "a lease")
        assert producer.reclaim() == 0
        child.kill()
    with subscribe(ring, "group") as subscription:
        sample = subscription.next(5)
        assert sample is not None and sample.seq == layout.MAX_SEQ
        sample.release()
        assert producer.reclaim() == 1
        producer.close()
