# SPDX-License-Identifier: Apache-2.0
"""Row 4: whoever cleans up after the dead is killed at its N-th step; the next one finishes."""

import contextlib
import secrets
import time
from collections.abc import Callable

import pytest
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared, kill_at

from crash import planted
from crash.nth import Outcome, check, ended, found_fault, run_all
from crash.survivors import Reader, create
from shmconn.directory import groups, remove_group, remove_rings
from shmconn.errors import OptionError, RingMissing
from shmconn.segment import ring_files
from shmconn.subscription import subscribe

# The push tier takes the two in which most happens.
STATES = (
    "half",
    "wrapped",
    *(pytest.param(one, marks=pytest.mark.long) for one in ("empty", "full")),
)


def die_with_samples(name: str, state: str, group: str | None) -> None:
    """A producer, and a member of ``group``, that die with samples in the ring."""

    def life() -> None:
        producer = create(name, (group,) if group else ())
        if state == "wrapped":
            passing = Reader(subscribe(name, group or "passing"), [])
            for _ in range(4):
                payload.put(producer)
            passing.read()
            if group is None:
                passing.subscription.close()
            producer.tick()
        for _ in range({"empty": 0, "half": 2, "full": 4, "wrapped": 3}[state]):
            payload.put(producer)
        if group:
            subscribe(name, group).next(0)

    Child(life).finish()


def a_start(name: str) -> None:
    """Cleaning by the next start under the name, which then closes."""
    create(name).close()


def a_start_elsewhere(name: str) -> None:
    """Cleaning by a start under another name."""
    create(f"{name}-other").close()


def rm(name: str) -> None:
    """Cleaning by `shmconn rm`."""
    remove_rings(name, force=True)


def groups_rm(name: str) -> None:
    """Cleaning by `shmconn groups rm` of the group that everything waits for."""
    remove_group(name, "waiting")


def the_last_leave(name: str) -> None:
    """Cleaning by the last member, who has read everything."""
    reader = Reader(subscribe(name, "waiting"), [])
    reader.read()
    reader.subscription.close()


# What cleans, and the group that waits for the dead ring's samples (None: nobody).
SCRIPTS: dict[str, tuple[Callable[[str], None], str | None]] = {
    "start": (a_start, None),
    "start elsewhere": (a_start_elsewhere, None),
    "rm": (rm, None),
    "groups rm": (groups_rm, "waiting"),
    "last leave": (the_last_leave, "waiting"),
}


def trial(base: str, script: str, state: str, number: int, *, looks: bool, live: bool) -> Outcome:
    """Kills a cleaner before its N-th step; a second one finishes what it began."""
    name = f"{base}-{secrets.token_hex(3)}"
    problems: list[str] = []
    clean, group = SCRIPTS[script]
    producer = create(name) if live else None
    die_with_samples(name, state, group)
    dead = set(ring_files(name)) - ({producer._ring.file.name} if producer else set())
    shared = Shared()

    def victim() -> None:
        kill_at(number, shared, looks=looks)
        clean(name)

    child = Child(victim, shared)
    assert child.wait(reap=number % 2 == 0)
    for suffix in ("", "-other"):
        with contextlib.suppress(RingMissing, OptionError):
            remove_group(name + suffix, "waiting")
        with contextlib.suppress(RingMissing):
            remove_rings(name + suffix, force=True)
    recovery_s = time.monotonic() - child.died_at
    left = dead & set(ring_files(name))
    if left:
        problems.append(f"dead rings stay: {left}")
    if producer is not None:
        problems += _works(name, producer)
    left_over = left_of(name)
    if left_over:
        problems.append(f"left in /dev/shm: {left_over}")
    return ended(child, recovery_s, problems)


def _works(name: str, producer: object) -> list[str]:
    """What is wrong with a live ring beside which the dead were cleared."""
    problems: list[str] = []
    reader = Reader(subscribe(name, "reader"), problems)
    payload.put(producer)  # type: ignore[arg-type]
    reader.read()
    if reader.got[producer.generation] != [1]:  # type: ignore[attr-defined]
        problems.append(f"the live ring gave {dict(reader.got)} to {groups(name)}")
    producer.close()  # type: ignore[attr-defined]
    reader.subscription.close()
    return problems


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cleaner_killed_at_any_step_leaves_work_that_the_next_one_finishes(
    ring: str, script: str, state: str
) -> None:
    def one(number: int) -> Outcome:
        return trial(ring, script, state, number, looks=False, live=script == "rm")

    check("4", "cleaner killed at each step that changes anything", run_all(one, ring))


@pytest.mark.long
@pytest.mark.parametrize("live", (False, True), ids=("alone", "beside a live ring"))
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cleaner_killed_at_any_look_leaves_work_that_the_next_one_finishes(
    ring: str, script: str, state: str, live: bool
) -> None:
    def one(number: int) -> Outcome:
        return trial(ring, script, state, number, looks=True, live=live)

    check("4", "cleaner killed at each step, looks too", run_all(one, ring))


FINDS = {
    planted.name_before_doorbell: "rm",
    planted.registry_before_the_rings: "rm",
}


def test_kills_of_a_cleaner_find_planted_faults(ring: str) -> None:
    missed = []
    for fault, script in FINDS.items():
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)

            def one(number: int, script: str = script) -> Outcome:
                return trial(ring, script, "half", number, looks=False, live=False)

            if not found_fault(run_all(one, ring, stop=True)):
                missed.append(fault.__name__)
    figures.detected("4", "kills of cleaners", len(FINDS), missed)
    assert missed == []
