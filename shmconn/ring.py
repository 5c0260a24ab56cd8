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

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shmconn import layout
from shmconn.cleanup import try_clean
from shmconn.doorbell import Doorbell, group_doorbell
from shmconn.errors import Closed, OptionError, Oversized
from shmconn.fill import Fill, Stored, encode_json, encode_token_ids
from shmconn.handle import Handle, digest_of, format_size
from shmconn.layout import RingShape
from shmconn.ledger import Ledger
from shmconn.segment import descriptors_named
from shmconn.slots import Slots
from shmconn.stall import Blocker, Stall
from shmconn.start import Plan, Started, start
from shmconn.unlinked import NameWatch, unlinked

if TYPE_CHECKING:
    import torch

_LONGEST_WAIT_S = 1e6  # the most that a lock's timeout surely takes


class Producer:
    """One life of a ring. Any program may be a producer; in vLLM it is the worker of TP rank 0.

    Use ``create``, then ``put`` or ``try_put``, then ``close`` (or a ``with`` block). Dropping it
    without ``close`` counts as its death. Methods may be called from several threads.
    """

    def __init__(self, started: Started, ttl_s: float) -> None:
        self.leftovers = started.left
        self._ring = started.ring
        self._registry = started.registry
        self._bell = started.bell
        self._lock = threading.RLock()
        self._turn = threading.RLock()  # of the put that waits for room
        self._slots = Slots(self._ring, self._registry)
        self._ledger = Ledger(self._ring.words)
        self._ttl_s = ttl_s
        # Never loaded back from the ring: what stands there decides nothing for its only writer.
        self._accepted = 0
        self._published = 0
        self._published_bytes = 0
        self._group_bells = [
            Doorbell(group_doorbell(self.name, group)) for group in range(layout.GROUPS)
        ]
        self._stall = Stall(self._registry, self._ring)
        self._names = NameWatch(
            f"ring {self.name!r} goes on with the readers that it has, and no other can join it"
        )
        self._closed = False

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
            NoDescriptors: this process may open no more files.
            Busy: the registry is locked for 5 s; names the holder.
            RegistryFull: there are more than 16 groups.
        """
        plan = Plan.checked(
            name, size, layer_ids, hidden_size, dtype, page_size, slots, groups, mode, engine_id
        )
        with descriptors_named(f"ring {name!r}"):
            return cls(start(plan), unclaimed_ttl_s)

    def close(self) -> None:
        """Ends the ring cleanly: readers get all that was published, then a normal end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._ring.file.locks.forked:
                return
            for number in self._ledger.open_up_to(self.accepted):
                self._ledger.entomb(number, bytes(16), "shutdown", 0)
            self._store(layout.CLOSED, 1)
            self._ring.file.close()
            for bell in self._group_bells:
                bell.post()
            try:
                try_clean(self._registry)
            finally:
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
        return self._slots.pages.free

    @property
    def free_slots(self) -> int:
        """Slots that nothing uses, as of the last reclaim."""
        return len(self._slots.free)

    @property
    def published(self) -> int:
        """Samples published so far."""
        return self._published

    @property
    def accepted(self) -> int:
        """Highest request number taken in."""
        return self._accepted

    @property
    def settled(self) -> int:
        """Every request up to this number was published or has a tombstone."""
        return self._ledger.settled

    @property
    def lost(self) -> dict[str, int]:
        """Tombstones by reason. An expired sample was published before and counts here too."""
        return dict(self._ledger.lost)

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
        fill = self._begin(hidden_states, token_ids, request_id, tag, metadata)
        return None if fill is None else self._finish(fill, hidden_states)

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

        Calls of several threads get room in turn: a long sample waits until a run is free that is
        long enough, and short ones that took each page as it came free would keep it waiting.

        Raises:
            TimeoutError: no room came; the message names who holds the oldest sample.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._check_open()
        fill = None
        if self._turn.acquire(timeout=min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S)):
            try:
                begin = partial(self._begin, hidden_states, token_ids, request_id, tag, metadata)
                fill = self._wait_for_room(deadline, begin)
            finally:
                self._turn.release()
        if fill is None:
            raise TimeoutError(f"no room within {timeout:g} s: {self.stall_text()}")
        return self._finish(fill, hidden_states)

    def _wait_for_room(self, deadline: float, begin: Callable[[], Fill | None]) -> Fill | None:
        while True:
            self._bell.clear()
            fill = begin()
            left = deadline - time.monotonic()
            if fill is not None or left <= 0:
                return fill
            self._bell.wait(left)
            self.expire()

    def _begin(
        self,
        hidden_states: "torch.Tensor",
        token_ids: Any,
        request_id: str,
        tag: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Fill | None:
        """Checks a sample, and accepts it if there is room; its states are still to be copied."""
        shape = tuple(hidden_states.shape)
        dtype = str(hidden_states.dtype).removeprefix("torch.")
        want = (len(self.layer_ids), self.hidden_size)
        if len(shape) != 3 or shape[1:] != want or dtype != self.dtype:
            raise OptionError(
                f"hidden_states are {list(shape)} {dtype}; ring {self.name!r} takes "
                f"[tokens, {want[0]}, {want[1]}] {self.dtype}"
            )
        ids = encode_token_ids(token_ids, shape[0])
        with self._lock:
            number = self.accepted + 1
            fill = self._allocate(number, request_id, shape[0], tag, metadata)
            if fill is not None:
                self.accept(number)
                fill.put_token_ids(ids)
        return fill

    def _finish(self, fill: Fill, hidden_states: "torch.Tensor") -> Handle:
        try:
            fill.copy_from(hidden_states)
        except BaseException:
            self.discard(fill)
            self.bury(fill.number, fill.request_id, "fault")
            raise
        return self.publish(fill)

    def accept(self, number: int) -> None:
        """Takes note of a request, each once and in any order; one thread calls this."""
        self._accepted = max(self._accepted, number)
        self._store(layout.ACCEPTED, self._accepted)

    def allocate(
        self,
        *,
        number: int,
        request_id: str,
        token_ids: Any = None,
        tokens: int | None = None,
        tag: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Fill | None:
        """Room for a sample that the caller fills, or None if there is none now.

        Args:
            number: the request's number.
            request_id: any text.
            token_ids: integers ``[tokens]``; None = the caller gives ``tokens`` and writes them
                into the fill later, for instance while a device copies the states.
            tokens: number of tokens, where ``token_ids`` do not tell.
            tag: a name for the sample.
            metadata: further JSON values that travel with it.

        Raises:
            OptionError: token ids or metadata are wrong.
            Oversized: the sample is larger than a third of the ring.
        """
        ids = None if token_ids is None else encode_token_ids(token_ids, tokens)
        if ids is None and tokens is None:
            raise OptionError("allocate needs token_ids, or the number of tokens")
        count = tokens if ids is None else len(ids) // 8
        with self._lock:
            fill = self._allocate(number, request_id, count or 0, tag, metadata)
        if fill is not None and ids is not None:
            fill.put_token_ids(ids)
        return fill

    def _allocate(
        self,
        number: int,
        request_id: str,
        tokens: int,
        tag: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> Fill | None:
        self._check_open()
        if self._published >= layout.MAX_SEQ:
            raise Closed(f"ring {self.name!r} has used up its 2**48 sequence numbers: restart it")
        text = encode_json(request_id, tag, self.layer_ids, metadata)
        states_bytes = tokens * self.bytes_per_token
        ids_at = layout.align(states_bytes, layout.CACHE_LINE)
        json_at = ids_at + 8 * tokens
        total = json_at + len(text)
        if total > self.shape.max_sample:
            raise Oversized(
                f"a sample of {tokens} tokens takes {format_size(total)}; ring "
                f"{self.name!r} takes at most {format_size(self.shape.max_sample)}, a third of "
                "its pages: make the ring larger (ring_size)"
            )
        count = -(-total // self.shape.page_size)
        taken = self._slots.take(count)
        if taken is None:
            self.reclaim()
            taken = self._slots.take(count)
            if taken is None:
                return None
        slot, first = taken
        start = self.shape.page_at(first)
        # A view of the map itself: it keeps the pages mapped as long as anybody fills them.
        run = memoryview(self._ring.map)[start : start + total]
        run[json_at:] = text
        return Fill(
            number=number,
            request_id=request_id,
            slot=slot,
            first_page=first,
            pages=count,
            tokens=tokens,
            layers=len(self.layer_ids),
            hidden=self.hidden_size,
            dtype=self.dtype,
            ids_offset=ids_at,
            json_offset=json_at,
            json_bytes=len(text),
            states=run[:states_bytes],
            ids=run[ids_at:json_at],
        )

    def publish(self, fill: Fill, *, handed_out: bool = True) -> Handle:
        """Makes a filled sample visible to all groups. Its pages must be whole by now.

        Args:
            fill: from ``allocate``.
            handed_out: whether anybody is told the handle; if not, groups by handle need not wait
                for it.
        """
        with self._lock:
            self._check_open()
            if not fill.has_token_ids:
                raise OptionError(f"the token ids of request {fill.request_id!r} were not written")
            seq = self._published + 1
            digest = digest_of(fill.request_id)
            words = self._ring.words
            words.write(self.shape.row_at(fill.slot), fill.row(digest))
            words.store(self.shape.seq_at(fill.slot), seq)
            self._published = seq
            self._store(layout.PUBLISHED, seq)
            self._slots.keep(
                fill.slot,
                Stored(
                    seq, fill.number, fill.request_id, fill.first_page, fill.pages, time.monotonic()
                ),
            )
            self._published_bytes += fill.json_offset
            self._store(layout.PUBLISHED_BYTES, self._published_bytes)
            self._ledger.settle(fill.number)
            if not handed_out:
                self._slots.spare(fill.slot)
            self._ring_bells()
            self._look_at_names()
            return Handle(self.name, self.generation, fill.number, digest)

    def discard(self, fill: Fill) -> None:
        """Gives a slot back that was not published. Nothing may write into it any more."""
        with self._lock:
            self._slots.give_back(fill.slot, fill.first_page, fill.pages)

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
            self._ledger.entomb(number, bytes.fromhex(digest_of(request_id)), reason, mask)
            self._ring_bells()

    def _ring_bells(self) -> None:
        for state, bell in zip(self._registry.states(), self._group_bells, strict=True):
            if state != layout.FREE and bell.open():
                bell.post()

    # --- making room ----------------------------------------------------------------------------

    def reclaim(self) -> int:
        """Takes back the slots that no group needs; returns how many. Never waits."""
        with self._lock:
            return self._slots.reclaim()

    def expire(self) -> int:
        """Releases, for groups by handle, what nobody claimed in time; returns how many."""
        with self._lock:
            expired = self._slots.expire(time.monotonic() - self._ttl_s)
            for group, stored in expired:
                digest = bytes.fromhex(digest_of(stored.request_id))
                self._ledger.entomb(stored.number, digest, "expired", 1 << group)
            if expired:
                self._ring_bells()
            return len(expired)

    def tick(self) -> None:
        """Reclaims and expires; to be called now and then while waiting."""
        self.expire()
        self.reclaim()
        self._look_at_names()

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
            return self._stall.can_progress(self._slots)

    def blockers(self) -> list[Blocker]:
        """The groups that need the oldest sample, and the member that holds it."""
        with self._lock:
            return self._stall.blockers(self._slots)

    def stall_text(self) -> str:
        """One line for people: how full, what is oldest, who holds it, what helps."""
        with self._lock:
            return self._stall.text(self._slots)

    # --- small things ---------------------------------------------------------------------------

    def _look_at_names(self) -> None:
        self._names.look(lambda: unlinked(self._ring.file, self._registry.file))

    def _store(self, at: int, value: int) -> None:
        self._ring.words.store(at, value)

    def _check_open(self) -> None:
        self._ring.file.locks.check_process()
        if self._closed:
            raise Closed(f"ring {self.name!r} was closed by its producer")
