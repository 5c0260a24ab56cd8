# SPDX-License-Identifier: Apache-2.0
"""A wait for the next sample while what this very process holds fills the ring.

A trainer that keeps samples until its optimizer's step, or a batch that takes more than the ring,
would wait for itself without a word: vLLM names the group and the pid, but in its own log.
"""

import gc
import logging
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmconn import layout
from shmconn.errors import Standstill
from shmconn.handle import format_size

if TYPE_CHECKING:
    from shmconn.member import Member
    from shmconn.views import RingView

_log = logging.getLogger("shmconn")
# How long nothing comes before it is said; each further time after twice as long.
SAY_AFTER_S = 5.0


@dataclass(frozen=True)
class Held:
    """What stands in a ring that is short of room.

    Attributes:
        samples, bytes: held by this process; bytes are those of whole pages.
        mates: samples that other members of the group hold.
        used: slots that are not free.
        waits: the producer has said that it waits for room.
    """

    ring: str
    samples: int
    bytes: int
    mates: int
    used: int
    waits: bool
    slots: int
    room: int
    published: int

    @classmethod
    def of(cls, member: "Member", view: "RingView") -> "Held":
        """As it is now."""
        words, shape = view.ring.words, view.ring.shape
        first = shape.hold_at(member.group, 0)
        slots = [(lease.at - first) // 8 for lease in list(member.leases) if lease.view is view]
        pages = sum(words.load(shape.row_at(slot) + layout.SLOT_PAGES) for slot in slots)
        seqs, holds = words.copy(layout.SEQ, shape.slots), words.copy(first, shape.slots)
        codes = (holds & 0xFFFF)[(holds >> 16 == seqs) & (seqs != 0)]
        others = (codes != layout.UNCLAIMED) & (codes != layout.RELEASED) & (codes != member.code)
        return cls(
            ring=view.ring.name,
            samples=len(slots),
            bytes=pages * shape.page_size,
            mates=int(others.sum()),
            used=int((seqs != 0).sum()),
            waits=words.load(layout.HELD_SINCE) != 0,
            slots=shape.slots,
            room=shape.pages * shape.page_size,
            published=words.load(layout.PUBLISHED),
        )

    @property
    def in_the_way(self) -> bool:
        """Whether this process holds some, and its group more than others need beside it."""
        return self.samples > 0 and 2 * (self.samples + self.mates) > self.used

    def text(self, group: str) -> str:
        """Who holds what, which number is too small, and what helps."""
        waits = "vLLM waits for room in it" if self.waits else "it is short of room"
        mates = f" and other members of group {group!r} {self.mates}" if self.mates else ""
        return (
            f"this process holds {self.samples} samples, {format_size(self.bytes)}, of ring "
            f"{self.ring!r}{mates}, while it waits for the next one; the ring takes "
            f"{self.slots} samples, {format_size(self.room)}, and {waits}. Let go of samples "
            "before asking for more (clone() what is kept; fewer of them for each optimizer step, "
            "a smaller max_len), or make the ring larger (ring_size, slots)"
        )


class Watch:
    """What one subscription waits for."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.reset()

    def reset(self) -> None:
        """A sample came."""
        self._since: float | None = None
        self._gap_s = SAY_AFTER_S
        self._before: Held | None = None
        self._certain: Held | None = None

    def look(self, member: "Member", views: "Collection[RingView]") -> None:
        """No sample was found; says so, with growing gaps, if what we hold is in the way."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < self._gap_s or not member.leases:
            return
        # Samples in reference cycles need no more than that.
        gc.collect()
        short = [view for view in views if view.short_of_room() and view.fate() is None]
        held = [held for view in short if (held := Held.of(member, view)).in_the_way]
        if not held:
            return
        waited_s, self._gap_s = now - self._since, 2 * self._gap_s
        for one in held:
            _log.warning("no sample for %.0f s: %s", waited_s, one.text(self._group))
        only = held[0] if len(views) == 1 else None
        all_ours = only is not None and only.used == only.samples
        if only is not None and only == self._before and all_ours and only.waits:
            self._certain = only
        self._before = only

    def check(self) -> None:
        """For a wait without a timeout.

        Raises:
            Standstill: all that is in the ring is held here, nothing has changed since that was
                said, and this is the only thread: nobody is left to end the wait.
        """
        if self._certain is not None and threading.active_count() == 1:
            raise Standstill(f"this wait cannot end: {self._certain.text(self._group)}")
