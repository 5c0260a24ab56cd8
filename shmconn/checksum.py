# SPDX-License-Identifier: Apache-2.0
"""The checksum of a sample in a file, and the check of what was read.

It is the CRC-32 of who and what the sample is, as text, and of the sums of each 4 KiB of its token
ids and of its states. A plain CRC of the states would take a third of a writer's speed on a tmpfs;
the sums take a twelfth, and still see any byte that was changed, cut, zeroed or moved by a page.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shmconn.errors import FileCorrupt

if TYPE_CHECKING:
    import torch

KEY = "checksum"  # in a sample's metadata
BLANK = "0" * 8  # where it will be written
_TEXTS = (
    "request_id", "tag", "handle", "layer_ids", "dtype", "shape", "ring", "generation", "metadata",
)  # fmt: skip
_BLOCK = 4096
_PIECE = 64 * _BLOCK  # so that a piece is still in the cache when it is written


class Checksum:
    """Of one sample, as its bytes come along.

    Args:
        metadata: the sample's texts.
    """

    def __init__(self, metadata: Mapping[str, str]) -> None:
        texts = "".join(f"{key}\0{metadata[key]}\0" for key in _TEXTS if key in metadata)
        self._crc = zlib.crc32(texts.encode("utf-8", "surrogatepass"))

    def pieces(self, data: Any) -> Iterator[memoryview]:
        """The bytes of a part in pieces, each taken note of before it is given out."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._add(np.frombuffer(piece, dtype=np.uint8))
            yield piece

    def _add(self, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        if rest := len(data) % _BLOCK:
            data = np.append(data, np.zeros(_BLOCK - rest, dtype=np.uint8))
        self._crc = zlib.crc32(data.view("<u8").reshape(-1, _BLOCK // 8).sum(axis=1), self._crc)

    def __str__(self) -> str:
        return f"{self._crc:08x}"


def checksum(metadata: Mapping[str, str], *parts: Any) -> str:
    """The checksum of a sample whose token ids and states are there as bytes."""
    found = Checksum(metadata)
    for part in parts:
        for _ in found.pieces(part):
            pass
    return str(found)


def check(
    file: str, metadata: Mapping[str, str], token_ids: "torch.Tensor", states: "torch.Tensor"
) -> None:
    """Refuse a sample that is not what was written.

    A sample without a checksum passes: an earlier version wrote it, or another program.

    Args:
        file: what to call it in an error.
        metadata: the sample's texts, as read.
        token_ids: as read.
        states: as read.

    Raises:
        FileCorrupt: the file was changed, cut or mixed up after it was written.
    """
    if KEY not in metadata:
        return
    dtype, shape = str(states.dtype).removeprefix("torch."), json.dumps(list(states.shape))
    stated = (metadata.get("dtype", dtype), metadata.get("shape", shape))
    if stated != (dtype, shape):
        raise FileCorrupt(file, "shape", f"is {dtype} {shape}, {' '.join(stated)} was written")
    found = checksum(metadata, _bytes(token_ids), _bytes(states))
    if found != metadata[KEY]:
        raise FileCorrupt(file, KEY, f"is {found}, {metadata[KEY]} was written")


def _bytes(tensor: "torch.Tensor") -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()
