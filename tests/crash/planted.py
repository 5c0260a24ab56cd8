# SPDX-License-Identifier: Apache-2.0
"""Wrong orders of steps, to show that the kills would find them.

Those of the producer are applied in the victim only; those of readers and cleaners in victim and
survivors, as a change of the code would be.
"""

from typing import Any

import pytest

from shmconn import cleanup, doorbell, layout
from shmconn.handle import Handle
from shmconn.ledger import Ledger
from shmconn.member import Member
from shmconn.registry import Registry
from shmconn.ring import Producer
from shmconn.segment import RingSegment
from shmconn.slots import Slots
from shmconn.views import RingView
from shmconn.words import Words


def published_before_the_row() -> None:
    """The commit comes before the slot's fields and sequence."""
    publish = Producer.publish

    def wrong(self: Producer, fill: Any) -> Handle:
        self._ring.words.store(layout.PUBLISHED, self.published + 1)
        return publish(self, fill)

    Producer.publish = wrong  # type: ignore[method-assign]


def closed_before_the_last_tombstones() -> None:
    """The last word of a life is not the last."""
    entomb = Ledger.entomb

    def wrong(self: Ledger, number: int, digest: bytes, reason: str, mask: int) -> None:
        if reason == "shutdown":
            self._words.store(layout.CLOSED, 1)
        entomb(self, number, digest, reason, mask)

    Ledger.entomb = wrong  # type: ignore[method-assign]


def magic_first() -> None:
    """The head is declared whole before it is."""
    store = Words.store

    def wrong(self: Words, offset: int, value: int) -> None:
        if offset == layout.VERSION_AT:
            store(self, layout.MAGIC, layout.RING_MAGIC)
        store(self, offset, value)

    Words.store = wrong  # type: ignore[method-assign]


PRODUCER = [published_before_the_row, closed_before_the_last_tombstones, magic_first]


def no_sweep(patch: pytest.MonkeyPatch) -> None:
    """A member row is taken over with the claims of its dead owner."""
    patch.setattr(Member, "_sweep", lambda self: None)


def active_before_start(patch: pytest.MonkeyPatch) -> None:
    """A new group counts before it is known from where on."""
    start = Registry.start_after_published

    def wrong(self: Registry, group: int) -> None:
        self.set_state(group, layout.ACTIVE)
        start(self, group)

    patch.setattr(Registry, "start_after_published", wrong)


def dead_registrants_stay(patch: pytest.MonkeyPatch) -> None:
    """Nobody undoes what a dead registrant began."""
    patch.setattr(Registry, "undo_dead_registrants", lambda self: None)


def released_at_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A claim counts as the release, so a death loses the sample."""
    claim = Member._try_claim

    def wrong(self: Member, view: RingView, slot: int, seq: int, live: set[int]) -> bool:
        got = claim(self, view, slot, seq, live)
        if got:
            at = view.ring.shape.hold_at(self.group, slot)
            view.ring.words.store(at, layout.hold_word(seq, layout.RELEASED))
        return got

    patch.setattr(Member, "_try_claim", wrong)


def a_lease_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """A slot is taken back as soon as it was claimed."""

    def wrong(registry: Registry, ring: RingSegment, slot: int, seq: int) -> bool:
        at = ring.shape.hold_at
        return any(
            registry.state(group) != layout.FREE and ring.words.load(at(group, slot)) >> 16 != seq
            for group in range(layout.GROUPS)
        )

    patch.setattr("shmconn.slots.needed", wrong)
    patch.setattr(Slots, "_candidates", lambda self: list(self.stored))


def name_before_doorbell(patch: pytest.MonkeyPatch) -> None:
    """The name, by which the rest would be found, goes first."""
    pending: list[str] = []
    unlink, unlink_bell = cleanup.unlink, doorbell.unlink

    def wrong(file_name: str) -> bool:
        gone = unlink(file_name)
        for bell in pending:
            unlink_bell(bell)
        pending.clear()
        return gone

    def later(bell: str) -> bool:
        pending.append(bell)
        return True

    patch.setattr(cleanup, "unlink", wrong)
    patch.setattr(doorbell, "unlink", later)


def registry_before_the_rings(patch: pytest.MonkeyPatch) -> None:
    """The registry goes while rings of its name are still there."""
    clean_up = cleanup.clean_up

    def wrong(registry: Registry, **options: Any) -> Any:
        if not registry.locks.held(layout.LOCK_R + 1, layout.LOCK_R):
            cleanup.unlink(registry.file.name)
        return clean_up(registry, **options)

    patch.setattr(cleanup, "clean_up", wrong)
    patch.setattr("shmconn.directory.clean_up", wrong)
