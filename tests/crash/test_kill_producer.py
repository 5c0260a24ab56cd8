# SPDX-License-Identifier: Apache-2.0
"""Row 1: the producer is killed at its N-th step, N = 1, 2, 3 ... until a life completes."""

import contextlib
import secrets
import time
from collections.abc import Callable

import pytest
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Baton, Child, Shared, kill_at

from crash import planted
from crash.nth import Outcome, check, ended, found_fault, run_all
from crash.survivors import Reader, account, create
from shmconn import layout
from shmconn.directory import remove_group
from shmconn.errors import OptionError, RingMissing
from shmconn.segment import RingSegment, ring_files
from shmconn.subscription import subscribe

# The push tier takes the two in which most happens.
STATES = (
    "half",
    "wrapped",
    *(pytest.param(one, marks=pytest.mark.long) for one in ("empty", "full")),
)
GROUPS = ("every-a", "every-b", {"name": "asked", "by_handle": True})


def life(name: str, state: str, baton: Baton) -> None:
    """One life of a producer; all that it does is watched. Readers have their turns in between."""
    producer = create(name, GROUPS, ttl_s=0.0)
    if state == "wrapped":
        for _ in range(4):
            payload.put(producer)
        baton.pass_to_parent()
        producer.tick()
    for _ in range({"empty": 0, "half": 2, "full": 4, "wrapped": 3}[state]):
        payload.put(producer)
    assert (payload.put(producer) is None) == (state == "full")
    baton.pass_to_parent()
    producer.tick()
    payload.put(producer)
    lost = producer.accepted + 1
    producer.accept(lost)
    producer.bury(lost, payload.request_id(producer.generation, lost), "aborted")
    fill = producer.allocate(number=lost + 1, request_id="discarded", token_ids=[1])
    if fill is not None:
        producer.accept(lost + 1)
        producer.discard(fill)
        producer.bury(lost + 1, "discarded", "fault")
    producer.accept(lost + 2)
    baton.pass_to_parent()
    producer.reclaim()
    producer.close()


def trial(base: str, state: str, number: int, *, looks: bool, plant: Callable[[], None]) -> Outcome:
    """Kills a producer before its N-th step, reads what is left, and starts the next one."""
    name = f"{base}-{secrets.token_hex(3)}"
    problems: list[str] = []
    first = Reader(subscribe(name, "every-a", wait_s=60), problems)
    follower = Reader(subscribe(name, "every-b", wait_s=60, follow=True), problems)
    readers = [first, follower]
    baton, shared = Baton(), Shared()

    def victim() -> None:
        baton.in_child()
        plant()
        kill_at(number, shared, looks=looks)
        life(name, state, baton)

    child = Child(victim, shared)
    baton.in_parent()
    for turn in baton.turns():
        for reader in readers:
            reader.read(most=1 + turn % 2 if turn else 4)
    # Every other one stays a zombie while the others go on.
    assert child.wait(reap=number % 2 == 0)

    # A generation that was never whole has no end: both wait for the next start.
    generations = _whole(name)
    generations |= {end.generation: end.published for r in readers for end in r.subscription.ends}
    for generation, published in generations.items():
        follower.read_until(
            f"the end of {generation}",
            lambda generation=generation: any(
                end.generation == generation for end in follower.subscription.ends
            ),
        )
        if published or first.subscription._views.live:
            # A ring without a sample may have gone before it was seen: then there was no end.
            first.read_until("the end", lambda: first.over)
        for reader in readers:
            got = reader.got[generation]
            problems += account(reader.subscription.group, got, 1, published)
    recovery_s = time.monotonic() - child.died_at
    for end in (end for reader in readers for end in reader.subscription.ends):
        if end.settled > end.accepted or (not end.died and end.settled != end.accepted):
            problems.append(f"an end says {end}")
    if first.died is not None and not 0 <= first.died.unpublished <= 3:
        problems.append(f"{first.died.unpublished} samples are said to be unpublished")

    problems += next_life(name, readers)
    outcome = ended(child, recovery_s, problems)
    if not outcome.killed and (first.died or not first.subscription.ended):
        problems.append("a closed ring did not end cleanly")
    return outcome


def _whole(name: str) -> dict[str, int]:
    """Generations whose head is whole, and what each had published."""
    rings = (RingSegment.attach(file_name, whole=False) for file_name in ring_files(name))
    return {ring.generation: ring.words.load(layout.PUBLISHED) for ring in rings if ring}


def next_life(name: str, readers: list[Reader]) -> list[str]:
    """Starts the ring again, reads from it, ends everything; nothing may be left."""
    problems: list[str] = []
    with contextlib.suppress(OptionError, RingMissing):
        remove_group(name, "asked")
    before = set(ring_files(name))
    producer = create(name)
    stale = before & set(ring_files(name))
    if stale:
        problems.append(f"a start left {stale}")
    waiting = [reader for reader in readers if not reader.over]
    if payload.put(producer) is None:
        problems.append("a new ring took no sample")
    producer.close()
    for reader in waiting:
        reader.read_until(
            "the sample of the next life",
            lambda reader=reader: reader.got[producer.generation] == [1],
        )
    for reader in readers:
        reader.subscription.close()
    left = left_of(name)
    if left:
        problems.append(f"left in /dev/shm: {left}")
    return problems


def nothing() -> None:
    """No planted fault."""


@pytest.mark.parametrize("state", STATES)
def test_a_producer_killed_at_any_step_costs_only_what_it_had_not_published(
    ring: str, state: str
) -> None:
    outcomes = run_all(lambda n: trial(ring, state, n, looks=False, plant=nothing), ring)
    check("1", "producer killed at each step that changes anything", outcomes)


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
def test_a_producer_killed_at_any_look_costs_no_more(ring: str, state: str) -> None:
    outcomes = run_all(lambda n: trial(ring, state, n, looks=True, plant=nothing), ring)
    check("1", "producer killed at each step, looks too", outcomes)


def test_kills_of_a_producer_find_planted_faults(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crash.survivors.PATIENCE_S", 1.0)
    missed = []
    for fault in planted.PRODUCER:

        def one(number: int, fault: Callable[[], None] = fault) -> Outcome:
            return trial(ring, "half", number, looks=False, plant=fault)

        if not found_fault(run_all(one, ring, stop=True)):
            missed.append(fault.__name__)
    figures.detected("1", "kills of the producer", len(planted.PRODUCER), missed)
    assert missed == []
