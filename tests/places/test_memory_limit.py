# SPDX-License-Identifier: Apache-2.0
"""Row 8: a control group that allows less than /dev/shm has free; it answers by killing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import figures, payload
from harness.processes import Child, Shared

from shmconn import segment
from shmconn.config import default_ring_size
from shmconn.errors import NoSpace
from shmconn.headroom import Headroom, headroom
from shmconn.ring import Producer

MIB = 1 << 20
LIMIT = 96 * MIB


def _own_group() -> Path | None:
    """The folder of this process's memory group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}")
        if not controllers and "memory" in _text(Path(f"/sys/fs/cgroup{path}/cgroup.controllers")):
            return Path(f"/sys/fs/cgroup{path}")
    return None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group, whose parent has the limit."""
    parent = _own_group()
    made = [] if parent is None else [parent / f"shmconn-test-{os.getpid()}"]
    try:
        made[0].mkdir()
        made.append(made[0] / "inner")
        made[1].mkdir()
        names = [name for name in ("memory.max", "memory.limit_in_bytes") if _text(made[0] / name)]
        (made[0] / names[0]).write_text(str(LIMIT))
    except (OSError, IndexError):
        for folder in reversed(made):
            if folder.is_dir():
                folder.rmdir()
        pytest.skip("makes control groups with a memory limit, which not every place allows")
    yield made[1]
    for folder in reversed(made):
        folder.rmdir()


def create(name: str, mib: int) -> Producer:
    return Producer.create(
        name,
        size=mib * MIB,
        layer_ids=list(range(32)),
        hidden_size=payload.HIDDEN,
        dtype="float32",
    )


def test_a_ring_that_the_control_group_cannot_hold_is_refused_and_one_that_fits_is_filled(
    damaged_ring: str, group: Path
) -> None:
    shared = Shared()

    def run() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        room = headroom()
        assert room.group is not None and room.group.path == str(group.parent), room
        assert room.group.limit == LIMIT and room.free <= LIMIT < room.shm
        assert default_ring_size() <= LIMIT // 4
        for mib in (97, 128, 512):
            shared.words[0] += 1
            try:
                create(damaged_ring, mib)
            except NoSpace as error:
                assert f"control group {group.parent} allows 96.0 MiB" in str(error), error
                shared.words[1] += 1
        with create(damaged_ring, 48) as producer:
            while payload.put(producer, 120) is not None:
                shared.words[2] += 1

    Child(run, shared).finish()
    figures.record(
        "8",
        "sizes of a ring above what a control group allows",
        trials=shared.words[0],
        exercised=shared.words[1],
        failures=0,
        signals=0,
        samples_in_one_that_fits=shared.words[2],
    )
    assert shared.words[0] == shared.words[1] == 3
    assert shared.words[2] > 0


def test_without_the_look_at_the_control_group_a_start_is_killed(
    damaged_ring: str, group: Path
) -> None:
    def run() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        segment.headroom = lambda: Headroom(1 << 40)
        create(damaged_ring, 128)

    child = Child(run)
    child.wait()
    assert child.status == -signal.SIGKILL, child.status
    figures.detected("8", "a start in a control group that allows less", planted=1)
