# SPDX-License-Identifier: Apache-2.0
"""Page allocation: a producer that fills several samples at once, each in one run of pages."""

from __future__ import annotations

from .faults import Fault
from .machine import Program, choose, store, unlock
from .producer import reclaim
from .promises import World

Fill = tuple[int, int, int, int]  # slot, first page, pages, pages written
Run = tuple[int, int, int, int]  # slot, sequence number, first page, pages


def find_run(w: World, taken: tuple[int, ...], count: int) -> int | None:
    """Return the first page of the shortest free run that has `count` pages, or None."""
    best, shortest = None, len(w.pages) + 1
    for first in range(len(w.pages) - count + 1):
        if first in taken or (first and first - 1 not in taken):
            continue
        length = next(n for n in range(1, len(w.pages) + 1) if first + n in (*taken, len(w.pages)))
        seen = count if w.fault is Fault.RUN_BY_ITS_FIRST_PAGE else length
        if count <= seen < shortest:
            best, shortest = first, seen
    return best


def filling_producer(w: World, sizes: tuple[int, ...], g: int = 0, i: int = 0) -> Program:
    """Publish samples of `sizes` pages in any order, up to two in filling; some are given up."""
    fills: tuple[tuple[int, Fill], ...] = ()  # (request, fill), as begun
    used: tuple[Run, ...] = ()
    k = n = given_up = 0
    while k < len(sizes) or fills:
        slot, first = _room(w, fills, used, sizes[k]) if k < len(sizes) else (-1, -1)
        ways: tuple[tuple[str, int], ...] = ()
        for j, (_, fill) in enumerate(fills):
            ways = (*ways, ("write" if fill[3] < fill[2] else "publish", j))
            if not given_up:
                ways = (*ways, ("discard", j))
        if first >= 0 and len(fills) < 2:
            ways = (*ways, ("begin", 0))
        if used and k < len(sizes) and first < 0:
            ways = (*ways, ("reclaim", 0))
        way = 0
        if len(ways) > 1:
            way = yield choose(len(ways), "fill: what next?")
        what, j = ways[way]
        del ways, way
        if what == "begin":
            k += 1
            fills = (*fills, (k, (slot, first, sizes[k - 1], 0)))
            del slot, first, what, j
            continue
        del slot, first
        if what == "reclaim":
            left = yield from reclaim(w, g, i, tuple((run[0], run[1]) for run in used))
            used = tuple(run for run in used if (run[0], run[1]) in left)
            del left, what, j
            continue
        number, fill = fills[j]
        fills = fills[:j] + fills[j + 1 :]
        if what == "write":
            yield store(w.page(g, fill[1] + fill[3]), number, "publish 2: page")
            fills = (*fills[:j], (number, (*fill[:3], fill[3] + 1)), *fills[j:])
        elif what == "discard":
            given_up = 1
        else:
            n += 1
            seq = number if w.fault is Fault.SEQ_AT_ALLOCATION else n
            yield store(w.number(g, fill[0]), number, "publish 3: number")
            yield store(w.run(g, fill[0]), fill[1] * 8 + fill[2], "publish 3: run")
            yield store(w.seq(g, fill[0]), seq, "publish 3")
            yield store(w.published(g), seq, "publish 4")
            used = (*used, (fill[0], seq, fill[1], fill[2]))
            del seq
        del what, j, number, fill
    yield store(w.closed(g), 1, "close 2")
    yield unlock(w.producer_lock(g), "close 3")


def _room(
    w: World, fills: tuple[tuple[int, Fill], ...], used: tuple[Run, ...], count: int
) -> tuple[int, int]:
    """Return a free slot and the first page of a free run, or -1 twice."""
    slots = [fill[0] for _, fill in fills] + [run[0] for run in used]
    free = [s for s in w.slots if s not in slots]
    if not free:
        return -1, -1
    spans = [(fill[1], fill[2]) for _, fill in fills] + [(run[2], run[3]) for run in used]
    taken = tuple(page for first, count_ in spans for page in range(first, first + count_))
    first = find_run(w, taken, count)
    return (free[0], first) if first is not None else (-1, -1)
