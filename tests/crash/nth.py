# SPDX-License-Identifier: Apache-2.0
"""A kill before the N-th step, N = 1, 2, 3 ... until a run completes unharmed."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from harness import figures
from harness.isolation import remove_left
from harness.processes import Child, KillAt

from shmconn.errors import ShmConnError


@dataclass
class Outcome:
    """What one run of a victim, killed or not, left to the others."""

    steps: int
    killed: bool
    step: str
    recovery_s: float
    problems: list[str] = field(default_factory=list)


Trial = Callable[[int], Outcome]


def ended(child: Child, recovery_s: float, problems: list[str]) -> Outcome:
    """The outcome of a trial whose victim is dead."""
    child.reap()
    killed = child.status == -9
    if not killed and child.status != 0:
        problems.append(f"the victim failed: {child.shared.note}")
    note = child.shared.note if killed else ""
    return Outcome(KillAt.steps(child.shared), killed, note, recovery_s, problems)


def run_all(trial: Trial, ring: str, *, stop: bool = False) -> list[Outcome]:
    """All kills; with ``stop`` until the first that broke a promise."""
    outcomes: list[Outcome] = []
    while True:
        try:
            outcome = trial(len(outcomes) + 1)
        except ShmConnError as error:
            # What survivors do must not fail.
            outcome = Outcome(0, True, "?", 0.0, [f"{type(error).__name__}: {error}"])
        if outcome.problems:
            remove_left(ring)
        elif not outcome.killed and outcome.steps < len(outcomes):
            # Another process's start cleared the dead ring first: this run was cut short.
            continue
        outcomes.append(outcome)
        if not outcome.killed or (stop and outcome.problems):
            return outcomes


def check(row: str, what: str, outcomes: list[Outcome], **more: object) -> None:
    """Records the figures of all kills; every step must have been covered, and none failed."""
    kills = [outcome for outcome in outcomes if outcome.killed]
    bad = [outcome for outcome in outcomes if outcome.problems]
    figures.record(
        row,
        what,
        trials=len(outcomes),
        exercised=len(kills),
        failures=len(bad),
        recovery_s=[outcome.recovery_s for outcome in kills],
        steps_covered=len(kills),
        steps_total=outcomes[-1].steps,
        **more,
    )
    found = [(n + 1, o.step, o.problems) for n, o in enumerate(outcomes) if o.problems]
    assert found == [], f"in process {os.getpid()}"
    assert len(kills) == outcomes[-1].steps


def found_fault(outcomes: list[Outcome]) -> bool:
    """Whether a kill, and not a victim that failed by itself, showed a planted fault."""
    last = outcomes[-1]
    return bool(last.problems) and not any("victim failed" in text for text in last.problems)
