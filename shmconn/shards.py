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

from shmconn.checksum import check
from shmconn.errors import FileCorrupt, OptionError
from shmconn.identity import DTYPES, Identity

_NAME = re.compile(r"shard-\d{5,9}\.safetensors")
_LENGTH = 8
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
_DTYPES = {name: getattr(torch, dtype) for name, dtype in DTYPES.items()} | {"I64": torch.int64}


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
    number: int
    states: _Tensor
    token_ids: _Tensor
    metadata: str
    identity: Identity | None


class ShardDataset(Dataset[dict[str, Any]]):
    """A torch map-style dataset over the sealed shards of a folder.

    An item is a dict: ``hidden_states`` [tokens, layers, hidden], ``token_ids`` int64 [tokens],
    and ``metadata``, the texts that a file of one sample has in its header: request_id, tag,
    handle, layer_ids, dtype, shape, ring, generation, metadata, checksum. Both tensors are views of
    a private mapping: to change one in place changes no file. The first time that a process takes
    an item, its bytes are compared with its checksum.

    Args:
        folder: where the shards are.

    Raises:
        OptionError: there is no shard in the folder, or they hold samples of different layers,
            hidden sizes or dtypes.
        FileCorrupt: a shard, or the item that is asked for, is damaged; names file and field.
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
        self._checked: set[int] = set()
        self._refuse_a_mixture(folder)

    def _refuse_a_mixture(self, folder: str | os.PathLike[str]) -> None:
        found: dict[Identity, str] = {}
        for item in self._items:
            if item.identity is not None:
                found.setdefault(item.identity, self._paths[item.shard].name)
        if len(found) > 1:
            raise OptionError(
                f"{os.fspath(folder)!r} holds samples of more than one kind, "
                + "; ".join(f"{name}: {identity}" for identity, name in found.items())
                + ": give each kind a folder of its own"
            )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # one number for -1 and the last
        item = self._items[index]
        states = self._view(item.shard, item.states)
        token_ids = self._view(item.shard, item.token_ids)
        metadata = json.loads(item.metadata)
        if index not in self._checked:
            check(f"{self._paths[item.shard]}, sample {item.number}", metadata, token_ids, states)
            self._checked.add(index)
        return {"hidden_states": states, "token_ids": token_ids, "metadata": metadata}

    def __getstate__(self) -> dict[str, Any]:
        """Without the mappings, which a worker process makes for itself."""
        return self.__dict__ | {"_maps": {}, "_checked": set()}

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
            raise FileCorrupt(str(path), "header length", f"{length} is above the file's size")
        start = _LENGTH + length
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            data = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            count = sum(name.endswith(".token_ids") for name in header)
            texts = sum(name.isdecimal() for name in metadata)
            items = [
                _item(index, number, header, metadata[str(number)], start, size)
                for number in range(count)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileCorrupt(str(path), "header", f"is not a shard's: {error!r}") from None
    if texts != count:
        raise FileCorrupt(str(path), "header", f"has {count} samples, and texts of {texts}")
    if start + data != size:
        raise FileCorrupt(str(path), "size", f"is {size}, {start + data} was written")
    return items


def _item(
    shard: int, number: int, header: dict[str, Any], metadata: str, start: int, size: int
) -> _Item:
    states, token_ids = header[f"{number}.hidden_states"], header[f"{number}.token_ids"]
    return _Item(
        shard,
        number,
        _tensor(states, start, size, 3),
        _tensor(token_ids, start, size, 1),
        metadata,
        Identity.of_header(states, json.loads(metadata)),
    )


def _tensor(entry: dict[str, Any], start: int, size: int, axes: int) -> _Tensor:
    dtype = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    tensor = _Tensor(dtype, tuple(entry["shape"]), start + begin)
    if len(tensor.shape) != axes or any(side < 0 for side in tensor.shape):
        raise ValueError(f"shape {entry['shape']}")
    if begin < 0 or end - begin != tensor.count * dtype.itemsize or start + end > size:
        raise ValueError(f"data_offsets {entry['data_offsets']}")
    return tensor
