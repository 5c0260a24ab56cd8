# SPDX-License-Identifier: Apache-2.0
"""Find: `get(handle)` by request number, and the producer of numbered requests."""

from __future__ import annotations

from .faults import Fault
from .machine import Check, Program, choose, load, lock, mark, store, unlock
from .member import candidate, end_lease, is_over
from .producer import entomb, publish, reclaim
from .promises import World
from .registrant import leave, register_and_join
from .states import RELEASED, held

PUT, BURY = "put", "bury"
Script = tuple[tuple[str, int], ...]


def numbered_producer(w: World, script: Script, g: int = 0, i: int = 0) -> Program:
    """Publish or bury requests in the order of the script, whatever their numbers; then close."""
    used: tuple[tuple[int, int], ...] = ()
    ahead: tuple[int, ...] = ()  # settled out of turn
    n = settled = 0
    for what, k in script:
        early = w.fault is Fault.SETTLED_BEFORE_TOMBSTONE
        if what == BURY and not early:
            yield from entomb(w, g, k)
        elif what == PUT:
            while len(used) == len(w.slots):
                used = yield from reclaim(w, g, i, used)
            n += 1
            taken = [s for s, _ in used]
            s = next(s for s in w.slots if s not in taken)
            del taken
            yield from publish(w, g, s, n, k)
            used = (*used, (s, n))
            del s
        ahead = (*ahead, k)
        while settled + 1 in ahead:
            settled += 1
        ahead = tuple(sorted(number for number in ahead if number > settled))
        yield store(w.settled(g), settled, "publish 5: settled")
        if what == BURY and early:
            yield from entomb(w, g, k)
    yield store(w.closed(g), 1, "close 2")
    yield unlock(w.producer_lock(g), "close 3")


def finder(
    w: World, name: int, handles: tuple[int, ...], *, i: int = 0, gives_back: bool = False
) -> Program:
    """A member that asks for certain requests, then leaves."""
    yield lock(w.registry_lock(i), "open 2")
    r, m = yield from register_and_join(w, i, name)
    for k in handles:
        got = yield from get(w, i, 0, r, m, k)
        if got is not None:
            s, n = got
            del got
            yield from end_lease(w, 0, r, s, n, gives_back)
            del s, n
    yield from leave(w, i, r, m)


def get(w: World, i: int, g: int, r: int, m: int, k: int) -> Program:
    """Return (slot, sequence number) of request k, with a lease, or None: it cannot come."""
    while True:
        over = settled = 0
        if w.fault is not Fault.FIND_BEFORE_END:
            over = yield from is_over(w, g)
        if w.fault is not Fault.SETTLED_AFTER_SLOTS:
            settled = yield load(w.settled(g), "find 1: settled")
        found = yield from _in_slots(w, i, g, r, m, k)
        if isinstance(found, tuple):
            return found
        if found == "released":
            yield mark("find 4: released", _gone(w, g, r, k))
            return None
        if found == "there":
            if (yield choose(2, "find 4: timeout?")):
                return None
            del over, settled, found
            continue
        del found
        if (yield from _in_tombstones(w, g, k)):
            yield mark("find 3: lost", _lost(w, g, r, k))
            return None
        if w.fault is Fault.SETTLED_AFTER_SLOTS:
            settled = yield load(w.settled(g), "find 1 (late): settled")
        if w.fault is Fault.FIND_BEFORE_END:
            over = yield from is_over(w, g)
        if k <= settled:
            yield mark("find 4: too old", _gone(w, g, r, k))
            return None
        if over:
            yield mark("find 5: it died", _died(w, g, r, k))
            return None
        del over, settled


def _in_slots(w: World, i: int, g: int, r: int, m: int, k: int) -> Program:
    for s in w.slots:
        n = yield load(w.seq(g, s), "find 2: seq")
        if n == 0:
            continue
        number = yield load(w.number(g, s), "find 2: number")
        again = yield load(w.seq(g, s), "find 2: seq again")
        if number != k or again != n:
            del number, again
            continue
        del number, again
        yield lock(w.claim_lock(i, r), "claim 1")
        p = yield load(w.published(g), "claim 2: published")
        start = yield load(w.start(g, r), "claim 2: start")
        wanted = max(1, start) <= n <= p
        del p, start
        got = False
        if wanted:
            got = yield from candidate(w, i, g, r, s, n, m, number=k)
        yield unlock(w.claim_lock(i, r), "claim 8")
        if got:
            return s, n
        if wanted:
            word = yield load(w.hold(g, r, s), "find 4: hold")
            if word == held(n, RELEASED):
                return "released"
            if w.fault is not Fault.UNCLAIMED_IS_NOTHING or held(n, 0) < word < held(n, RELEASED):
                return "there"
            del word
        del wanted, got
    return "nothing"


def _in_tombstones(w: World, g: int, k: int) -> Program:
    for e in w.tombstones:
        index = yield load(w.at("tomb index", g, e), "find 3: index")
        if index == 0:
            continue
        number = yield load(w.at("tomb number", g, e), "find 3: number")
        again = yield load(w.at("tomb index", g, e), "find 3: index again")
        if number == k and again == index:
            return True
        del index, number, again
    return False


# ---- what get() may say


def _fate(w: World, t: bytearray, g: int, r: int, k: int) -> str:
    n = t[w.at("became", g, k)]
    if n == 0:
        return "none"
    if t[w.at("had", g, r)] >> n & 1 or n < t[w.start(g, r)]:
        return "had"
    return "there"


def _gone(w: World, g: int, r: int, k: int) -> Check:
    def check(t: bytearray, actor: int) -> str | None:
        fate = _fate(w, t, g, r, k)
        if fate == "there":
            return f"request {k} is called gone, and its sample is there"
        if fate == "none" and t[w.at("buried", g)] < len(w.tombstones):
            return f"request {k} is called gone, and its tombstone would say why"
        return None

    return check


def _lost(w: World, g: int, r: int, k: int) -> Check:
    def check(t: bytearray, actor: int) -> str | None:
        return f"request {k} is lost, and there" if _fate(w, t, g, r, k) == "there" else None

    return check


def _died(w: World, g: int, r: int, k: int) -> Check:
    def check(t: bytearray, actor: int) -> str | None:
        if _fate(w, t, g, r, k) == "there":
            return f"the producer died before request {k}, and its sample is there"
        return None

    return check
