# SPDX-License-Identifier: Apache-2.0
"""Register, Join, Leave and `groups rm`: everything about groups that is done under R."""

from __future__ import annotations

from .faults import Fault
from .machine import Program, fence, load, lock, look, mark, store, test, trylock, unlock
from .promises import World
from .states import ACTIVE, FREE, NAMED, NAMELESS, REGISTERING, UNCLAIMED, held


def _states(w: World, i: int) -> tuple[int, ...]:
    return tuple(w.state(i, r) for r in w.rows)


def rings_of(w: World, i: int, label: str) -> Program:
    """List the rings of the name (under R, so that none comes or goes)."""
    if len(w.rings) == 1 and not w.lifecycle:
        return (0,)
    named = yield look(tuple(w.at("exists", g) for g in w.rings), f"{label}: list")
    mine = yield look(tuple(w.at("registry", g) for g in w.rings), f"{label}: list")
    return tuple(g for g in w.rings if named[g] == NAMED and mine[g] == i)


def made(w: World, g: int, label: str) -> Program:
    """Is the ring made? A ring with magic 0 is skipped."""
    if not w.lifecycle:
        return True
    magic = yield load(w.at("ring magic", g), f"{label}: magic")
    return magic == 1


def undo_dead_registrants(w: World, i: int, label: str) -> Program:
    """Whoever holds R and finds a row REGISTERING knows that its registrant is dead."""
    states = yield look(_states(w, i), label)
    for r in w.rows:
        if states[r] == REGISTERING:
            yield store(w.state(i, r), FREE, label)


def register(w: World, i: int, name: int) -> Program:
    """Register a group (R held); return its row."""
    yield from undo_dead_registrants(w, i, "register 1")
    states = yield look(_states(w, i), "register 2")
    names = yield look(tuple(w.name(i, r) for r in w.rows), "register 2")
    for r in w.rows:
        if states[r] == ACTIVE and names[r] == name:
            return r
    for r in w.rows:
        if states[r] == NAMELESS:
            yield from _describe(w, i, r, name, "register 3")
            yield store(w.state(i, r), ACTIVE, "register 3")
            return r
    r = states.index(FREE)
    others = any(states)
    del names
    yield from _describe(w, i, r, name, "register 4")
    if w.fault is Fault.START_BEFORE_VISIBLE:
        yield from _start_at_published(w, i, r)
        yield store(w.state(i, r), ACTIVE, "register 7")
        return r
    first = ACTIVE if w.fault is Fault.ACTIVE_BEFORE_START else REGISTERING
    yield store(w.state(i, r), first, "register 4")
    if w.fault is not Fault.NO_FENCE:
        yield fence("register 5")
    backlog = w.fault is Fault.NO_NAMELESS_ROW and not others
    if w.fault is not Fault.BACKLOG_BESIDE_OTHERS and not backlog:
        yield from _start_at_published(w, i, r)
    if first != ACTIVE:
        yield store(w.state(i, r), ACTIVE, "register 7")
    return r


def _describe(w: World, i: int, r: int, name: int, label: str) -> Program:
    if w.lifecycle:
        yield store(w.at("bell", r), 1, f"{label}: doorbell")
    yield store(w.name(i, r), name, f"{label}: name")


def _start_at_published(w: World, i: int, r: int) -> Program:
    rings = yield from rings_of(w, i, "register 6")
    for g in rings:
        if (yield from made(w, g, "register 6")):
            p = yield load(w.published(g), "register 6: published")
            yield store(w.start(g, r), p + 1, "register 6: start")


def join(w: World, i: int, r: int) -> Program:
    """Join a group (R held until the end); return the member row."""
    joined = yield look(tuple(w.joined(i, r, m) for m in w.members), "join 1")
    dead_first = tuple(m for m in w.members if joined[m])
    order = (*dead_first, *(m for m in w.members if m not in dead_first))
    for m in order:
        if (yield trylock(w.member_lock(i, r, m), "join 1")):
            break
    else:
        return None
    del joined, dead_first, order
    yield store(w.joined(i, r, m), 1, "join 2")
    if w.fault is not Fault.NO_SWEEP:
        yield lock(w.claim_lock(i, r), "join 3")
        rings = yield from rings_of(w, i, "join 3")
        for g in rings:
            if (yield from made(w, g, "join 3")):
                for s in w.slots:
                    # Under L nobody else makes or unmakes a claim in the name of a dead row.
                    word = yield look((w.hold(g, r, s),), "join 3: hold")
                    if word[0] % 8 == m + 1:
                        free = held(word[0] // 8, UNCLAIMED)
                        yield store(w.hold(g, r, s), free, "join 3: sweep")
                        del free
                    del word
        yield unlock(w.claim_lock(i, r), "join 3")
    yield mark("joined", w.check_joined(i, r))
    yield unlock(w.registry_lock(i), "join 4")
    return m


def register_and_join(w: World, i: int, name: int) -> Program:
    """Both, with R kept in between; return (group row, member row)."""
    r = yield from register(w, i, name)
    if w.fault is Fault.REGISTRY_FREE_BEFORE_JOIN:
        yield unlock(w.registry_lock(i), "register: R given back")
        yield lock(w.registry_lock(i), "join: R taken again")
    m = yield from join(w, i, r)
    return r, m


def leave(w: World, i: int, r: int, m: int, ended: tuple[int, ...] = ()) -> Program:
    """Leave a group, without a lease; R is given back. `ended`: rings that it read to the end."""
    yield lock(w.registry_lock(i), "leave 1")
    yield store(w.joined(i, r, m), 0, "leave 2")
    if w.fault is Fault.LAST_LIVE_MEMBER_REMOVES:
        alive = False
        for other in w.members:
            if other != m and (yield test(w.member_lock(i, r, other), "leave 3: live?")):
                alive = True
    else:
        joined = yield look(tuple(w.joined(i, r, other) for other in w.members), "leave 3")
        alive = any(joined[other] for other in w.members if other != m)
        del joined
    if not alive:
        if ended:
            yield mark("leave 3: the last one", w.check_all_read(i, r, ended))
        yield from remove_group(w, i, r)
    del alive
    yield unlock(w.member_lock(i, r, m), "leave 4", check=w.check_left(i, r, m))
    yield unlock(w.registry_lock(i), "leave 5")


def remove_group(w: World, i: int, r: int) -> Program:
    """Leave 3a and 3b (R held)."""
    if w.fault is not Fault.LEAVER_TRUSTS_REGISTERING:
        yield from undo_dead_registrants(w, i, "leave 3: undo")
    states = yield look(_states(w, i), "leave 3")
    if w.fault is Fault.NO_NAMELESS_ROW or any(states[o] for o in w.rows if o != r):
        yield store(w.state(i, r), FREE, "leave 3a")
        return
    del states
    if w.fault is not Fault.NAMELESS_FROM_BEGINNING:
        rings = yield from rings_of(w, i, "leave 3b")
        for g in rings:
            if (yield from made(w, g, "leave 3b")):
                p = yield load(w.published(g), "leave 3b: published")
                yield store(w.start(g, r), p + 1, "leave 3b: start")
    yield store(w.state(i, r), NAMELESS, "leave 3b")


def operator(w: World, i: int, name: int) -> Program:
    """`groups rm`, again and again: remove a group none of whose members lives."""
    while True:
        yield lock(w.registry_lock(i), "rm 1")
        states = yield look(_states(w, i), "rm 1")
        names = yield look(tuple(w.name(i, r) for r in w.rows), "rm 1")
        rows = tuple(r for r in w.rows if states[r] == ACTIVE and names[r] == name)
        del states, names
        for r in rows:
            for m in w.members:
                if (yield test(w.member_lock(i, r, m), "rm 2: live?")):
                    break
            else:
                for m in w.members:
                    yield store(w.joined(i, r, m), 0, "rm 3")
                yield from remove_group(w, i, r)
        yield unlock(w.registry_lock(i), "rm 5")
        del rows
