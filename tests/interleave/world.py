# SPDX-License-Identifier: Apache-2.0
"""A tiny ring, what its actors do, and what must hold before each step and at the end.

The nine invariants of the protocol are looked for in memory, by other code than the ring's own.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import payload

from interleave import seams
from interleave.scheduler import Run
from shmconn import layout, segment
from shmconn.handle import Handle
from shmconn.headroom import Headroom
from shmconn.layout import RingShape
from shmconn.ledger import tombstones_of
from shmconn.registry import Registry
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.segment import RingSegment
from shmconn.subscription import Subscription, subscribe

SLOTS = 2
PAGES = 6
SHAPE = RingShape(seams.PAGE, PAGES, SLOTS)


class Memory:
    """The words of a segment, looked at by the inspector only."""

    def __init__(self, buffer: Any) -> None:
        self.words = memoryview(buffer).cast("B")[: len(buffer) // 8 * 8].cast("Q")

    def __getitem__(self, offset: int) -> int:
        return self.words[offset >> 3]


class World:
    """One ring name, with all that its actors did to it in one schedule."""

    made = 0

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.files: dict[str, list[Any]] = {}
        self.rings: dict[str, RingSegment] = {}  # by generation
        self.members: list[Subscription] = []
        self.given: dict[str, list[tuple[str, int]]] = {}  # group -> (generation, seq)
        self.released: set[tuple[str, str, int]] = set()
        self.first: dict[str, int] = {}  # group -> first sequence number that it is owed
        self.left: set[str] = set()  # groups that gave up what they had not read
        self.groups: set[str] = set()
        self.holding: dict[tuple[str, int, int], Subscription] = {}  # by generation, row, seq
        self.handles: list[Handle] = []
        self.backlog = False  # what is there first must go to one group
        self.producers: dict[str, Producer] = {}
        self._memories: dict[str, Memory] = {}
        self._registries: dict[int, Memory] = {}
        self._found_whole: set[tuple[Any, ...]] = set()
        self._highest: Counter[tuple[str, int]] = Counter()
        self._needed: dict[tuple[str, int, int], bool] = {}
        self._done: set[tuple[str, int, int]] = set()  # generation, group row, seq
        run.inspect = self.inspect

    def memory(self, generation: str) -> Memory:
        """The words of a ring."""
        if generation not in self._memories:
            self._memories[generation] = Memory(self.rings[generation].map)
        return self._memories[generation]

    @contextlib.contextmanager
    def owned_by(self, actor: str) -> Iterator[None]:
        """What is opened here is the actor's, and is closed when it is killed."""
        self.run.owner = self.files.setdefault(actor, [])
        yield
        self.run.owner = None

    # --- what actors do -------------------------------------------------------------------------

    def create(self, *groups: object, ttl_s: float = 600.0) -> Producer:
        """A ring of two slots."""
        producer = Producer.create(
            self.name,
            size=SHAPE.size,
            layer_ids=[0],
            hidden_size=payload.HIDDEN,
            dtype="float32",
            page_size=seams.PAGE,
            slots=SLOTS,
            groups=groups,
            unclaimed_ttl_s=ttl_s,
        )
        self.rings[producer.generation] = producer._ring
        self.producers[producer.generation] = producer
        for group in groups:
            if isinstance(group, str):
                self.first[f"{group} {producer.generation}"] = 1
        return producer

    @contextlib.contextmanager
    def may_wait(self) -> Iterator[None]:
        """The running actor may wait for others here: only a producer that runs must not."""
        actor = self.run.current
        before, actor.waits = actor.waits, True  # type: ignore[union-attr]
        yield
        actor.waits = before  # type: ignore[union-attr]

    @contextlib.contextmanager
    def no_space(self) -> Iterator[None]:
        """/dev/shm is full here."""
        headroom, segment.headroom = segment.headroom, lambda: Headroom(0)
        try:
            yield
        finally:
            segment.headroom = headroom

    def join(self, group: str, **options: Any) -> Subscription:
        """Subscribes, and notes from where on the group is owed samples."""
        subscription = subscribe(self.name, group, wait_s=60, **options)
        row = subscription._member.group
        if not subscription.by_handle:
            self.groups.add(group)
        for generation in self.rings:
            start = max(1, self.memory(generation)[layout.START + 8 * row])
            self.first.setdefault(f"{group} {generation}", start)
        self.members.append(subscription)
        return subscription

    def put(self, producer: Producer) -> Handle | None:
        """Publishes the next sample, if there is room."""
        number, generation = producer.accepted + 1, producer.generation
        fill = producer.allocate(
            number=number,
            request_id=payload.request_id(generation, number),
            token_ids=payload.token_ids(number, 1),
            metadata={"number": number},
        )
        if fill is None:
            return None
        producer.accept(number)
        seq = producer.published + 1
        target = np.frombuffer(fill.states, dtype=np.uint64)
        source = payload.expected(generation, fill.slot, seq, number, len(target))
        for half in (slice(0, 16), slice(16, None)):
            seams.touch("fill", (), (generation, "page", fill.first_page), (seq, half.start))
            target[half] = source[half]
        del target
        handle = producer.publish(fill)
        self.handles.append(handle)
        return handle

    def check(self, subscription: Subscription, sample: Sample) -> None:
        """A sample must be whole, and must not have been released by its group."""
        found = payload.problems(sample, payload.slot_of(subscription, sample))
        key = (subscription.group, sample.handle.generation, sample.seq)
        if key in self.released:
            found.append(f"{key} was delivered after its release")
        if sample.seq > self.memory(sample.handle.generation)[layout.PUBLISHED]:
            found.append(f"{key} was delivered before it was committed")
        self.run.violations += found

    def take(self, subscription: Subscription, sample: Sample) -> None:
        """Takes note of a delivery."""
        self.check(subscription, sample)
        given = self.given.setdefault(subscription.group, [])
        generation = sample.handle.generation
        given.append((generation, sample.seq))
        self.holding[generation, subscription._member.group, sample.seq] = subscription

    def claim(self, subscription: Subscription) -> Sample:
        """Takes a sample that must be there."""
        sample = subscription.next(0)
        assert sample is not None
        self.take(subscription, sample)
        return sample

    def unclaimed(self, generation: str, row: int) -> list[int]:
        """Samples of a ring that a group could still claim."""
        memory, shape = self.memory(generation), self.rings[generation].shape
        first = max(1, memory[layout.START + 8 * row])
        found = []
        for slot in range(SLOTS):
            seq, word = memory[shape.seq_at(slot)], memory[shape.hold_at(row, slot)]
            code = word & 0xFFFF if word >> 16 == seq else layout.UNCLAIMED
            if first <= seq <= memory[layout.PUBLISHED] and code == layout.UNCLAIMED:
                found.append(seq)
        return found

    def use(self, subscription: Subscription, sample: Sample) -> None:
        """The reader looks at the pages: others may do something before."""
        generation = sample.handle.generation
        ring = self.rings[generation]
        row = ring.shape.row_at(payload.slot_of(subscription, sample))
        page = self.memory(generation)[row + layout.SLOT_FIRST_PAGE]
        seams.touch("use", (generation, "page", page), (), None)

    def release(self, subscription: Subscription, sample: Sample) -> None:
        """Checks again, releases, and takes note of it."""
        self.use(subscription, sample)
        self.check(subscription, sample)
        generation, seq = sample.handle.generation, sample.seq
        self.holding.pop((generation, subscription._member.group, seq), None)
        sample.release()
        # A kill inside the finalizer of the lease cannot be raised there.
        self.run.still_alive()
        self.released.add((subscription.group, generation, seq))

    def attempt(self, subscription: Subscription, count: int = 1) -> None:
        """Asks ``count`` times for a sample, without waiting for one."""
        for _ in range(count):
            sample = subscription.next(0)
            if sample is not None:
                self.take(subscription, sample)
                self.release(subscription, sample)
                del sample

    def read(self, subscription: Subscription, count: int = 1 << 30) -> None:
        """Takes and releases ``count`` samples, waiting for them, or all up to the end."""
        while count:
            seen = self.run.memory
            sample = subscription.next(0)
            if sample is not None:
                count -= 1
                self.take(subscription, sample)
                self.release(subscription, sample)
                del sample
            elif subscription.ended:
                return
            else:
                self.run.wait_for("change", seen)

    def leave(self, subscription: Subscription, *, last: bool = False) -> None:
        """Leaves; ``last``: its group goes, and what it had not read is given up."""
        if last:
            self.left.add(subscription.group)
        subscription.close()

    # --- what must hold -------------------------------------------------------------------------

    def inspect(self) -> list[str]:
        """Invariants 1 to 7, in memory as it is now."""
        found: list[str] = []
        for generation, ring in self.rings.items():
            registry = self.producers[generation]._registry
            states = self._states(registry)
            epoch = self._registries[id(registry)][layout.EPOCH]
            self._never_falls(found, f"epoch {generation}", 0, epoch)
            if not any(states):
                found.append("every group row is FREE")
            found += self._inspect_ring(generation, ring, states)
        held = Counter(
            (lease.view.generation, member._member.group, lease.seq)
            for member in self.members
            if member._member.registry.locks.fd >= 0
            for lease in member._member.leases
        )
        found += [f"{key} is leased to two members" for key, count in held.items() if count > 1]
        for member in self.members:
            row = member._member.group
            joined = member._member.registry.locks.fd >= 0 and not member._closed
            if joined and self._states(member._member.registry)[row] != layout.ACTIVE:
                found.append(
                    f"a member of {member.group} is in row {row}, which is not its group's"
                )
        for (generation, row, seq), subscription in self.holding.items():
            if subscription._member.registry.locks.fd < 0:
                continue
            memory, shape = self.memory(generation), self.rings[generation].shape
            words = [memory[shape.hold_at(row, slot)] for slot in range(SLOTS)]
            if layout.hold_word(seq, subscription._member.code) not in words:
                found.append(f"sample {seq} was taken from under its lease: row {row} has {words}")
        return found

    def _states(self, registry: Registry) -> list[int]:
        if id(registry) not in self._registries:
            self._registries[id(registry)] = Memory(registry.words._bytes)
        memory = self._registries[id(registry)]
        return [memory[layout.GROUP_STATES + 8 * row] for row in range(seams.GROUPS)]

    def _inspect_ring(self, generation: str, ring: RingSegment, states: list[int]) -> list[str]:
        found: list[str] = []
        memory, shape = self.memory(generation), ring.shape
        published = memory[layout.PUBLISHED]
        for name, at in (
            ("published", layout.PUBLISHED),
            ("accepted", layout.ACCEPTED),
            ("settled", layout.SETTLED),
        ):
            self._never_falls(found, f"{name} {generation}", 0, memory[at])
        seqs = [memory[shape.seq_at(slot)] for slot in range(SLOTS)]
        for row, state in enumerate(states):
            start = memory[layout.START + 8 * row]
            holds = [memory[shape.hold_at(row, slot)] for slot in range(SLOTS)]
            self._inspect_holds(found, generation, row, holds)
            if state in (layout.ACTIVE, layout.NAMELESS):
                for seq in range(max(1, start), published + 1):
                    done = (generation, row, seq) in self._done
                    if not done and seq not in seqs:
                        found.append(f"row {row} is owed sample {seq}, which is in no slot")
        for slot, seq in enumerate(seqs):
            if 0 < seq <= published:
                needed = any(
                    state != layout.FREE
                    and seq >= memory[layout.START + 8 * row]
                    and memory[shape.hold_at(row, slot)] != seq << 16 | layout.RELEASED
                    for row, state in enumerate(states)
                )
                # While a row is REGISTERING all is needed: that is no rise, since it only delays.
                if layout.REGISTERING not in states:
                    if needed and self._needed.get((generation, slot, seq)) is False:
                        found.append(f"sample {seq} in slot {slot} is needed again")
                    self._needed[generation, slot, seq] = needed
                found += self._whole(generation, ring, slot, seq)
        return found

    def _inspect_holds(self, found: list[str], generation: str, row: int, holds: list[int]) -> None:
        for slot, word in enumerate(holds):
            seq, code = word >> 16, word & 0xFFFF
            if code == layout.RELEASED:
                self._done.add((generation, row, seq))
            elif word and (generation, row, seq) in self._done:
                found.append(f"hold of row {row}, slot {slot}, sample {seq} was released: {code}")
            self._never_falls(found, f"seq of hold {generation} {row}", slot, seq)

    def _never_falls(self, found: list[str], what: str, index: int, value: int) -> None:
        if value < self._highest[what, index]:
            found.append(f"{what} fell from {self._highest[what, index]} to {value}")
        self._highest[what, index] = value

    def _whole(self, generation: str, ring: RingSegment, slot: int, seq: int) -> list[str]:
        memory = self.memory(generation)
        row = ring.shape.row_at(slot)
        values = self.run.values
        tag = ring.map.tag  # type: ignore[attr-defined]
        page = values.get((generation, "page", memory[row + layout.SLOT_FIRST_PAGE]))
        # As long as neither the row nor the pages were written again, it is as it was found.
        key = (generation, slot, seq, values.get((tag, row)), page)
        if key in self._found_whole:
            return []
        number, first = memory[row + layout.SLOT_NUMBER], memory[row + layout.SLOT_FIRST_PAGE]
        count = memory[row + layout.SLOT_STATES_BYTES] // 8
        if not number or first >= PAGES or not count:
            return [f"the row of sample {seq} in slot {slot} is not whole"]
        start = ring.shape.page_at(first) // 8
        states = np.array(memory.words[start : start + count])
        want = payload.expected(generation, slot, seq, number, count)
        if not np.array_equal(states, want):
            return [f"the pages of sample {seq} in slot {slot} are not whole"]
        self._found_whole.add(key)
        return []

    # --- the end --------------------------------------------------------------------------------

    def finish(self, killed: bool) -> list[str]:
        """Reads what is left, by whoever is owed it; what is wrong with the whole."""
        found: list[str] = self.inspect()
        registry = Registry.peek(self.name)
        active = []
        if registry is not None:
            rows = range(seams.GROUPS)
            active = [
                (registry.group_name(row), registry.by_handle(row))
                for row in rows
                if registry.state(row) == layout.ACTIVE
            ]
            registry.close()
        for group, by_handle in active:
            if not by_handle:
                self._drain(group, found)
        for group in self.groups - self.left:
            for generation in self.rings:
                first = self.first.get(f"{group} {generation}", 1)
                published = self.memory(generation)[layout.PUBLISHED]
                given = [seq for g, seq in self.given.get(group, []) if g == generation]
                missing = set(range(first, published + 1)) - set(given)
                if missing:
                    found.append(f"group {group} was never given {sorted(missing)}")
                if len(given) != len(set(given)) and not killed:
                    found.append(f"group {group} was given {given}")
        if self.backlog:
            first = [self.first.get(f"{g} {r}", 1) for g in self.groups for r in self.rings]
            if first and min(first) > 1:
                found.append("what was there before any group was given to none")
        for generation, producer in self.producers.items():
            words = producer._ring.words
            for group, at, seq in self.released:
                # In these tests the number of a request is that of its sample.
                expired = [t for t in tombstones_of(words, seq) if t.reason == "expired"]
                if at == generation and expired:
                    found.append(f"sample {seq}, which {group} released, is said to have expired")
            if producer._ring.file.locks.fd >= 0:
                producer.reclaim()
                kept = [stored.seq for stored in producer._slots.stored.values()]
                if kept and all(not by_handle for _, by_handle in active) and active:
                    found.append(f"samples {kept} stay, though all groups have read them")
        return found

    def _drain(self, group: str, found: list[str]) -> None:
        """Takes what a group has not had yet, in the place of its dead members if need be."""
        subscription = subscribe(self.name, group, wait_s=60)
        with contextlib.suppress(Exception):
            while True:
                sample = subscription.next(0)
                if sample is None:
                    break
                self.take(subscription, sample)
                self.release(subscription, sample)
        found += self.run.violations
        subscription._member.registry.locks.close()

    def close(self) -> None:
        """Closes what actors left open."""
        for files in (*self.files.values(), *(actor.files for actor in self.run.actors.values())):
            for file in files:
                file.close()
        World.made += 1
        if World.made % 64 == 0:
            # Collections by chance would run finalizers in the middle of a schedule.
            gc.collect()
