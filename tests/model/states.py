# SPDX-License-Identifier: Apache-2.0
"""The state of the model: every shared word and lock is one byte of a `bytes` object.

```
| words of registries and rings | locks | ghost words | kills left | a block for each actor |
  block: | local state, 2 bytes | leases | number of stores in the buffer | address, value, ... |
```
A lock holds its owner's number + 1, or 0. Ghost words are no part of the protocol: they record
what was promised to whom, so that a broken promise is seen (see `promises.py`).
"""

from __future__ import annotations

from typing import Any

FREE, REGISTERING, ACTIVE, NAMELESS = range(4)
STATE_NAMES = ("FREE", "REGISTERING", "ACTIVE", "NAMELESS")
UNCLAIMED, RELEASED = 0, 7  # codes of a hold word; between them: member row + 1
NEVER, NAMED, UNLINKED = range(3)  # a name in /dev/shm
TORN = 99  # a page that is half written


def held(sequence: int, code: int) -> int:
    """Return the hold word of a sequence number and a code."""
    return sequence * 8 + code


class Layout:
    """Where every word is, and what it says.

    Args say how many there are of each: `samples` per ring, `members` rows per group,
    `names` of groups (1, 2, ...), `registries` inodes that the registry's name may lead to,
    `requests` numbers if they are not the sequence numbers, `buffer` stores that may wait in an
    actor's store buffer (0: stores are seen at once). With `lifecycle` rings and registry are
    made and unlinked; else they are there.
    """

    def __init__(
        self,
        *,
        slots: int = 1,
        rows: int = 2,
        members: int = 1,
        samples: int = 2,
        names: int = 2,
        rings: int = 1,
        registries: int = 1,
        pages: int = 0,
        tombstones: int = 0,
        requests: int = 0,
        buffer: int = 0,
        lifecycle: bool = False,
        own_registry: bool = False,
    ) -> None:
        self.slots, self.rows, self.members = range(slots), range(rows), range(members)
        self.samples, self.rings = samples, range(rings)
        self.names, self.pages = range(1, names + 1), range(pages)
        self.registries, self.tombstones = range(registries), range(tombstones)
        self.requests, self.buffer, self.lifecycle = requests, buffer, lifecycle
        self.words: list[str] = []
        self._at: dict[tuple[Any, ...], int] = {}
        self.preset: dict[int, int] = {}
        self._registry_words()
        self._ring_words(own_registry)
        self.first_lock = len(self.words)
        self._locks()
        self.last_lock = len(self.words)
        self._ghosts()
        self.kills = self._word("kills left", "kills")
        self.first_block = len(self.words)
        self.blocks: list[int] = []
        self.lease_bytes: list[int] = []
        self._lease_numbers: dict[tuple[int, int, int, int], int] = {}
        self._leases_on: dict[tuple[int, int], frozenset[int]] = {}
        self._number_leases()
        if buffer and len(self.words) > 255:
            raise ValueError(f"{len(self.words)} words: an address must fit in a byte")

    # ---- addresses

    def _word(self, text: str, *key: Any) -> int:
        self._at[key] = len(self.words)
        self.words.append(text)
        return len(self.words) - 1

    def _registry_words(self) -> None:
        self._word("registry name", "path")
        for i in self.registries:
            tail = f"@{i}" if len(self.registries) > 1 else ""
            self._word(f"registry file{tail}", "inode", i)
            self._word(f"registry magic{tail}", "magic", i)
            self._word(f"epoch{tail}", "epoch", i)
            for r in self.rows:
                self._word(f"state[{r}]{tail}", "state", i, r)
                self._word(f"name[{r}]{tail}", "name", i, r)
                for m in self.members:
                    self._word(f"joined[{r},{m}]{tail}", "joined", i, r, m)
        for r in self.rows:
            self._word(f"doorbell g{r}", "bell", r)

    def _ring_words(self, own_registry: bool) -> None:
        for g in self.rings:
            tail = f" of ring {g}" if len(self.rings) > 1 else ""
            self._word(f"ring {g} name", "exists", g)
            self._word(f"doorbell{tail}", "ring bell", g)
            self._word(f"registry{tail}", "registry", g)
            self._word(f"ring magic{tail}", "ring magic", g)
            self._word(f"published{tail}", "published", g)
            self._word(f"settled{tail}", "settled", g)
            self._word(f"closed{tail}", "closed", g)
            self.preset[self.at("registry", g)] = g if own_registry else 0
            for s in self.slots:
                self._word(f"seq[{s}]{tail}", "seq", g, s)
                self._word(f"number[{s}]{tail}", "number", g, s)
                self._word(f"run[{s}]{tail}", "run", g, s)
            for p in self.pages:
                self._word(f"page[{p}]{tail}", "page", g, p)
            for r in self.rows:
                self._word(f"start[{r}]{tail}", "start", g, r)
                for s in self.slots:
                    self._word(f"hold[{r},{s}]{tail}", "hold", g, r, s)
            for e in self.tombstones:
                self._word(f"tombstone[{e}] index{tail}", "tomb index", g, e)
                self._word(f"tombstone[{e}] number{tail}", "tomb number", g, e)
            self._word(f"tombstones written{tail}", "buried", g)

    def _locks(self) -> None:
        for g in self.rings:
            self._word(f"P{g}" if len(self.rings) > 1 else "P", "P", g)
        self.registry_locks = len(self.words)
        for i in self.registries:
            tail = f"@{i}" if len(self.registries) > 1 else ""
            self._word(f"R{tail}", "R", i)
            for r in self.rows:
                self._word(f"L[{r}]{tail}", "L", i, r)
                for m in self.members:
                    self._word(f"M[{r},{m}]{tail}", "M", i, r, m)

    def _ghosts(self) -> None:
        for name in self.names:
            self._word(f"known[{name}]", "known", name)
        for i in self.registries:
            for r in self.rows:
                self._word(f"had members[{i},{r}]", "had members", i, r)
        for g in self.rings:
            self._word(f"had by any[{g}]", "had by any", g)
            for k in range(self.requests + 1):
                self._word(f"became[{g},{k}]", "became", g, k)
            for r in self.rows:
                self._word(f"had[{g},{r}]", "had", g, r)
            for name in self.names:
                self._word(f"owed[{g},{name}]", "owed", g, name)

    def _number_leases(self) -> None:
        number = 0
        for g in self.rings:
            for s in self.slots:
                here = []
                for r in self.rows:
                    for n in range(1, self.samples + 1):
                        number += 1
                        self._lease_numbers[g, r, s, n] = number
                        here.append(number)
                self._leases_on[g, s] = frozenset(here)

    def at(self, *key: Any) -> int:
        """Return the address of a word that has no method of its own below."""
        return self._at[key]

    def state(self, i: int, r: int) -> int:
        return self._at["state", i, r]

    def name(self, i: int, r: int) -> int:
        return self._at["name", i, r]

    def joined(self, i: int, r: int, m: int) -> int:
        return self._at["joined", i, r, m]

    def epoch(self, i: int) -> int:
        return self._at["epoch", i]

    def published(self, g: int) -> int:
        return self._at["published", g]

    def settled(self, g: int) -> int:
        return self._at["settled", g]

    def closed(self, g: int) -> int:
        return self._at["closed", g]

    def seq(self, g: int, s: int) -> int:
        return self._at["seq", g, s]

    def number(self, g: int, s: int) -> int:
        """The slot's fields and, if there are no page words, what its pages hold."""
        return self._at["number", g, s]

    def run(self, g: int, s: int) -> int:
        """First page * 8 + pages."""
        return self._at["run", g, s]

    def page(self, g: int, p: int) -> int:
        return self._at["page", g, p]

    def start(self, g: int, r: int) -> int:
        return self._at["start", g, r]

    def hold(self, g: int, r: int, s: int) -> int:
        return self._at["hold", g, r, s]

    def producer_lock(self, g: int) -> int:
        return self._at["P", g]

    def registry_lock(self, i: int) -> int:
        return self._at["R", i]

    def claim_lock(self, i: int, r: int) -> int:
        return self._at["L", i, r]

    def member_lock(self, i: int, r: int, m: int) -> int:
        return self._at["M", i, r, m]

    def lease(self, g: int, r: int, s: int, n: int) -> int:
        """Return the number that stands for this lease in an actor's block."""
        return self._lease_numbers[g, r, s, n]

    # ---- what a state says

    def needed(self, t: bytes | bytearray, g: int, r: int, s: int) -> bool:
        """`need(r, s)` of the protocol."""
        state = t[self.state(t[self.at("registry", g)], r)]
        if state == REGISTERING:
            return True
        n = t[self.seq(g, s)]
        return (
            state != FREE
            and n >= t[self.start(g, r)]
            and t[self.hold(g, r, s)] != held(n, RELEASED)
        )

    def whole(self, t: bytes | bytearray, g: int, s: int, number: int) -> bool:
        """Do slot and pages hold this request, all of it?"""
        if t[self.number(g, s)] != number:
            return False
        if not self.pages:
            return True
        first, count = divmod(t[self.run(g, s)], 8)
        return count > 0 and all(t[self.page(g, p)] == number for p in range(first, first + count))

    def leased(self, t: bytes | bytearray, numbers: frozenset[int]) -> bool:
        """Has any actor one of these leases?"""
        return any(t[byte] in numbers for byte in self.lease_bytes)

    # ---- whole states

    def blocks_for(self, actors: int, leases: int) -> int:
        """Give each actor its block; return the size of one."""
        size = 2 + leases + (1 + 2 * self.buffer if self.buffer else 0)
        self.blocks = [self.first_block + a * size for a in range(actors)]
        self.lease_bytes = [b + 2 + k for b in self.blocks for k in range(leases)]
        return size

    def render(self, address: int, value: int) -> str:
        """Return a word's value as people read it."""
        word = self.words[address]
        if word.startswith("state"):
            return STATE_NAMES[value]
        if word.startswith("hold"):
            n, code = divmod(value, 8)
            what = {UNCLAIMED: "unclaimed", RELEASED: "released"}.get(code, f"member {code - 1}")
            return f"({n}, {what})"
        return "torn" if value == TORN else str(value)
