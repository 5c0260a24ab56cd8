# SPDX-License-Identifier: Apache-2.0
"""The demo as a process of its own, with all that it leaves behind."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of whatever a dead child leaves running, so that it can be seen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Living children of this process, adopted ones too; dead ones are reaped on the way."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            found.add(int(entry.name))
    return found


def shm_files() -> dict[str, int]:
    """Names and inodes in /dev/shm."""
    return {entry.name: entry.inode() for entry in os.scandir("/dev/shm")}


def shm_in_use() -> set[int]:
    """Inodes in /dev/shm that a living process maps."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        used |= {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}
    return used


class DemoRun:
    """Starts `demo.py`; ends with `finish` or `interrupt`, each of which checks what is left."""

    def __init__(self, log: Path, **environment: str) -> None:
        adopt_orphans()
        self.log = log
        self._shm = shm_files()
        self._children = children()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(DEMO / "demo.py")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "120", **environment},
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """All that it printed so far."""
        return self.log.read_text(errors="replace")

    @property
    def ring(self) -> str:
        """The name of its ring."""
        match = re.search(r"drain (demo-\S+)", self.out)
        assert match is not None, self.out
        return match[1]

    @property
    def folder(self) -> Path:
        """What it wrote."""
        return ROOT / "out" / self.ring

    def wait_for(self, text: str) -> None:
        """Until it printed `text`; fails if it ends without."""
        while text not in self.out:
            assert self.process.poll() is None, self.out
            time.sleep(0.1)

    def wait_for_replies(self, count: int) -> None:
        """Until the sender's log has so many lines."""
        self.wait_for("2/5")
        log = self.folder / "sends.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.out
            time.sleep(0.05)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C in its terminal: every process of the foreground group gets the signal."""
        os.killpg(self.process.pid, number)

    def finish(self, code: int) -> None:
        """Wait for the end; it must have this code and leave nothing."""
        try:
            ended = self.process.wait(540)
        finally:
            self.kill()
        assert ended == code, self.out
        assert "Traceback" not in self.out
        assert children() - self._children == set(), self.out
        # Other programs of this machine come and go; theirs are in use or bear another ring's name.
        used = shm_in_use()
        left = {
            name
            for name, inode in shm_files().items()
            if name not in self._shm and inode not in used
            if self.ring in name or "shmconn." not in name
        }
        assert left == set(), self.out

    def kill(self) -> None:
        """End what is left of it, by force."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
