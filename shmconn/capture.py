# SPDX-License-Identifier: Apache-2.0
"""Finds the cache of hidden states among vLLM's KV caches and copies blocks of it.

vLLM keeps the hidden states of its ``extract_hidden_states`` method in the paged cache of a
pseudo attention layer, with the captured layers where heads would be:

    up to 0.28    [blocks, block, layers, hidden]
    from 0.32     [blocks, layers, block, hidden]    in any physical order

Shapes cannot tell the two apart when a block has as many tokens as there are layers, so the
backend's class decides. Everything here works on the view ``[blocks, block, layers, hidden]``
of it, by its strides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shmconn.errors import OptionError
from shmconn.fill import Fill

# How vLLM marks the layer: by the type of its cache's specification, and before 0.22 by its name
# alone. A group of like layers may hide the type, so the name is looked at where none is found.
SPEC = "HiddenStateCacheSpec"
LAYER = "cache_only_layers"
# Widest integers first: the fewer elements, the faster a gather.
_INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


@dataclass(frozen=True)
class CacheView:
    """The paged cache of hidden states.

    Attributes:
        states: ``[blocks, block, layers, hidden]``, a view of vLLM's own memory.
        expand: blocks of the cache in one block of the scheduler.
    """

    states: torch.Tensor
    expand: int = 1

    @property
    def block(self) -> int:
        """Tokens in one block of the cache."""
        return int(self.states.shape[1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return int(self.states.shape[2] * self.states.shape[3]) * self.states.element_size()

    def words(self) -> torch.Tensor:
        """The same memory as the widest integers that its strides allow: bytes are bytes."""
        states = self.states
        for size, kind in _INTEGERS:
            ratio = size // states.element_size()
            offsets = (states.shape[3], states.storage_offset(), *states.stride()[:3])
            if ratio >= 1 and all(offset % ratio == 0 for offset in offsets):
                return states.view(kind)
        raise OptionError(f"hidden states of dtype {states.dtype} cannot be captured")

    def cache_blocks(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """The cache's blocks that hold the first ``tokens`` tokens of the scheduler's blocks.

        Raises:
            OptionError: there are too few, or one is not in the cache.
        """
        ids = list(blocks)
        if self.expand > 1:
            ids = [one * self.expand + part for one in ids for part in range(self.expand)]
        needed = -(-tokens // self.block)
        if needed > len(ids):
            raise OptionError(f"{tokens} tokens do not fit {len(ids)} blocks of {self.block}")
        ids = ids[:needed]
        if ids and not 0 <= min(ids) <= max(ids) < self.states.shape[0]:
            raise OptionError(f"blocks {min(ids)} to {max(ids)} of {self.states.shape[0]}")
        return ids


class Place(NamedTuple):
    """Where vLLM keeps the hidden states.

    Attributes:
        group: index of the scheduler's group.
        block_size: tokens in one block of it.
        layer: name of the layer.
    """

    group: int
    block_size: int
    layer: str


def find_place(kv_cache_config: Any) -> Place:
    """The one layer with hidden states among the scheduler's groups.

    Raises:
        OptionError: there is none, or more than one; names the layers seen.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [(at, name) for at, group in enumerate(groups) for name in _marked(group)]
    if not found:
        found = [(i, one) for i, group in enumerate(groups) for one in group.layer_names]
        found = [(at, name) for at, name in found if LAYER in name]
    if len(found) == 1:
        index, layer = found[0]
        return Place(index, int(groups[index].kv_cache_spec.block_size), layer)
    seen = "; ".join(", ".join(list(group.layer_names)[:3]) for group in groups)
    which = " and ".join(name for _, name in found) or "none"
    raise OptionError(
        f"expected one layer of hidden states in vLLM's {len(groups)} KV cache groups ({seen}), "
        f"found {which}"
    )


def _marked(group: Any) -> list[str]:
    """The group's layers whose specification is of the hidden states' own type."""

    def is_hidden(spec: Any) -> bool:
        return any(one.__name__ == SPEC for one in type(spec).__mro__)

    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)
    if isinstance(by_layer, Mapping):
        return [name for name, one in by_layer.items() if is_hidden(one)]
    return list(group.layer_names) if is_hidden(spec) else []


def find_cache(
    kv_caches: Mapping[str, torch.Tensor],
    place: Place,
    *,
    layers: int,
    hidden_size: int,
    token_major: bool,
) -> CacheView:
    """The cache of hidden states among all of a worker's caches.

    Args:
        kv_caches: by name of the layer.
        place: where the scheduler says that it is.
        layers: how many layers are captured.
        hidden_size: of the target model.
        token_major: whether the shape is ``[blocks, block, layers, hidden]``.

    Raises:
        OptionError: it is not there, or is not what the model's configuration says.
    """
    name, block_size = place.layer, place.block_size
    cache = kv_caches.get(name)
    if cache is None:
        raise OptionError(
            f"vLLM registered {len(kv_caches)} KV caches, but none of the layer {name}: "
            f"{', '.join(list(kv_caches)[:3])}"
        )
    if cache.dim() != 4:
        raise OptionError(f"the cache of {name} has shape {list(cache.shape)}, not 4 axes")
    states = cache if token_major else cache.transpose(1, 2)
    block = states.shape[1]
    if tuple(states.shape[2:]) != (layers, hidden_size) or states.stride(3) != 1:
        raise OptionError(
            f"the cache of {name} has shape {list(cache.shape)} and strides "
            f"{list(cache.stride())}: no {layers} layers of {hidden_size} in it"
        )
    if block_size % block:
        raise OptionError(
            f"the cache of {name} has blocks of {block} tokens, which do not make up the "
            f"scheduler's blocks of {block_size}"
        )
    return CacheView(states, block_size // block)


# Host work that has room in the time of a copy.
Meanwhile = Callable[[], None] | None


class Capture(Protocol):
    """Copies a request's blocks out of the cache into a slot."""

    def at_step(self) -> None:
        """Called by the main thread in each step: marks are made on that step's stream."""

    def mark(self) -> Any:
        """Called by the main thread: what the steps' stream was given so far, to wait for."""

    def bind(self) -> None:
        """Called once by the thread that will copy."""

    def copy(
        self, fill: Fill, blocks: Sequence[int], ready: Any, meanwhile: Meanwhile = None
    ) -> None:
        """Fills ``fill.states``; they are whole when it returns. Begins after ``ready``.

        ``meanwhile`` is called once, while a device copies, if one does.
        """

    def close(self) -> None:
        """Lets go of the ring's memory; no copy comes after it."""


def make_capture(cache: CacheView, data_area: memoryview) -> Capture:
    """The capture that suits the device that the cache is on.

    Args:
        data_area: the ring's pages, to be registered with the device.
    """
    if cache.states.device.type == "cpu":
        return HostCapture(cache)
    from shmconn.capture_cuda import DeviceCapture

    return DeviceCapture(cache, data_area)


class HostCapture:
    """Copies out of a cache in host memory, straight into the slot, one block at a time.

    One thread, with numpy: torch's thread pool belongs to the model.
    """

    def __init__(self, cache: CacheView) -> None:
        self._cache = cache
        self._words: np.ndarray[Any, Any] = cache.words().numpy()

    def at_step(self) -> None:
        """There are no streams."""

    def mark(self) -> None:
        """Host memory is written when a step returns: there is nothing to wait for."""

    def bind(self) -> None:
        """Any thread may copy."""

    def copy(
        self, fill: Fill, blocks: Sequence[int], ready: None, meanwhile: Meanwhile = None
    ) -> None:
        """Fills the slot with the rows of these blocks, in order."""
        if meanwhile is not None:
            meanwhile()
        target: np.ndarray[Any, Any] = np.frombuffer(fill.states, dtype=self._words.dtype)
        target = target.reshape(fill.tokens, *self._words.shape[2:])
        at = 0
        for block in self._cache.cache_blocks(blocks, fill.tokens):
            rows = min(self._cache.block, fill.tokens - at)
            target[at : at + rows] = self._words[block, :rows]
            at += rows

    def close(self) -> None:
        """Nothing is held of the ring."""
