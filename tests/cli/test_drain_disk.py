# SPDX-License-Identifier: Apache-2.0
"""A disk in trouble: samples wait in the ring, the rest goes on, nothing is lost.

The disk is a small tmpfs in a mount namespace of the drain's own, so that it can be filled, made
read-only and emptied without touching the machine.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_processes import Process
from harness import figures
from test_drain import check, samples

from reader.service import default_group

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which only root may")

FILLED = 300  # KiB of the 500 KiB that the disk has
LARGE = 1000  # tokens of a sample of 500 KiB


class Disk:
    """A small tmpfs that a drain writes to, as seen from outside of its mount namespace."""

    def __init__(self, folder: Path, drain: Process) -> None:
        self.drain = drain
        self.path = Path(f"/proc/{drain.child.pid}/root{folder}")

    def free(self) -> None:
        (self.path / "filler").unlink()

    def remount(self, options: str) -> None:
        inside = str(self.path).split("/root", 1)[1]
        enter = ["nsenter", "-t", str(self.drain.child.pid), "-m"]
        subprocess.run([*enter, "mount", "-o", f"remount,{options}", inside], check=True)

    def count(self) -> int:
        return len(samples(self.path))


@pytest.fixture
def on_small_disk(
    ring: str, shmconn: Callable[..., Process], tmp_path: Path
) -> Iterator[Callable[..., Disk]]:
    """Starts a drain onto a disk of 500 KiB, part of which is taken."""
    folder = tmp_path / "disk"
    folder.mkdir()
    script = (
        f"mount -t tmpfs -o size={{size}}k tmpfs {folder} && "
        f'head -c {FILLED}k /dev/zero > {folder}/filler && exec "$@"'
    )

    def start(*words: Any, size: int = 500) -> Disk:
        wrap = ["unshare", "-m", "sh", "-c", script.format(size=size), "sh"]
        drain = shmconn("drain", ring, "--to", folder, "--wait", 60, *words, wrap=wrap)
        drain.says("writes to")
        return Disk(folder, drain)

    yield start


def checked(disk: Disk, numbers: range) -> None:
    """Everything is there, byte for byte, beside what filled the disk."""
    (disk.path / "filler").unlink(missing_ok=True)
    check(disk.path, numbers)


def test_a_sample_that_does_not_fit_waits_while_others_go_on(
    ring, producer, run, on_small_disk, tmp_path
) -> None:
    disk = on_small_disk("--follow", "--writers", 1)
    source = producer(size="16MiB")
    source.put(1, 1, tokens=LARGE // 2)
    source.put(2, 1, tokens=1)
    disk.drain.says("No space left")
    disk.drain.until(lambda: disk.count() == 1)
    source.put(3, 5, tokens=1)
    disk.drain.until(lambda: disk.count() == 6)
    assert "1 sample kept in the ring" in disk.drain.err
    assert "request r1" in disk.drain.err
    disk.free()
    disk.drain.until(lambda: disk.count() == 7)
    disk.drain.says("takes samples again")
    assert not [name for name in os.listdir(disk.path) if name.endswith(".tmp")]
    disk.drain.signal(signal.SIGTERM)
    assert disk.drain.wait() == 143
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "disk")))


def test_all_that_a_full_disk_refused_arrives_once_there_is_room(
    ring, producer, run, on_small_disk, tmp_path
) -> None:
    disk = on_small_disk("--follow", size=1200)
    source = producer(size="16MiB")
    source.tell("put", first=1, count=60)
    disk.drain.says("No space left")
    refused = 60 - disk.count()
    disk.remount("size=8m")
    disk.drain.until(lambda: disk.count() >= 60)
    names = sorted(os.path.basename(file) for file in samples(disk.path))
    figures.record(
        "27",
        "samples drained to a disk that is full and then has room",
        trials=60,
        exercised=refused,
        failures=60 - len(names),
        half_written=sum(name.endswith(".tmp") for name in os.listdir(disk.path)),
    )
    checked(disk, range(1, 61))
    disk.drain.signal(signal.SIGTERM)
    assert disk.drain.wait() == 143
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "disk")))


def test_giving_up_ends_with_5_and_another_drain_gets_everything(
    ring, producer, run, on_small_disk, tmp_path
) -> None:
    disk = on_small_disk("--give-up", 1, "--group", "files")
    source = producer(size="16MiB")
    source.put(1, 3, tokens=LARGE)
    assert disk.drain.wait() == 5, disk.drain.err
    assert re.search(r"gave up: .* 3 samples are kept in the ring, nothing is lost", disk.drain.out)
    source.close()
    run("drain", ring, "--to", tmp_path / "large", "--group", "files")
    check(tmp_path / "large", range(1, 4), tokens=LARGE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_on_a_full_disk_gives_back_what_was_refused(
    ring, producer, run, on_small_disk, tmp_path, number, code
) -> None:
    disk = on_small_disk("--group", "files")
    source = producer(size="16MiB")
    source.put(1, 3, tokens=LARGE)
    disk.drain.says("No space left")
    disk.drain.signal(number)
    assert disk.drain.wait() == code, disk.drain.err
    assert "3 samples unread" in disk.drain.out
    source.close()
    run("drain", ring, "--to", tmp_path / "large", "--group", "files")
    check(tmp_path / "large", range(1, 4), tokens=LARGE)


def test_a_disk_that_turns_read_only_is_waited_for(
    ring, producer, run, on_small_disk, tmp_path
) -> None:
    disk = on_small_disk("--follow", size=4000)
    disk.remount("ro")
    source = producer()
    source.put(1, 5)
    disk.drain.says("Read-only")
    disk.remount("rw")
    disk.drain.until(lambda: disk.count() == 5)
    checked(disk, range(1, 6))
    disk.drain.signal(signal.SIGTERM)
    assert disk.drain.wait() == 143
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "disk")))


def test_a_folder_that_vanishes_is_waited_for(ring, producer, shmconn, tmp_path) -> None:
    out = tmp_path / "out"
    source = producer()
    drain = shmconn("drain", ring, "--to", out)
    source.put(1, 5)
    drain.until(lambda: len(samples(out)) == 5)
    out.rename(tmp_path / "away")
    source.put(6, 5)
    drain.says("No such file")
    (tmp_path / "away").rename(out)
    source.close()
    assert drain.wait() == 0, drain.err
    check(out, range(1, 11))
