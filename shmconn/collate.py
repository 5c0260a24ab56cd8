# SPDX-License-Identifier: Apache-2.0
"""Samples into training batches: one copy, from the ring into the batch.

A batch is one run of memory that holds ``max_len`` tokens. Samples lie in it one after the other:

    hidden_states                [1, max_len, (layers - 1) * hidden]   the auxiliary layers
    verifier_last_hidden_states  [1, max_len, hidden]                  the last layer
    input_ids                    int64 [1, max_len]
    position_ids                 int64 [1, max_len]   counts from 0 in each sample
    document_ids                 int64 [1, max_len]   0, 1, ... by sample; -1 = padding
    loss_mask                    bool  [1, max_len]   with ``loss_mask=`` only
    lengths                      int64 [samples]
    handles                      list of str          the samples, in order
    cut_tokens                   int                  tokens that did not fit

The names and shapes are those of speculators' collated batches. Padding is 0 but in document_ids.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from shmconn import layout
from shmconn.errors import OptionError
from shmconn.sample import Sample
from shmconn.subscription import Subscription

_log = logging.getLogger("shmconn")

Batch = dict[str, Any]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in layout.DTYPES}
# Memory of batches that were dropped is kept for the next ones, but not more than this many.
_KEPT = 3


class Collator:
    """Packs samples into batches of one shape. Picklable; each process has its own memory.

    Use it as a DataLoader's ``collate_fn``, as ``SampleDataset(collator=...)``, or call ``pack``.
    A batch's memory is used again once the last tensor over it is gone, never earlier.

    Args:
        max_len: tokens in a batch.
        split: the last layer apart from the others; else all of them lie in ``hidden_states``
            ``[1, max_len, layers * hidden]``.
        dtype: of the states, a torch dtype or its name; they are cast while they are copied.
            ``None``: as they are in the ring.
        pin: page-locked memory, for asynchronous copies to a CUDA device.
        device: make the batch there: each sample goes by one DMA from the ring to the device.
        loss_mask: gives a sample's mask, one true or false per token.

    Raises:
        OptionError: an argument is wrong.
    """

    def __init__(
        self,
        max_len: int,
        *,
        split: bool = True,
        dtype: "torch.dtype | str | None" = None,
        pin: bool = False,
        device: "torch.device | str | None" = None,
        loss_mask: Callable[[Sample], Any] | None = None,
    ) -> None:
        if not isinstance(max_len, int) or max_len < 1:
            raise OptionError(f"max_len {max_len!r} must be a number of tokens, 1 or more")
        if not isinstance(dtype, torch.dtype | None) and dtype not in tuple(DTYPES):
            raise OptionError(f"dtype {dtype!r} must be one of {', '.join(sorted(DTYPES))}")
        self.max_len = max_len
        self.split = split
        self.dtype: torch.dtype | None = DTYPES[dtype] if isinstance(dtype, str) else dtype
        self.pin = pin
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "cpu":
            self.device = None
        if self.device is not None and self.device.type != "cuda":
            raise OptionError(f"device {str(device)!r} must be a CUDA device or the CPU")
        if pin and (self.device is not None or not torch.cuda.is_available()):
            why = "device is given" if self.device is not None else "there is no CUDA device"
            raise OptionError(f"pin=True has no use here: {why}")
        self.loss_mask = loss_mask
        self._memory = _Memory()
        self._warned = False
        self._warned_of_room = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": _Memory()}

    def __call__(self, samples: Iterable[Sample]) -> Batch:
        """One batch of all the samples; their leases end. What does not fit is cut.

        Raises:
            OptionError: there are no samples, or they are of different shapes.
        """
        packing: Packing | None = None
        for sample in samples:
            packing = packing or self.start(sample)
            packing.add(sample)
        if packing is None:
            raise OptionError("there are no samples to make a batch of")
        return packing.finish()

    def pack(self, samples: Iterable[Sample]) -> Iterator[Batch]:
        """Batches of whole samples, each as full as their order allows.

        Only a sample of more than ``max_len`` tokens is cut. Leases last until a batch is full: one
        that takes more than the ring holds is never filled, where a SampleDataset makes room.

        Raises:
            Standstill: as ``Subscription.next``.
        """
        packing: Packing | None = None
        subscription = samples if isinstance(samples, Subscription) else None
        source = iter(samples)
        sample: Sample | None = None
        try:
            while (sample := next(source, None)) is not None:
                if packing is not None and not packing.fits(sample):
                    batch, packing = packing.finish(), None
                    yield batch
                    del batch
                if packing is None:
                    self.warn_of_room(subscription, sample)
                    packing = self.start(sample)
                packing.add(sample)
                sample = None
        except BaseException:
            # Broken off, or failed: what is in hand, and in the batch that is not full, is unused.
            unused = [] if packing is None else list(packing.samples)
            if sample is not None and sample not in unused:
                unused.append(sample)
            _let_go(unused, subscription)
            raise
        if packing is not None:
            yield packing.finish()

    def warn_of_cut(self, tokens: int) -> None:
        """Says once that tokens are cut; each batch counts its own."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "tokens that did not fit into a batch of %d were cut: %d now, later ones are "
                "counted in the batch's cut_tokens",
                self.max_len,
                tokens,
            )

    def warn_of_room(self, subscription: Subscription | None, sample: Sample) -> None:
        """Says once that a batch takes more than the ring of its samples."""
        capacity = subscription.tokens_capacity(sample) if subscription is not None else None
        if capacity is None or self._warned_of_room or self.max_len <= capacity:
            return
        self._warned_of_room = True
        _log.warning(
            "a batch of max_len=%d tokens takes more than ring %r, which holds %d tokens: its "
            "leases cannot last until it is full. A SampleDataset ends them earlier, and a kill "
            "then loses those samples; Collator.pack alone waits for ever. Make the ring larger "
            "(ring_size), or max_len smaller",
            self.max_len,
            sample.handle.ring,
            capacity,
        )

    def start(self, sample: Sample) -> "Packing":
        """An empty batch for samples like this one."""
        return Packing(self, sample, self._memory)


class Packing:
    """One batch that is being filled.

    The leases of its samples end when it is finished: if this process dies before, another member
    of the group gets those samples.
    """

    def __init__(self, collator: Collator, like: Sample, memory: "_Memory") -> None:
        self._collator = collator
        self._like = (like.layer_ids, like.shape[2], like.dtype)
        self._offset = 0
        self._lengths: list[int] = []
        self._handles: list[str] = []
        self._cut = 0
        self._leases: list[Sample] = []
        layers, hidden = like.shape[1:]
        if collator.split and layers < 2:
            raise OptionError(
                f"samples of ring {like.handle.ring!r} have one layer, {like.layer_ids[0]}: there "
                "is nothing to split (Collator(split=False))"
            )
        dtype = collator.dtype or DTYPES[like.dtype]
        n = collator.max_len
        parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if collator.split:
            parts["hidden_states"] = (dtype, (n, layers - 1, hidden))
            parts["verifier_last_hidden_states"] = (dtype, (n, hidden))
        else:
            parts["hidden_states"] = (dtype, (n, layers, hidden))
        for name in ("input_ids", "position_ids", "document_ids"):
            parts[name] = (torch.int64, (n,))
        if collator.loss_mask is not None:
            parts["loss_mask"] = (torch.bool, (n,))
        self._parts, self._dirty = memory.take(parts, pin=collator.pin, device=collator.device)

    def fits(self, sample: Sample) -> bool:
        """Whether the whole sample still fits."""
        return self._offset + sample.tokens <= self._collator.max_len

    def add(self, sample: Sample) -> None:
        """Copies a sample in, cut if it does not fit.

        Raises:
            OptionError: its layers, hidden size or dtype are not those of the batch, or its loss
                mask has another length.
        """
        like = (sample.layer_ids, sample.shape[2], sample.dtype)
        if like != self._like:
            raise OptionError(
                f"sample {sample.handle} has layers {list(like[0])}, hidden size {like[1]}, "
                f"{like[2]}; the batch has {list(self._like[0])}, {self._like[1]}, {self._like[2]}"
            )
        count = min(sample.tokens, self._collator.max_len - self._offset)
        if count == 0 and sample.tokens:
            self._cut += sample.tokens
            sample.release()
            return
        mask: torch.Tensor | None = None
        if self._collator.loss_mask is not None:
            mask = self._mask_of(sample, self._collator.loss_mask)
        device = self._collator.device
        if device is None:
            states, ids = sample.hidden_states, sample.token_ids
        else:
            # One DMA; the split and the cast are the device's work.
            states, ids = sample.to(device, non_blocking=True)
        rows = slice(self._offset, self._offset + count)
        # If a copy below fails, those rows are no part of the batch.
        self._dirty = max(self._dirty, rows.stop)
        parts = self._parts
        if self._collator.split:
            parts["hidden_states"][rows] = states[:count, :-1]
            parts["verifier_last_hidden_states"][rows] = states[:count, -1]
        else:
            parts["hidden_states"][rows] = states[:count]
        parts["input_ids"][rows] = ids[:count]
        torch.arange(count, out=parts["position_ids"][rows])
        parts["document_ids"][rows] = len(self._lengths)
        if mask is not None:
            parts["loss_mask"][rows] = mask[:count]
        self._cut += sample.tokens - count
        self._offset += count
        self._lengths.append(count)
        self._handles.append(str(sample.handle))
        self._leases.append(sample)

    @staticmethod
    def _mask_of(sample: Sample, loss_mask: Callable[[Sample], Any]) -> torch.Tensor:
        mask = torch.as_tensor(loss_mask(sample))
        if mask.shape != (sample.tokens,):
            raise OptionError(
                f"loss_mask gave shape {list(mask.shape)} for sample {sample.handle} of "
                f"{sample.tokens} tokens"
            )
        return mask.to(torch.bool)

    @property
    def samples(self) -> list[Sample]:
        """Samples that were copied and whose lease is still held."""
        return self._leases

    def release(self) -> None:
        """Ends the leases of what was copied so far, before the batch is full."""
        for sample in self._leases:
            sample.release()
        self._leases.clear()

    def finish(self) -> Batch:
        """The batch; the leases of its samples end."""
        end, parts = self._offset, self._parts
        if self._cut:
            self._collator.warn_of_cut(self._cut)
        # Memory that was used before holds an older batch behind the end of this one.
        stale = slice(end, max(end, self._dirty))
        for name, part in parts.items():
            if name != "document_ids":
                part[stale] = 0
        parts["document_ids"][end:] = -1
        batch: Batch = {
            name: (part.flatten(1) if part.dim() == 3 else part).unsqueeze(0)
            for name, part in parts.items()
        }
        batch["lengths"] = torch.tensor(self._lengths, dtype=torch.int64)
        batch["handles"] = self._handles
        batch["cut_tokens"] = self._cut
        self.release()
        return batch


class _Memory:
    """Runs of bytes for batches; a run comes back when no tensor over it is left."""

    def __init__(self) -> None:
        self._free: deque[_Run] = deque(maxlen=_KEPT)

    def take(
        self,
        parts: "dict[str, tuple[torch.dtype, tuple[int, ...]]]",
        *,
        pin: bool,
        device: "torch.device | None",
    ) -> "tuple[dict[str, torch.Tensor], int]":
        """Tensors over one run, and how many rows of them may be other than 0."""
        places: dict[str, slice] = {}
        end = 0
        for name, (dtype, shape) in parts.items():
            start = layout.align(end, layout.CACHE_LINE)
            end = start + int(np.prod(shape)) * dtype.itemsize
            places[name] = slice(start, end)
        rows = next(iter(parts.values()))[1][0]
        memory, dirty = torch.empty(0, dtype=torch.uint8), rows
        if pin or device is not None:
            # torch keeps such memory for the next batch, and knows which copies still read it.
            memory = torch.empty(end, dtype=torch.uint8, pin_memory=pin, device=device)
        elif get_worker_info() is not None:
            # The batch leaves this process: sharing this memory needs no second copy.
            memory.set_(torch.UntypedStorage._new_shared(end))  # type: ignore[no-untyped-call]
            dirty = 0
        else:
            memory, dirty = self._reuse(end, rows)
        return {
            name: memory[places[name]].view(dtype).view(shape)
            for name, (dtype, shape) in parts.items()
        }, dirty

    def _reuse(self, size: int, rows: int) -> tuple[torch.Tensor, int]:
        dirty = rows
        try:
            run = self._free.pop()
        except IndexError:
            run = np.empty(0, np.uint8)
        if len(run) != size:
            run, dirty = np.zeros(size, np.uint8), 0
        alias = np.frombuffer(run.data, np.uint8)
        # The tensors keep the memoryview, that keeps the alias; nothing else does.
        weakref.finalize(alias, self._free.append, run).atexit = False
        return torch.frombuffer(alias.data, dtype=torch.uint8), dirty


def _let_go(samples: list[Sample], subscription: Subscription | None) -> None:
    if subscription is not None:
        for sample in samples:
            subscription.give_back(sample)
    elif samples:
        _log.warning(
            "%d samples of a batch that was never finished are let go of, unused. Give pack() the "
            "subscription itself, or use a SampleDataset with a collator, to have them given back",
            len(samples),
        )


_Run = np.ndarray[Any, np.dtype[np.uint8]]
