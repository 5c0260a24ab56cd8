# SPDX-License-Identifier: Apache-2.0
"""The protocol's ordering steps, each left out or swapped in turn, and where that must be seen.

Numbers are those of section 6 of docs/protocol.md. Not here, since no order of steps shows it:
the fences (16: memory is sequentially consistent in one process; the model's store buffers see
it), group tables of each generation (8: no such code), and what is only a hint or a belt.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmconn import find, layout, need, start
from shmconn.handle import Handle
from shmconn.ledger import Ledger
from shmconn.liveness import LockFile
from shmconn.member import Lease, Member
from shmconn.registry import Group, Registry
from shmconn.ring import Producer
from shmconn.sample import Row, Sample
from shmconn.segment import RingSegment, ShmFile
from shmconn.slots import Slots
from shmconn.subscription import Subscription
from shmconn.views import RingView

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


# --- claims and releases ----------------------------------------------------------------------


def takeover_without_a_second_look(patch: Patch) -> None:
    """1: a dead member's claim is taken over by the word that was loaded before its death."""

    def wrong(self: Member, view: RingView, slot: int, seq: int, live: set[int]) -> bool:
        words, shape = view.ring.words, view.ring.shape
        if words.load(shape.seq_at(slot)) != seq:
            return False
        at = shape.hold_at(self.group, slot)
        word = words.load(at)
        code = word & 0xFFFF if word >> 16 == seq else layout.UNCLAIMED
        if code in (layout.RELEASED, self.code):
            return False
        if code != layout.UNCLAIMED and self.registry.alive(self.group, code - 1):
            return False
        words.store(at, layout.hold_word(seq, self.code))
        return True

    patch.setattr(Member, "_try_claim", wrong)


def a_copy_is_taken_for_proof(patch: Patch) -> None:
    """A claim does not look at the hold word again, after the copy."""
    columns = Member._columns

    def see(self: Member, view: RingView) -> Any:
        seqs, holds, wanted = columns(self, view)
        self.copied = dict(zip(seqs.tolist(), holds.tolist(), strict=True))  # type: ignore[attr-defined]
        return seqs, holds, wanted

    def wrong(self: Any, view: RingView, slot: int, seq: int, live: set[int]) -> bool:
        word = self.copied.get(seq, 0)
        code = word & 0xFFFF if word >> 16 == seq else layout.UNCLAIMED
        if code != layout.UNCLAIMED and self.registry.alive(self.group, code - 1):
            return False
        view.ring.words.store(
            view.ring.shape.hold_at(self.group, slot), layout.hold_word(seq, self.code)
        )
        return True

    patch.setattr(Member, "_columns", see)
    patch.setattr(Member, "_try_claim", wrong)


def released_in_two_stores(patch: Patch) -> None:
    """11: unclaimed first, then released."""

    def wrong(self: Lease, code: int) -> None:
        words = self.view.ring.words
        if self.member.registry.locks.intact():
            words.store(self.at, layout.hold_word(self.seq, layout.UNCLAIMED))
            words.store(self.at, layout.hold_word(self.seq, code))
        self.member.leases.discard(self)

    patch.setattr(Lease, "end", wrong)


def claims_without_the_lock(patch: Patch) -> None:
    """13: members of a group claim at the same time."""
    patch.setattr(Registry, "lock_claims", lambda self, group, deadline: None)
    patch.setattr(Registry, "unlock_claims", lambda self, group: None)


def no_sweep(patch: Patch) -> None:
    """10: a member row is taken over with the claims of its dead owner."""
    patch.setattr(Member, "_sweep", lambda self: None)


def a_lease_does_not_count(patch: Patch) -> None:
    """A claim ends the group's need, as if it were a release."""

    def wrong(registry: Registry, ring: RingSegment, group: int, slot: int, seq: int) -> bool:
        if registry.state(group) == layout.FREE:
            return False
        if seq < ring.words.load(layout.START + 8 * group):
            return False
        return ring.words.load(ring.shape.hold_at(group, slot)) >> 16 != seq

    patch.setattr(need, "needs", wrong)
    patch.setattr(Slots, "_candidates", lambda self: list(self.stored))


def claims_before_the_start(patch: Patch) -> None:
    """A newcomer claims what was published before it came, beside other groups."""
    columns = Member._columns

    def wrong(self: Member, view: RingView) -> Any:
        seqs, holds, _ = columns(self, view)
        published = view.ring.words.load(layout.PUBLISHED)
        return seqs, holds, (seqs > 0) & (seqs <= published)

    patch.setattr(Member, "_columns", wrong)


def claims_before_the_commit(patch: Patch) -> None:
    """A reader claims what has a sequence number, committed or not."""
    columns = Member._columns

    def wrong(self: Member, view: RingView) -> Any:
        seqs, holds, _ = columns(self, view)
        start = view.ring.words.load(layout.START + 8 * self.group)
        return seqs, holds, (seqs > 0) & (seqs >= start)

    patch.setattr(Member, "_columns", wrong)


# --- publishing and settling ------------------------------------------------------------------


def sequence_before_the_row(patch: Patch) -> None:
    """13: the slot's sequence and the commit come before its fields."""
    publish = Producer.publish

    def wrong(self: Producer, fill: Any) -> Handle:
        seq = self.published + 1
        self._ring.words.store(self.shape.seq_at(fill.slot), seq)
        self._ring.words.store(layout.PUBLISHED, seq)
        return publish(self, fill)

    patch.setattr(Producer, "publish", wrong)


def commit_before_the_sequence(patch: Patch) -> None:
    """``published`` is stored before the slot has its sequence number."""
    publish = Producer.publish

    def wrong(self: Producer, fill: Any) -> Handle:
        self._ring.words.store(layout.PUBLISHED, self.published + 1)
        return publish(self, fill)

    patch.setattr(Producer, "publish", wrong)


def settled_before_the_commit(patch: Patch) -> None:
    """A request counts as settled before its sample is there."""
    publish = Producer.publish

    def wrong(self: Producer, fill: Any) -> Handle:
        self._ring.words.store(layout.SETTLED, fill.number)
        return publish(self, fill)

    patch.setattr(Producer, "publish", wrong)


def settled_before_the_tombstone(patch: Patch) -> None:
    """A request counts as settled before its tombstone is there."""
    entomb = Ledger.entomb

    def wrong(self: Ledger, number: int, digest: bytes, reason: str, mask: int) -> None:
        self._words.store(layout.SETTLED, number)
        entomb(self, number, digest, reason, mask)

    patch.setattr(Ledger, "entomb", wrong)


def settled_loaded_after_the_slots(patch: Patch) -> None:
    """A look for one request loads ``settled`` last."""
    tombstones = find._check_tombstones

    def late(member: Member, view: RingView, wanted: Handle) -> None:
        tombstones(member, view, wanted)
        if wanted.number <= view.ring.words.load(layout.SETTLED):
            raise find.SampleGone("already delivered")

    patch.setattr(find, "_check_tombstones", late)


def what_was_given_back_counts_as_gone(patch: Patch) -> None:
    """A look for one request takes an unclaimed word, after a claim in vain, for nothing."""

    def wrong(member: Member, view: RingView, wanted: Handle) -> tuple[Sample | None, str]:
        words, shape = view.ring.words, view.ring.shape
        settled = words.load(layout.SETTLED)
        for slot, seq in find._slots_of(member, view, wanted):
            sample = member.claim_slot(view, slot, seq)
            if sample is not None:
                return sample, ""
            word = words.load(shape.hold_at(member.group, slot))
            if 1 <= word & 0xFFFF <= layout.MEMBERS:
                return None, ""
        if wanted.number <= settled:
            raise find.SampleGone("already delivered")
        return None, ""

    patch.setattr("shmconn.subscription.find", wrong)


def a_row_read_without_its_sequence(patch: Patch) -> None:
    """A look for one request does not compare the sequence after it has read the row."""

    def wrong(member: Member, view: RingView, wanted: Handle) -> Iterator[tuple[int, int]]:
        words, shape = view.ring.words, view.ring.shape
        for slot in range(shape.slots):
            number = words.load(shape.row_at(slot) + layout.SLOT_NUMBER)
            if number == wanted.number and Row.read(view.ring, slot).digest == wanted.digest:
                yield slot, words.load(shape.seq_at(slot))

    patch.setattr(find, "_slots_of", wrong)


# --- groups that come and go ------------------------------------------------------------------


def start_before_it_is_seen(patch: Patch) -> None:
    """2: a newcomer computes its start, then becomes visible."""
    set_state = Registry.set_state

    def wrong(self: Registry, group: int, state: int) -> None:
        if state != layout.REGISTERING:
            set_state(self, group, state)

    patch.setattr(Registry, "set_state", wrong)


def no_start(patch: Patch) -> None:
    """3 and 14: a newcomer, or who comes after the last, gets all that is still in the ring."""
    patch.setattr(Registry, "start_after_published", lambda self, group: None)


def active_before_its_start(patch: Patch) -> None:
    """4: a newcomer counts at once, its start comes later."""
    start_after = Registry.start_after_published

    def wrong(self: Registry, group: int) -> None:
        if self.state(group) == layout.REGISTERING:
            self.set_state(group, layout.ACTIVE)
        start_after(self, group)

    patch.setattr(Registry, "start_after_published", wrong)


def dead_registrants_stay(patch: Patch) -> None:
    """5: nobody undoes what a dead registrant began."""
    patch.setattr(Registry, "undo_dead_registrants", lambda self: None)


def live_registrants_are_undone(patch: Patch) -> None:
    """5: the producer undoes a registrant without a try of lock R."""

    def wrong(self: Any) -> None:
        self._registry.undo_dead_registrants()

    patch.setattr(Slots, "_heal_registering", wrong)


def leavers_trust_dead_registrants(patch: Patch) -> None:
    """A leaver counts the row of a dead registrant as one that needs what comes."""

    def wrong(self: Registry, group: int) -> None:
        others = (self.state(other) for other in range(layout.GROUPS) if other != group)
        if any(state != layout.FREE for state in others):
            self.set_state(group, layout.FREE)
        else:
            self.start_after_published(group)
            self.set_state(group, layout.NAMELESS)

    patch.setattr(Registry, "dissolve", wrong)


def free_between_register_and_join(patch: Patch) -> None:
    """6: lock R is given up between registering and joining."""
    join = Registry.join

    def wrong(self: Registry, group: int, *, durable: bool, background: bool) -> int:
        self.unlock()
        with self.exclusive():
            self._thread.acquire()
            row = join(self, group, durable=durable, background=background)
            self.locks.try_lock(layout.LOCK_R)
        self.locks.lock(layout.LOCK_R, 1e9, lambda: "")
        return row

    patch.setattr(Registry, "join", wrong)


def the_last_that_lives_takes_the_group(patch: Patch) -> None:
    """7: a leave asks who lives, not who has joined."""

    def wrong(self: Registry, group: int, member: int) -> bool:
        self.words.store(layout.member_row(group, member) + layout.MEMBER_JOINED, 0)
        last = not self.any_alive(group)
        if last:
            self.dissolve(group)
        return last

    patch.setattr(Registry, "leave", wrong)


def the_last_group_leaves_no_row(patch: Patch) -> None:
    """15: no group at all, instead of a nameless one."""
    patch.setattr(Registry, "dissolve", lambda self, group: self.set_state(group, layout.FREE))


def the_backlog_does_not_count(patch: Patch) -> None:
    """15: what nobody has subscribed to is needed by nobody."""
    needs = need.needs

    def wrong(registry: Registry, ring: RingSegment, group: int, slot: int, seq: int) -> bool:
        if registry.state(group) == layout.NAMELESS:
            return False
        return needs(registry, ring, group, slot, seq)

    patch.setattr(need, "needs", wrong)
    patch.setattr(Slots, "_candidates", lambda self: list(self.stored))


def the_backlog_stays_nameless(patch: Patch) -> None:
    """15: the first group does not take over the nameless row."""
    register = Registry.register

    def wrong(self: Registry, wish: Group) -> int:
        states = [self.state(group) for group in range(layout.GROUPS)]
        if self.find(wish.name) is None and layout.NAMELESS in states:
            group = states.index(layout.FREE)
            self._describe(group, wish)
            self.set_state(group, layout.REGISTERING)
            self.start_after_published(group)
            self.set_state(group, layout.ACTIVE)
            return group
        return register(self, wish)

    patch.setattr(Registry, "register", wrong)


# --- ends -------------------------------------------------------------------------------------


def claims_before_the_fate(patch: Patch) -> None:
    """9: a reader looks for samples first, then whether the ring has ended."""

    def wrong(self: Any) -> Sample | None:
        epoch = self._views.look()
        for view in list(self._views.live.values()):
            sample: Sample | None = self._member.claim(view)
            if sample is not None:
                return sample
            fate = view.fate()
            if fate is not None:
                self._views.end(view, fate)
        self._look_for_the_end(epoch)
        return None

    patch.setattr(Subscription, "_try_next", wrong)


def one_look_at_closed(patch: Patch) -> None:
    """A ring without a producer counts as dead, without a second look at ``closed``."""

    def wrong(self: RingView) -> str | None:
        if self.ring.words.load(layout.CLOSED):
            return "closed"
        return None if self.ring.producer_alive() else "died"

    patch.setattr(RingView, "fate", wrong)


def closed_after_the_lock(patch: Patch) -> None:
    """The producer gives up its lock before it stores ``closed``."""
    store = Producer._store

    def wrong(self: Producer, at: int, value: int) -> None:
        if at == layout.CLOSED:
            self._ring.file.close()
        store(self, at, value)

    patch.setattr(Producer, "_store", wrong)


def no_second_look_for_rings(patch: Patch) -> None:
    """A reader ends although another ring came during its last look."""

    def wrong(self: Any, epoch: int) -> None:
        if not self._views.live:
            self.ended = bool(self.ends)

    patch.setattr(Subscription, "_look_for_the_end", wrong)


def an_end_without_a_ring(patch: Patch) -> None:
    """A reader that waits for a ring ends when one came and went."""

    def wrong(self: Any, epoch: int) -> None:
        if not self._views.live and epoch and not self._views.unattached():
            self.ended = True

    patch.setattr(Subscription, "_look_for_the_end", wrong)


# --- expiry -----------------------------------------------------------------------------------


def expiry_without_the_lock(patch: Patch) -> None:
    """12: the producer expires while a member claims."""
    patch.setattr(Registry, "try_lock_claims", lambda self, group: True)
    unlock = Registry.unlock_claims

    def maybe(self: Registry, group: int) -> None:
        place = LockFile.try_lock
        if place is not None and self.words.load(layout.NOTE_L + 8 * group):
            unlock(self, group)

    patch.setattr(Registry, "unlock_claims", maybe)


def expiry_without_a_second_look(patch: Patch) -> None:
    """12: a dead member's claim expires by the word that was loaded before its death."""

    def wrong(self: Any, group: int, slot: int, stored: Any) -> bool:
        words = self._ring.words
        at = self._ring.shape.hold_at(group, slot)
        word = words.load(at)
        code = word & 0xFFFF if word >> 16 == stored.seq else layout.UNCLAIMED
        if code == layout.RELEASED or (code and self._registry.alive(group, code - 1)):
            return False
        words.store(at, layout.hold_word(stored.seq, layout.RELEASED))
        return True

    patch.setattr(Slots, "_expire", wrong)


def expiry_of_live_leases(patch: Patch) -> None:
    """12: a lease expires although its member lives."""

    def wrong(self: Any, group: int, slot: int, stored: Any) -> bool:
        at = self._ring.shape.hold_at(group, slot)
        self._ring.words.store(at, layout.hold_word(stored.seq, layout.RELEASED))
        return True

    patch.setattr(Slots, "_expire", wrong)


# --- names ------------------------------------------------------------------------------------


def names_not_looked_at_again(patch: Patch) -> None:
    """Open 3: who waited for lock R does not look whether the name still leads there."""
    patch.setattr(ShmFile, "current", lambda self: True)


def producer_lock_after_r(patch: Patch) -> None:
    """Start: the ring's name is there, R is free, and the producer's lock not yet taken."""
    late: list[LockFile] = []

    def make(*args: Any) -> ShmFile:
        file = ShmFile(*args)
        take = file.locks.try_lock
        file.locks.try_lock = lambda offset: late.append(file.locks) or True  # type: ignore[assignment,func-returns-value]
        file.locks.take = take  # type: ignore[attr-defined]
        return file

    unlock = Registry.unlock

    def then(self: Registry) -> None:
        unlock(self)
        while late:
            late.pop().take(layout.LOCK_P)  # type: ignore[attr-defined]

    patch.setattr(start, "ShmFile", make)
    patch.setattr(Registry, "unlock", then)


def rings_go_that_are_needed(patch: Patch) -> None:
    """A clean-up does not ask who still needs the samples of a dead ring."""
    patch.setattr("shmconn.cleanup._waits", lambda *args: False)


FAULTS: dict[Fault, str] = {
    takeover_without_a_second_look: "takeover",
    a_copy_is_taken_for_proof: "takeover",
    released_in_two_stores: "claims",
    claims_without_the_lock: "claims",
    no_sweep: "takeover",
    claims_before_the_start: "newcomer reads",
    claims_before_the_commit: "claims",
    a_lease_does_not_count: "claims",
    sequence_before_the_row: "claims",
    commit_before_the_sequence: "claims",
    settled_before_the_commit: "settling",
    settled_before_the_tombstone: "settling",
    settled_loaded_after_the_slots: "settling",
    what_was_given_back_counts_as_gone: "handles",
    a_row_read_without_its_sequence: "expiry",
    start_before_it_is_seen: "newcomer reads",
    no_start: "newcomer reads",
    active_before_its_start: "newcomer dies",
    dead_registrants_stay: "newcomer dies",
    live_registrants_are_undone: "newcomer reads",
    leavers_trust_dead_registrants: "dead registrant",
    free_between_register_and_join: "comes back",
    the_last_that_lives_takes_the_group: "mates leave",
    the_last_group_leaves_no_row: "leave and come",
    the_backlog_does_not_count: "backlog",
    the_backlog_stays_nameless: "backlog",
    claims_before_the_fate: "end",
    one_look_at_closed: "end",
    closed_after_the_lock: "end",
    no_second_look_for_rings: "restart",
    an_end_without_a_ring: "came and went",
    expiry_without_the_lock: "expiry",
    expiry_without_a_second_look: "expiry and death",
    expiry_of_live_leases: "expiry",
    names_not_looked_at_again: "open and clean",
    producer_lock_after_r: "start and sweep",
    rings_go_that_are_needed: "late reader",
}
