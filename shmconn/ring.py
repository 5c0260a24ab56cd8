# SPDX-License-Identifier: Apache-2.0
"""The producer: the only writer of a ring's head, slots and pages.

Publish, in this order, each one store:
  1. take a slot with seq 0 and a free run of pages       killed after: no sample
  2. fill the pages, wait for the last copy into them     no sample
  3. the slot's fields, then seq = published + 1          no sample: seq is above published
  4. published                                            a whole sample; this is the commit
  5. settled                                              (one short until here)
  6. doorbells                                            found at the next look, <= 0.1 s

Reclaim looks at the need of each published slot (need.py), without a lock and without waiting:
need only ever falls.
"""

import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import posix_ipc

from shmconn import layout
from shmconn.cleanup import clean_up, sweep_others, try_clean
from shmconn.doorbell import INTERVAL_S, Doorbell, group_doorbell
from shmconn.doorbell import unlink as unlink_doorbell
from shmconn.errors import Closed, OptionError, Oversized
from shmconn.fill import Fill, Stored, encode_json, encode_token_ids
from shmconn.handle import Handle, check_name, digest_of, format_size, parse_size
from shmconn.layout import RingShape
from shmconn.need import needed
from shmconn.pages import PageRuns
from shmconn.registry import Group, Registry
from shmconn.segment import RingSegment, ShmFile, ring_file, unlink
from shmconn.stall import Blocker, Stall
from shmconn.words import Words

if TYPE_CHECKING:
    import torch

_ROW = struct.Struct("<Q16s11QQ")


def parse_groups(groups: Iterable[object]) -> list[Group]:
    """Groups from names or ``{"name": ..., "by_handle": ...}``.

    Raises:
        OptionError: another form, or a name that is not allowed.
    """
    parsed = []
    for group in groups:
        if isinstance(group, str):
            group = {"name": group}
        if not isinstance(group, Mapping) or not {"name"} <= set(group) <= {"name", "by_handle"}:
            raise OptionError(
                f"group {group!r} must be a name or {{'name': ..., 'by_handle': ...}}"
            )
        by_handle = group.get("by_handle", False)
        if not isinstance(by_handle, bool):
            raise OptionError(f"by_handle {by_handle!r} of group {group['name']!r} must be a bool")
        parsed.append(Group(check_name(group["name"], "group"), by_handle))
    return parsed


@dataclass(frozen=True)
class _Plan:
    """The checked options of a new ring."""

    name: str
    shape: RingShape
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    groups: list[Group]
    mode: int
    engine_id: str


class Producer:
    """One life of a ring. Any program may be a producer; in vLLM it is the worker of TP rank 0.

    Use ``create``, then ``put`` or ``try_put``, then ``close`` (or a ``with`` block). Dropping it
    without ``close`` counts as its death. Methods may be called from several threads.
    """

    def __init__(
        self, ring: RingSegment, registry: Registry, bell: Doorbell, ttl_s: float, left: list[str]
    ) -> None:
        self._ring = ring
        self._registry = registry
        self._bell = bell
        self._ttl_s = ttl_s
        self._lock = threading.RLock()
        self._pages = PageRuns(ring.shape.pages)
        self._free_slots = deque(range(ring.shape.slots))
        self._stored: dict[int, Stored] = {}  # in order of publishing
        # seq of each published slot, 0 elsewhere: what the shared column holds, kept apart.
        self._seqs = np.zeros(ring.shape.slots, dtype=np.uint64)
        self._settled = 0
        self._settled_ahead: set[int] = set()
        self._published = 0
        self._tombstones = 0
        self._lost: dict[str, int] = dict.fromkeys(layout.REASONS, 0)
        self._group_bells = [
            Doorbell(group_doorbell(ring.name, group)) for group in range(layout.GROUPS)
        ]
        self._stall = Stall(registry, ring)
        self._closed = False
        self.leftovers = left

    # --- life -----------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str,
        *,
        size: int | str,
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: str = "bfloat16",
        page_size: int | str = layout.MIN_PAGE,
        slots: int | None = None,
        groups: Iterable[object] = (),
        mode: int = 0o600,
        engine_id: str = "",
        unclaimed_ttl_s: float = 600.0,
    ) -> "Producer":
        """Makes a new ring under ``name``, after clearing dead ones that no group waits for.

        Args:
            name: 1 to 64 of ``[A-Za-z0-9_-]``; may be used by several producers at once.
            size: bytes of the whole segment, or text like ``"8GiB"``; all of it is reserved.
            layer_ids: the layers of each sample, in the order of its second axis.
            hidden_size: length of the last axis.
            dtype: bfloat16, float16 or float32.
            page_size: a power of two, 64 KiB or more.
            slots: samples that fit at most; default the least of pages and 4,096.
            groups: groups that must see everything from the first sample.
            mode: file mode of the segments.
            engine_id: tells rings of one name apart, for people and for the scheduler.
            unclaimed_ttl_s: seconds after which a sample that nobody claimed is released for
                groups that ask by handle only.

        Raises:
            OptionError: an argument is wrong.
            NoSpace: /dev/shm is too small; nothing is left behind.
            Busy: the registry is locked for 5 s; names the holder.
            RegistryFull: there are more than 16 groups.
        """
        plan = _Plan(
            check_name(name),
            _check_shape(size, page_size, slots, layer_ids, hidden_size, dtype),
            tuple(layer_ids),
            hidden_size,
            dtype,
            parse_groups(groups),
            mode,
            engine_id,
        )
        registry = Registry.open(plan.name, mode=mode)
        try:
            left = clean_up(registry, backlog_counts=False).waiting
            if not registry.file.current():
                # The clean-up found nothing in use and took the registry too.
                registry.unlock()
                registry.close()
                registry = Registry.open(plan.name, mode=mode)
            ring, bell = _start(registry, plan)
        except BaseException:
            registry.close()
            raise
        sweep_others(plan.name)
        return cls(ring, registry, bell, unclaimed_ttl_s, left)

    def close(self) -> None:
        """Ends the ring cleanly: readers get all that was published, then a normal end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._ring.file.locks.forked:
                return
            for number in range(self._settled + 1, self.accepted + 1):
                if number not in self._settled_ahead:
                    self._entomb(number, bytes(16), "shutdown", 0)
            self._store(layout.CLOSED, 1)
            self._ring.file.close()
            for bell in self._group_bells:
                bell.post()
            try_clean(self._registry)
            self._registry.close()

    def __enter__(self) -> "Producer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- what it is -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the ring."""
        return self._ring.name

    @property
    def generation(self) -> str:
        """This life of the ring: 32 hex digits, never used twice."""
        return self._ring.generation

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of each sample, in the order of its second axis."""
        return self._ring.layer_ids

    @property
    def hidden_size(self) -> int:
        """Length of a sample's last axis."""
        return self._ring.hidden_size

    @property
    def dtype(self) -> str:
        """Name of the dtype of the states."""
        return self._ring.dtype

    @property
    def shape(self) -> RingShape:
        """Sizes of the ring."""
        return self._ring.shape

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's states."""
        return len(self.layer_ids) * self.hidden_size * layout.DTYPE_BYTES[self.dtype]

    @property
    def tokens_capacity(self) -> int:
        """Tokens whose states fill the data area."""
        return self.shape.pages * self.shape.page_size // self.bytes_per_token

    @property
    def free_pages(self) -> int:
        """Pages that nothing uses, as of the last reclaim."""
        return self._pages.free

    @property
    def free_slots(self) -> int:
        """Slots that nothing uses, as of the last reclaim."""
        return len(self._free_slots)

    @property
    def published(self) -> int:
        """Samples published so far."""
        return self._published

    @property
    def accepted(self) -> int:
        """Highest request number taken in."""
        return self._ring.words.load(layout.ACCEPTED)

    @property
    def settled(self) -> int:
        """Every request up to this number was published or has a tombstone."""
        return self._settled

    @property
    def lost(self) -> dict[str, int]:
        """Tombstones by reason. An expired sample was published before and counts here too."""
        return dict(self._lost)

    @property
    def data_area(self) -> memoryview:
        """The bytes of all pages, to be registered with a device."""
        return memoryview(self._ring.map)[self.shape.data :]

    # --- putting samples in ---------------------------------------------------------------------

    def try_put(
        self,
        hidden_states: "torch.Tensor",
        token_ids: Any,
        *,
        request_id: str,
        tag: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Handle | None:
        """Publishes a sample, or returns None if the ring has no room for it now.

        Args:
            hidden_states: ``[tokens, layers, hidden]`` of the ring's dtype, on any device.
            token_ids: integers ``[tokens]``.
            request_id: any text; it need not be unique.
            tag: a name for the sample, used by file sinks.
            metadata: further JSON values that travel with the sample.

        Raises:
            OptionError: shape, dtype or metadata do not fit the ring.
            Oversized: the sample is larger than a third of the ring.
            Closed: the ring was closed.
        """
        shape = tuple(hidden_states.shape)
        dtype = str(hidden_states.dtype).removeprefix("torch.")
        want = (len(self.layer_ids), self.hidden_size)
        if len(shape) != 3 or shape[1:] != want or dtype != self.dtype:
            raise OptionError(
                f"hidden_states are {list(shape)} {dtype}; ring {self.name!r} takes "
                f"[tokens, {want[0]}, {want[1]}] {self.dtype}"
            )
        with self._lock:
            number = self.accepted + 1
            fill = self._allocate(number, request_id, token_ids, tag, metadata, shape[0])
            if fill is None:
                return None
            self.accept(number)
        try:
            fill.tensor().copy_(hidden_states)
        except BaseException:
            self.discard(fill)
            self.bury(number, request_id, "fault")
            raise
        return self.publish(fill)

    def put(
        self,
        hidden_states: "torch.Tensor",
        token_ids: Any,
        *,
        request_id: str,
        tag: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Handle:
        """``try_put`` that waits for room, ``timeout`` seconds or for ever.

        Raises:
            TimeoutError: no room came; the message names who holds the oldest sample.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._bell.clear()
            handle = self.try_put(
                hidden_states, token_ids, request_id=request_id, tag=tag, metadata=metadata
            )
            if handle is not None:
                return handle
            left = INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no room within {timeout:g} s: {self.stall_text()}")
            self._bell.wait(left)
            self.expire()

    def accept(self, number: int) -> None:
        """Takes note of a request. Numbers rise; one thread calls this."""
        self._store(layout.ACCEPTED, number)

    def allocate(
        self,
        *,
        number: int,
        request_id: str,
        token_ids: Any,
        tag: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        tokens: int | None = None,
    ) -> Fill | None:
        """Room for a sample that the caller fills, or None if there is none now.

        Raises:
            OptionError: token ids or metadata are wrong.
            Oversized: the sample is larger than a third of the ring.
        """
        with self._lock:
            return self._allocate(number, request_id, token_ids, tag, metadata, tokens)

    def _allocate(
        self,
        number: int,
        request_id: str,
        token_ids: Any,
        tag: str | None,
        metadata: Mapping[str, Any] | None,
        tokens: int | None,
    ) -> Fill | None:
        self._check_open()
        if self._published >= layout.MAX_SEQ:
            raise Closed(f"ring {self.name!r} has used up its 2**48 sequence numbers: restart it")
        ids = encode_token_ids(token_ids, tokens)
        text = encode_json(request_id, tag, self.layer_ids, metadata)
        states_bytes = len(ids) // 8 * self.bytes_per_token
        ids_at = layout.align(states_bytes, layout.CACHE_LINE)
        total = ids_at + len(ids) + len(text)
        if total > self.shape.max_sample:
            raise Oversized(
                f"a sample of {len(ids) // 8} tokens takes {format_size(total)}; ring "
                f"{self.name!r} takes at most {format_size(self.shape.max_sample)}, a third of "
                "its pages: make the ring larger (ring_size)"
            )
        count = -(-total // self.shape.page_size)
        first = self._take(count)
        if first is None:
            self.reclaim()
            first = self._take(count)
            if first is None:
                return None
        slot = self._free_slots.popleft()
        self._show_free()
        start = self.shape.page_at(first)
        # A view of the map itself: it keeps the pages mapped as long as anybody fills them.
        run = memoryview(self._ring.map)[start : start + total]
        run[ids_at : ids_at + len(ids)] = ids
        run[ids_at + len(ids) :] = text
        return Fill(
            number=number,
            request_id=request_id,
            slot=slot,
            first_page=first,
            pages=count,
            tokens=len(ids) // 8,
            layers=len(self.layer_ids),
            hidden=self.hidden_size,
            dtype=self.dtype,
            ids_offset=ids_at,
            json_offset=ids_at + len(ids),
            json_bytes=len(text),
            states=run[:states_bytes],
        )

    def _take(self, count: int) -> int | None:
        return self._pages.allocate(count) if self._free_slots else None

    def publish(self, fill: Fill) -> Handle:
        """Makes a filled sample visible to all groups. Its pages must be whole by now."""
        with self._lock:
            self._check_open()
            seq = self._published + 1
            digest = digest_of(fill.request_id)
            request_id = fill.request_id.encode("utf-8", "surrogatepass")[: layout.SLOT_ID_BYTES]
            row = _ROW.pack(
                fill.number,
                bytes.fromhex(digest),
                fill.first_page,
                fill.pages,
                fill.tokens,
                fill.layers,
                fill.hidden,
                layout.DTYPES[fill.dtype],
                fill.states.nbytes,
                fill.ids_offset,
                fill.json_offset,
                fill.json_bytes,
                time.time_ns(),
                len(request_id),
            )
            words = self._ring.words
            words.write(self.shape.row_at(fill.slot), row + bytes(8) + request_id)
            words.store(self.shape.seq_at(fill.slot), seq)
            self._published = seq
            self._store(layout.PUBLISHED, seq)
            self._seqs[fill.slot] = seq
            self._stored[fill.slot] = Stored(
                seq, fill.number, fill.request_id, fill.first_page, fill.pages, time.monotonic()
            )
            total = self._ring.words.load(layout.PUBLISHED_BYTES)
            self._store(layout.PUBLISHED_BYTES, total + fill.json_offset)
            self._settle(fill.number)
            self._ring_bells()
            return Handle(self.name, self.generation, fill.number, digest)

    def discard(self, fill: Fill) -> None:
        """Gives a slot back that was not published. Nothing may write into it any more."""
        with self._lock:
            self._pages.release(fill.first_page, fill.pages)
            self._free_slots.append(fill.slot)
            self._show_free()

    def bury(self, number: int, request_id: str, reason: str, mask: int = 0) -> None:
        """Records that a request yields no sample, and why.

        Args:
            number: the request's number.
            request_id: the request's id.
            reason: one of ``layout.REASONS``.
            mask: bit r set = group r was to blame.
        """
        with self._lock:
            self._check_open()
            self._entomb(number, bytes.fromhex(digest_of(request_id)), reason, mask)

    def _entomb(self, number: int, digest: bytes, reason: str, mask: int) -> None:
        code = layout.REASONS.index(reason)
        index = self._tombstones + 1
        row = layout.TOMBSTONE_TABLE + self._tombstones % layout.TOMBSTONES * layout.TOMBSTONE
        words = self._ring.words
        words.store(row + layout.TOMB_INDEX, 0)
        words.store(row + layout.TOMB_NUMBER, number)
        words.write(row + layout.TOMB_DIGEST, digest)
        words.store(row + layout.TOMB_REASON, code)
        words.store(row + layout.TOMB_GROUPS, mask)
        words.store(row + layout.TOMB_INDEX, index)
        self._tombstones = index
        self._lost[reason] += 1
        words.store(layout.LOST_BY_REASON + 8 * code, self._lost[reason])
        if reason != "expired":
            total = sum(n for why, n in self._lost.items() if why != "expired")
            self._store(layout.LOST, total)
            self._settle(number)
        self._ring_bells()

    def _ring_bells(self) -> None:
        for state, bell in zip(self._registry.states(), self._group_bells, strict=True):
            if state != layout.FREE and bell.open():
                bell.post()

    def _settle(self, number: int) -> None:
        self._settled_ahead.add(number)
        while self._settled + 1 in self._settled_ahead:
            self._settled += 1
            self._settled_ahead.remove(self._settled)
        self._store(layout.SETTLED, self._settled)

    # --- making room ----------------------------------------------------------------------------

    def reclaim(self) -> int:
        """Takes back the slots that no group needs; returns how many. Never waits."""
        with self._lock:
            if not self._stored:
                return 0
            # A fence: the loads below are not older than our last store of `published`.
            self._ring.file.locks.held(layout.LOCK_P)
            self._heal_registering()
            done = [
                slot
                for slot in self._candidates()
                if not needed(self._registry, self._ring, slot, self._stored[slot].seq)
            ]
            for slot in done:
                self._ring.words.store(self.shape.seq_at(slot), 0)
                self._seqs[slot] = 0
                stored = self._stored.pop(slot)
                self._pages.release(stored.first_page, stored.pages)
                self._free_slots.append(slot)
            if done:
                self._show_free()
            return len(done)

    def _candidates(self) -> list[int]:
        """Slots worth a look, by a copy of the hold words: a hint, never a proof."""
        seqs = self._seqs
        free = seqs != np.uint64(0)
        released = seqs << np.uint64(16) | np.uint64(layout.RELEASED)
        for group, state in enumerate(self._registry.states()):
            if state != layout.FREE:
                start = self._ring.words.load(layout.START + 8 * group)
                hold = self._ring.words.copy(self.shape.hold_at(group, 0), self.shape.slots)
                free &= (hold == released) | (seqs < np.uint64(start))
        return [int(slot) for slot in np.flatnonzero(free)]

    def _heal_registering(self) -> None:
        """Frees the row of a registrant that died, by one try of R; else it blocks all reclaim."""
        registry = self._registry
        if layout.REGISTERING in registry.states() and registry.locks.try_lock(layout.LOCK_R):
            registry.undo_dead_registrants()
            registry.locks.unlock(layout.LOCK_R)

    def expire(self) -> int:
        """Releases, for groups by handle, what nobody claimed in time; returns how many."""
        expired = 0
        with self._lock:
            too_old = time.monotonic() - self._ttl_s
            if not self._stored or next(iter(self._stored.values())).since > too_old:
                return 0
            old = [(slot, kept) for slot, kept in self._stored.items() if kept.since < too_old]
            for group in range(layout.GROUPS):
                if self._registry.state(group) != layout.ACTIVE:
                    continue
                if self._registry.by_handle(group) and self._registry.try_lock_claims(group):
                    expired += sum(self._expire(group, slot, stored) for slot, stored in old)
                    self._registry.unlock_claims(group)
        return expired

    def _expire(self, group: int, slot: int, stored: Stored) -> bool:
        at = self.shape.hold_at(group, slot)
        word = self._ring.words.load(at)
        claimed = word >> 16 == stored.seq and word & 0xFFFF != layout.UNCLAIMED
        if stored.seq < self._ring.words.load(layout.START + 8 * group):
            return False
        if claimed:
            code = word & 0xFFFF
            if code == layout.RELEASED or self._registry.alive(group, code - 1):
                return False
            if self._ring.words.load(at) != word:
                return False
        self._ring.words.store(at, layout.hold_word(stored.seq, layout.RELEASED))
        self._entomb(
            stored.number, bytes.fromhex(digest_of(stored.request_id)), "expired", 1 << group
        )
        return True

    def tick(self) -> None:
        """Reclaims and expires; to be called now and then while waiting."""
        self.expire()
        self.reclaim()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a reader has released something, at most 0.1 s."""
        self._bell.wait(timeout_s)
        self._bell.clear()

    def fits(self, tokens: int) -> bool:
        """Whether a sample of so many tokens can ever fit."""
        slack = layout.CACHE_LINE + 8 * tokens + 4096
        return tokens * self.bytes_per_token + slack <= self.shape.max_sample

    # --- who is in the way ----------------------------------------------------------------------

    def set_held_since(self, unix_ns: int) -> None:
        """Tells readers since when the producer has been holding; 0 = it is not."""
        self._store(layout.HELD_SINCE, unix_ns)

    def can_progress(self) -> bool:
        """Whether some published slot is needed only by groups that have a live member."""
        with self._lock:
            return self._stall.can_progress(self._stored)

    def blockers(self) -> list[Blocker]:
        """The groups that need the oldest sample, and the member that holds it."""
        with self._lock:
            return self._stall.blockers(self._stored)

    def stall_text(self) -> str:
        """One line for people: how full, what is oldest, who holds it, what helps."""
        with self._lock:
            return self._stall.text(self._stored, self.free_pages, self.free_slots)

    # --- small things ---------------------------------------------------------------------------

    def _store(self, at: int, value: int) -> None:
        self._ring.words.store(at, value)

    def _show_free(self) -> None:
        self._store(layout.FREE_PAGES, self._pages.free)
        self._store(layout.FREE_SLOTS, len(self._free_slots))

    def _check_open(self) -> None:
        self._ring.file.locks.check_process()
        if self._closed:
            raise Closed(f"ring {self.name!r} was closed by its producer")


def _check_shape(
    size: int | str,
    page_size: int | str,
    slots: int | None,
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: str,
) -> RingShape:
    size = parse_size(size, "ring size")
    page_size = parse_size(page_size, "page size")
    if page_size < layout.MIN_PAGE or page_size & (page_size - 1):
        raise OptionError(f"page size {page_size} must be a power of two, 65536 or more")
    if slots is not None and not 1 <= slots <= layout.MAX_SLOTS:
        raise OptionError(f"slots {slots} must be 1 to {layout.MAX_SLOTS}")
    if not 1 <= len(layer_ids) <= layout.MAX_LAYERS:
        raise OptionError(f"{len(layer_ids)} layers: a ring takes 1 to {layout.MAX_LAYERS}")
    if any(not isinstance(layer, int) or not 0 <= layer <= 1 << 20 for layer in layer_ids):
        raise OptionError(f"layer ids {list(layer_ids)} must be whole numbers from 0 up")
    if not 1 <= hidden_size <= 1 << 24:
        raise OptionError(f"hidden size {hidden_size} must be 1 to {1 << 24}")
    if dtype not in layout.DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(layout.DTYPES)}")
    shape = RingShape.of_size(size, page_size, slots)
    if shape.pages < 3:
        least = RingShape(page_size, 3, slots or 3).size
        raise OptionError(
            f"ring size {format_size(size)} is too small: three pages of "
            f"{format_size(page_size)} and the tables need {format_size(least)}"
        )
    return shape


def _start(registry: Registry, plan: _Plan) -> tuple[RingSegment, Doorbell]:
    """Makes the ring; R is held on entry and free on return, also after an error."""
    generation = secrets.token_bytes(16)
    file_name = ring_file(plan.name, generation.hex())
    made: list[str] = []
    file = None
    try:
        # The name and lock P come under R, so that a ring without P is dead, never newborn.
        file = ShmFile(file_name, posix_ipc.O_CREX, plan.mode)
        file.locks.try_lock(layout.LOCK_P)
        bell = Doorbell(file_name, create=True, mode=plan.mode)
        for wish in plan.groups:
            _, new = registry.register(wish, plan.mode)
            made += [wish.name] if new else []
        epoch = registry.words.load(layout.EPOCH)
        registry.words.store(layout.EPOCH, epoch + 1)
    except BaseException:
        _undo(registry, file_name, file, made)
        registry.unlock()
        raise
    registry.unlock()
    try:
        file.reserve(plan.shape.size, f"ring {plan.name!r}")
        _write_head(file, registry, plan, generation)
        return RingSegment(file, whole=True), bell
    except BaseException:
        with registry.exclusive():
            _undo(registry, file_name, file, made)
        raise


def _undo(registry: Registry, file_name: str, file: ShmFile | None, made: list[str]) -> None:
    if file is not None:
        unlink_doorbell(file_name)
        unlink(file_name)
        file.close()
    for name in made:
        group = registry.find(name)
        # R was free meanwhile: somebody may have joined, and the group is his now.
        if group is not None and not registry.joined(group):
            registry.dissolve(group)
    clean_up(registry, backlog_counts=True)


def _write_head(file: ShmFile, registry: Registry, plan: _Plan, generation: bytes) -> None:
    words = Words(file.map(layout.TOMBSTONE_TABLE))
    engine_id = plan.engine_id.encode()[: layout.ENGINE_ID_BYTES]
    host = socket.gethostname().encode()[: layout.HOST_BYTES]
    for at, value in (
        (layout.VERSION_AT, layout.VERSION),
        (layout.SIZE_AT, plan.shape.size),
        (layout.PAGE_SIZE, plan.shape.page_size),
        (layout.PAGES, plan.shape.pages),
        (layout.SLOTS, plan.shape.slots),
        (layout.DATA, plan.shape.data),
        (layout.DTYPE, layout.DTYPES[plan.dtype]),
        (layout.HIDDEN_SIZE, plan.hidden_size),
        (layout.LAYERS, len(plan.layer_ids)),
        (layout.PRODUCER_PID, os.getpid()),
        (layout.PRODUCER_STARTED, time.time_ns()),
        (layout.ENGINE_ID_LENGTH, len(engine_id)),
        (layout.HOST_LENGTH, len(host)),
        (layout.MAX_SAMPLE, plan.shape.max_sample),
        (layout.FREE_PAGES, plan.shape.pages),
        (layout.FREE_SLOTS, plan.shape.slots),
        *((layout.LAYER_IDS + 8 * i, layer) for i, layer in enumerate(plan.layer_ids)),
    ):
        words.store(at, value)
    words.write(layout.GENERATION, generation)
    words.write(layout.RING_REGISTRY_ID, registry.id)
    words.write(layout.ENGINE_ID, engine_id)
    words.write(layout.HOST, host)
    words.store(layout.MAGIC, layout.RING_MAGIC)
