# SPDX-License-Identifier: Apache-2.0
"""The demo as a process of its own, with all that it leaves behind."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
# A demo takes a minute and a half alone, and many on a machine that does other things.
HANG_S = 1200.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of whatever a dead child leaves running, so that it can be seen."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> dict[int, int]:
    """Parents of all living processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state not in "ZX":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Living processes below `pid`."""
    parents = processes()
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def shm_inodes(pid: int) -> set[int]:
    """Files in /dev/shm that a process maps; a semaphore's name there is not the one it has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if " /dev/shm/" in line}


class DemoRun:
    """Starts `demo.py`; ends with `finish` or `interrupt`, each of which checks what is left."""

    def __init__(self, log: Path, **environment: str) -> None:
        adopt_orphans()
        self.log = log
        self._before = {entry.name for entry in os.scandir("/dev/shm")}
        self._mine = descendants(os.getpid())
        self._inodes: set[int] = set()
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
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def _look(self) -> None:
        """Note what the demo and its children map: other programs' files come and go as well."""
        while not self._ended.wait(0.5):
            for pid in {self.process.pid} | descendants(self.process.pid):
                self._inodes |= shm_inodes(pid)

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
            ended = self.process.wait(HANG_S)
        finally:
            self.kill()
        assert ended == code, self.out
        assert "Traceback" not in self.out
        left = sorted(
            entry.name
            for entry in os.scandir("/dev/shm")
            if entry.name not in self._before
            and (entry.inode() in self._inodes or self.ring in entry.name)
        )
        assert left == [], f"in /dev/shm: {left}\n{self.out}"
        # Whatever its dead parents left running is a child of ours by now.
        left = sorted(descendants(os.getpid()) - self._mine)
        assert left == [], f"processes: {left}\n{self.out}"

    def kill(self) -> None:
        """End what is left of it: asked first, because only it knows its children."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._ended.set()
        self._watch.join()
