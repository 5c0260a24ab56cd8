# SPDX-License-Identifier: Apache-2.0
"""One member of a group: its claims, its leases, and how it leaves.

A claim is made under the group's lock; a release is one store without any lock, since a finalizer
does it, maybe inside a claim of the same thread. So a finalizer here only stores words, posts a
semaphore and puts into a ``SimpleQueue``.

A claim, in this order (docs/protocol.md has the why of each):
  lock L; load published and start; copy seq and hold words as a hint; for a candidate load seq,
  then hold; claimed by another: test its life, load the word again; store our claim; unlock L.
"""

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmconn import layout
from shmconn.cleanup import try_clean
from shmconn.doorbell import Doorbell, group_doorbell
from shmconn.errors import (
    AccessDenied,
    Closed,
    LayoutMismatch,
    SegmentCorrupt,
    ShmConnError,
)
from shmconn.registry import Group, Registry
from shmconn.sample import Facts, Row, Sample
from shmconn.segment import RingSegment, descriptors_named, ring_files
from shmconn.views import RingView

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_log = logging.getLogger("shmconn")
# Longest wait for another member's claim: it holds L for microseconds unless it was stopped.
_CLAIM_WAIT_S = 0.5
_SWEEP_WAIT_S = 5.0
_FIRST = 16


class Member:
    """A member row that we hold; leases keep it, and so our lock, alive."""

    def __init__(self, registry: Registry, group: int, row: int) -> None:
        self.registry = registry
        self.group = group
        self.row = row
        self.code = row + 1
        self.leases: set[Lease] = set()
        # Threads of one member are not kept apart by its own locks. Held from a claim until its
        # lease is known: whoever leaves between the two would leave the sample without an owner.
        self.claiming = threading.RLock()
        self.bell = Doorbell(group_doorbell(registry.name, group))
        self.leaving = False
        self.place_kept = False  # leaving like a death
        self.left = False
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    @classmethod
    def join(
        cls, name: str, wish: Group, *, create: bool, durable: bool, background: bool, wait_s: float
    ) -> "Member":
        """Registers the group, if it is new, and joins it.

        Raises:
            RingMissing: there is no ring of that name, and ``create`` is false.
            OptionError, RegistryFull, Busy: see the registry.
        """
        registry = Registry.open(name, create=create, wait_s=wait_s)
        try:
            group = registry.register(wish)
            row = registry.join(group, durable=durable, background=background)
            member = cls(registry, group, row)
            member._sweep()
        except BaseException:
            registry.unlock()
            try_clean(registry, 0.0)
            registry.close()
            raise
        registry.unlock()
        return member

    def _sweep(self) -> None:
        """Gives back what a dead owner of our row had claimed. Under R."""
        import numpy as np

        self.registry.lock_claims(self.group, time.monotonic() + _SWEEP_WAIT_S)
        try:
            for file_name in ring_files(self.registry.name):
                try:
                    ring = RingSegment.attach(file_name, whole=False)
                except (SegmentCorrupt, LayoutMismatch, AccessDenied):
                    continue  # we can have claimed nothing of it
                if ring is None or ring.registry_id != self.registry.id:
                    continue
                holds = ring.words.copy(ring.shape.hold_at(self.group, 0), ring.shape.slots)
                # Only their owner, who is dead, and L's holder store such words: none comes now.
                for slot in ((holds & np.uint64(0xFFFF)) == np.uint64(self.code)).nonzero()[0]:
                    at = ring.shape.hold_at(self.group, int(slot))
                    word = ring.words.load(at)
                    ring.words.store(at, layout.hold_word(word >> 16, layout.UNCLAIMED))
        finally:
            self.registry.unlock_claims(self.group)

    # --- claims ---------------------------------------------------------------------------------

    def claim(self, view: RingView) -> "Sample | None":
        """The oldest sample that this group has not been given, or None.

        Raises:
            SegmentCorrupt: its slot is damaged; it was released.
            Busy: a member that was stopped in the middle of a claim holds the group's claims.
            Closed: we are leaving.
        """
        with self.claiming:
            self._check_staying()
            self.registry.lock_claims(self.group, time.monotonic() + _CLAIM_WAIT_S)
            slot, seq, more = -1, 0, False
            # Mates that were seen alive in this attempt: each is asked for once, not once a sample.
            live: set[int] = set()
            try:
                for slot, hint, code in self._candidates(view):
                    if code in live:
                        continue
                    if seq:
                        more = True
                        break
                    seq = self._try_claim(view, slot, hint, live) and hint
                    taken = slot if seq else -1
            finally:
                self.registry.unlock_claims(self.group)
            if not seq:
                return None
            if more:
                self.bell.post()
            return self._lease(view, taken, seq)

    def claim_slot(self, view: RingView, slot: int, seq: int) -> "Sample | None":
        """One certain sample, or None if it is not ours to take any more."""
        with self.claiming:
            self._check_staying()
            self.registry.lock_claims(self.group, time.monotonic() + _CLAIM_WAIT_S)
            try:
                got = self._try_claim(view, slot, seq, set())
            finally:
                self.registry.unlock_claims(self.group)
            return self._lease(view, slot, seq) if got else None

    def _check_staying(self) -> None:
        if self.leaving:
            raise Closed(f"this member of ring {self.registry.name!r} is leaving")

    def _candidates(self, view: RingView) -> Iterator[tuple[int, int, int]]:
        """Slots worth a look, oldest first, with sequence and holder: a hint, never a proof."""
        import numpy as np

        seqs, holds, wanted = self._columns(view)
        codes = np.where(holds >> np.uint64(16) == seqs, holds & np.uint64(0xFFFF), np.uint64(0))
        ours = (codes == np.uint64(layout.RELEASED)) | (codes == np.uint64(self.code))
        slots = np.flatnonzero(wanted & ~ours)
        if len(slots) > 2 * _FIRST:
            # The oldest few are nearly always enough: a full sort would cost more than the claim.
            parted = slots[np.argpartition(seqs[slots], _FIRST)]
            yield from self._in_order(seqs, codes, parted[:_FIRST])
            slots = parted[_FIRST:]
        yield from self._in_order(seqs, codes, slots)

    @staticmethod
    def _in_order(
        seqs: "npt.NDArray[np.uint64]",
        codes: "npt.NDArray[np.uint64]",
        slots: "npt.NDArray[np.intp]",
    ) -> Iterator[tuple[int, int, int]]:
        slots = slots[seqs[slots].argsort()]
        yield from zip(slots.tolist(), seqs[slots].tolist(), codes[slots].tolist(), strict=True)

    def _columns(
        self, view: RingView
    ) -> "tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]":
        import numpy as np

        words, shape = view.ring.words, view.ring.shape
        published = words.load(layout.PUBLISHED)
        start = max(1, words.load(layout.START + 8 * self.group))
        seqs = words.copy(layout.SEQ, shape.slots)
        holds = words.copy(shape.hold_at(self.group, 0), shape.slots)
        return seqs, holds, (seqs >= np.uint64(start)) & (seqs <= np.uint64(published))

    def _try_claim(self, view: RingView, slot: int, seq: int, live: set[int]) -> bool:
        """Stores our claim if the sample is unclaimed or its owner is dead. Under L.

        An owner that is alive is added to ``live``, by its code.
        """
        words, shape = view.ring.words, view.ring.shape
        if words.load(shape.seq_at(slot)) != seq:
            return False
        at = shape.hold_at(self.group, slot)
        word = words.load(at)
        if word >> 16 == seq:
            code = word & 0xFFFF
            if code in (layout.RELEASED, self.code):
                return False
            if code != layout.UNCLAIMED:
                if not 1 <= code <= layout.MEMBERS:
                    return False
                if self.registry.alive(self.group, code - 1):
                    live.add(code)
                    return False
                # It may have released before it died, and the slot be filled again since.
                if words.load(at) != word:
                    return False
        words.store(at, layout.hold_word(seq, self.code))
        return True

    def unread(self, view: RingView) -> int:
        """Published samples that nobody of the group has taken, about."""
        import numpy as np

        seqs, holds, wanted = self._columns(view)
        taken = (holds >> np.uint64(16) == seqs) & (holds & np.uint64(0xFFFF) != np.uint64(0))
        return int(np.count_nonzero(wanted & ~taken))

    # --- leases ---------------------------------------------------------------------------------

    def _lease(self, view: RingView, slot: int, seq: int) -> Sample:
        import numpy as np

        ring = view.ring
        lease = Lease(self, view, ring.shape.hold_at(self.group, slot), seq)
        try:
            row = Row.read(ring, slot)
            start = ring.shape.page_at(row.first_page)
            text = ring.words.read(start + row.json_offset, row.json_bytes)
            facts = Facts.read(ring, row, seq, text)
        except BaseException:
            lease.end(layout.RELEASED)
            raise
        buffer = np.frombuffer(ring.map, np.uint8, row.json_offset, start)
        lease.follow(buffer)
        self._count(layout.MEMBER_CLAIMED, 1)
        self._count(layout.MEMBER_BYTES, row.json_offset)
        edges: tuple[int, ...] = ()
        if view.pinned is not None:
            edges = view.pinned.edges(start - ring.shape.data, row.json_offset)
        return Sample(facts, buffer, row.ids_offset, edges)

    def _count(self, field: int, by: int) -> None:
        at = layout.member_row(self.group, self.row) + field
        self.registry.words.store(at, self.registry.words.load(at) + by)

    # --- leaving --------------------------------------------------------------------------------

    def leave(self, *, clean: bool) -> None:
        """Leaves once the last lease has ended; not clean = the place is kept, like a death."""
        # Set before the look at the leases: a lease that ends later tells the queue.
        with self.claiming:
            self.place_kept = not clean
            self.leaving = True
        if self.leases:
            _leavers[self] = clean
            threading.Thread(
                target=self._leave_later, args=(clean,), name="shmconn-leave", daemon=True
            ).start()
        else:
            self._leave(clean)

    def _leave_later(self, clean: bool) -> None:
        while self.leases:
            self.ended.get()
        self._leave(clean)

    def _leave(self, clean: bool) -> None:
        with self.claiming:
            if self.left or self.registry.locks.forked:
                return
            self.left = True
            _leavers.pop(self, None)
            try:
                if clean:
                    what = f"leaving ring {self.registry.name!r}"
                    with descriptors_named(what), self.registry.exclusive():
                        self.registry.leave(self.group, self.row)
                        self.registry.locks.unlock(layout.member_lock(self.group, self.row))
                    try_clean(self.registry)
            finally:
                self.registry.close()


class Lease:
    """A member's hold on one sample. Ends exactly once."""

    def __init__(self, member: Member, view: RingView, at: int, seq: int) -> None:
        self.member = member
        self.view = view
        self.at = at
        self.seq = seq
        self.finalizer: weakref.finalize[Any, Any] | None = None
        member.leases.add(self)

    def follow(self, buffer: Any) -> None:
        """Ends the lease when ``buffer`` and every view of it are gone."""
        self.finalizer = weakref.finalize(buffer, self._end_with_views)
        # At interpreter exit a tensor may still be in use; only a clean close releases then.
        self.finalizer.atexit = False

    def _end_with_views(self) -> None:
        """Releases; but what an exception found in use comes again, as after a death."""
        self.end(layout.UNCLAIMED if self.member.place_kept else layout.RELEASED)

    def end(self, code: int) -> None:
        """Stores the word: released, or unclaimed to give it back. Needs no lock."""
        words, locks = self.view.ring.words, self.member.registry.locks
        mine = layout.hold_word(self.seq, self.member.code)
        # Without our lock somebody else may own the sample by now; a child owns nothing.
        if locks.intact() and words.load(self.at) == mine:
            words.store(self.at, layout.hold_word(self.seq, code))
            self.view.bell.post()
            if code == layout.RELEASED:
                self.member._count(layout.MEMBER_RELEASED, 1)
            else:
                self.member.bell.post()
        self.member.leases.discard(self)
        if self.member.leaving:
            self.member.ended.put(None)

    def give_back(self) -> None:
        """Makes the sample another member's to claim, although views of it may live on."""
        if self.finalizer is not None and self.finalizer.detach() is not None:
            self.end(layout.UNCLAIMED)


_leavers: dict[Member, bool] = {}


def _leave_at_exit() -> None:
    """Lets subscriptions that were closed with tensors alive leave when the process ends."""
    for member, clean in list(_leavers.items()):
        for lease in list(member.leases):
            if not clean:
                lease.give_back()
            elif lease.finalizer is not None:
                lease.finalizer()
        try:
            member._leave(clean)
        except ShmConnError as error:
            _log.warning("at the end of this process its place was kept: %s", error)


atexit.register(_leave_at_exit)
