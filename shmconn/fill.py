# SPDX-License-Identifier: Apache-2.0
"""A sample on its way into the ring, and what the producer remembers of one that is there."""

import json
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from shmconn import layout
from shmconn.errors import OptionError

if TYPE_CHECKING:
    import torch

# From SLOT_NUMBER on, in the order of docs/format.md.
_ROW = struct.Struct("<Q16s11QQ")


@dataclass(eq=False)
class Fill:
    """A slot that was allocated and is not published yet; only its producer sees it.

    Attributes:
        tokens, layers, hidden, dtype: shape of the states.
        states: the bytes to fill, ``[tokens, layers, hidden]`` in C order.
        has_token_ids: whether ``write_token_ids`` was called; without them nothing is published.
    """

    number: int
    request_id: str
    slot: int
    first_page: int
    pages: int
    tokens: int
    layers: int
    hidden: int
    dtype: str
    ids_offset: int
    json_offset: int
    json_bytes: int
    states: memoryview = field(repr=False)
    ids: memoryview = field(repr=False)
    has_token_ids: bool = False

    def write_token_ids(self, token_ids: Any) -> None:
        """Puts the token ids beside the states.

        Raises:
            OptionError: not ``tokens`` whole numbers.
        """
        self.put_token_ids(encode_token_ids(token_ids, self.tokens))

    def put_token_ids(self, encoded: bytes) -> None:
        """``write_token_ids`` of what ``encode_token_ids`` gave."""
        self.ids[:] = encoded
        self.has_token_ids = True

    def tensor(self) -> "torch.Tensor":
        """The states as a torch tensor ``[tokens, layers, hidden]`` over the ring's memory."""
        return as_tensor(self.states, self.dtype, (self.tokens, self.layers, self.hidden))

    def copy_from(self, hidden_states: "torch.Tensor") -> None:
        """Copies states of this shape and dtype, on any device.

        Between two pieces of host memory numpy does it in this thread. torch would use its OpenMP
        threads, which then spin for milliseconds on the cores of whoever reads.
        """
        ours = self.tensor()
        if hidden_states.device.type != "cpu":
            ours.copy_(hidden_states)
            return
        import numpy as np
        import torch

        # numpy has no bfloat16; the bits are what is copied.
        bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
        np.copyto(ours.view(bits).numpy(), hidden_states.detach().view(bits).numpy())

    def row(self, digest: str) -> bytes:
        """What the slot's row says of it, published now.

        Args:
            digest: of the request id, 32 hex digits.
        """
        request_id = self.request_id.encode("utf-8", "surrogatepass")[: layout.SLOT_ID_BYTES]
        fields = _ROW.pack(
            self.number,
            bytes.fromhex(digest),
            self.first_page,
            self.pages,
            self.tokens,
            self.layers,
            self.hidden,
            layout.DTYPES[self.dtype],
            self.states.nbytes,
            self.ids_offset,
            self.json_offset,
            self.json_bytes,
            time.time_ns(),
            len(request_id),
        )
        return fields + bytes(8) + request_id


class Stored(NamedTuple):
    """What the producer remembers of a published slot."""

    seq: int
    number: int
    request_id: str
    first_page: int
    pages: int
    since: float  # monotonic seconds


def as_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """A torch view over bytes; it keeps the object that exports them alive."""
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(buffer, dtype=kind).view(shape)


def encode_token_ids(token_ids: Any, tokens: int | None) -> bytes:
    """Token ids as little-endian int64.

    Raises:
        OptionError: not whole numbers in one dimension, or not ``tokens`` of them.
    """
    import numpy as np

    try:
        # Lists are what vLLM has, and twice as fast this way; it refuses all but whole numbers.
        ids = np.asarray(array("q", token_ids) if isinstance(token_ids, list) else token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"token_ids are no list of whole numbers: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise OptionError(
            f"token_ids must be whole numbers in one dimension, not {ids.dtype} {list(ids.shape)}"
        )
    if tokens is not None and len(ids) != tokens:
        raise OptionError(f"{len(ids)} token ids for {tokens} tokens of hidden states")
    return ids.astype("<i8").tobytes()


def encode_json(
    request_id: str,
    tag: str | None,
    layer_ids: Sequence[int],
    metadata: Mapping[str, Any] | None,
) -> bytes:
    """The JSON that travels with a sample.

    Raises:
        OptionError: something in it has no JSON form.
    """
    if not isinstance(request_id, str) or not (tag is None or isinstance(tag, str)):
        raise OptionError(f"request id {request_id!r} and tag {tag!r} must be text")
    record = {
        "request_id": request_id,
        "tag": tag,
        "layer_ids": list(layer_ids),
        "metadata": dict(metadata or {}),
    }
    try:
        return json.dumps(record, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise OptionError(f"metadata {metadata!r} has no JSON form: {error}") from error
