# SPDX-License-Identifier: Apache-2.0
"""Samples out of the shards that ``shmconn drain --format shards`` wrote, at random, by mmap.

::

    dataset = ShardDataset("out/")
    dataset[17]["hidden_states"]          # [tokens, layers, hidden]
    torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=None, num_workers=4)
"""

import json
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from shmconn.errors import OptionError, SegmentCorrupt

_NAME = re.compile(r"shard-\d{5,9}\.safetensors")
_LENGTH = 8
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor is in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class _Item:
    """One sample of a shard."""

    shard: int
    states: _Tensor
    token_ids: _Tensor
    metadata: str


class ShardDataset(Dataset[dict[str, Any]]):
    """A torch map-style dataset over the sealed shards of a folder.

    An item is a dict: ``hidden_states`` [tokens, layers, hidden], ``token_ids`` int64 [tokens],
    and ``metadata``, the texts that a file of one sample has in its header: request_id, tag,
    handle, layer_ids, dtype, shape, ring, generation, metadata. Both tensors are views of a private
    mapping: to change one in place changes no file.

    Args:
        folder: where the shards are.

    Raises:
        OptionError: there is no shard in the folder.
        SegmentCorrupt: a shard is damaged; names the file and the field.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        paths = sorted(p for p in Path(folder).iterdir() if _NAME.fullmatch(p.name))
        if not paths:
            raise OptionError(
                f"there is no shard-*.safetensors in {os.fspath(folder)!r}: a shard that is being "
                "written ends in .part and is sealed when it is full or its drain ends"
            )
        self._paths = paths
        self._maps: dict[int, mmap.mmap] = {}
        self._items = [item for index, path in enumerate(paths) for item in _read(index, path)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._items[index]
        return {
            "hidden_states": self._view(item.shard, item.states),
            "token_ids": self._view(item.shard, item.token_ids),
            "metadata": json.loads(item.metadata),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Without the mappings, which a worker process makes for itself."""
        return self.__dict__ | {"_maps": {}}

    def tokens(self, index: int) -> int:
        """Number of tokens of an item, without reading it: to batch by length."""
        return self._items[index].token_ids.shape[0]

    def _view(self, shard: int, tensor: _Tensor) -> torch.Tensor:
        if not tensor.count:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if shard not in self._maps:
            with open(self._paths[shard], "rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(
            self._maps[shard], dtype=tensor.dtype, count=tensor.count, offset=tensor.offset
        )
        return flat.view(tensor.shape)


def _read(index: int, path: Path) -> list[_Item]:
    """The samples of a shard, each checked against the size of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > min(size - _LENGTH, _MAX_HEADER):
            raise SegmentCorrupt(str(path), "header length", f"{length} is above the file's size")
        try:
            header = json.loads(file.read(length))
            metadata = header["__metadata__"]
            count = sum(name.endswith(".token_ids") for name in header)
            return [
                _Item(
                    index,
                    _tensor(header[f"{number}.hidden_states"], _LENGTH + length, size, 3),
                    _tensor(header[f"{number}.token_ids"], _LENGTH + length, size, 1),
                    metadata[str(number)],
                )
                for number in range(count)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SegmentCorrupt(str(path), "header", f"is not a shard's: {error!r}") from None


def _tensor(entry: dict[str, Any], start: int, size: int, axes: int) -> _Tensor:
    dtype = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    tensor = _Tensor(dtype, tuple(entry["shape"]), start + begin)
    if len(tensor.shape) != axes or any(side < 0 for side in tensor.shape):
        raise ValueError(f"shape {entry['shape']}")
    if begin < 0 or end - begin != tensor.count * dtype.itemsize or start + end > size:
        raise ValueError(f"data_offsets {entry['data_offsets']}")
    return tensor
