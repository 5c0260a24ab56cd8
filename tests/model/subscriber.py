# SPDX-License-Identifier: Apache-2.0
"""A member that reads all rings of a name: those there, and those that come."""

from __future__ import annotations

from .faults import Fault
from .lifecycle import clean_up, open_registry
from .machine import Program, choose, load, lock, test
from .member import claim, end_lease, is_over, visit
from .promises import World
from .registrant import leave, register_and_join
from .states import NAMED


def subscriber(w: World, name: int) -> Program:
    """Subscribe, read every ring to its end, leave, clean up."""
    if w.lifecycle:
        i = yield from open_registry(w)
    else:
        i = 0
        yield lock(w.registry_lock(i), "open 2")
    r, m = yield from register_and_join(w, i, name)
    ended = yield from read_all(w, i, r, m)
    yield from leave(w, i, r, m, ended)
    if w.lifecycle:
        yield from clean_up(w, i)


def read_all(w: World, i: int, r: int, m: int) -> Program:
    """Read until the end over the name; return the rings, none if none came."""
    listed = -1  # the epoch of the last list that was whole
    mapped: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    while True:
        epoch = yield load(w.epoch(i), "end: epoch")
        if epoch != listed:
            found = yield from attach(w, i, mapped)
            mapped, whole = found
            listed = epoch if whole else -1
            del found, whole
        del epoch
        got: tuple[int, int] | None = None
        for g in mapped:
            if g in ended:
                continue
            over = yield from is_over(w, g)
            got = yield from claim(w, i, g, r, m)
            if got is not None:
                break
            if over:
                ended = (*ended, g)
        if got:
            s, n = got
            del got, over
            yield from end_lease(w, g, r, s, n)
            del s, n, g
            continue
        g = over = 0
        del got, g, over
        if len(ended) < len(mapped) or listed < 0:
            continue
        if not mapped:
            if (yield choose(2, "no ring: wait on?")):
                return ()
        else:
            again = yield load(w.epoch(i), "end: epoch again", check=w.check_name_end(i, r, listed))
            if w.fault is Fault.END_WITHOUT_EPOCH or again == listed:
                return ended
            del again


def subscriber_of_each_generation(w: World, name: int) -> Program:
    """Fault 8: each generation has groups of its own, so a member subscribes to each anew."""
    places: tuple[tuple[int, int], ...] = ()
    for g in w.rings:
        yield lock(w.registry_lock(g), "open 2")
        place = yield from register_and_join(w, g, name)
        places = (*places, place)
        r, m = place
        del place
        got = None
        while got != "end":
            got = yield from visit(w, g, g, r, m)
            if isinstance(got, tuple):
                s, n = got
                got = None
                yield from end_lease(w, g, r, s, n)
                del s, n
        del r, m, got
    for g in w.rings:
        yield from leave(w, g, *places[g])


def attach(w: World, i: int, mapped: tuple[int, ...]) -> Program:
    """List the rings and map the new ones; tell whether none of them is being made."""
    whole = True
    for g in w.rings:
        if g in mapped or (yield load(w.at("exists", g), "list")) != NAMED:
            continue
        # Without R: P first. With the magic first, a ring may be made and closed in between.
        alive = w.fault is Fault.MAGIC_BEFORE_LOCK or (yield test(w.producer_lock(g), "attach: P"))
        magic = yield load(w.at("ring magic", g), "attach: magic")
        if w.fault is Fault.MAGIC_BEFORE_LOCK and not magic:
            alive = yield test(w.producer_lock(g), "attach: P (late)")
        if magic:
            mapped = tuple(sorted((*mapped, g)))
        elif alive:
            whole = False
        del alive, magic
    return mapped, whole
