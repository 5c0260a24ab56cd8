# SPDX-License-Identifier: Apache-2.0
"""Samples: zero-copy tensors whose life is the lease.

A tensor made here keeps the bytes it shows alive, and those bytes keep the lease: when the last
tensor, slice or numpy alias over them is gone, the lease ends by one store and the producer may
use the pages again. A view is never silently overwritten.
"""

import contextlib
import json
import queue
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shmconn import layout
from shmconn.errors import Closed, SegmentCorrupt
from shmconn.fill import as_tensor
from shmconn.handle import Handle
from shmconn.segment import RingSegment

if TYPE_CHECKING:
    import torch

_ROW = struct.Struct("<Q16s11QQ")


@dataclass(frozen=True)
class Row:
    """The fields of a slot, checked against the sizes of its ring. Offsets are into the run."""

    number: int
    digest: str
    first_page: int
    pages: int
    tokens: int
    layers: int
    hidden: int
    dtype: str
    states_bytes: int
    ids_offset: int
    json_offset: int
    json_bytes: int
    published_at: int  # Unix time in ns

    @classmethod
    def read(cls, ring: RingSegment, slot: int) -> "Row":
        """The row of a slot that we hold.

        Raises:
            SegmentCorrupt: a field does not fit the ring; nothing is read by it.
        """
        raw = ring.words.read(ring.shape.row_at(slot), _ROW.size)
        (
            number,
            digest,
            first,
            pages,
            tokens,
            layers,
            hidden,
            code,
            states,
            ids,
            at,
            size,
            when,
            _,
        ) = _ROW.unpack(raw)
        shape = ring.shape
        dtype = layout.DTYPE_NAMES.get(code, "")
        run = pages * shape.page_size
        for name, good in (
            ("pages", 1 <= pages <= shape.pages and first <= shape.pages - pages),
            ("dtype", dtype == ring.dtype),
            ("layers", layers == len(ring.layer_ids)),
            ("hidden size", hidden == ring.hidden_size),
            ("tokens", tokens * 8 <= run),
            ("states", states == tokens * layers * hidden * layout.DTYPE_BYTES[ring.dtype]),
            ("token ids", ids == layout.align(states, layout.CACHE_LINE)),
            ("json", at == ids + 8 * tokens and at + size <= run),
        ):
            if not good:
                raise SegmentCorrupt(ring.file.name, f"slot {slot}: {name}", "is out of bounds")
        return cls(
            number, digest.hex(), first, pages, tokens, layers, hidden, dtype, states, ids, at,
            size, when,
        )  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What a sample tells beside its tensors."""

    handle: Handle
    seq: int
    request_id: str
    tag: str | None
    layer_ids: tuple[int, ...]
    metadata: dict[str, Any]
    dtype: str
    shape: tuple[int, int, int]
    published_at: int

    @classmethod
    def read(cls, ring: RingSegment, row: Row, seq: int, text: bytes) -> "Facts":
        """Facts out of a slot's row and its JSON.

        Raises:
            SegmentCorrupt: the JSON is not what a producer writes.
        """
        try:
            record = json.loads(text)
            request_id, tag = record["request_id"], record["tag"]
            layer_ids, metadata = record["layer_ids"], record["metadata"]
            good = (
                isinstance(request_id, str)
                and isinstance(tag, str | None)
                and layer_ids == list(ring.layer_ids)
                and isinstance(metadata, dict)
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SegmentCorrupt(ring.file.name, "json", f"of a sample: {error}") from error
        if not good or Handle.make(ring.name, ring.generation, 1, request_id).digest != row.digest:
            raise SegmentCorrupt(ring.file.name, "json", "of a sample does not fit its slot")
        return cls(
            Handle(ring.name, ring.generation, row.number, row.digest),
            seq,
            request_id,
            tag,
            ring.layer_ids,
            metadata,
            row.dtype,
            (row.tokens, row.layers, row.hidden),
            row.published_at,
        )


@dataclass(eq=False)
class Sample:
    """One request's hidden states and token ids, with who and what they are.

    The tensors are views into the ring. They are made to be read: another group may read the very
    same bytes, so ``clone()`` before you change anything in place.
    """

    facts: Facts
    _buffer: Any = field(repr=False)
    _ids_offset: int = field(repr=False)
    # Offsets that one copy to a device must not cross: edges of the pages' registration.
    _edges: tuple[int, ...] = field(repr=False, default=())
    _tensors: "dict[str, torch.Tensor]" = field(repr=False, default_factory=dict)

    @property
    def handle(self) -> Handle:
        """The name of this sample for ever."""
        return self.facts.handle

    @property
    def request_id(self) -> str:
        """The request's id in its engine. Data, never a path."""
        return self.facts.request_id

    @property
    def tag(self) -> str | None:
        """The name that the request gave to its sample. Data, never a path."""
        return self.facts.tag

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers along the second axis; k = residual stream after k layers, 0 = embeddings."""
        return self.facts.layer_ids

    @property
    def metadata(self) -> dict[str, Any]:
        """Further JSON values that the producer gave."""
        return self.facts.metadata

    @property
    def number(self) -> int:
        """Number of the request in its generation."""
        return self.facts.handle.number

    @property
    def seq(self) -> int:
        """Sequence number of the sample in its ring."""
        return self.facts.seq

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(tokens, layers, hidden)``."""
        return self.facts.shape

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.facts.shape[0]

    @property
    def dtype(self) -> str:
        """Name of the dtype of the states."""
        return self.facts.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        tokens, layers, hidden = self.facts.shape
        return tokens * layers * hidden * layout.DTYPE_BYTES[self.facts.dtype]

    @property
    def states_bytes(self) -> memoryview:
        """The states as bytes, without torch; ends with the lease like a tensor."""
        return memoryview(self._live()).cast("B")[: self.nbytes]

    @property
    def token_ids_bytes(self) -> memoryview:
        """The token ids as little-endian int64 bytes, without torch."""
        start = self._ids_offset
        return memoryview(self._live()).cast("B")[start : start + 8 * self.tokens]

    @property
    def hidden_states(self) -> "torch.Tensor":
        """``[tokens, layers, hidden]``, a view into the ring."""
        return self._tensor("states", self.dtype, self.shape)

    @property
    def token_ids(self) -> "torch.Tensor":
        """int64 ``[tokens]``, a view into the ring."""
        return self._tensor("ids", "int64", (self.tokens,))

    def _tensor(self, which: str, dtype: str, shape: tuple[int, ...]) -> "torch.Tensor":
        if which not in self._tensors:
            self._live()
            data = self.states_bytes if which == "states" else self.token_ids_bytes
            self._tensors[which] = as_tensor(data, dtype, shape)
        return self._tensors[which]

    def _live(self) -> Any:
        if self._buffer is None:
            raise Closed(
                f"the sample of request {self.request_id!r} was released: clone() it first if "
                "you need it longer"
            )
        return self._buffer

    def clone(self) -> "Sample":
        """A copy in memory of its own, without a lease."""
        buffer = bytearray(memoryview(self._live()).cast("B"))
        return Sample(self.facts, buffer, self._ids_offset)

    def __reduce__(self) -> "tuple[Any, tuple[Facts, torch.Tensor, int]]":
        """Pickles a copy: a lease cannot leave its process.

        torch's own pickler, which the queues of its DataLoader use, carries the copy in shared
        memory.
        """
        import torch

        data = memoryview(self._live()).cast("B")
        if not len(data):
            return _unpickle, (self.facts, torch.empty(0, dtype=torch.uint8), self._ids_offset)
        # Straight into memory that torch can share, so that sharing it is no second copy.
        storage = torch.UntypedStorage._new_shared(len(data))  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=torch.uint8).set_(storage)
        copy.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return _unpickle, (self.facts, copy, self._ids_offset)

    def to(self, device: Any, non_blocking: bool = False) -> "tuple[torch.Tensor, torch.Tensor]":
        """Copies of both tensors on a device.

        With ``non_blocking`` the lease goes on until the device has done the copy, whatever
        happens to the sample meanwhile.

        Args:
            device: a torch device or its name.
            non_blocking: return before the copy is done; of use with ``subscribe(pin=True)``.

        Returns:
            ``(hidden_states, token_ids)``, of no lease.
        """
        import torch

        device = torch.device(device)
        if device.type == "cpu":
            return self.hidden_states.clone(), self.token_ids.clone()
        states = self._to(device, self.hidden_states, 0, non_blocking)
        ids = self._to(device, self.token_ids, self._ids_offset, non_blocking)
        if non_blocking:
            event = torch.Event(device)
            event.record()
            _device_copies.keep(event, self._live())
        return states, ids

    def _to(
        self, device: "torch.device", tensor: "torch.Tensor", start: int, non_blocking: bool
    ) -> "torch.Tensor":
        """A copy of a tensor that lies ``start`` bytes after the beginning of the run."""
        import torch

        inside = [edge for edge in self._edges if start < edge < start + tensor.nbytes]
        if not inside:
            return tensor.to(device, non_blocking=non_blocking)
        copy = torch.empty_like(tensor, device=device)
        source, target = tensor.view(-1), copy.view(-1)
        at = 0
        for edge in (*inside, start + tensor.nbytes):
            to = (edge - start) // tensor.element_size()
            target[at:to].copy_(source[at:to], non_blocking=non_blocking)
            at = to
        return copy

    def release(self) -> None:
        """Drops this sample's own references to the ring.

        The lease ends now, or with the last tensor, slice or alias that is still held elsewhere.
        """
        self._tensors.clear()
        self._buffer = None


def _unpickle(facts: Facts, data: "torch.Tensor", ids_offset: int) -> Sample:
    return Sample(facts, data.numpy(), ids_offset)


class _DeviceCopies:
    """Keeps leases until a device has read their pages."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def keep(self, event: Any, buffer: Any) -> None:
        """Holds on to ``buffer`` until ``event`` has happened."""
        self._queue.put((event, buffer))
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="shmconn-device-copies", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            event, buffer = self._queue.get()
            with contextlib.suppress(RuntimeError):
                # A failed device cannot read the pages any more either.
                event.synchronize()
            del event, buffer


_device_copies = _DeviceCopies()
