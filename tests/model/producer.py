# SPDX-License-Identifier: Apache-2.0
"""The running producer: publish, reclaim, expire, close. It waits for nobody."""

from __future__ import annotations

from .faults import Fault
from .machine import Program, choose, fence, load, look, store, test, trylock, unlock
from .promises import World
from .states import ACTIVE, FREE, REGISTERING, RELEASED, TORN, held


def producer(w: World, g: int = 0, i: int = 0, samples: int | None = None) -> Program:
    """Publish all samples, then close. Request n is sample n."""
    used: tuple[tuple[int, int], ...] = ()  # (slot, sequence number) of what is published
    for n in range(1, (w.samples if samples is None else samples) + 1):
        while len(used) == len(w.slots):
            used = yield from reclaim(w, g, i, used)
        taken = [s for s, _ in used]
        s = next(s for s in w.slots if s not in taken)
        del taken
        yield from publish(w, g, s, n, n)
        used = (*used, (s, n))
    yield store(w.closed(g), 1, "close 2")
    yield unlock(w.producer_lock(g), "close 3")


def publish(w: World, g: int, s: int, n: int, k: int) -> Program:
    """Publish request k as sample n in slot s."""
    if w.fault is Fault.SEQ_BEFORE_PAGES:
        yield store(w.seq(g, s), n, "publish 3 (seq first)")
        yield store(w.published(g), n, "publish 4")
    yield store(w.number(g, s), TORN, "publish 2: first half")
    yield store(w.number(g, s), k, "publish 2: second half")
    if w.fault is not Fault.SEQ_BEFORE_PAGES:
        yield store(w.seq(g, s), n, "publish 3")
        yield store(w.published(g), n, "publish 4")


def reclaim(w: World, g: int, i: int, used: tuple[tuple[int, int], ...]) -> Program:
    """One pass over the published slots; return those that are still needed."""
    yield fence("reclaim 1")
    if w.fault is Fault.NO_NAMELESS_ROW:
        return (yield from _reclaim_without_nameless(w, g, i, used))
    left: tuple[tuple[int, int], ...] = ()
    for s, n in used:
        if w.by_handle and (yield choose(2, "expire: old enough?")):
            yield from expire(w, g, i, s, n)
        if (yield from needed(w, g, i, s, n)):
            left = (*left, (s, n))
        else:
            yield store(w.seq(g, s), 0, "reclaim 3")
    return left


def needed(w: World, g: int, i: int, s: int, n: int) -> Program:
    """Does any row need sample n in slot s? Fresh loads, row by row."""
    for r in w.rows:
        state = yield load(w.state(i, r), "reclaim 2: state")
        if state == FREE:
            continue
        if state == REGISTERING:
            if w.fault is not Fault.DEAD_REGISTRANT_STAYS:
                yield from undo_if_dead(w, i, r)
            return True
        del state
        start = yield load(w.start(g, r), "reclaim 2: start")
        if n < start:
            continue
        del start
        word = yield load(w.hold(g, r, s), "reclaim 2: hold")
        if word != held(n, RELEASED):
            return True
        del word
    return False


def undo_if_dead(w: World, i: int, r: int) -> Program:
    """A row is REGISTERING: if R can be had, its registrant is dead."""
    if (yield trylock(w.registry_lock(i), "reclaim: REGISTERING, try R")):
        if (yield load(w.state(i, r), "reclaim: still REGISTERING?")) == REGISTERING:
            yield store(w.state(i, r), FREE, "reclaim: undo the dead registrant")
        yield unlock(w.registry_lock(i), "reclaim: unlock R")


def _reclaim_without_nameless(
    w: World, g: int, i: int, used: tuple[tuple[int, int], ...]
) -> Program:
    left: tuple[tuple[int, int], ...] = ()
    for s, n in used:
        anyone = False
        for r in w.rows:
            state = yield load(w.state(i, r), "reclaim 2: state")
            if state == FREE:
                continue
            anyone = True
            if state == REGISTERING:
                yield from undo_if_dead(w, i, r)
                break
            start = yield load(w.start(g, r), "reclaim 2: start")
            word = yield load(w.hold(g, r, s), "reclaim 2: hold")
            if n >= start and word != held(n, RELEASED):
                break
            del state, start, word
        else:
            if anyone:
                yield store(w.seq(g, s), 0, "reclaim 3")
                continue
        left = (*left, (s, n))
    return left


def expire(w: World, g: int, i: int, s: int, n: int) -> Program:
    """Release a sample that nobody of a group by handle claimed in time."""
    for r in w.rows:
        state = yield load(w.state(i, r), "expire: state")
        name = yield load(w.name(i, r), "expire: kind")
        start = yield load(w.start(g, r), "expire: start")
        if state != ACTIVE or name not in w.by_handle or n < start:
            continue
        del state, name, start
        locked = w.fault is not Fault.EXPIRE_WITHOUT_LOCK
        if locked and not (yield trylock(w.claim_lock(i, r), "expire 1")):
            continue
        word = yield load(w.hold(g, r, s), "expire 2: hold")
        claimed = word >= held(n, 1)  # else unclaimed, or a word of an older sample
        ours = not claimed
        if claimed and word != held(n, RELEASED):
            owner = w.member_lock(i, r, word % 8 - 1)
            if not (yield test(owner, "expire 2: owner")):
                ours = (yield load(w.hold(g, r, s), "expire 2: hold again")) == word
            del owner
        del word, claimed
        if ours:
            yield store(w.hold(g, r, s), held(n, RELEASED), "expire 3")
        if locked:
            yield unlock(w.claim_lock(i, r), "expire 4")
        if ours and w.tombstones:
            (k,) = yield look((w.number(g, s),), "expire 5: own number")
            yield from entomb(w, g, k)
            del k
        del ours, locked


def entomb(w: World, g: int, k: int) -> Program:
    """Write a tombstone into the circular table; its index word is 0 meanwhile."""
    (last,) = yield look((w.at("buried", g),), "tombstone: own counter")
    e = last % len(w.tombstones)
    yield store(w.at("tomb index", g, e), 0, "tombstone: index 0")
    yield store(w.at("tomb number", g, e), k, "tombstone: number")
    yield store(w.at("buried", g), last + 1, "tombstone: own counter")
    yield store(w.at("tomb index", g, e), last + 1, "tombstone: index")
