# SPDX-License-Identifier: Apache-2.0
"""Row 21: interpreters that end while a ring is in use, without a crash and without a word."""

import faulthandler
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crash.survivors import SLOTS, create
from harness import figures, payload

from lifetime.exits import LIGHT, SPAWNING, WITH_TORCH
from shmconn.directory import groups, remove_group, remove_rings
from shmconn.errors import RingMissing
from shmconn.segment import ring_files

PROGRAM = Path(__file__).with_name("exits.py")
PUSH = [state.__name__ for state in LIGHT + WITH_TORCH]
ALL = PUSH + [state.__name__ for state in SPAWNING]
# What is said on purpose: samples are given up by a close.
SAID = "samples unread; they are given up"


def end_in(ring: str, state: str) -> str | None:
    """Ends an interpreter in a state; returns what was wrong."""
    run = [sys.executable, "-W", "error", "-X", "faulthandler", str(PROGRAM), ring, state]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    said = [line for line in done.stderr.splitlines() if SAID not in line]
    if done.returncode or said or done.stdout:
        return f"{state}: {done.returncode}, {said}, {done.stdout!r}"
    return None


def clear(ring: str) -> None:
    """Gives up what an exit left, as a person would; nothing is left then."""
    for name in (ring, f"{ring}-made"):
        give_up = time.monotonic() + 20
        while True:
            try:
                found = groups(name)
                remove_rings(name)
            except RingMissing:
                break
            if not any(group.alive for group in found):
                for group in found:
                    if group.name:
                        remove_group(name, group.name)
                break
            assert time.monotonic() < give_up, f"somebody lives on in {name}: {found}"
            time.sleep(0.01)


def end_in_all(ring: str, states: list[str], rounds: int) -> None:
    problems = []
    for _ in range(rounds):
        for state in states:
            with create(ring, ("group",)) as producer:
                for _ in range(SLOTS):
                    payload.put(producer)
                problem = end_in(ring, state)
                if problem:
                    problems.append(problem)
                # The ring is as usable as before: what was held goes to the next of the group.
                producer.reclaim()
                producer.tick()
                assert len(ring_files(ring)) == 1
            clear(ring)
            assert ring_files(ring) == ring_files(f"{ring}-made") == []
    figures.record(
        "21",
        "interpreter exits with a ring in use",
        trials=rounds * len(states),
        exercised=rounds * len(states),
        failures=len(problems),
        states=len(states),
    )
    assert problems == []


def test_an_interpreter_ends_quietly_in_any_state(ring_name: str) -> None:
    end_in_all(ring_name, PUSH, 1)


@pytest.mark.long
def test_interpreters_end_quietly_in_any_state_time_and_again(ring_name: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    end_in_all(ring_name, ALL, -(-200 // len(ALL)))
    assert not [name for name in os.listdir("/dev/shm") if ring_name in name]
