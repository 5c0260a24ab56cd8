# SPDX-License-Identifier: Apache-2.0
"""Counterexamples as people read them: one line for each step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .machine import CHOOSE, DEAD, DONE, FIRST, LOAD, LOCK, LOOK, STORE, TEST, TRY, UNLOCK
from .steps import Model, Violation


def trace_to(
    model: Model, states: list[bytes], parents: array[int], at: int, violation: Violation | None
) -> list[str]:
    """Return the steps from the start to a state, and the one that broke a promise."""
    path = [at]
    while path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    lines = []
    s = model.initial
    for number in path[1:]:
        wanted = states[number]
        moves, kills = model.steps(s)
        all_of_them = [(a, t, False) for a, t in moves] + [(a, t, True) for a, t in kills]
        a, t, killed = next(step for step in all_of_them if model.canonical(step[1]) == wanted)
        lines.append(_line(model, s, a, t, killed))
        s = t
    if violation is not None:
        if violation.actor >= 0:
            try:
                model.steps(s)
            except Violation as again:
                lines.append(_line(model, s, again.actor, again.state, False))
        lines.append(f"=> {violation.problem}")
    else:
        lines.append("=> not all can finish from here")
        lines.extend(_standing(model, s))
    return lines


def _line(model: Model, s: bytes, a: int, t: bytes, killed: bool) -> str:
    world, actor = model.world, model.actors[a]
    block = world.blocks[a]
    local = s[block] | s[block + 1] << 8
    changed = [k for k in range(world.first_lock) if s[k] != t[k]]
    text = "  ".join(f"{world.words[k]} = {world.render(k, t[k])}" for k in changed)
    if killed:
        return f"{actor.name:12} KILLED before: {actor.automaton.ops[local].label}"
    if local == DEAD and (t[block] | t[block + 1] << 8) == FIRST:
        return f"{actor.name:12} starts again"
    if world.buffer and t[block + 2 + model.leases] < s[block + 2 + model.leases]:
        return f"{actor.name:12} its oldest store reaches memory: {text}"
    op = actor.automaton.ops[local]
    if op.kind == STORE and world.buffer:
        text = f"{world.words[op.address]} = {world.render(op.address, op.value)} (buffered)"
    elif op.kind == LOAD:
        value = model.forwarded(s, block, op.address) if world.buffer else s[op.address]
        text = f"{world.words[op.address]} is {world.render(op.address, value)}"
    elif op.kind == CHOOSE:
        after = t[block] | t[block + 1] << 8
        ways = actor.automaton.following[local]
        text = next(f"way {way}" for way in ways if ways[way] == after)
    elif op.kind == LOOK:
        text = ", ".join(f"{world.words[k]} is {world.render(k, s[k])}" for k in op.many)
    elif op.kind in (LOCK, UNLOCK):
        text = ("lock " if op.kind == LOCK else "unlock ") + world.words[op.address]
    elif op.kind == TRY:
        text = f"try {world.words[op.address]}: " + ("got" if s[op.address] == 0 else "held")
    elif op.kind == TEST:
        text = f"{world.words[op.address]} is " + ("held" if s[op.address] else "free")
    return f"{actor.name:12} {op.label:34} {text}".rstrip()


def _standing(model: Model, s: bytes) -> Iterator[str]:
    for block, actor in zip(model.world.blocks, model.actors, strict=True):
        local = s[block] | s[block + 1] << 8
        where = {DEAD: "dead", DONE: "done"}.get(local) or actor.automaton.ops[local].label
        yield f"   {actor.name} stands at: {where}"
