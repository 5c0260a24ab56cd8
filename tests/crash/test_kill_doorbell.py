# SPDX-License-Identifier: Apache-2.0
"""Row 12: a kill amid the making of a doorbell leaves no file that nobody can tell whose it is."""

import contextlib
import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable

import posix_ipc
import pytest
from harness import figures
from harness.processes import Child, Shared

from shmconn import doorbell
from shmconn.layout import SHM_DIR

KILLS = 200
AT_WORK, MADE = range(2)


def make_ours(name: str) -> None:
    doorbell.Doorbell(name, create=True)


def make_by_the_c_library(name: str) -> None:
    posix_ipc.Semaphore(f"/{name}", posix_ipc.O_CREAT, 0o600, 0).close()


def kills(make: Callable[[str], None], name: str, seed: int) -> tuple[int, list[str]]:
    """Kills a process that makes doorbells; how many kills fell into that, and what was left."""
    dice = random.Random(seed)
    before = set(os.listdir(SHM_DIR))
    at_work = 0

    for _ in range(KILLS):
        shared = Shared()

        def run(shared: Shared = shared) -> None:
            while True:
                shared.words[AT_WORK] = 1
                make(name)
                shared.words[AT_WORK] = 0
                shared.words[MADE] += 1
                doorbell.unlink(name)

        child = Child(run, shared)
        while not shared.words[MADE]:
            time.sleep(0.0005)
        time.sleep(dice.uniform(0, 0.0005))
        child.kill()
        assert child.status == -signal.SIGKILL
        at_work += shared.words[AT_WORK]
    doorbell.unlink(name)
    # Other programs of this host may make semaphores meanwhile; theirs go by themselves.
    pattern = re.compile(r"sem\.[A-Za-z0-9]{6}")
    left = [file for file in sorted(set(os.listdir(SHM_DIR)) - before) if pattern.fullmatch(file)]
    time.sleep(0.2)
    return at_work, [file for file in left if os.path.exists(f"{SHM_DIR}/{file}")]


def test_a_kill_amid_the_making_of_a_doorbell_leaves_no_file(ring_name: str) -> None:
    at_work, left = kills(make_ours, f"shmconn.{ring_name}.g0", seed=1)
    figures.record(
        "12",
        "SIGKILL of who makes doorbells",
        trials=KILLS,
        exercised=at_work,
        failures=len(left),
    )
    assert left == []
    assert at_work > 0


def test_where_the_kernel_makes_no_file_without_a_name_the_c_library_makes_the_doorbell(
    ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return really(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    bell = doorbell.Doorbell(f"shmconn.{ring_name}.g0", create=True)
    monkeypatch.undo()
    assert os.path.getsize(f"{SHM_DIR}/sem.{bell.name}") == 32
    bell.post()
    semaphore = posix_ipc.Semaphore(f"/{bell.name}")
    assert semaphore.value == 1
    semaphore.close()
    doorbell.unlink(bell.name)


def test_doorbells_made_by_the_c_library_would_leave_files(ring_name: str) -> None:
    _, left = kills(make_by_the_c_library, f"shmconn.{ring_name}.g0", seed=2)
    for file in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{SHM_DIR}/{file}")
    missed = [] if left else ["sem_open"]
    figures.detected("12", "files that sem_open leaves", planted=1, missed=missed)
    assert left, "no kill fell between the two names of a semaphore: the test cannot see it"
