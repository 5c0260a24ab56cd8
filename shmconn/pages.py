# SPDX-License-Identifier: Apache-2.0
"""The producer's private list of free pages: contiguous runs, next-fit around the ring."""

from bisect import bisect_left


class PageRuns:
    """Free runs of pages. A run never wraps around the end, so a tensor over it is one view."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free = pages
        self._starts: list[int] = [0] if pages else []
        self._lengths: dict[int, int] = {0: pages} if pages else {}
        self._next = 0

    def allocate(self, count: int) -> int | None:
        """First page of a free run of ``count`` pages, or None if there is no such run.

        The search begins where the last one ended, so that long runs are not nibbled at their
        beginning by every short sample.
        """
        if count > self.free:
            return None
        first = bisect_left(self._starts, self._next)
        for index in (*range(first, len(self._starts)), *range(first)):
            start: int = self._starts[index]
            length = self._lengths[start]
            if length < count:
                continue
            del self._lengths[start]
            if length == count:
                del self._starts[index]
            else:
                self._starts[index] = start + count
                self._lengths[start + count] = length - count
            self.free -= count
            self._next = start + count
            return start
        return None

    def release(self, start: int, count: int) -> None:
        """Gives a run back and joins it with its free neighbours."""
        index = bisect_left(self._starts, start)
        self.free += count
        if index < len(self._starts) and self._starts[index] == start + count:
            count += self._lengths.pop(self._starts.pop(index))
        if index > 0:
            before = self._starts[index - 1]
            if before + self._lengths[before] == start:
                self._lengths[before] += count
                return
        self._starts.insert(index, start)
        self._lengths[start] = count

    def longest(self) -> int:
        """Pages of the longest free run."""
        return max(self._lengths.values(), default=0)
