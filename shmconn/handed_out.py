# SPDX-License-Identifier: Apache-2.0
"""Which samples a training has been given, by handle, small enough for a checkpoint."""

import bisect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shmconn.errors import OptionError
from shmconn.handle import Handle
from shmconn.sample import Sample

VERSION = 1
_GENERATION = re.compile(r"[0-9a-f]{32}")


class HandedOut:
    """A set of handles: for each generation the ranges of request numbers."""

    def __init__(self) -> None:
        # Per generation: first numbers and last numbers of disjoint ranges, both rising.
        self._ranges: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, handle: Handle) -> None:
        """Takes note of a handle."""
        self._add_range(handle.generation, handle.number, handle.number)

    def __contains__(self, handle: Handle) -> bool:
        firsts, lasts = self._ranges.get(handle.generation, ([], []))
        at = bisect.bisect_right(firsts, handle.number) - 1
        return at >= 0 and handle.number <= lasts[at]

    def __len__(self) -> int:
        return sum(last - first + 1 for _, first, last in self._all())

    def _all(self) -> Iterator[tuple[str, int, int]]:
        for generation, (firsts, lasts) in self._ranges.items():
            for first, last in zip(firsts, lasts, strict=True):
                yield generation, first, last

    def _add_range(self, generation: str, first: int, last: int) -> None:
        firsts, lasts = self._ranges.setdefault(generation, ([], []))
        # The ranges that touch the new one become one with it.
        low = bisect.bisect_left(lasts, first - 1)
        high = bisect.bisect_right(firsts, last + 1)
        if low < high:
            first, last = min(first, firsts[low]), max(last, lasts[high - 1])
        firsts[low:high] = [first]
        lasts[low:high] = [last]

    def state_dict(self) -> dict[str, Any]:
        """Plain values: lists of ``[first, last]`` by generation."""
        ranges: dict[str, list[list[int]]] = {}
        for generation, first, last in self._all():
            ranges.setdefault(generation, []).append([first, last])
        return {"version": VERSION, "handed_out": ranges}

    def merge(self, state: Any) -> None:
        """Adds what a state names.

        Raises:
            OptionError: it is not what ``state_dict`` gives; nothing is added.
        """
        for generation, first, last in list(_checked(state)):
            self._add_range(generation, first, last)


def _checked(state: Any) -> Iterator[tuple[str, int, int]]:
    if not isinstance(state, Mapping) or not isinstance(state.get("handed_out"), Mapping):
        raise OptionError(f"{type(state).__name__} is no state of a SampleDataset")
    if state.get("version") != VERSION:
        raise OptionError(
            f"the dataset's state is of version {state.get('version')!r}, this shmconn reads "
            f"{VERSION}"
        )
    for generation, ranges in state["handed_out"].items():
        if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
            raise OptionError(f"the dataset's state names a generation {generation!r}")
        if not isinstance(ranges, list | tuple):
            raise OptionError(f"the dataset's state names ranges {ranges!r}")
        for one in ranges:
            try:
                first, last = (int(number) for number in one)
            except (TypeError, ValueError):
                first, last = 1, 0
            if not 1 <= first <= last:
                raise OptionError(f"the dataset's state names a range {one!r}")
            yield generation, first, last


def handles_of(item: Any) -> Iterator[Handle]:
    """The samples that an item of a training is made of.

    Args:
        item: a sample, a batch, a handle, or several of them in a list.

    Raises:
        OptionError: it names none.
    """
    if isinstance(item, Sample):
        yield item.handle
    elif isinstance(item, str | Handle):
        yield Handle.parse(item)
    elif isinstance(item, Mapping) and "handles" in item:
        if not all(isinstance(one, str | Handle) for one in item["handles"]):
            raise OptionError(
                "the batch's 'handles' are no handles: a DataLoader over a dataset with a collator "
                "needs batch_size=None, or it wraps each batch once more"
            )
        yield from map(Handle.parse, item["handles"])
    elif isinstance(item, list | tuple):
        for one in item:
            yield from handles_of(one)
    else:
        raise OptionError(
            f"a {type(item).__name__} names no samples: record samples, handles, or batches with "
            "'handles'"
        )
