# SPDX-License-Identifier: Apache-2.0
"""A member: claim, release, give back, and how it sees the end."""

from __future__ import annotations

from .faults import Fault
from .machine import Program, choose, load, lock, mark, store, test, unlock
from .promises import World
from .registrant import leave, register_and_join
from .states import RELEASED, UNCLAIMED, held


def member(
    w: World,
    name: int,
    *,
    i: int = 0,
    leaves_early: bool = False,
    gives_back: bool = False,
    keeps: int = 1,
) -> Program:
    """The life of a member of a group, on one ring that is there: subscribe, read all, leave.

    It holds up to `keeps` leases, and ends them in any order.
    """
    yield lock(w.registry_lock(i), "open 2")
    r, m = yield from register_and_join(w, i, name)
    kept: tuple[tuple[int, int, int], ...] = ()  # (which lease, slot, sequence number)
    ended: tuple[int, ...] = ()
    while not ended:
        if leaves_early and (yield choose(2, "leave early?")):
            break
        if kept and (len(kept) == keeps or (yield choose(2, "end a lease?"))):
            kept = yield from _end_one(w, 0, r, m, kept, gives_back)
            continue
        free = min({*range(keeps)} - {lease for lease, _, _ in kept})
        got = yield from visit(w, i, 0, r, m, free)
        if got == "end":
            ended = (0,)
        elif got is not None:
            kept = (*kept, (free, *got))
        del free, got
    while kept:
        kept = yield from _end_one(w, 0, r, m, kept, gives_back)
    # Who may also leave early may leave what a mate gives back.
    yield from leave(w, i, r, m, () if leaves_early else ended)


def _end_one(
    w: World,
    g: int,
    r: int,
    m: int,
    kept: tuple[tuple[int, int, int], ...],
    gives_back: bool,
) -> Program:
    k = 0
    if len(kept) > 1:
        k = yield choose(len(kept), "end which lease?")
    lease, s, n = kept[k]
    rest = kept[:k] + kept[k + 1 :]
    del k, kept
    yield from end_lease(w, g, r, s, n, gives_back, lease)
    return rest


def visit(w: World, i: int, g: int, r: int, m: int, lease: int = 0) -> Program:
    """Claim one sample of a ring: (slot, sequence number), None, or "end" at the ring's end."""
    over = False
    if w.fault is not Fault.SCAN_BEFORE_TEST:
        over = yield from is_over(w, g)
    got = yield from claim(w, i, g, r, m, lease)
    if got is not None:
        return got
    if w.fault is Fault.SCAN_BEFORE_TEST:
        over = yield from is_over(w, g)
    if not over:
        return None
    yield mark("end", w.check_end(i, g, r))
    return "end"


def is_over(w: World, g: int) -> Program:
    """Can nothing more be published? To be asked before the claim that finds nothing."""
    if (yield load(w.closed(g), "end 1: closed")):
        return True
    alive = yield test(w.producer_lock(g), "end 1: P")
    return not alive


def claim(w: World, i: int, g: int, r: int, m: int, lease: int = 0) -> Program:
    """One claim attempt; return (slot, sequence number) or None."""
    locked = w.fault is not Fault.CLAIM_WITHOUT_LOCK
    if locked:
        yield lock(w.claim_lock(i, r), "claim 1")
    p = yield load(w.published(g), "claim 2: published")
    start = yield load(w.start(g, r), "claim 2: start")
    order: tuple[tuple[int, int], ...] = ()
    for s in w.slots:
        n = yield load(w.seq(g, s), "claim 3: seq")
        if max(1, start) <= n <= p:
            order = tuple(sorted((*order, (n, s))))
        del n
    del p, start
    got = None
    for n, s in order:
        if (yield from candidate(w, i, g, r, s, n, m, lease)):
            got = (s, n)
            break
    del order
    if locked:
        yield unlock(w.claim_lock(i, r), "claim 8")
    return got


def candidate(
    w: World,
    i: int,
    g: int,
    r: int,
    s: int,
    n: int,
    m: int,
    lease: int = 0,
    number: int | None = None,
) -> Program:
    """Claim 4 to 6 for one candidate. Is it ours now?"""
    if (yield load(w.seq(g, s), "claim 4: seq again")) != n:
        return False
    word = yield load(w.hold(g, r, s), "claim 4: hold")
    if word in (held(n, RELEASED), held(n, m + 1)):
        return False
    if word > held(n, UNCLAIMED):
        if (yield test(w.member_lock(i, r, word % 8 - 1), "claim 5: M of the holder")):
            return False
        blind = w.fault is Fault.TAKEOVER_WITHOUT_RELOAD
        if not blind and (yield load(w.hold(g, r, s), "claim 5: hold again")) != word:
            return False
        del blind
    del word
    yield store(
        w.hold(g, r, s),
        held(n, m + 1),
        "claim 6",
        lease=(lease, w.lease(g, r, s, n)),
        check=w.check_claim(i, g, r, s, n, number),
    )
    return True


def end_lease(
    w: World, g: int, r: int, s: int, n: int, gives_back: bool = False, lease: int = 0
) -> Program:
    """Release the sample, or give it back. Until this store its pages are read."""
    hold = w.hold(g, r, s)
    if gives_back and (yield choose(2, "give back?")):
        yield store(hold, held(n, UNCLAIMED), "give back", lease=(lease, 0))
    elif w.fault is Fault.CLEAR_THEN_RELEASE:
        yield store(hold, held(n, UNCLAIMED), "release: clear the claim")
        yield store(hold, held(n, RELEASED), "release 2", lease=(lease, 0))
    else:
        yield store(hold, held(n, RELEASED), "release 2", lease=(lease, 0))
