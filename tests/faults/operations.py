# SPDX-License-Identifier: Apache-2.0
"""A ring beside a plain account of it: after each operation both must say the same.

The account is made of dicts and knows nothing of words, locks or hints. A group is a start, the
sequence numbers that it released, and who holds what; the next sample of a member is the oldest
that nobody alive of its group holds.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from crash.survivors import PAGES, SLOTS, create
from harness import payload

from shmconn.directory import groups, remove_group
from shmconn.fill import Fill
from shmconn.sample import Sample
from shmconn.subscription import Subscription, subscribe

NAMES = ("one", "two", "three")
MEMBERS = 3  # of a group, alive
FILLS = 2  # at once
TOKENS = (1, 1, 1, 200, 300, 450)  # 1 or 2 pages each


@dataclass
class Held:
    sample: Sample
    slot: int


@dataclass
class Reader:
    subscription: Subscription
    held: dict[int, Held] = field(default_factory=dict)  # by sequence number


@dataclass
class Group:
    """What a group was given, by the account."""

    start: int
    released: set[int] = field(default_factory=set)
    readers: list[Reader] = field(default_factory=list)
    dead: int = 0  # members that died and have not been replaced

    def needs(self, seq: int) -> bool:
        return seq >= self.start and seq not in self.released

    def holders(self) -> set[int]:
        return {seq for reader in self.readers for seq in reader.held}


class World:
    """The ring, the account, and the operations on both."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.dice = random.Random(seed)
        self.producer = create(name)
        self.groups: dict[str, Group] = {}
        self.backlog: Group | None = Group(1)
        self.stored: dict[int, tuple[int, int, int]] = {}  # seq: slot, first page, pages
        self.fills: list[Fill] = []
        self.mix: Counter[str] = Counter()
        self.full = 0

    def step(self) -> None:
        """One random operation."""
        # Puts and claims are most of what happens, deaths and leaves are rare.
        todo = self.dice.choices(
            ("begin", "publish", "discard", "next", "release", "give_back", "reclaim")
            + ("join", "leave", "die", "remove", "bury"),
            (30, 30, 2, 40, 50, 3, 6, 3, 2, 2, 4, 1),
        )[0]
        if getattr(self, todo)() is not False:
            self.mix[todo] += 1
        self.check()

    # --- the producer ---------------------------------------------------------------------------

    def _needed(self, seq: int) -> bool:
        every = [*self.groups.values(), *([self.backlog] if self.backlog else [])]
        return any(group.needs(seq) for group in every)

    def _take_back(self) -> int:
        gone = [seq for seq in self.stored if not self._needed(seq)]
        for seq in gone:
            del self.stored[seq]
        return len(gone)

    def _fits(self, pages: int) -> bool:
        """Whether there is a slot and a run of pages, page by page."""
        runs = [run[1:] for run in self.stored.values()]
        runs += [(fill.first_page, fill.pages) for fill in self.fills]
        taken = {page for first, count in runs for page in range(first, first + count)}
        room = any(
            taken.isdisjoint(range(first, first + pages)) for first in range(PAGES - pages + 1)
        )
        return room and len(runs) < SLOTS

    def begin(self) -> bool | None:
        if len(self.fills) == FILLS:
            return False
        tokens = self.dice.choice(TOKENS)
        number = self.producer.accepted + 1
        fill = self.producer.allocate(
            number=number,
            request_id=payload.request_id(self.producer.generation, number),
            token_ids=payload.token_ids(number, tokens),
            metadata={"number": number},
        )
        bytes_ = tokens * payload.TOKEN_BYTES + 8 * tokens + 200
        pages = -(-bytes_ // 65536)
        if not self._fits(pages):
            self._take_back()
        assert (fill is not None) == self._fits(pages), f"{pages} pages: {fill}"
        if fill is None:
            self.full += 1
            return None
        assert fill.pages == pages
        self.producer.accept(number)
        self.fills.append(fill)
        return None

    def publish(self) -> bool | None:
        if not self.fills:
            return False
        fill = self.fills.pop(self.dice.randrange(len(self.fills)))
        seq = self.producer.published + 1
        payload.fill_in(fill, self.producer.generation, seq, 1)
        self.producer.publish(fill)
        self.stored[seq] = (fill.slot, fill.first_page, fill.pages)
        return None

    def discard(self) -> bool | None:
        if not self.fills:
            return False
        fill = self.fills.pop()
        self.producer.discard(fill)
        self.producer.bury(fill.number, fill.request_id, "fault")
        return None

    def bury(self) -> None:
        number = self.producer.accepted + 1
        self.producer.accept(number)
        self.producer.bury(number, f"lost-{number}", "aborted")

    def reclaim(self) -> None:
        assert self.producer.reclaim() == self._take_back()

    # --- groups and members ---------------------------------------------------------------------

    def join(self) -> bool | None:
        name = self.dice.choice(NAMES)
        group = self.groups.get(name)
        if group is not None and len(group.readers) == MEMBERS:
            return False
        subscription = subscribe(self.name, name)
        if group is None:
            group = self.backlog or Group(self.producer.published + 1)
            self.backlog = None
            self.groups[name] = group
        # The dead are replaced first.
        group.dead = max(0, group.dead - 1)
        group.readers.append(Reader(subscription))
        return None

    def _pick(self, holding: bool | None = None) -> tuple[str, Group, Reader] | None:
        found = [
            (name, group, reader)
            for name, group in self.groups.items()
            for reader in group.readers
            if holding is None or bool(reader.held) == holding
        ]
        return self.dice.choice(found) if found else None

    def _dissolve(self, name: str) -> None:
        del self.groups[name]
        if not self.groups:
            # What comes next is kept for the next group; what was unread is given up.
            self.backlog = Group(self.producer.published + 1)

    def leave(self) -> bool | None:
        picked = self._pick(holding=False)
        if picked is None:
            return False
        name, group, reader = picked
        reader.subscription.close()
        group.readers.remove(reader)
        if not group.readers and not group.dead:
            self._dissolve(name)
        return None

    def die(self) -> bool | None:
        picked = self._pick()
        if picked is None:
            return False
        _, group, reader = picked
        # What the kernel does at a death: its locks go; nothing else is written.
        reader.subscription._member.registry.close()
        group.readers.remove(reader)
        group.dead += 1
        return None

    def remove(self) -> bool | None:
        dead = [name for name, group in self.groups.items() if not group.readers]
        if not dead:
            return False
        remove_group(self.name, dead[0])
        self._dissolve(dead[0])
        return None

    # --- samples --------------------------------------------------------------------------------

    def next(self) -> bool | None:
        picked = self._pick()
        if picked is None:
            return False
        _, group, reader = picked
        free = [s for s in self.stored if group.needs(s) and s not in group.holders()]
        sample = reader.subscription.next(0)
        assert (sample.seq if sample else None) == min(free, default=None), f"of {free}"
        if sample is not None:
            slot = payload.slot_of(reader.subscription, sample)
            assert slot == self.stored[sample.seq][0]
            assert payload.problems(sample, slot) == []
            reader.held[sample.seq] = Held(sample, slot)
        return None

    def _take_held(self) -> tuple[Group, Reader, int, Held] | None:
        picked = self._pick(holding=True)
        if picked is None:
            return None
        _, group, reader = picked
        seq = self.dice.choice(list(reader.held))
        held = reader.held.pop(seq)
        assert payload.problems(held.sample, held.slot) == []
        return group, reader, seq, held

    def release(self) -> bool | None:
        taken = self._take_held()
        if taken is None:
            return False
        group, _, seq, held = taken
        held.sample.release()
        group.released.add(seq)
        return None

    def give_back(self) -> bool | None:
        taken = self._take_held()
        if taken is None:
            return False
        _, reader, _, held = taken
        assert reader.subscription.give_back(held.sample)
        return None

    # --- both say the same ----------------------------------------------------------------------

    def check(self) -> None:
        used = len(self.stored) + len(self.fills)
        pages = sum(run[2] for run in self.stored.values()) + sum(f.pages for f in self.fills)
        assert self.producer.free_slots == SLOTS - used
        assert self.producer.free_pages == PAGES - pages
        if self.dice.random() < 0.02:
            self._check_groups()

    def _check_groups(self) -> None:
        shown: dict[str, Any] = {group.name: group for group in groups(self.name)}
        want = dict(self.groups) | ({"": self.backlog} if self.backlog else {})
        assert set(shown) == set(want)
        for name, group in want.items():
            needed = sum(map(group.needs, self.stored))
            assert sum(shown[name].needed.values()) == needed
            members = shown[name].members
            assert sum(member.alive for member in members) == len(group.readers)
            assert len(members) == len(group.readers) + group.dead
            alive = sum(member.leases for member in members if member.alive)
            assert alive == sum(len(reader.held) for reader in group.readers)

    def end(self) -> None:
        """Lets everything go; nothing is left then."""
        for fill in self.fills:
            self.producer.discard(fill)
        self.fills.clear()
        for name in list(self.groups):
            group = self.groups[name]
            for reader in group.readers:
                for held in reader.held.values():
                    held.sample.release()
                reader.subscription.close()
            if group.dead:
                remove_group(self.name, name)
        self.producer.reclaim()
        if self.backlog is None:
            assert self.producer.free_slots == SLOTS
        self.producer.close()
