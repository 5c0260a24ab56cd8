# SPDX-License-Identifier: Apache-2.0
"""What must hold: the invariants of the protocol, and what each group was promised.

A *watch* looks at the state before and after a store to its word. A *check* belongs to a step of
a program: a claim, the end, a leave. Both return what is wrong, or None.

Ghost words: whether a row `had members`; `known` groups (registered, and not everybody left);
samples `owed` to a group (published while it was known, not released); what a row's groups `had`,
and what `had by any` was released by some group or given up by all of its members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .faults import Fault
from .shm import Names
from .states import (
    ACTIVE,
    FREE,
    NAMED,
    NAMELESS,
    REGISTERING,
    RELEASED,
    STATE_NAMES,
    TORN,
    UNCLAIMED,
    UNLINKED,
    held,
)

Watch = Callable[[bytes, bytearray, int], "str | None"]
Check = Callable[[bytearray, int], "str | None"]


class World(Names):
    """The words of a model, and what must hold of them.

    Args:
        by_handle: names of the groups that ask by handle.
        sole: each group has one member; then nothing may be unread at an end.
        by_hand: groups may be removed that nobody ever joined.
        harm_only: leave out the invariants whose breach alone harms nobody (2, 5, 6, 7).
        fault: the rule that this model leaves out.
        sizes: see `Layout`.
    """

    def __init__(
        self,
        *,
        by_handle: tuple[int, ...] = (),
        sole: bool = True,
        by_hand: bool = False,
        harm_only: bool = False,
        fault: Fault | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.by_handle, self.sole, self.by_hand = by_handle, sole, by_hand
        self.harm_only, self.fault = harm_only, fault
        self.watches: dict[int, Watch] = {}
        for i in self.registries:
            self.watches[self.epoch(i)] = self._never_falls(self.epoch(i))
            for r in self.rows:
                self.watches[self.state(i, r)] = self._on_state(i, r)
                for m in self.members:
                    self.watches[self.joined(i, r, m)] = self._on_joined(i, r, m)
        for g in self.rings:
            self.watches[self.at("exists", g)] = self._on_exists(g)
            self.watches[self.published(g)] = self._on_published(g)
            self.watches[self.settled(g)] = self._never_falls(self.settled(g))
            for s in self.slots:
                self.watches[self.seq(g, s)] = self._on_seq(g, s)
                self.watches[self.number(g, s)] = self._on_number(g, s)
            for p in self.pages:
                self.watches[self.page(g, p)] = self._on_page(g, p)
            for r in self.rows:
                self.watches[self.start(g, r)] = self._on_start(g, r)
                for s in self.slots:
                    self.watches[self.hold(g, r, s)] = self._on_hold(g, r, s)

    def _missing(self, t: bytes | bytearray, g: int, r: int) -> str | None:
        """Invariant 3."""
        if t[self.state(t[self.at("registry", g)], r)] not in (ACTIVE, NAMELESS):
            return None
        if t[self.at("exists", g)] == UNLINKED:
            return None
        for n in range(max(1, t[self.start(g, r)]), t[self.published(g)] + 1):
            if t[self.at("had", g, r)] >> n & 1:
                continue
            if not any(
                t[self.seq(g, s)] == n and t[self.hold(g, r, s)] != held(n, RELEASED)
                for s in self.slots
            ):
                return f"sample {n} of ring {g} is lost for row {r} (invariant 3)"
        return None

    def _risen(self, s: bytes, t: bytearray, g: int, r: int) -> str | None:
        """Invariant 2, for one row and one step."""
        if self.harm_only:
            return None
        for slot in self.slots:
            n = t[self.seq(g, slot)]
            if 0 < n <= s[self.published(g)] and n == s[self.seq(g, slot)]:
                state = t[self.state(t[self.at("registry", g)], r)]
                counts = state in (ACTIVE, NAMELESS) and self.needed(t, g, r, slot)
                if counts and not self.needed(s, g, r, slot):
                    return f"row {r} came to need published sample {n} (invariant 2)"
        return None

    def _rings_under(self, t: bytearray, i: int) -> list[int]:
        return [g for g in self.rings if t[self.at("registry", g)] == i]

    # ---- what is checked after a store

    def _taken(self, t: bytes | bytearray, g: int, i: int, r: int) -> bool:
        """Does this row's group lose samples of a ring by going now, and never had a member?"""
        if t[self.at("had members", i, r)] or t[self.at("exists", g)] == UNLINKED or self.by_hand:
            return False
        return any(
            not t[self.at("had", g, r)] >> n & 1
            for n in range(max(1, t[self.start(g, r)]), t[self.published(g)] + 1)
        )

    def _on_joined(self, i: int, r: int, m: int) -> Watch:
        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            t[self.at("had members", i, r)] |= t[self.joined(i, r, m)]
            return None

        return watch

    def _never_falls(self, at: int) -> Watch:
        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            return f"{self.words[at]} falls (invariant 6)" if t[at] < s[at] else None

        return watch

    def _on_state(self, i: int, r: int) -> Watch:
        at = self._at["state", i, r]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            old, new = s[at], t[at]
            name = t[self.name(i, r)]
            rings = self._rings_under(t, i)
            if old == ACTIVE and any(self._taken(t, g, i, r) for g in rings):
                return f"row {r} gives up samples, and nobody has left"
            if new != ACTIVE:
                t[self.at("had members", i, r)] = 0
                for g in rings:
                    t[self.at("had", g, r)] = 0
            if new == ACTIVE:
                t[self.at("known", name)] = 1
            elif old == ACTIVE:
                if any(t[self.joined(i, r, m)] for m in self.members):
                    return f"row {r} goes while a member that has joined has not left (leave 3)"
                t[self.at("known", name)] = 0
                for g in rings:
                    t[self.at("had by any", g)] |= (2 << t[self.published(g)]) - 1
                    t[self.at("owed", g, name)] = 0
            if (
                not self.harm_only
                and self.fault is not Fault.NO_NAMELESS_ROW
                and all(t[self.state(i, other)] == FREE for other in self.rows)
            ):
                return "every row is FREE (invariant 7)"
            for g in rings:
                problem = self._risen(s, t, g, r) or self._missing(t, g, r)
                if problem:
                    return problem
            return None

        return watch

    def _on_start(self, g: int, r: int) -> Watch:
        at = self._at["start", g, r]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            i = t[self.at("registry", g)]
            if t[at] < s[at] and not self.harm_only:
                return f"start[{r}] falls (invariant 6)"
            if t[self.state(i, r)] == ACTIVE and self.fault is not Fault.ACTIVE_BEFORE_START:
                if any(t[self.joined(i, r, m)] for m in self.members):
                    return f"row {r} gives up samples, but a member has not left (leave 3)"
                if self._taken(s, g, i, r):
                    return f"row {r} gives up samples, and nobody has left"
                name = t[self.name(i, r)]
                given_up = (1 << t[at]) - 1
                t[self.at("had by any", g)] |= given_up
                t[self.at("owed", g, name)] &= ~given_up & 255
            elif t[self.state(i, r)] == REGISTERING:
                owed = t[self.at("owed", g, t[self.name(i, r)])]
                if owed & ((1 << t[at]) - 1):
                    return f"row {r} starts after a sample that is owed to its group"
            return self._risen(s, t, g, r) or self._missing(t, g, r)

        return watch

    def _on_published(self, g: int) -> Watch:
        at = self._at["published", g]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            n = t[at]
            if n != s[at] + 1:
                return f"published goes from {s[at]} to {n}"
            slots = [slot for slot in self.slots if t[self.seq(g, slot)] == n]
            if len(slots) != 1:
                return f"{n} is published, and {len(slots)} slots hold it"
            if not self.whole(t, g, slots[0], t[self.number(g, slots[0])]):
                return f"{n} is published and not whole (invariant 1)"
            if t[self.number(g, slots[0])] == TORN:
                return f"{n} is published and not whole (invariant 1)"
            if self.requests:
                t[self.at("became", g, t[self.number(g, slots[0])])] = n
            for name in self.names:
                if t[self.at("known", name)]:
                    t[self.at("owed", g, name)] |= 1 << n
            return None

        return watch

    def _on_seq(self, g: int, slot: int) -> Watch:
        at = self._at["seq", g, slot]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            old, new = s[at], t[at]
            if 0 < old <= t[self.published(g)]:
                for name in self.names:
                    if t[self.at("owed", g, name)] >> old & 1:
                        return f"sample {old} of ring {g} is reclaimed, and owed to group {name}"
                if not t[self.at("had by any", g)] >> old & 1:
                    return f"sample {old} of ring {g} is reclaimed, and nobody had it"
                for r in self.rows:
                    problem = self._missing(t, g, r)
                    if problem:
                        return problem
                if self.leased(t, self._leases_on[g, slot]):
                    return f"slot {slot} is reclaimed under a lease"
            if 0 < new <= t[self.published(g)]:
                return f"sequence number {new} is given twice"
            return None

        return watch

    def _in_use(self, t: bytearray, g: int, slot: int) -> str | None:
        if self.leased(t, self._leases_on[g, slot]):
            return f"slot {slot} is written under a lease: a torn read"
        if 0 < t[self.seq(g, slot)] <= t[self.published(g)] and not self.harm_only:
            for r in self.rows:
                if self.needed(t, g, r, slot):
                    return f"slot {slot} is written while row {r} needs it (invariant 1)"
        return None

    def _on_exists(self, g: int) -> Watch:
        at = self._at["exists", g]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            if t[at] != UNLINKED:
                return None
            if t[self.producer_lock(g)] not in (0, actor + 1):
                return f"ring {g} is unlinked under its producer"
            for name in self.names:
                if t[self.at("owed", g, name)]:
                    return f"ring {g} is unlinked with samples owed to group {name}"
            return None

        return watch

    def _on_number(self, g: int, slot: int) -> Watch:
        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            return self._in_use(t, g, slot)

        return watch

    def _on_page(self, g: int, page: int) -> Watch:
        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            for slot in self.slots:
                first, count = divmod(t[self.run(g, slot)], 8)
                if t[self.seq(g, slot)] and first <= page < first + count:
                    problem = self._in_use(t, g, slot)
                    if problem:
                        return f"page {page}: {problem}"
            return None

        return watch

    def _on_hold(self, g: int, r: int, slot: int) -> Watch:
        at = self._at["hold", g, r, slot]

        def watch(s: bytes, t: bytearray, actor: int) -> str | None:
            before, old_code = divmod(s[at], 8)
            n, code = divmod(t[at], 8)
            if n < before:
                return f"a hold word goes back from {before} to {n}"
            if n == before and old_code == RELEASED != code and not self.harm_only:
                return f"a released hold word of sample {n} is overwritten (invariant 5)"
            if code == RELEASED:
                if t[self.seq(g, slot)] == n and self.leased(
                    t, frozenset([self._lease_numbers[g, r, slot, n]])
                ):
                    return f"sample {n} is released under another's live lease"
                t[self.at("had", g, r)] |= 1 << n
                t[self.at("had by any", g)] |= 1 << n
                name = t[self.name(t[self.at("registry", g)], r)]
                if name:
                    t[self.at("owed", g, name)] &= ~(1 << n) & 255
            return self._risen(s, t, g, r)

        return watch

    # ---- what is checked where a program says so

    def check_claim(self, i: int, g: int, r: int, slot: int, n: int, number: int | None) -> Check:
        """A lease begins: invariants 1 and 4, and nothing twice."""
        lease = self._lease_numbers[g, r, slot, n]

        def check(t: bytearray, actor: int) -> str | None:
            if t[self.state(i, r)] != ACTIVE or n < t[self.start(g, r)]:
                return f"a claim of sample {n}, which row {r} does not need"
            if n > t[self.published(g)]:
                return f"a claim of sample {n}, which is not published"
            if sum(t[byte] == lease for byte in self.lease_bytes) > 1:
                return f"two live members hold sample {n} (invariant 4)"
            if t[self.at("had", g, r)] >> n & 1:
                return f"sample {n} is delivered again after its release"
            wanted = t[self.number(g, slot)] if number is None else number
            if t[self.seq(g, slot)] != n or not self.whole(t, g, slot, wanted) or wanted == TORN:
                return f"a torn read of sample {n}"
            return None

        return check

    def check_end(self, i: int, g: int, r: int) -> Check:
        """A member was told of the end of a ring."""

        def check(t: bytearray, actor: int) -> str | None:
            for slot in self.slots:
                n = t[self.seq(g, slot)]
                if not 0 < n <= t[self.published(g)] or n < t[self.start(g, r)]:
                    continue
                word = t[self.hold(g, r, slot)]
                lease = frozenset([self._lease_numbers[g, r, slot, n]])
                read = word == held(n, RELEASED) or self.leased(t, lease)
                if word < held(n, UNCLAIMED) or (self.sole and not read):
                    return f"an early end of ring {g}: sample {n} is unread"
            return None

        return check

    def check_name_end(self, i: int, r: int, listed: int) -> Check:
        """A member is told of the end over the name, if the epoch is still `listed`."""

        def check(t: bytearray, actor: int) -> str | None:
            if self.fault is not Fault.END_WITHOUT_EPOCH and t[self.epoch(i)] != listed:
                return None
            for g in self.rings:
                if t[self.at("registry", g)] == i and t[self.at("exists", g)] == NAMED:
                    problem = self.check_end(i, g, r)(t, actor)
                    if problem:
                        return problem
            return None

        return check

    def check_all_read(self, i: int, r: int, ended: tuple[int, ...]) -> Check:
        """The last of a group leaves, after the end of these rings."""

        def check(t: bytearray, actor: int) -> str | None:
            name = t[self.name(i, r)]
            if any(t[self.at("owed", g, name)] for g in ended):
                return f"all of row {r} left after the end, with samples unread"
            return None

        return check

    def check_joined(self, i: int, r: int) -> Check:
        """A member has joined: its group must be there."""

        def check(t: bytearray, actor: int) -> str | None:
            if self.lifecycle and t[self._at["path",]] != i + 1:
                return "a member joined a registry whose name leads elsewhere"
            if t[self.state(i, r)] != ACTIVE:
                return f"a member in row {r}, which is {STATE_NAMES[t[self.state(i, r)]]}"
            return None

        return check

    def check_left(self, i: int, r: int, m: int) -> Check:
        """A live member drops its lock: only after it has left (invariant 9)."""

        def check(t: bytearray, actor: int) -> str | None:
            if t[self.joined(i, r, m)]:
                return f"member {m} of row {r} drops its lock and is joined (invariant 9)"
            return None

        return check
