# SPDX-License-Identifier: Apache-2.0
"""One request's sample in one ring: there, held, delivered, lost, or on its way.

In this order: the ring's fate and ``settled``, then the slots, then the tombstones. So a request
that was settled before the look and is found nowhere was delivered, or is too old.
"""

import contextlib
from collections.abc import Iterator

from shmconn import layout
from shmconn.errors import ProducerDied, SampleGone, SampleLost, SegmentCorrupt
from shmconn.handle import Handle
from shmconn.ledger import tombstones_of
from shmconn.member import Member
from shmconn.sample import Row, Sample
from shmconn.views import RingView


def find(member: Member, view: RingView, wanted: Handle) -> tuple[Sample | None, str]:
    """Claims a request's sample.

    Returns:
        The sample, or None and what it waits for.

    Raises:
        SampleLost, SampleGone, ProducerDied: it can never come; see the classes.
    """
    words, shape = view.ring.words, view.ring.shape
    fate = view.fate()
    accepted = words.load(layout.ACCEPTED)
    settled = words.load(layout.SETTLED)
    released = False
    for slot, seq in _slots_of(member, view, wanted):
        sample = member.claim_slot(view, slot, seq)
        if sample is not None:
            return sample, ""
        word = words.load(shape.hold_at(member.group, slot))
        code = word & 0xFFFF
        released = word == layout.hold_word(seq, layout.RELEASED)
        if released:
            break
        if word >> 16 != seq or not 1 <= code <= layout.MEMBERS:
            # Its holder gave it back since the claim was tried.
            return None, ""
        if code == member.code:
            return None, ": this process holds it already"
        registry = member.registry
        pid = registry.member_word(member.group, code - 1, layout.MEMBER_PID)
        return None, f": pid {pid} of group {registry.group_name(member.group)!r} holds it"
    _check_tombstones(member, view, wanted)
    if released or wanted.number <= settled:
        raise SampleGone(
            f"sample {wanted.number} of ring {wanted.ring!r} was already delivered to group "
            f"{member.registry.group_name(member.group)!r}, or is too old"
        )
    if fate is not None:
        raise _never(wanted, fate, accepted, settled)
    return None, ", vLLM has not published it yet"


def _never(wanted: Handle, fate: str, accepted: int, settled: int) -> ProducerDied:
    took = "published it" if wanted.number <= accepted else "took this request in"
    verb = "died" if fate == "died" else "closed the ring"
    return ProducerDied(
        f"the producer of ring {wanted.ring!r} {verb} before it {took} (request "
        f"{wanted.number}): send it again once vLLM runs",
        accepted=accepted,
        settled=settled,
    )


def _slots_of(member: Member, view: RingView, wanted: Handle) -> Iterator[tuple[int, int]]:
    """Slots whose row is of the wanted request, whole between two equal loads of seq."""
    words, shape = view.ring.words, view.ring.shape
    published = words.load(layout.PUBLISHED)
    start = max(1, words.load(layout.START + 8 * member.group))
    # In this order: a slot that has a seq has its row.
    there = words.copy(layout.SEQ, shape.slots) != 0
    numbers = words.column(shape.row_at(0) + layout.SLOT_NUMBER, layout.SLOT_ROW, shape.slots)
    for index in (there & (numbers == wanted.number)).nonzero()[0]:
        slot = int(index)
        seq = words.load(shape.seq_at(slot))
        number = words.load(shape.row_at(slot) + layout.SLOT_NUMBER)
        if number != wanted.number or not start <= seq <= published:
            continue
        if words.load(shape.seq_at(slot)) != seq:
            continue
        with contextlib.suppress(SegmentCorrupt):
            if Row.read(view.ring, slot).digest == wanted.digest:
                yield slot, seq


def _check_tombstones(member: Member, view: RingView, wanted: Handle) -> None:
    for tombstone in tombstones_of(view.ring.words, wanted.number):
        if tombstone.reason == "expired" and member.group not in tombstone.groups:
            continue
        names = ", ".join(member.registry.group_name(group) for group in tombstone.groups)
        raise SampleLost(
            f"request {wanted.number} of ring {wanted.ring!r} has no sample: {tombstone.reason}"
            f"{f' (groups: {names})' if names else ''}",
            reason=tombstone.reason,
            retry=tombstone.retry,
        )
