# SPDX-License-Identifier: Apache-2.0
"""Child processes of the demo: started in a session of their own, watched, and always ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
# Of a vLLM server on the CPU, which finds everything on this machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
    "VLLM_NO_USAGE_STATS": "1",
    # Threads that spin while they wait cost a busy machine two thirds of its time, and take the
    # cores from whatever runs beside them.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_ASK_AGAIN_S = 10.0


class Child:
    """A command that runs in the background and writes to a log file.

    It leads a session, so that Ctrl-C in the terminal reaches only the demo, which then ends its
    children in order; and so that whatever the command started can be found and ended too.

    Attributes:
        shm: Inodes of the files in /dev/shm that the session was seen to use.
    """

    def __init__(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self.shm: set[int] = set()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.command = shlex.join(command)

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def last_line(self) -> str:
        """The last line of the log that says something."""
        lines = self.tail(5)
        return lines[-1] if lines else ""

    def tail(self, count: int) -> list[str]:
        """The last lines of the log that say something."""
        with self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * count))
            text = file.read().decode("utf-8", "replace")
        return [line for line in text.replace("\r", "\n").splitlines() if line.strip()][-count:]

    def members(self) -> list[int]:
        """Pids of the session's living processes."""
        return [pid for pid in _pids() if _session(pid) == self._process.pid]

    def look(self) -> None:
        """Note which files in /dev/shm the session uses now."""
        for pid in self.members():
            self.shm |= _mapped(pid)

    def terminate(self) -> None:
        """Ask it to end: SIGTERM to the command itself."""
        if self.code is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float) -> None:
        """SIGTERM, a wait of up to `grace_s`, then SIGKILL to what is left of the session."""
        until = time.monotonic() + grace_s
        asked = 0.0
        while self.code is None and time.monotonic() < until:
            # vLLM is deaf to the signal in a part of its start.
            if time.monotonic() - asked > _ASK_AGAIN_S:
                self.terminate()
                asked = time.monotonic()
            self.look()
            self.wait(0.2)
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()


def shm_files() -> dict[str, int]:
    """What is in /dev/shm now: names and inodes."""
    files = {}
    for entry in os.scandir(SHM):
        # A file may go between the look at the folder and at it.
        with contextlib.suppress(FileNotFoundError):
            files[entry.name] = entry.inode()
    return files


def unlink_unused(names: Iterable[str]) -> list[str]:
    """Remove those files from /dev/shm that no process maps any more; returns their names."""
    used = set().union(*(_mapped(pid) for pid in _pids()))
    files = shm_files()
    removed = sorted(name for name in names if name in files and files[name] not in used)
    for name in removed:
        (SHM / name).unlink(missing_ok=True)
    return removed


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _session(pid: int) -> int | None:
    """Session of a living process; None for a zombie or one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    # The command's name stands in brackets and may hold anything; the rest is plain.
    state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
    # A process whose first thread is gone lives, and holds its files, while it has others.
    return None if state in "ZX" and threads <= 1 else int(session)


def _mapped(pid: int) -> set[int]:
    """Inodes, because a semaphore is mapped under a name that it had before its own."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if f" {SHM}/" in line}
