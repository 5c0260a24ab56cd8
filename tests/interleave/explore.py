# SPDX-License-Identifier: Apache-2.0
"""Which schedules run: all up to a number of preemptions, by random priorities, or one again.

A preemption takes the turn from an actor that could go on. With states that were seen before cut
off, a schedule is followed only where it leads to something new.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from interleave.scheduler import Chooser, Run, Touched

Make = Callable[[Chooser, Touched], "tuple[Run, list[str]]"]


@dataclass
class Report:
    """What an exploration came to."""

    schedules: int = 0  # that ran to their end
    cut: int = 0  # that came to a state seen before
    states: int = 0
    points: int = 0  # choices in the longest schedule
    preemptions: int = 0  # the bound; 0 for random priorities
    complete: bool = False
    violations: list[str] = field(default_factory=list)
    schedule: str = ""  # of the violation, to be run again

    def add(self, other: "Report") -> None:
        """Adds the figures of another exploration."""
        self.schedules += other.schedules
        self.cut += other.cut
        self.states += other.states
        self.points = max(self.points, other.points)


class Priorities(Chooser):
    """PCT: the ready actor of the highest priority goes on; at a few points it becomes lowest."""

    def __init__(self, seed: int, points: int, depth: int) -> None:
        self._dice = random.Random(seed)
        self._changes = {self._dice.randrange(max(1, points)) for _ in range(depth - 1)}
        self._kill_at = self._dice.randrange(max(1, points))
        self._priority: dict[str, float] = {}
        self._point = 0

    def choose(self, run: Run, options: list[str], current: str | None) -> str:
        self._point += 1
        if "kill" in options and self._point >= self._kill_at:
            return "kill"
        actors = [name for name in options if name != "kill"]
        for name in actors:
            self._priority.setdefault(name, 1 + self._dice.random())
        if self._point in self._changes and current is not None:
            self._priority[current] = -float(self._point)
        return max(actors, key=self._priority.__getitem__)


@dataclass
class _Node:
    options: list[tuple[str, int]]  # and what it costs
    taken: int = 0


class _Depth(Chooser):
    """Follows a path, then takes first choices, and remembers the others."""

    def __init__(self, path: list[_Node], bound: int, seen: dict[int, int]) -> None:
        self._path = path
        self._bound = bound
        self._seen = seen
        self._at = 0
        self._spent = 0

    def choose(self, run: Run, options: list[str], current: str | None) -> str:
        if self._at == len(self._path):
            state, left = run.state(), self._bound - self._spent
            if self._seen.get(state, -1) >= left:
                return "cut"
            self._seen[state] = left
            # A kill counts like a preemption.
            costs = [(name, int(current is not None and i > 0)) for i, name in enumerate(options)]
            self._path.append(_Node([option for option in costs if option[1] <= left]))
        node = self._path[self._at]
        self._at += 1
        choice, cost = node.options[node.taken]
        if choice not in options:
            raise AssertionError(f"{choice} is not one of {options}: not deterministic")
        self._spent += cost
        return choice


def exhaustive(
    make: Make,
    bound: int,
    *,
    most: int = 1 << 30,
    seconds: float = float("inf"),
    warm_up: int = 30,
) -> Report:
    """All schedules with at most ``bound`` preemptions, or those of the first ``seconds``."""
    touched = Touched()
    over = time.monotonic() + seconds
    for seed in range(warm_up):
        run, violations = make(Priorities(seed, 100, 4), touched)
        touched.adopt()
        if violations:
            return Report(1, violations=violations, schedule=" ".join(run.switches))
    while True:
        # Places that turn out to be shared only now were not handed over at before: start again.
        report = _search(make, bound, most, over, touched)
        if report.violations or not touched.adopt() or not report.complete:
            return report


def _search(make: Make, bound: int, most: int, over: float, touched: Touched) -> Report:
    report = Report(preemptions=bound)
    path: list[_Node] = []
    seen: dict[int, int] = {}
    while report.schedules + report.cut < most and time.monotonic() < over:
        run, violations = make(_Depth(path, bound, seen), touched)
        report.points = max(report.points, len(path))
        report.states = len(seen)
        if run.cut:
            report.cut += 1
        else:
            report.schedules += 1
        if violations:
            report.violations, report.schedule = violations, " ".join(run.switches)
            return report
        while path and path[-1].taken == len(path[-1].options) - 1:
            path.pop()
        if not path:
            report.complete = True
            return report
        path[-1].taken += 1
    return report


def by_priorities(make: Make, seeds: range, *, depth: int = 4, points: int = 120) -> Report:
    """One schedule of random priorities for each seed."""
    report = Report()
    touched = Touched()
    for seed in seeds:
        run, violations = make(Priorities(seed, points, depth), touched)
        touched.adopt()
        report.schedules += 1
        report.points = max(report.points, len(run.switches))
        if violations:
            report.violations, report.schedule = violations, " ".join(run.switches)
            return report
    return report
