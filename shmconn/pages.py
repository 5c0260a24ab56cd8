# SPDX-License-Identifier: Apache-2.0
"""The producer's private list of free pages: contiguous runs, best fit.

Best fit keeps what is held for long close together, so that long runs stay free. Next-fit spreads
it all around the ring: at a fifth of a ring used it seldom had a third of the ring in one run.
No placement can promise more than this: where L samples are held, the longest free run is at least
the free pages over L + 1.
"""

from bisect import bisect_left, insort


class PageRuns:
    """Free runs of pages. A run never wraps around the end, so a tensor over it is one view."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free = pages
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []  # (length, start), sorted
        if pages:
            self._add(0, pages)

    def allocate(self, count: int) -> int | None:
        """First page of ``count`` pages in the shortest free run that has them, or None."""
        index = bisect_left(self._by_length, (count, 0))
        if index == len(self._by_length):
            return None
        length, start = self._by_length[index]
        self._remove(start)
        if length > count:
            self._add(start + count, length - count)
        self.free -= count
        return start

    def release(self, start: int, count: int) -> None:
        """Gives a run back and joins it with its free neighbours."""
        self.free += count
        if start + count in self._lengths:
            count += self._remove(start + count)
        index = bisect_left(self._starts, start)
        if index > 0:
            before = self._starts[index - 1]
            if before + self._lengths[before] == start:
                count += self._remove(before)
                start = before
        self._add(start, count)

    def longest(self) -> int:
        """Pages of the longest free run."""
        return self._by_length[-1][0] if self._by_length else 0

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
        insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        """Takes a run out of the list; returns its length."""
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length
