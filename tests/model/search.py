# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search over all interleavings, with kills, restarts and store buffers.

A state is one `bytes` object (see `states.py`), what it may become is in `steps.py`. A search ends
with a counterexample (a shortest one), with all states seen, or at its limit. If all were seen it
also tells whether from each of them, with no more kills, all can still finish.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

import numpy as np

from .steps import Model, Violation
from .trace import trace_to


@dataclass
class Found:
    """What a search found."""

    states: int
    depth: int
    complete: bool
    seconds: float
    problem: str | None = None
    trace: list[str] = field(default_factory=list)
    finished: int = 0  # states in which all have finished
    can_finish: bool | None = None  # from every state; None: not asked

    def __str__(self) -> str:
        end = "to the end" if self.complete else "cut"
        if self.problem:
            end = f"counterexample: {self.problem}"
        elif self.can_finish:
            end += ", all can finish from each"
        return f"{self.states:,} states, depth {self.depth}, {self.seconds:.1f} s, {end}"


def search(
    model: Model,
    *,
    limit: int = 20_000_000,
    finish: bool = True,
    seconds: float = float("inf"),
) -> Found:
    """Search all states that the model can reach, up to `limit` of them.

    Args:
        limit: stop after this many states; the search then says that it is not complete.
        finish: also ask whether all can finish from each state (needs memory for the steps).
        seconds: stop after this long, with the level of that moment searched to its end.
    """
    began = time.monotonic()
    first = model.canonical(model.initial)
    index: dict[bytes, int] = {first: 0}
    states = [first]
    parents = array("I", [0])
    steps = array("I")
    first_step = array("Q", [0])
    goals = bytearray()
    depth, level_end = 0, 1
    at = 0
    canonical = model.canonical if model.alike else None

    def result(complete: bool, problem: str | None, trace: list[str]) -> Found:
        return Found(
            len(states), depth, complete, time.monotonic() - began, problem, trace, sum(goals)
        )

    while at < len(states):
        if at == level_end:
            depth += 1
            level_end = len(states)
            if len(states) > limit or time.monotonic() - began > seconds:
                return result(False, None, [])
        s = states[at]
        try:
            moves, kills = model.steps(s)
            if finish:
                goal = model.finished(s)
                if goal and model.final is not None:
                    problem = model.final(s)
                    if problem:
                        raise Violation(problem, -1, s)
                goals.append(goal)
        except Violation as violation:
            return result(False, violation.problem, trace_to(model, states, parents, at, violation))
        for number, group in enumerate((moves, kills)):
            for _, t in group:
                if canonical is not None:
                    t = canonical(t)
                known = index.get(t)
                if known is None:
                    known = len(states)
                    index[t] = known
                    states.append(t)
                    parents.append(at)
                if finish and number == 0:
                    steps.append(known)
        if finish:
            first_step.append(len(steps))
        at += 1
    found = result(True, None, [])
    del index
    if finish:
        stuck = _cannot_finish(goals, steps, first_step)
        found.can_finish = stuck is None
        if stuck is not None:
            found.problem = "not all can finish from here"
            found.trace = trace_to(model, states, parents, stuck, None)
            found.depth = len(found.trace)
        found.seconds = time.monotonic() - began
    return found


def _cannot_finish(goals: bytearray, steps: array[int], first_step: array[int]) -> int | None:
    """Return the first state from which no steps lead to a finished one."""
    can = np.frombuffer(goals, dtype=np.uint8).astype(bool)
    into = np.frombuffer(steps, dtype=np.uint32) if len(steps) else np.zeros(0, np.uint32)
    counts = np.diff(np.frombuffer(first_step, dtype=np.uint64)).astype(np.int64)
    out_of = np.repeat(np.arange(len(goals), dtype=np.uint32), counts)
    order = np.argsort(into, kind="stable")
    out_of = out_of[order]
    begin = np.searchsorted(into[order], np.arange(len(goals) + 1))
    edge = np.flatnonzero(can)
    while len(edge):
        low, high = begin[edge], begin[edge + 1]
        picked = [out_of[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True) if b > a]
        if not picked:
            break
        before = np.unique(np.concatenate(picked))
        edge = before[~can[before]]
        can[edge] = True
    left = np.flatnonzero(~can)
    return int(left[0]) if len(left) else None
