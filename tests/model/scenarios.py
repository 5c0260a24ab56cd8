# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a search: small casts of producers, members and newcomers."""

from __future__ import annotations

from collections.abc import Callable

from .faults import Fault
from .finder import PUT, Script, finder, numbered_producer
from .lifecycle import producer_life, sweeper
from .machine import Actor, Automaton, Program
from .member import member
from .producer import producer
from .promises import World
from .registrant import operator
from .runs import filling_producer
from .states import ACTIVE, NAMED, NAMELESS
from .steps import Model
from .subscriber import subscriber, subscriber_of_each_generation


def _actor(
    name: str, program: Callable[[], Program], killed: bool = False, restarts: bool = True
) -> Actor:
    return Actor(name, Automaton(program), killed, restarts)


def _members(
    groups: tuple[int, ...],
    program: Callable[[int], Program],
    killed: str,
    for_good: str,
    first: int,
) -> tuple[list[Actor], tuple[tuple[int, int], ...]]:
    """Make the members of all groups, and tell which of them are alike."""
    actors: list[Actor] = []
    alike: list[tuple[int, int]] = []
    for name, count in enumerate(groups, 1):
        letter = "ABC"[name - 1]
        automaton = Automaton(lambda name=name: program(name))  # type: ignore[misc]
        for k in range(count):
            dies = killed in ("all", "members") or letter in killed
            actors.append(
                Actor(f"member {letter}{k + 1}", automaton, dies, restarts=letter not in for_good)
            )
            if k:
                alike.append((first + len(actors) - 2, first + len(actors) - 1))
    return actors, tuple(alike)


def one_ring(
    *,
    fault: Fault | None = None,
    harm_only: bool = False,
    groups: tuple[int, ...] = (1,),
    slots: int = 1,
    samples: int = 2,
    rows: int = 2,
    kills: int = 0,
    buffer: int = 0,
    killed: str = "all",
    for_good: str = "",
    removes: int = 0,
    leaves_early: tuple[int, ...] = (),
    gives_back: bool = False,
    keeps: int = 1,
    by_handle: tuple[int, ...] = (),
) -> Model:
    """One ring that is there. `groups[k]` is how many members group k + 1 has."""
    w = World(
        slots=slots,
        rows=rows,
        members=max(groups),
        samples=samples,
        names=len(groups),
        buffer=buffer,
        by_handle=by_handle,
        sole=max(groups) == 1,
        by_hand=removes > 0,
        harm_only=harm_only,
        fault=fault,
    )
    if fault is not Fault.NO_NAMELESS_ROW:
        w.preset[w.state(0, 0)] = NAMELESS
    w.preset[w.producer_lock(0)] = 1
    actors = [
        _actor(
            "producer",
            lambda: producer(w),
            killed in ("all", "producer"),
            restarts=False,
        )
    ]
    members, alike = _members(
        groups,
        lambda name: member(
            w, name, leaves_early=name in leaves_early, gives_back=gives_back, keeps=keeps
        ),
        killed,
        for_good,
        len(actors),
    )
    actors += members
    if removes:
        actors.append(
            Actor("operator", Automaton(lambda: operator(w, 0, removes)), waited_for=False)
        )
    return Model(w, actors, kills=kills, alike=alike, leases=keeps)


def whole_life(
    *,
    fault: Fault | None = None,
    harm_only: bool = False,
    producers: int = 1,
    groups: tuple[int, ...] = (1,),
    rows: int = 2,
    kills: int = 0,
    killed: str = "all",
    for_good: str = "",
    registries: int = 4,
    buffer: int = 0,
    wishes: tuple[int, ...] = (),
    may_fail: bool = False,
    swept: bool = False,
) -> Model:
    """Nothing is there at first: registry and rings are made, and all are gone at the end."""
    w = World(
        slots=1,
        rows=rows,
        members=max(groups, default=1),
        samples=1,
        names=max(len(groups), *wishes, 1),
        rings=producers + (kills if killed in ("all", "producer") else 0),
        registries=registries,
        sole=max(groups, default=1) == 1,
        lifecycle=True,
        buffer=buffer,
        harm_only=harm_only,
        fault=fault,
    )
    actors = []
    automaton = Automaton(lambda: producer_life(w, wishes, may_fail))
    for k in range(producers):
        actors.append(Actor(f"producer {k + 1}", automaton, killed in ("all", "producer")))
    alike = tuple((k - 1, k) for k in range(1, producers))
    members, alike_too = _members(
        groups, lambda name: subscriber(w, name), killed, for_good, len(actors)
    )
    actors += members
    if swept:
        actors.append(Actor("sweeper", Automaton(lambda: sweeper(w)), last=True))
    return Model(
        w,
        actors,
        kills=kills,
        alike=alike + alike_too,
        final=lambda s: _left_over(w, s),
    )


def _left_over(w: World, s: bytes) -> str | None:
    """Nothing may be left but samples that a group is to get, and what leads to them."""
    named = [g for g in w.rings if s[w.at("exists", g)] == NAMED]
    for g in named:
        if not any(
            w.needed(s, g, r, slot)
            for r in w.rows
            for slot in w.slots
            if 0 < s[w.seq(g, slot)] <= s[w.published(g)]
        ):
            return f"ring {g} is left, and nobody needs it"
    bells = [g for g in w.rings if s[w.at("ring bell", g)] and g not in named]
    path = s[w.at("path")]
    if not named and path and not any(s[w.state(path - 1, r)] == ACTIVE for r in w.rows):
        return "the registry is left, and nobody needs it"
    if bells or (not path and any(s[w.at("bell", r)] for r in w.rows)):
        return "a doorbell is left"
    return None


def several_rings(
    *,
    fault: Fault | None = None,
    harm_only: bool = False,
    samples: tuple[int, ...] = (1, 1),
    groups: tuple[int, ...] = (1,),
    slots: int = 1,
    rows: int = 2,
    kills: int = 0,
    killed: str = "all",
    buffer: int = 0,
) -> Model:
    """Rings that are there under one name, each with its producer, and members that read all.

    `samples[g]` is how many ring g gets.
    """
    rings = len(samples)
    own = fault is Fault.GROUPS_PER_GENERATION
    w = World(
        slots=slots,
        rows=rows,
        members=max(groups),
        samples=max(samples),
        names=len(groups),
        rings=rings,
        registries=rings if own else 1,
        own_registry=own,
        buffer=buffer,
        sole=max(groups) == 1,
        harm_only=harm_only,
        fault=fault,
    )
    for i in w.registries:
        w.preset[w.state(i, 0)] = NAMELESS
    actors = []
    for g in w.rings:
        w.preset[w.producer_lock(g)] = g + 1
        w.preset[w.at("exists", g)] = NAMED
        w.preset[w.at("ring magic", g)] = 1
        actors.append(
            _actor(
                f"producer {g}",
                lambda g=g: producer(w, g, g if own else 0, samples[g]),  # type: ignore[misc]
                killed in ("all", "producer"),
                restarts=False,
            )
        )
    program = subscriber_of_each_generation if own else subscriber
    members, alike = _members(groups, lambda name: program(w, name), killed, "", len(actors))
    return Model(w, actors + members, kills=kills, alike=alike)


def by_handle(
    script: Script,
    *,
    fault: Fault | None = None,
    harm_only: bool = False,
    asks: tuple[tuple[int, ...], ...] = ((1, 2),),
    slots: int = 1,
    tombstones: int = 1,
    kills: int = 0,
    killed: str = "all",
    gives_back: bool = False,
    buffer: int = 0,
) -> Model:
    """One ring and one group that asks by handle: `asks[m]` are the requests of member m."""
    w = World(
        slots=slots,
        rows=2,
        members=len(asks),
        samples=sum(what == PUT for what, _ in script),
        names=1,
        tombstones=tombstones,
        requests=max(k for _, k in script),
        by_handle=(1,),
        sole=len(asks) == 1,
        buffer=buffer,
        harm_only=harm_only,
        fault=fault,
    )
    w.preset[w.state(0, 0)] = NAMELESS
    w.preset[w.producer_lock(0)] = 1
    actors = [
        _actor(
            "producer",
            lambda: numbered_producer(w, script),
            killed in ("all", "producer"),
            restarts=False,
        )
    ]
    automata = {
        wanted: Automaton(lambda wanted=wanted: finder(w, 1, wanted, gives_back=gives_back))  # type: ignore[misc]
        for wanted in asks
    }
    for m, wanted in enumerate(asks):
        actors.append(Actor(f"member A{m + 1}", automata[wanted], killed in ("all", "members")))
    alike = tuple((m, m + 1) for m in range(1, len(asks)) if asks[m - 1] == asks[m])
    return Model(w, actors, kills=kills, alike=alike)


def runs_of_pages(
    sizes: tuple[int, ...],
    *,
    fault: Fault | None = None,
    harm_only: bool = False,
    pages: int = 3,
    slots: int = 2,
    groups: tuple[int, ...] = (1,),
    kills: int = 0,
    killed: str = "all",
) -> Model:
    """One ring with pages: sample k takes `sizes[k - 1]` of them, in one run."""
    w = World(
        slots=slots,
        rows=2,
        members=max(groups),
        samples=len(sizes),
        names=len(groups),
        pages=pages,
        sole=max(groups) == 1,
        harm_only=harm_only,
        fault=fault,
    )
    w.preset[w.state(0, 0)] = NAMELESS
    w.preset[w.producer_lock(0)] = 1
    actors = [
        _actor(
            "producer",
            lambda: filling_producer(w, sizes),
            killed in ("all", "producer"),
            restarts=False,
        )
    ]
    members, alike = _members(groups, lambda name: member(w, name), killed, "", len(actors))
    return Model(w, actors + members, kills=kills, alike=alike)
