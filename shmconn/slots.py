# SPDX-License-Identifier: Apache-2.0
"""The producer's own account of its slots and pages: what is free, what is published, and since
when. It takes back what no group needs any more, by looking, and never waits for anybody.
"""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from shmconn import layout
from shmconn.fill import Stored
from shmconn.need import needed, wanted
from shmconn.pages import PageRuns
from shmconn.registry import Registry
from shmconn.segment import RingSegment

if TYPE_CHECKING:
    import numpy.typing as npt


class Slots:
    """Free and published slots of one ring. The producer's lock guards it."""

    def __init__(self, ring: RingSegment, registry: Registry) -> None:
        self._ring = ring
        self._registry = registry
        self.pages = PageRuns(ring.shape.pages)
        self.free = deque(range(ring.shape.slots))
        self.stored: dict[int, Stored] = {}  # published ones, in order of publishing
        self.refused = 0  # pages that the last take asked for in vain; 0 = it found them
        # Of each published slot, 0 elsewhere: what the shared column holds, kept apart.
        self.seqs = np.zeros(ring.shape.slots, dtype=np.uint64)

    def take(self, pages: int) -> tuple[int, int] | None:
        """A free slot and the first page of a free run, or None."""
        first = self.pages.allocate(pages) if self.free else None
        self.refused = pages if first is None else 0
        if first is None:
            return None
        slot = self.free.popleft()
        self._show()
        return slot, first

    def keep(self, slot: int, stored: Stored) -> None:
        """Takes note of a slot that was published."""
        self.seqs[slot] = stored.seq
        self.stored[slot] = stored

    def give_back(self, slot: int, first_page: int, pages: int) -> None:
        """Makes a slot and its run free."""
        self.pages.release(first_page, pages)
        self.free.append(slot)
        self._show()

    def reclaim(self) -> int:
        """Takes back the published slots that no group needs; returns how many."""
        if not self.stored:
            return 0
        # A fence: the loads below are not older than our last store of `published`.
        self._ring.file.locks.held(layout.LOCK_P)
        self._heal_registering()
        done = [
            slot
            for slot in self._candidates()
            if not needed(self._registry, self._ring, slot, self.stored[slot].seq)
        ]
        for slot in done:
            self._ring.words.store(self._ring.shape.seq_at(slot), 0)
            self.seqs[slot] = 0
            stored = self.stored.pop(slot)
            self.give_back(slot, stored.first_page, stored.pages)
        return len(done)

    def _candidates(self) -> list[int]:
        """Slots worth a look, by a copy of the hold words: a hint, never a proof."""
        free = self.seqs != np.uint64(0)
        for group, state in enumerate(self._registry.states()):
            if state != layout.FREE:
                free &= ~wanted(self._ring, group, self.seqs)
        return [int(slot) for slot in np.flatnonzero(free)]

    def _heal_registering(self) -> None:
        """Frees the row of a registrant that died, by one try of R; else it blocks all reclaim."""
        registry = self._registry
        if layout.REGISTERING in registry.states() and registry.locks.try_lock(layout.LOCK_R):
            registry.undo_dead_registrants()
            registry.locks.unlock(layout.LOCK_R)

    def expire(self, before: float) -> list[tuple[int, Stored]]:
        """Releases, for groups by handle, what was published before ``before`` and not claimed.

        Args:
            before: monotonic seconds.

        Returns:
            (group, stored) of each.
        """
        if not self.stored or next(iter(self.stored.values())).since >= before:
            return []
        # In order of publishing, so the newest of the old ones tells which are old.
        newest = next(kept.seq for kept in reversed(self.stored.values()) if kept.since < before)
        return self._expire_by_handle(self.seqs <= np.uint64(newest))

    def spare(self, slot: int) -> None:
        """Releases a slot for groups by handle, as nobody will ask for it.

        While a member of such a group claims, it is left to ``expire``.
        """
        only = np.zeros(len(self.seqs), dtype=bool)
        only[slot] = True
        self._expire_by_handle(only)

    def _expire_by_handle(self, old: "npt.NDArray[np.bool_]") -> list[tuple[int, Stored]]:
        """``expire`` of the slots in a mask."""
        expired: list[tuple[int, Stored]] = []
        registry = self._registry
        for group in range(layout.GROUPS):
            if registry.state(group) != layout.ACTIVE or not registry.by_handle(group):
                continue
            # What was released already is not looked at again.
            slots = [
                int(slot) for slot in np.flatnonzero(old & wanted(self._ring, group, self.seqs))
            ]
            slots.sort(key=lambda slot: self.stored[slot].seq)
            # One try: while a member claims, this waits for the next call.
            if slots and registry.try_lock_claims(group):
                kept = [(slot, self.stored[slot]) for slot in slots]
                expired += [(group, one) for slot, one in kept if self._expire(group, slot, one)]
                registry.unlock_claims(group)
        return expired

    def _expire(self, group: int, slot: int, stored: Stored) -> bool:
        words = self._ring.words
        at = self._ring.shape.hold_at(group, slot)
        word = words.load(at)
        if stored.seq < words.load(layout.START + 8 * group):
            return False
        code = word & 0xFFFF if word >> 16 == stored.seq else layout.UNCLAIMED
        if code != layout.UNCLAIMED:
            if code == layout.RELEASED or self._registry.alive(group, code - 1):
                return False
            # It may have released before it died.
            if words.load(at) != word:
                return False
        words.store(at, layout.hold_word(stored.seq, layout.RELEASED))
        return True

    def _show(self) -> None:
        self._ring.words.store(layout.FREE_PAGES, self.pages.free)
        self._ring.words.store(layout.FREE_SLOTS, len(self.free))
