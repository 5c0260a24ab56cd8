# SPDX-License-Identifier: Apache-2.0
"""Row 16: the shipped code under every schedule of a few preemptions, and under random ones."""

import faulthandler
import gc
import logging
import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import figures
from harness.isolation import use_prefix
from harness.processes import Child

from interleave import planted, seams
from interleave.explore import Priorities, Report, by_priorities, exhaustive
from interleave.scenarios import SCENARIOS, maker
from interleave.scheduler import Touched

# Searched to two preemptions on the push tier, and to one; the others only by random priorities.
TWO = ("claims", "newcomer", "mates leave", "handles", "settling", "came and went")
ONE = (
    "takeover",
    "newcomer dies",
    "comes back",
    "death",
    "restart",
    "late reader",
    "failing start",
    "start and sweep",
    "expiry and death",
)
# Longest time for one scenario on the long tier; what was not reached by then is told.
BOX_S = float(os.environ.get("SHMCONN_BOX_S", "600"))
SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(31)


@pytest.fixture
def tiny(ring: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a tiny ring, with the seams in."""
    # By its own call: loggers remember what is enabled, and only this makes them forget.
    logging.disable(logging.WARNING)
    seams.install(monkeypatch)
    # Finalizers must run where the last reference goes, not where a collection strikes.
    gc.disable()
    yield ring
    logging.disable(logging.NOTSET)
    gc.enable()
    gc.collect()


def on_all_cores(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of jobs that run in forked children, as many at once as there are cores."""
    results: list[Any] = [None] * len(jobs)
    waiting, running = list(enumerate(jobs)), dict[int, tuple[Child, int]]()
    while waiting or running:
        while waiting and len(running) < min(2, os.cpu_count() or 1):
            index, job = waiting.pop(0)
            receive, send = os.pipe()

            def work(job: Callable[[], Any] = job, send: int = send) -> None:
                with os.fdopen(send, "wb") as file:
                    pickle.dump(job(), file)

            running[index] = (Child(work), receive)
            os.close(send)
        index, (child, receive) = next(iter(running.items()))
        with os.fdopen(receive, "rb") as file:
            data = file.read()
        child.finish()
        results[index] = pickle.loads(data)
        del running[index]
    return results


def search(name: str, bound: int, prefix: str, seconds: float = float("inf")) -> Report:
    """All schedules of a scenario, or those of the first seconds, on a ring of its own."""
    with pytest.MonkeyPatch.context() as patch:
        use_prefix(patch, f"shmconn-{prefix}-{name.replace(' ', '-')}.")
        return exhaustive(maker(SCENARIOS[name], prefix), bound, seconds=seconds)


def at_random(name: str, prefix: str, count: int) -> Report:
    """Schedules of random priorities, on a ring of their own."""
    with pytest.MonkeyPatch.context() as patch:
        use_prefix(patch, f"shmconn-{prefix}-{name.replace(' ', '-')}.")
        report = by_priorities(maker(SCENARIOS[name], prefix), range(SEED, SEED + count))
    # There is no end to random schedules.
    report.complete = True
    return report


def check(reports: dict[str, Report], bound: str, **more: Any) -> None:
    total = Report()
    for report in reports.values():
        total.add(report)
    bad = {name: report for name, report in reports.items() if report.violations}
    unfinished = [name for name, report in reports.items() if not report.complete]
    figures.record(
        "16",
        f"schedules, {bound}",
        trials=total.schedules + total.cut,
        exercised=total.schedules,
        failures=len(bad),
        scenarios=len(reports),
        cut_by_equal_states=total.cut,
        states=total.states,
        longest=total.points,
        not_to_the_end=unfinished,
        **more,
    )
    for name, report in bad.items():
        print(f"{name}: {report.violations}; again: {name!r}, {report.schedule!r}")
    assert bad == {}


@pytest.mark.long
def test_every_schedule_up_to_two_preemptions_keeps_the_promises(tiny: str) -> None:
    jobs = [lambda name=name: search(name, 2, tiny) for name in TWO]
    reports = dict(zip(TWO, on_all_cores(jobs), strict=True))
    assert all(report.complete or report.violations for report in reports.values())
    check(reports, "all up to 2 preemptions")


def test_every_schedule_with_one_preemption_or_kill_keeps_the_promises(tiny: str) -> None:
    jobs = [lambda name=name: search(name, 1, tiny) for name in ONE]
    reports = dict(zip(ONE, on_all_cores(jobs), strict=True))
    assert all(report.complete or report.violations for report in reports.values())
    check(reports, "all up to 1 preemption or kill")


def test_random_priorities_keep_the_promises(tiny: str) -> None:
    print(f"SHMCONN_SEED={SEED}")
    names = [name for name in SCENARIOS if name not in TWO]
    jobs = [
        lambda name=name: at_random(name, tiny, 400 if name == "everybody" else 40)
        for name in names
    ]
    reports = dict(zip(names, on_all_cores(jobs), strict=True))
    check(reports, "random priorities", seed=str(SEED))


def find(fault: planted.Fault, scenario: str, prefix: str) -> tuple[Report, list[str]]:
    """Looks for a planted fault; what it found, and what the same schedule shows again."""
    with pytest.MonkeyPatch.context() as patch:
        use_prefix(patch, f"shmconn-{prefix}-{fault.__name__[:20]}.")
        fault(patch)
        make = maker(SCENARIOS[scenario], prefix)
        report = Report()
        for bound in (0, 1, 2):
            report = exhaustive(make, bound, most=5000)
            if report.violations:
                break
        again = maker(SCENARIOS[scenario], prefix, again=report.schedule)
        _, violations = again(Priorities(0, 1, 1), Touched())
        return report, violations


def test_schedules_find_every_planted_fault_and_show_it_again(tiny: str) -> None:
    faults = list(planted.FAULTS.items())
    jobs = [lambda fault=fault, name=name: find(fault, name, tiny) for fault, name in faults]
    missed, lost = [], []
    for (fault, _), (report, again) in zip(faults, on_all_cores(jobs), strict=True):
        if not report.violations:
            missed.append(fault.__name__)
        elif not again:
            lost.append((fault.__name__, report.violations, report.schedule))
    figures.detected("16", "schedules", len(faults), missed)
    assert missed == []
    assert lost == []


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "everybody"])
def test_schedules_up_to_three_preemptions_keep_the_promises(tiny: str, name: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    report = search(name, 3, tiny, BOX_S)
    check({name: report}, f"up to 3 preemptions, scenario by scenario, {BOX_S:.0f} s at most each")


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_random_priorities_keep_the_promises(tiny: str, name: str) -> None:
    print(f"SHMCONN_SEED={SEED}")
    count = 200_000 if name == "everybody" else 20_000
    check({name: at_random(name, tiny, count)}, "random priorities", seed=str(SEED))
