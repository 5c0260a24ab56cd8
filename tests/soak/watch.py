# SPDX-License-Identifier: Apache-2.0
"""What a process takes while it runs: memory of its own, descriptors, mappings; and /dev/shm."""

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from harness.processes import Child, Shared

MEASURES = ("memory_kib", "descriptors", "mappings", "shm_kib", "shm_files")
MOST = 100_000


def measure(pid: int, name: str) -> list[int]:
    """One look at a process, and at what a ring name has in /dev/shm."""
    with open(f"/proc/{pid}/status") as file:
        own = next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
    with open(f"/proc/{pid}/maps") as file:
        mappings = sum(1 for _ in file)
    size = files = 0
    for entry in os.scandir("/dev/shm"):
        if name in entry.name:
            try:
                size += entry.stat().st_blocks // 2
            except FileNotFoundError:
                continue
            files += 1
    return [own, len(os.listdir(f"/proc/{pid}/fd")), mappings, size, files]


class Watcher:
    """A process that looks at another one now and then, until it is ended."""

    def __init__(self, pid: int, name: str, every_s: float) -> None:
        self._rows = np.frombuffer(mmap.mmap(-1, MOST * 8 * len(MEASURES)), dtype=np.int64)
        self._rows = self._rows.reshape(MOST, len(MEASURES))
        self._shared = Shared()
        self._child = Child(lambda: self._run(pid, name, every_s), self._shared)

    def _run(self, pid: int, name: str, every_s: float) -> None:
        for row in range(MOST):
            self._rows[row] = measure(pid, name)
            self._shared.words[0] = row + 1
            time.sleep(every_s)

    def end(self) -> "np.ndarray":
        """All looks, one in a row."""
        if not self._child.running:
            raise AssertionError(f"the watcher ended: {self._shared.note}")
        self._child.kill()
        return self._rows[: self._shared.words[0]].copy()


def growth(looks: "np.ndarray") -> dict[str, float]:
    """How much more each measure was in the last quarter than in the second, by the median."""
    count = len(looks)
    second, last = looks[count // 4 : count // 2], looks[-(count // 4) :]
    grown = np.median(last, axis=0) - np.median(second, axis=0)
    return dict(zip(MEASURES, grown.tolist(), strict=True))


def child_ready(child: Child, ready: Callable[[], object]) -> None:
    """Waits until a child is ready, or has died."""
    give_up = time.monotonic() + 60
    while not ready():
        assert child.running, f"died: {child.shared and child.shared.note}"
        assert time.monotonic() < give_up, "did not become ready"
        time.sleep(0.001)
