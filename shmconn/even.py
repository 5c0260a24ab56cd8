# SPDX-License-Identifier: Apache-2.0
"""As many batches on every rank: one that has one more would hang in its collective for ever.

    for batch in EvenBatches(dataset):
        loss(model(batch)).backward()

The ranks of a training share a group, and a fast one gets more of its samples. Here they vote
before each step, by one small all-reduce, whether each of them has a batch.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed

from shmconn.dataset import SampleDataset
from shmconn.errors import OptionError, ProducerDied
from shmconn.handed_out import handles_of

_log = logging.getLogger("shmconn")
_ENDS = ("drop", "pad")


class EvenBatches:
    """Iterates ``source`` in step with all other ranks, all of which iterate theirs.

    A rank waits for the slowest one before each batch, at most for the process group's own
    ``timeout``: make that longer than vLLM may be idle. Without a process group there is one rank,
    and nothing is voted.

    Args:
        source: a SampleDataset, or batches, as a DataLoader over one gives them. A dataset's
            ``state_dict`` counts what came out of here.
        end: what to do when some ranks have a batch and some have none. ``drop``: all stop; what is
            left over is said and counted (``dropped``). ``pad``: go on until no rank has any;
            the others are given batches of padding alone (``padded``): document_ids are -1,
            loss_mask is false, there are no handles.
        process_group: of the ranks; the default one if None.

    Raises:
        OptionError: an argument is wrong.
    """

    def __init__(
        self,
        source: Iterable[Any],
        end: str = "drop",
        process_group: "distributed.ProcessGroup | None" = None,
    ) -> None:
        if end not in _ENDS:
            raise OptionError(f"end {end!r} must be one of {', '.join(_ENDS)}")
        self.end = end
        self.dropped = 0
        self.padded = 0
        self._source = source
        self._group = process_group
        self._shape: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Batches; as many as on every other rank.

        Raises:
            ProducerDied: all ranks are through, and one of them read to the end of a ring whose
                producer had been killed.
        """
        source = self._source
        items = source.unrecorded() if isinstance(source, SampleDataset) else iter(source)
        died: ProducerDied | None = None
        while True:
            try:
                held = [next(items)] if died is None else []
            except StopIteration:
                held = []
            except ProducerDied as error:
                # An end like any other for the ranks that go on; told when all are through.
                died, held = error, []
            vote = self._vote(held, died)
            if vote.over(self.end):
                self._drop(held)
                if died is not None:
                    raise died
                if vote.died:
                    raise ProducerDied("another rank has read all of a ring whose producer died")
                return
            if held and isinstance(source, SampleDataset):
                source.record(held[0])
            # Nothing here may keep what the caller drops.
            yield held.pop() if held else self._padding()

    def _vote(self, held: list[Any], died: ProducerDied | None) -> "_Vote":
        if held and self.end == "pad" and self._shape is None:
            self._shape = _shape_of(held[0])
        if not distributed.is_initialized():
            return _Vote(not held, bool(held), 0, False, died is not None)
        rank = distributed.get_rank()
        missing = self.end == "pad" and self._shape is None
        mine = _Vote(not held, bool(held), rank + 1 if held else 0, missing, died is not None)
        device = "cuda" if distributed.get_backend(self._group) == "nccl" else "cpu"
        votes = torch.tensor(list(map(int, mine)), device=device)
        distributed.all_reduce(votes, distributed.ReduceOp.MAX, self._group)
        vote = _Vote(*votes.tolist())
        if vote.shapeless and vote.some and vote.none:
            # A rank that never had a batch learns from one that has what padding looks like.
            shape = [self._shape]
            distributed.broadcast_object_list(shape, vote.who - 1, self._group)
            self._shape = self._shape or shape[0]
        return vote

    def _drop(self, held: list[Any]) -> None:
        if not held:
            return
        left = sum(1 for _ in handles_of(held[0]))
        self.dropped += left
        if isinstance(self._source, SampleDataset):
            self._source.give_back(held.pop())
            return
        _log.warning(
            "%d samples of this rank's last batch are not used: another rank has none "
            "(EvenBatches(end='pad') uses all)",
            left,
        )

    def _padding(self) -> dict[str, Any]:
        self.padded += 1
        assert self._shape is not None  # else no rank has a batch, and all have stopped
        batch: dict[str, Any] = {}
        for name, value in self._shape.items():
            if isinstance(value, _Tensor):
                fill = -1 if name == "document_ids" else 0
                value = torch.full(value.shape, fill, dtype=value.dtype, device=value.device)
            batch[name] = value
        return batch


class _Vote(NamedTuple):
    """What all ranks said together."""

    none: bool  # some rank has no batch
    some: bool  # some rank has one
    who: int  # a rank that has one, counted from 1
    shapeless: bool  # some rank has never had one
    died: bool

    def over(self, end: str) -> bool:
        """Whether all ranks stop here."""
        return self.none if end == "drop" else not self.some


class _Tensor:
    """What a tensor of padding is made from."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        # Of its kind only: each rank has a device of its own.
        self.device = tensor.device.type


def _shape_of(batch: Any) -> dict[str, Any]:
    if not isinstance(batch, Mapping) or "handles" not in batch:
        raise OptionError(
            f"EvenBatches(end='pad') pads a Collator's batches; this is a {type(batch).__name__} "
            "(SampleDataset(..., collator=Collator(max_len)), or end='drop')"
        )
    shape: dict[str, Any] = {}
    for name, value in batch.items():
        shape[name] = _Tensor(value) if isinstance(value, torch.Tensor) else value
    return {**shape, "lengths": torch.empty(0, dtype=torch.int64), "handles": [], "cut_tokens": 0}
