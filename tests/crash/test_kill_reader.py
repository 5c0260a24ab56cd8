# SPDX-License-Identifier: Apache-2.0
"""Row 3: a reader is killed at its N-th step, from subscribing to having left."""

import secrets
import time
from collections.abc import Callable

import pytest
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Baton, Child, Shared, kill_at

from crash import planted, survivors
from crash.nth import Outcome, check, ended, found_fault, run_all
from crash.survivors import PAGES, SLOTS, Reader, account, create
from shmconn import layout
from shmconn.errors import SampleGone, SampleLost
from shmconn.handle import Handle
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.subscription import Subscription, subscribe

# The push tier takes the two in which most happens.
STATES = (
    "half",
    "wrapped",
    *(pytest.param(one, marks=pytest.mark.long) for one in ("empty", "full")),
)
# What a victim tells the survivors about each sequence number, in its shared words.
TOLD = 16
RECEIVED, RELEASED = 1, 2


class Victim:
    """A reader that writes down what it received and what it released, each when it was done."""

    def __init__(self, subscription: Subscription, shared: Shared) -> None:
        self.subscription = subscription
        self._shared = shared

    def took(self, sample: Sample | None) -> Sample | None:
        """Checks a sample and writes it down."""
        if sample is not None:
            slot = payload.slot_of(self.subscription, sample)
            found = payload.problems(sample, slot)
            if found:
                raise AssertionError(found)
            self._shared.words[TOLD + sample.seq] = RECEIVED
        return sample

    def release(self, sample: Sample | None) -> None:
        """Releases a sample and writes that down."""
        if sample is not None:
            seq = sample.seq
            sample.release()
            self._shared.words[TOLD + seq] = RELEASED

    def give_back(self, sample: Sample | None) -> None:
        """Makes a sample another's to take."""
        if sample is not None:
            for lease in list(self.subscription._member.leases):
                if lease.seq == sample.seq:
                    lease.give_back()


def in_turn(name: str, group: str, baton: Baton, shared: Shared) -> None:
    """Subscribes, holds several samples, releases, gives back, closes with a lease, leaves."""
    subscription = subscribe(name, group)
    victim = Victim(subscription, shared)
    first = victim.took(subscription.next(0))
    baton.pass_to_parent()
    second = victim.took(subscription.next(0))
    victim.release(first)
    third = victim.took(subscription.next(0))
    victim.give_back(second)
    fourth = victim.took(subscription.next(0))
    victim.release(fourth)
    leaver = _leaver(subscription)
    victim.release(third)
    leaver()


def _leaver(subscription: Subscription) -> Callable[[], None]:
    """Closes; what waits for the last lease runs in this thread, so that its steps are counted."""
    member = subscription._member
    if not member.leases:
        subscription.close()
        return lambda: None
    member.leaving = True
    return lambda: member._leave_later(True)


def by_handle(name: str, group: str, baton: Baton, shared: Shared, handles: list[Handle]) -> None:
    """Subscribes, asks for each of some handles, releases them, closes."""
    subscription = subscribe(name, group, by_handle=True)
    victim = Victim(subscription, shared)
    baton.pass_to_parent()
    held = [victim.took(subscription.get(handle, timeout=0)) for handle in handles]
    for sample in held:
        victim.release(sample)
    del held[:]
    subscription.close()


# A script's victim, and who else is there: `joins` = a mate is in its group already.
SCRIPTS = {
    "joins": ("every-a", ("every-a", "every-b")),
    "newcomer": ("new", ("every-a", "every-b")),
    "alone": ("new", ()),
    "asks": ("asked", ("every-b",)),
}


class Scene:
    """A producer and readers that outlive the victim."""

    def __init__(self, name: str, script: str, state: str) -> None:
        self.name = name
        self.group, others = SCRIPTS[script]
        self.asks = script == "asks"
        self.problems: list[str] = []
        self.handles: dict[int, Handle] = {}
        asked = [{"name": "asked", "by_handle": True}] if self.asks else []
        self.producer: Producer = create(name, (*others, *asked))
        self.readers = {group: Reader(subscribe(name, group), self.problems) for group in others}
        if state == "wrapped":
            self._wrap()
        self.put({"empty": 0, "half": 2, "full": 4, "wrapped": 3}[state])

    def _wrap(self) -> None:
        """Publishes, reads and reclaims four samples, so that what follows reuses slots."""
        self.put(4)
        if self.asks:
            ttl_s, self.producer._ttl_s = self.producer._ttl_s, 0.0
            self.producer.expire()
            self.producer._ttl_s = ttl_s
        if self.readers:
            for reader in self.readers.values():
                reader.read()
        else:
            passing = Reader(subscribe(self.name, "passing"), self.problems)
            passing.read()
            passing.subscription.close()
        if self.producer.reclaim() != 4:
            self.problems.append(f"not reclaimed: {self.producer.stall_text()}")

    def put(self, count: int) -> int:
        """Publishes up to ``count`` samples; how many found room."""
        for done in range(count):
            handle = payload.put(self.producer)
            if handle is None:
                return done
            self.handles[self.producer.published] = handle
        return count

    def ask(self, subscription: Subscription, received: set[int], released: set[int]) -> None:
        """Asks for every sample there was; of those received, some must have been released."""
        for seq, handle in self.handles.items():
            try:
                sample = subscription.get(handle, timeout=survivors.PATIENCE_S)
            except (SampleGone, SampleLost) as error:
                if seq not in received:
                    self.problems.append(f"nobody got sample {seq}: {error}")
                continue
            self.problems += payload.problems(sample, payload.slot_of(subscription, sample))
            if seq in released:
                self.problems.append(f"sample {seq} came again after its release")
            sample.release()


def trial(base: str, script: str, state: str, number: int, *, looks: bool) -> Outcome:
    """Kills a reader before its N-th step; the others go on, and its group comes back."""
    name = f"{base}-{secrets.token_hex(3)}"
    scene = Scene(name, script, state)
    problems, producer, readers = scene.problems, scene.producer, scene.readers
    before = dict(scene.handles)
    baton, shared = Baton(), Shared()

    def victim() -> None:
        baton.in_child()
        kill_at(number, shared, looks=looks)
        if script == "asks":
            wanted = [handle for seq, handle in before.items() if seq > len(before) - 2]
            by_handle(name, scene.group, baton, shared, wanted)
        else:
            in_turn(name, scene.group, baton, shared)

    child = Child(victim, shared)
    baton.in_parent()
    for _ in baton.turns():
        scene.put(1)
    assert child.wait(reap=number % 2 == 0)

    told = shared.words[TOLD : TOLD + 32].tolist()
    received = {seq for seq, what in enumerate(told) if what}
    released = {seq for seq, what in enumerate(told) if what == RELEASED}
    mate = readers.get(scene.group)
    if scene.asks:
        again = Reader(subscribe(name, scene.group, by_handle=True), problems)
        # In the state "wrapped" the first four expired; before its start a group is owed nothing.
        before_its_time = set(range(1, max(_start(producer, again), 5 * (state == "wrapped"))))
        scene.ask(again.subscription, received | before_its_time, released | before_its_time)
    elif mate is None:
        again = Reader(subscribe(name, scene.group), problems)
        start = _start(producer, again)
        owed = set(range(start, producer.published + 1)) - received
        again.read_until("what its group is owed", lambda: owed <= set(_got(producer, again)))
    else:
        again = mate
        start = 1
        owed = set(range(1, producer.published + 1)) - received
        again.read_until("what its mate had left", lambda: owed <= set(_got(producer, again)))
    for reader in readers.values():
        reader.read()

    def all_free() -> bool:
        producer.tick()
        for reader in (again, *readers.values()):
            if not scene.asks or reader is not again:
                reader.read()
        return producer.free_slots == SLOTS and producer.free_pages == PAGES

    _until("free slots and pages", all_free, problems)
    recovery_s = time.monotonic() - child.died_at
    if not scene.asks:
        got = _got(producer, again)
        twice = sorted(set(got) & released)
        if twice:
            problems.append(f"{twice} came again after their release")
        if len(got) != len(set(got)):
            problems.append(f"the group was given {got}")

    if scene.put(2) != 2:
        problems.append(f"no room afterwards: {producer.stall_text()}")
    if scene.asks:
        fresh = {seq: scene.handles[seq] for seq in (producer.published - 1, producer.published)}
        scene.handles = fresh
        scene.ask(again.subscription, set(), set())
    elif mate is not None:
        # The dead member comes back and leaves; until then its group would stay.
        subscribe(name, scene.group).close()
    producer.close()
    for reader in {id(r): r for r in (again, *readers.values())}.values():
        if not scene.asks or reader is not again:
            reader.read_until("the end", lambda reader=reader: reader.over)
        reader.subscription.close()
    other = readers.get("every-b")
    if other is not None:
        problems += account("every-b", _got(producer, other), 1, producer.published)
    left = left_of(name)
    if left:
        problems.append(f"left in /dev/shm: {left}")
    return ended(child, recovery_s, problems)


def _start(producer: Producer, reader: Reader) -> int:
    group = reader.subscription._member.group
    return max(1, producer._ring.words.load(layout.START + 8 * group))


def _got(producer: Producer, reader: Reader) -> list[int]:
    return reader.got[producer.generation]


def _until(what: str, done: Callable[[], bool], problems: list[str]) -> None:
    give_up = time.monotonic() + survivors.PATIENCE_S
    while not done():
        if time.monotonic() > give_up:
            problems.append(f"{what} did not come")
            return
        time.sleep(0.001)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reader_killed_at_any_step_costs_nobody_anything(
    ring: str, script: str, state: str
) -> None:
    outcomes = run_all(lambda n: trial(ring, script, state, n, looks=False), ring)
    check("3", "reader killed at each step that changes anything", outcomes)


@pytest.mark.long
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reader_killed_at_any_look_costs_nobody_anything(
    ring: str, script: str, state: str
) -> None:
    outcomes = run_all(lambda n: trial(ring, script, state, n, looks=True), ring)
    check("3", "reader killed at each step, looks too", outcomes)


FINDS = {
    planted.no_sweep: ("alone", "half"),
    planted.active_before_start: ("newcomer", "wrapped"),
    planted.dead_registrants_stay: ("newcomer", "half"),
    planted.released_at_the_claim: ("joins", "half"),
}


def test_kills_of_a_reader_find_planted_faults(ring: str) -> None:
    missed = []
    for fault, (script, state) in FINDS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("crash.survivors.PATIENCE_S", 1.0)
            fault(patch)

            def one(number: int, script: str = script, state: str = state) -> Outcome:
                return trial(ring, script, state, number, looks=False)

            if not found_fault(run_all(one, ring, stop=True)):
                missed.append(fault.__name__)
    figures.detected("3", "kills of readers", len(FINDS), missed)
    assert missed == []
