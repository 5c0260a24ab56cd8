# SPDX-License-Identifier: Apache-2.0
"""The rings of one name, as a member sees them: those it reads, those that ended, those to come.

There may be several at a time: of data-parallel ranks, or of a dead generation and the next one.
"""

import logging
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmconn import layout
from shmconn.cleanup import try_clean
from shmconn.doorbell import Doorbell
from shmconn.errors import NoMemory, ShmConnError
from shmconn.registry import Registry
from shmconn.segment import RingSegment, descriptors_named, ring_files, split_ring_name
from shmconn.unlinked import NameWatch, unlinked

if TYPE_CHECKING:
    from shmconn.pinning import Pinned

_log = logging.getLogger("shmconn")


@dataclass(frozen=True)
class RingEnd:
    """How a ring ended.

    Attributes:
        generation: its generation.
        died: the producer was killed; else it closed the ring.
        published, accepted, settled: its last counters.
    """

    generation: str
    died: bool
    published: int
    accepted: int
    settled: int


class RingView:
    """A ring as one member sees it."""

    def __init__(self, ring: RingSegment, *, counted: bool, pin: bool = False) -> None:
        """Looks at a ring that was mapped.

        Args:
            counted: what was lost in this ring so far was lost while we were joined.
            pin: register the pages with the device.
        """
        self.ring = ring
        self.pinned = _pin(ring) if pin else None
        if self.pinned is not None:
            # Leases keep the view: its pages are unregistered after the last of them has ended.
            weakref.finalize(self, self.pinned.close).atexit = False
        self.bell = Doorbell(ring.file.name)
        self._lost_before = Counter[str]() if counted else self._tombstones()

    @property
    def generation(self) -> str:
        """Generation of the ring."""
        return self.ring.generation

    def _tombstones(self) -> "Counter[str]":
        word = self.ring.words.load
        reasons = enumerate(layout.REASONS)
        return Counter({why: word(layout.LOST_BY_REASON + 8 * code) for code, why in reasons})

    def lost(self) -> "Counter[str]":
        """Tombstones since we joined, by reason."""
        return self._tombstones() - self._lost_before

    def short_of_room(self) -> bool:
        """Whether the producer waits for room, or may have to for its next sample."""
        word, shape = self.ring.words.load, self.ring.shape
        room = word(layout.FREE_PAGES) * shape.page_size
        return (
            bool(word(layout.HELD_SINCE)) or not word(layout.FREE_SLOTS) or room < shape.max_sample
        )

    def fate(self) -> str | None:
        """closed, died, or None while the producer lives. To be asked before a claim attempt."""
        if self.ring.words.load(layout.CLOSED):
            return "closed"
        if self.ring.producer_alive():
            return None
        # It may have closed between the two looks.
        return "closed" if self.ring.words.load(layout.CLOSED) else "died"


def _pin(ring: RingSegment) -> "Pinned | None":
    """Registers the ring's pages with the device; None, and one warning, if it cannot be done."""
    from shmconn.pinning import Pinned

    return Pinned.try_register(
        memoryview(ring.map)[ring.shape.data :],
        f"subscribe(pin=True): the pages of ring {ring.name!r} are not registered, so copies to "
        "a device are slower and wait",
    )


class Views:
    """The rings of one name that a subscription reads.

    Args:
        follow: a ring that cannot be read is passed over, and only the last ended one is kept.
        pin: register the pages of each with the device.

    Attributes:
        live: rings that have not ended yet, by generation.
        ends: how the others ended, in order.
    """

    def __init__(self, name: str, registry: Registry, *, follow: bool, pin: bool) -> None:
        self._name = name
        self._registry = registry
        self._follow = follow
        self._pin = pin
        self.live: dict[str, RingView] = {}
        self.ends: list[RingEnd] = []
        self._done: set[str] = set()  # generations that ended or were refused
        self._ended: dict[str, RingView] = {}  # still asked by get(): what was lost, and why
        self._lost_in_ended: Counter[str] = Counter()
        self._epoch = -1
        self._looked = False
        self._names = NameWatch(f"ring {name!r} is read on, but no other reader can join it")

    def look(self) -> int:
        """Attaches rings that came since; returns the epoch of the look.

        Raises:
            NoDescriptors, NoMemory: one could not be opened; the next call tries again.
        """
        epoch = self._registry.words.load(layout.EPOCH)
        if epoch != self._epoch:
            with descriptors_named(f"the next generation of ring {self._name!r}"):
                self._attach(epoch)
        self._looked = True
        self._names.look(self._unlinked)
        return epoch

    def _unlinked(self) -> list[str]:
        """Names that are gone though they are in use; a ring that has ended loses its name."""
        rings = [view.ring.file for view in self.live.values()]
        gone = [file for file in rings if file.locks.unlinked() and file.locks.held(layout.LOCK_P)]
        return unlinked(*gone, self._registry.file)

    def cut_off(self) -> bool:
        """Whether the registry lost its name: rings to come will have another."""
        return bool(unlinked(self._registry.file))

    def _attach(self, epoch: int) -> None:
        pending = False
        for file_name in ring_files(self._name):
            generation = split_ring_name(file_name).generation
            if generation in self.live or generation in self._done:
                continue
            try:
                ring = RingSegment.attach(file_name, whole=True)
            except NoMemory:
                raise  # nothing is wrong with the ring
            except ShmConnError:
                if not self._follow and not self.live:
                    raise
                self._done.add(generation)
                _log.exception("a ring was refused")
                continue
            if ring is None:
                pending = True
                # Its producer may have died while it made the ring: then it is unlinked here.
                try_clean(self._registry, 0.0)
            elif ring.registry_id != self._registry.id:
                self._done.add(generation)
                _log.error(
                    "ring %s belongs to a registry that was removed by hand; it is not read",
                    file_name,
                )
            else:
                self.live[generation] = RingView(ring, counted=self._looked, pin=self._pin)
        if not pending:
            self._epoch = epoch

    def unattached(self) -> bool:
        """Whether a ring of the name is being made, or came since the last look."""
        return any(
            split_ring_name(file).generation not in {*self.live, *self._done}
            for file in ring_files(self._name)
        )

    def any_there(self) -> bool:
        """Whether the name has any ring, also one that was refused or not looked at yet."""
        try:
            return bool(ring_files(self._name))
        except OSError:
            # No descriptor is left to look with: as if there were one, so nothing is given up.
            return True

    def all_attached(self) -> bool:
        """Whether every ring that there is was looked at."""
        return self._epoch >= 0 and not self.unattached()

    def of(self, generation: str) -> RingView | None:
        """A ring, also one that has ended."""
        return self.live.get(generation) or self._ended.get(generation)

    def end(self, view: RingView, fate: str) -> None:
        """A ring has ended, and all of it was read."""
        words = view.ring.words
        self.ends.append(
            RingEnd(
                view.generation,
                fate == "died",
                words.load(layout.PUBLISHED),
                words.load(layout.ACCEPTED),
                words.load(layout.SETTLED),
            )
        )
        self._lost_in_ended += view.lost()
        del self.live[view.generation]
        if self._follow:
            self._ended.clear()
        self._ended[view.generation] = view
        self._done.add(view.generation)
        try_clean(self._registry, 0.0)

    def lost(self) -> "Counter[str]":
        """Tombstones in all of them since we joined, by reason."""
        return sum((view.lost() for view in list(self.live.values())), self._lost_in_ended)

    def clear(self) -> None:
        """Lets go of them; leases keep what they need."""
        self.live.clear()
        self._ended.clear()
