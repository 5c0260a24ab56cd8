# SPDX-License-Identifier: Apache-2.0
"""Open, Start, Clean up: how registries and rings come into /dev/shm and go."""

from __future__ import annotations

from .faults import Fault
from .machine import Program, call, choose, load, lock, look, store, test, unlock
from .producer import producer
from .promises import World
from .registrant import register, remove_group, undo_dead_registrants
from .states import (
    ACTIVE,
    FREE,
    NAMED,
    NAMELESS,
    REGISTERING,
    RELEASED,
    UNLINKED,
    held,
)


def open_registry(w: World, create: bool = True) -> Program:
    """Open or make the registry; return its inode with R held, or None."""
    while True:
        i = yield call(w.open_path, "open 1", int(create))
        if i < 0:
            return None
        yield lock(w.registry_lock(i), "open 2")
        if w.fault is Fault.OPEN_WITHOUT_LOOK or (yield call(w.leads_to, "open 3", i)):
            break
        yield unlock(w.registry_lock(i), "open 3: another by now")
    if (yield load(w.at("magic", i), "open 4: magic")) == 0:
        if not create and w.fault is Fault.EMPTY_REGISTRY_STAYS:
            yield unlock(w.registry_lock(i), "open 4: empty")
            return None
        yield call(w.empty, "open 4: size 0", i)
        yield store(w.state(i, 0), NAMELESS, "open 4: row 0")
        yield store(w.at("magic", i), 1, "open 4: magic")
    return i


def start(w: World, wishes: tuple[int, ...] = (), may_fail: bool = False) -> Program:
    """Make a ring; return (registry, ring), or None if /dev/shm was too small.

    The groups that the configuration names come last, when nothing can fail any more: another
    producer may count on them as soon as they are there, so they cannot be taken back.
    """
    i = yield from open_registry(w)
    yield from undo_dead_registrants(w, i, "start 2: undo")
    yield from clean_rings(w, i, starting=True)
    g = yield call(w.create_ring, "start 3", i)
    if w.fault is not Fault.PRODUCER_LOCK_AFTER_R:
        yield lock(w.producer_lock(g), "start 4")
    yield store(w.at("ring bell", g), 1, "start 5: doorbell")
    made: tuple[tuple[int, int], ...] = ()
    early = w.fault in (Fault.UNDO_WITHOUT_LOOK, Fault.GROUPS_BEFORE_RESERVE)
    if early:
        made = yield from _register_all(w, i, wishes)
    yield unlock(w.registry_lock(i), "start 6")
    if w.fault is Fault.PRODUCER_LOCK_AFTER_R:
        yield lock(w.producer_lock(g), "start 4 (after R)")
    if may_fail and (yield choose(2, "start 7: too small?")):
        yield from _undo_start(w, i, g, made)
        return None
    yield lock(w.registry_lock(i), "start 9: R")
    if not early:
        yield from _register_all(w, i, wishes)
    epoch = yield look((w.epoch(i),), "start 9: epoch")
    yield store(w.epoch(i), epoch[0] + 1, "start 9: epoch")
    del epoch
    yield store(w.at("ring magic", g), 1, "start 9: magic")
    yield unlock(w.registry_lock(i), "start 9: R")
    return i, g


def _register_all(w: World, i: int, wishes: tuple[int, ...]) -> Program:
    """Register groups; return row and name of those that are new."""
    made: tuple[tuple[int, int], ...] = ()
    for name in wishes:
        before = yield look(tuple(w.state(i, r) for r in w.rows), "start: groups")
        r = yield from register(w, i, name)
        if before[r] != ACTIVE:
            made = (*made, (r, name))
        del before, r
    return made


def _undo_start(w: World, i: int, g: int, made: tuple[tuple[int, int], ...]) -> Program:
    yield lock(w.registry_lock(i), "undo start")
    yield store(w.at("ring bell", g), 0, "undo start: doorbell")
    yield store(w.at("exists", g), UNLINKED, "undo start: name")
    for r, name in made:
        if w.fault is Fault.GROUPS_BEFORE_RESERVE:
            state = yield look((w.state(i, r), w.name(i, r)), "undo start: group")
            joined = yield look(tuple(w.joined(i, r, m) for m in w.members), "undo start: joined")
            if state != (ACTIVE, name) or any(joined):
                continue
            del state, joined
        yield from remove_group(w, i, r)
    yield unlock(w.producer_lock(g), "undo start: P")
    yield from clean_up_held(w, i)
    yield unlock(w.registry_lock(i), "undo start")


def clean_rings(w: World, i: int, starting: bool = False) -> Program:
    """Unlink the rings that nobody needs (R held)."""
    named = yield look(tuple(w.at("exists", g) for g in w.rings), "clean up: list")
    mine = yield look(tuple(w.at("registry", g) for g in w.rings), "clean up: list")
    todo = tuple(g for g in w.rings if named[g] == NAMED and mine[g] == i)
    del named, mine
    for g in todo:
        if (yield test(w.producer_lock(g), "clean up: P")):
            continue
        magic = yield load(w.at("ring magic", g), "clean up: ring magic")
        if magic and (yield from _wanted(w, i, g, starting)):
            continue
        del magic
        yield store(w.at("ring bell", g), 0, "clean up: ring's doorbell")
        yield store(w.at("exists", g), UNLINKED, "clean up: ring's name")


def _wanted(w: World, i: int, g: int, starting: bool) -> Program:
    if w.fault is Fault.CLEAN_WITHOUT_NEED:
        return False
    # The producer is dead and R is held: of all these words only hold words still change.
    (p,) = yield look((w.published(g),), "clean up: published")
    seqs = yield look(tuple(w.seq(g, s) for s in w.slots), "clean up: seq")
    states = yield look(tuple(w.state(i, r) for r in w.rows), "clean up: states")
    starts = yield look(tuple(w.start(g, r) for r in w.rows), "clean up: starts")
    todo = tuple(
        (s, r)
        for s in w.slots
        for r in w.rows
        if max(1, starts[r]) <= seqs[s] <= p
        and states[r] != FREE
        and not (starting and states[r] == NAMELESS)
    )
    del p, states, starts
    for s, r in todo:
        word = yield load(w.hold(g, r, s), "clean up: hold")
        if word != held(seqs[s], RELEASED):
            return True
        del word
    return False


def clean_up_held(w: World, i: int) -> Program:
    """Clean up, R held."""
    blind = w.fault is Fault.CLEAN_WITHOUT_LOOK
    if not blind and not (yield call(w.leads_to, "clean up: still the one?", i)):
        return
    yield from undo_dead_registrants(w, i, "clean up: undo")
    yield from clean_rings(w, i)
    named = yield look(tuple(w.at("exists", g) for g in w.rings), "clean up: rings left")
    states = yield look(tuple(w.state(i, r) for r in w.rows), "clean up: groups left")
    if NAMED in named or ACTIVE in states or REGISTERING in states:
        return
    del named, states
    if (yield call(w.in_use, "clean up: any lock?", i)):
        return
    for r in w.rows:
        yield store(w.at("bell", r), 0, "clean up: doorbell")
    yield call(w.unlink_path, "clean up: registry's name")


def clean_up(w: World, i: int) -> Program:
    """Clean up at the end of a leave or a close."""
    yield lock(w.registry_lock(i), "clean up: R")
    yield from clean_up_held(w, i)
    yield unlock(w.registry_lock(i), "clean up: R")


def producer_life(w: World, wishes: tuple[int, ...] = (), may_fail: bool = False) -> Program:
    """Start, publish all, close, clean up."""
    made = yield from start(w, wishes, may_fail)
    if made is None:
        return
    i, g = made
    del made
    yield from producer(w, g, i)
    yield from clean_up(w, i)


def sweeper(w: World) -> Program:
    """What a later start does under other names, and `shmconn rm` under this one."""
    i = yield from open_registry(w, create=False)
    if i is not None:
        yield from clean_up_held(w, i)
        yield unlock(w.registry_lock(i), "clean up: R")
