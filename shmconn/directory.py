# SPDX-License-Identifier: Apache-2.0
"""What is on this host: rings, groups and members, looked at without taking part."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmconn import layout
from shmconn.cleanup import Swept, clean_up, try_clean
from shmconn.errors import OptionError, RingMissing, ShmConnError
from shmconn.handle import check_name
from shmconn.registry import Registry
from shmconn.segment import RingSegment, ring_files, split_ring_name
from shmconn.which import missing_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class RingInfo:
    """A ring as ``ls`` and ``stat`` show it. ``problem`` says why the rest is unknown."""

    name: str
    generation: str
    file: str
    problem: str | None = None
    live: bool = False
    closed: bool = False
    size: int = 0
    engine_id: str = ""
    host: str = ""
    pid: int = 0
    started_ns: int = 0
    layer_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: str = ""
    page_size: int = 0
    pages: int = 0
    slots: int = 0
    free_pages: int = 0
    free_slots: int = 0
    published: int = 0
    published_bytes: int = 0
    accepted: int = 0
    settled: int = 0
    lost: int = 0
    lost_by_reason: dict[str, int] = field(default_factory=dict)
    held_since_ns: int = 0
    bytes_per_token: int = 0
    tokens_capacity: int = 0

    @property
    def state(self) -> str:
        """live, closed, dead, or damaged."""
        if self.problem:
            return "damaged"
        return "closed" if self.closed else "live" if self.live else "dead"


@dataclass(frozen=True)
class MemberInfo:
    """A member of a group. ``alive`` is the kernel's word, ``joined`` without it is a death."""

    pid: int
    host: str
    alive: bool
    joined: bool
    leases: int
    claimed: int
    released: int
    bytes_claimed: int
    started_ns: int


@dataclass(frozen=True)
class GroupInfo:
    """A group; ``name`` is "" for the samples that nobody has subscribed to yet."""

    name: str
    by_handle: bool
    durable: bool
    members: list[MemberInfo]
    unread: dict[str, int]  # by generation: needed and claimed by nobody
    needed: dict[str, int]  # by generation: needed at all
    oldest_ns: int  # Unix time at which the oldest needed sample was published, 0 = none
    oldest_request_id: str

    @property
    def alive(self) -> bool:
        """Whether any member lives."""
        return any(member.alive for member in self.members)


def rings(name: str | None = None) -> list[RingInfo]:
    """Every ring of this host, or of one name, live ones and dead ones."""
    if name is not None:
        check_name(name)
    found = []
    for file_name in ring_files(name):
        try:
            ring = RingSegment.attach(file_name, whole=False)
        except ShmConnError as error:
            found.append(RingInfo(*split_ring_name(file_name), file_name, problem=str(error)))
            continue
        if ring is not None:
            found.append(_ring_info(ring))
    return found


def _ring_info(ring: RingSegment) -> RingInfo:
    word, shape = ring.words.load, ring.shape
    per_token = len(ring.layer_ids) * ring.hidden_size * layout.DTYPE_BYTES[ring.dtype]
    by_reason = {
        reason: word(layout.LOST_BY_REASON + 8 * code) for code, reason in enumerate(layout.REASONS)
    }
    return RingInfo(
        name=ring.name,
        generation=ring.generation,
        file=ring.file.name,
        live=ring.producer_alive(),
        closed=bool(word(layout.CLOSED)),
        size=shape.size,
        engine_id=ring.text(layout.ENGINE_ID, layout.ENGINE_ID_LENGTH, layout.ENGINE_ID_BYTES),
        host=ring.text(layout.HOST, layout.HOST_LENGTH, layout.HOST_BYTES),
        pid=word(layout.PRODUCER_PID),
        started_ns=word(layout.PRODUCER_STARTED),
        layer_ids=ring.layer_ids,
        hidden_size=ring.hidden_size,
        dtype=ring.dtype,
        page_size=shape.page_size,
        pages=shape.pages,
        slots=shape.slots,
        free_pages=word(layout.FREE_PAGES),
        free_slots=word(layout.FREE_SLOTS),
        published=word(layout.PUBLISHED),
        published_bytes=word(layout.PUBLISHED_BYTES),
        accepted=word(layout.ACCEPTED),
        settled=word(layout.SETTLED),
        lost=word(layout.LOST),
        lost_by_reason={reason: count for reason, count in by_reason.items() if count},
        held_since_ns=word(layout.HELD_SINCE),
        bytes_per_token=per_token,
        tokens_capacity=shape.pages * shape.page_size // per_token,
    )


def groups(name: str) -> list[GroupInfo]:
    """The groups of a ring name, with their members.

    Raises:
        RingMissing: nothing of that name is there.
    """
    registry = Registry.peek(check_name(name))
    if registry is None:
        raise RingMissing(missing_text(name))
    attached = []
    for file_name in ring_files(name):
        try:
            ring = RingSegment.attach(file_name, whole=False)
        except ShmConnError:
            continue
        if ring is not None and ring.registry_id == registry.id:
            attached.append(ring)
    try:
        return [
            _group_info(registry, group, attached)
            for group in range(layout.GROUPS)
            if registry.state(group) in (layout.ACTIVE, layout.NAMELESS)
        ]
    finally:
        registry.close()


def _group_info(registry: Registry, group: int, attached: list[RingSegment]) -> GroupInfo:
    import numpy as np

    unread: dict[str, int] = {}
    needed: dict[str, int] = {}
    leases = [0] * layout.MEMBERS
    oldest, oldest_id = 0, ""
    for ring in attached:
        slots, seqs, codes = _needed_slots(ring, group)
        needed[ring.generation] = len(slots)
        unread[ring.generation] = int((codes == layout.UNCLAIMED).sum())
        counts = np.bincount(codes, minlength=layout.MEMBERS + 1)[1 : layout.MEMBERS + 1]
        leases = [had + int(has) for had, has in zip(leases, counts, strict=True)]
        # The oldest first; one that is released meanwhile is passed over.
        for index in seqs.argsort():
            row = ring.shape.row_at(int(slots[index]))
            when = ring.words.load(row + layout.SLOT_PUBLISHED_AT)
            length = min(ring.words.load(row + layout.SLOT_ID_LENGTH), layout.SLOT_ID_BYTES)
            text = ring.words.read(row + layout.SLOT_ID, length).decode(errors="replace")
            if ring.words.load(ring.shape.seq_at(int(slots[index]))) == int(seqs[index]):
                if not oldest or when < oldest:
                    oldest, oldest_id = when, text
                break
    named = registry.state(group) == layout.ACTIVE
    return GroupInfo(
        name=registry.group_name(group) if named else "",
        by_handle=named and registry.by_handle(group),
        durable=named and registry.durable(group),
        members=[
            _member_info(registry, group, member, leases[member])
            for member in (registry.joined(group) if named else [])
        ],
        unread=unread,
        needed=needed,
        oldest_ns=oldest,
        oldest_request_id=oldest_id,
    )


def _needed_slots(
    ring: RingSegment, group: int
) -> "tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64], npt.NDArray[np.intp]]":
    """Slots, seqs and codes of the hold words of what a group needs: a look, not a proof."""
    import numpy as np

    words, shape = ring.words, ring.shape
    published = np.uint64(words.load(layout.PUBLISHED))
    start = np.uint64(max(1, words.load(layout.START + 8 * group)))
    seqs = words.copy(layout.SEQ, shape.slots)
    holds = words.copy(shape.hold_at(group, 0), shape.slots)
    codes = np.where(holds >> np.uint64(16) == seqs, holds & np.uint64(0xFFFF), layout.UNCLAIMED)
    found = np.flatnonzero((seqs >= start) & (seqs <= published) & (codes != layout.RELEASED))
    return found, seqs[found], codes[found].astype(np.intp)


def _member_info(registry: Registry, group: int, member: int, leases: int) -> MemberInfo:
    def word(field: int) -> int:
        return registry.member_word(group, member, field)

    return MemberInfo(
        pid=word(layout.MEMBER_PID),
        host=registry.host(group, member),
        alive=registry.alive(group, member),
        joined=bool(word(layout.MEMBER_JOINED)),
        leases=leases,
        claimed=word(layout.MEMBER_CLAIMED),
        released=word(layout.MEMBER_RELEASED),
        bytes_claimed=word(layout.MEMBER_BYTES),
        started_ns=word(layout.MEMBER_STARTED),
    )


def remove_group(name: str, group: str) -> None:
    """Gives up a group without live members, and what it has not read.

    Raises:
        RingMissing: nothing of that name is there.
        OptionError: there is no such group, or a member of it lives.
        Busy: the registry is locked; names the holder.
    """
    check_name(group, "group")
    try:
        registry = Registry.open(check_name(name), create=False)
    except RingMissing:
        raise RingMissing(missing_text(name)) from None
    try:
        row = registry.find(group)
        if row is None:
            there = [g.name for g in groups(name) if g.name]
            raise OptionError(
                f"ring {name!r} has no group {group!r}; it has: {', '.join(there) or 'none'}"
            )
        if registry.any_alive(row):
            pids = [
                registry.member_word(row, member, layout.MEMBER_PID)
                for member in registry.joined(row)
                if registry.alive(row, member)
            ]
            raise OptionError(
                f"group {group!r} of ring {name!r} has live members (pid "
                f"{', '.join(map(str, pids))}): end them first"
            )
        for member in registry.joined(row):
            registry.words.store(layout.member_row(row, member) + layout.MEMBER_JOINED, 0)
        registry.dissolve(row)
    finally:
        registry.unlock()
        try_clean(registry)
        registry.close()


def remove_rings(name: str, *, force: bool = False) -> Swept:
    """Unlinks the dead rings of a name.

    Args:
        name: the ring.
        force: also those whose samples a group still waits for. A live ring always stays.

    Raises:
        RingMissing: nothing of that name is there.
        Busy: the registry is locked; names the holder.
    """
    check_name(name)
    orphaned = bool(ring_files(name))
    try:
        registry = Registry.open(name, create=orphaned)
    except RingMissing:
        raise RingMissing(missing_text(name)) from None
    try:
        return clean_up(registry, backlog_counts=False, force=force)
    finally:
        registry.unlock()
        registry.close()
