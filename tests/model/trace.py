# SPDX-License-Identifier: Apache-2.0
"""Counterexamples as people read them: one line for each step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .machine import (
    CHOOSE,
    DEAD,
    DONE,
    LOAD,
    LOCK,
    SILENT,
    STORE,
    TEST,
    TRY,
    UNLOCK,
    ModelError,
    Op,
)
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
    """One step, and in brackets the silent ones that it leads through."""
    world, actor = model.world, model.actors[a]
    block = world.blocks[a]
    local = s[block] | s[block + 1] << 8
    changed = [k for k in range(world.first_lock) if s[k] != t[k]]
    text = "  ".join(f"{world.words[k]} = {world.render(k, t[k])}" for k in changed)
    if local == DEAD and (t[block] | t[block + 1] << 8) == DEAD:
        freed = [world.words[k] for k in range(world.first_lock, world.last_lock) if s[k] != t[k]]
        return f"{actor.name:12} the kernel frees {', '.join(freed)}"
    if killed:
        return f"{actor.name:12} KILLED before: {actor.automaton.ops[local].label}"
    if world.buffer and t[block + 2 + model.leases] < s[block + 2 + model.leases]:
        return f"{actor.name:12} its oldest store reaches memory: {text}"
    try:
        path = model.path(a, s, t)
    except ModelError:
        path = []  # it broke a promise on its way
    begun = path[0][0].kind not in SILENT if path else local != DEAD
    op = actor.automaton.ops[local]
    if local == DEAD:
        line = "starts again"
    elif begun:
        line = f"{op.label:34} {_what(model, s, block, op) or text}"
    else:
        line = "goes on"
    silent = [_silent(model, op, result) for op, result in path[1 if begun else 0 :]]
    return f"{actor.name:12} {line}".rstrip() + (f"  [{'; '.join(silent)}]" if silent else "")


def _what(model: Model, s: bytes, block: int, op: Op) -> str:
    world = model.world
    if op.kind == STORE and world.buffer:
        return f"{world.words[op.address]} = {world.render(op.address, op.value)} (buffered)"
    if op.kind == LOAD:
        value = model.forwarded(s, block, op.address) if world.buffer else s[op.address]
        return f"{world.words[op.address]} is {world.render(op.address, value)}"
    if op.kind in (LOCK, UNLOCK):
        return ("lock " if op.kind == LOCK else "unlock ") + world.words[op.address]
    if op.kind == TRY:
        return f"try {world.words[op.address]}: " + ("got" if s[op.address] == 0 else "held")
    if op.kind == TEST:
        return f"{world.words[op.address]} is " + ("held" if s[op.address] else "free")
    return ""


def _silent(model: Model, op: Op, result: object) -> str:
    world = model.world
    if op.kind == CHOOSE:
        return f"{op.label} way {result}"
    if isinstance(result, tuple):
        pairs = zip(op.many, result, strict=True)
        return f"{op.label}: " + ", ".join(
            f"{world.words[k]} {world.render(k, v)}" for k, v in pairs
        )
    return op.label


def _standing(model: Model, s: bytes) -> Iterator[str]:
    for block, actor in zip(model.world.blocks, model.actors, strict=True):
        local = s[block] | s[block + 1] << 8
        where = {DEAD: "dead", DONE: "done"}.get(local) or actor.automaton.ops[local].label
        yield f"   {actor.name} stands at: {where}"
