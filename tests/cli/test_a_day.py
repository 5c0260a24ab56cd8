# SPDX-License-Identifier: Apache-2.0
"""A day of a drain in one test: two outputs, a disk that fills up twice, the drain killed five
times and the producer twice. Afterwards each output holds exactly what was published, byte for
byte, once, and nothing was rewritten."""

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from cli_producer import ids_of, states_of, tokens_of
from harness import figures
from test_drain import check, samples

from reader.service import default_group
from shmconn.shards import ShardDataset

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which only root may")

DISK_MIB = 400


class Day:
    """Everything that runs, and what was seen of the files so far."""

    def __init__(self, ring, producer, shmconn, tmp_path: Path, seed: int) -> None:
        self.ring, self._producer, self._shmconn = ring, producer, shmconn
        self.random = random.Random(seed)
        self.disk = tmp_path / "disk"
        self.disk.mkdir()
        mount = f"mount -t tmpfs -o size={DISK_MIB}m tmpfs {self.disk} && exec sleep 3000"
        self.holder = shmconn(wrap=["unshare", "-m", "sh", "-c", mount])
        self.inside = Path(f"/proc/{self.holder.child.pid}/root{self.disk}")
        self.holder.until(lambda: os.path.ismount(self.inside))
        self.seen: dict[Path, tuple[int, int]] = {}
        self.published: list[int] = []
        self.next = 1
        self.source = None
        self.drain = self._start_drain()

    @property
    def files(self) -> Path:
        return self.inside / "files"

    @property
    def shards(self) -> Path:
        return self.inside / "shards"

    def _start_drain(self):
        enter = ["nsenter", "-t", str(self.holder.child.pid), "-m"]
        words = ["drain", self.ring, "--to", self.disk / "files", "--to", self.disk / "shards"]
        words += ["--format", "safetensors", "--format", "shards", "--shard-size", "4MiB"]
        words += ["--follow", "--wait", 60, "--checksum"]
        drain = self._shmconn(*words, wrap=enter)
        drain.until(lambda: drain.err.count("writes to") == 2)
        return drain

    def look(self) -> None:
        """Remember each file as it is now."""
        for file in [*samples(self.files), *samples(self.shards)]:
            self.seen.setdefault(file, identity(file))

    def reach(self, count: int) -> None:
        """Wait for so many files."""
        self.drain.until(lambda: len(samples(self.files)) >= count)

    def produce(self, last: int) -> None:
        """Have all up to a number put, by a new producer if the last one was killed."""
        if self.source is None:
            self.source = self._producer(size="8MiB")
            self.first = self.next
        self.source.tell("put", first=self.next, count=last - self.next + 1)
        self.next = last + 1

    def kill_producer(self, run) -> None:
        """SIGKILL; stopped before, so that how much it had published can be read in its ring."""
        self.source.signal(signal.SIGSTOP)
        rings = json.loads(run("ls", "--json").out)
        (count,) = [r["published"] for r in rings if r["generation"] == self.source.generation]
        self.source.child.kill()
        self.source.kill()
        self.published += range(self.first, self.first + count)
        self.next = self.first + count
        self.source = None

    def kill_drain(self) -> None:
        self.drain.kill()
        self.look()
        self.drain = self._start_drain()

    def fill_disk(self) -> Path:
        """Leave no room at all."""
        filler = self.inside / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        return filler

    def refusals(self) -> int:
        """How often this drain has said that the disk is full."""
        return self.drain.err.count("No space left")

    def await_refusal(self, count: int) -> None:
        """Wait until it has said so that often."""
        self.drain.until(lambda: self.refusals() >= count)

    def handles(self, folder: Path) -> list[str]:
        return [json.loads(line)["handle"] for line in open_lines(folder / "manifest.jsonl")]


def identity(file: Path) -> tuple[int, int]:
    """What changes when a file is written anew: its inode, or its time."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("count", [600, pytest.param(5000, marks=pytest.mark.long)])
def test_a_day(ring, producer, shmconn, run, tmp_path, count) -> None:
    day = Day(ring, producer, shmconn, tmp_path, seed=count)
    events = ["drain"] * 5 + ["producer"] * 2 + ["disk"] * 2
    day.random.shuffle(events)
    step = count // (len(events) + 1)
    for event in events:
        done = len(samples(day.files))
        if event == "disk":
            refusals = day.refusals()
            filler = day.fill_disk()
            day.produce(min(day.next + step, count))
            day.await_refusal(refusals + 1)
            filler.unlink()
        else:
            day.produce(min(day.next + step, count))
            day.reach(done + step // 2)
            if event == "drain":
                day.kill_drain()
            else:
                day.kill_producer(run)
        day.look()
    day.produce(count)
    day.source.finish()
    day.published += range(day.first, count + 1)
    wanted = len(day.published)
    day.reach(wanted)
    day.drain.until(lambda: min(len(day.handles(f)) for f in (day.files, day.shards)) >= wanted)
    day.drain.signal(signal.SIGTERM)
    assert day.drain.wait() == 143, day.drain.err

    given = [day.handles(folder) for folder in (day.files, day.shards)]
    figures.record(
        "27",
        "killed drains and producers and full disks in a day of two outputs",
        trials=len(events),
        exercised=len(events),
        failures=sum(len(handles) - len(set(handles)) for handles in given)
        + sum(abs(count - len(set(handles))) for handles in given)
        + sum(identity(file) != day.seen[file] for file in day.seen),
        files_and_shards=sum(map(len, given)),
    )
    assert sorted(day.published) == list(range(1, count + 1))
    check(day.files, range(1, count + 1))
    check_shards(day.shards, count)
    for folder in (day.files, day.shards):
        handles = day.handles(folder)
        assert len(handles) == len(set(handles)) == count
    assert {file: identity(file) for file in day.seen} == day.seen
    assert len(day.seen) > count // 2
    assert any(file.parent == day.shards for file in day.seen)
    for name in ("files", "shards"):
        run("groups", "rm", ring, default_group(str(day.disk / name)))


def check_shards(folder: Path, count: int) -> None:
    dataset = ShardDataset(folder)
    numbers = []
    for index in range(len(dataset)):
        item = dataset[index]
        number = int(item["metadata"]["request_id"].removeprefix("r"))
        numbers.append(number)
        tokens = tokens_of(number)
        np.testing.assert_array_equal(item["hidden_states"].numpy(), states_of(number, tokens))
        np.testing.assert_array_equal(item["token_ids"].numpy(), ids_of(number, tokens))
    assert sorted(numbers) == list(range(1, count + 1))
    assert not [path for path in folder.iterdir() if path.name.endswith((".part", ".tmp"))]
