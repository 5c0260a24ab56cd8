# SPDX-License-Identifier: Apache-2.0
"""Forked victims, killed where a test wants it, and what they leave behind for the survivors."""

import contextlib
import gc
import mmap
import os
import select
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

from shmconn import words

# Steps that only look: a kill before one leaves the same as a kill before the next that changes.
LOOKS = ("load", "copy", "test", "list", "stat", "magic", "wait", "clear")
HANG_S = 60.0
_NOTE = 4096

_children: "set[Child]" = set()


class Shared:
    """Memory that a victim and its survivors share, so that it outlives the victim."""

    def __init__(self, count: int = 64) -> None:
        self._map = mmap.mmap(-1, _NOTE + 8 * count)
        self.words = memoryview(self._map)[_NOTE:].cast("q")

    @property
    def note(self) -> str:
        """The last text that was noted."""
        (length,) = struct.unpack_from("<I", self._map)
        return self._map[4 : 4 + length].decode(errors="replace")

    @note.setter
    def note(self, text: str) -> None:
        data = text.encode()[-(_NOTE - 4) :]
        self._map[4 : 4 + len(data)] = data
        struct.pack_into("<I", self._map, 0, len(data))


class Child:
    """A forked process. It ends by ``os._exit``, so that nothing of the parent's runs there."""

    def __init__(self, run: Callable[[], object], shared: Shared | None = None) -> None:
        self.shared = shared or Shared()
        self.died_at = 0.0
        self.status: int | None = None
        with warnings.catch_warnings():
            # Threads of numpy's libraries do not run in what these children do.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._run(run)
        self._pidfd = os.pidfd_open(self.pid)
        _children.add(self)

    def _run(self, run: Callable[[], object]) -> None:
        code = 1
        # A collection would copy each page of the parent's objects.
        gc.disable()
        try:
            run()
            code = 0
        except BaseException:
            self.shared.note = traceback.format_exc()
        finally:
            os._exit(code)

    def wait(self, timeout_s: float = HANG_S, *, reap: bool = True) -> bool:
        """Waits for its death; false if it lives on. Unreaped, it stays a zombie."""
        if self.status is not None:
            return True
        ready, _, _ = select.select([self._pidfd], [], [], timeout_s)
        if not ready:
            return False
        self.died_at = self.died_at or time.monotonic()
        if reap:
            self.reap()
        return True

    def reap(self) -> None:
        """Takes its exit status; negative = killed by that signal."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
            os.close(self._pidfd)
            _children.discard(self)

    @property
    def running(self) -> bool:
        """Whether it has not died yet."""
        return not self.wait(0.0, reap=False)

    @property
    def cpu_s(self) -> float:
        """Processor time it has used; 0 once it is dead."""
        with contextlib.suppress(OSError):
            # The clock of another process, as clock_getcpuclockid(3) names it.
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        if self.status is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self, *, reap: bool = True) -> None:
        """SIGKILL, and its death."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait(reap=reap)

    def finish(self, timeout_s: float = HANG_S) -> None:
        """Waits for a good end."""
        if not self.wait(timeout_s):
            self.kill()
            raise AssertionError(f"process {self.pid} hung; noted: {self.shared.note}")
        assert self.status == 0, f"process ended with {self.status}: {self.shared.note}"


def end_all() -> None:
    """Kills and reaps every child that a test left."""
    for child in list(_children):
        child.kill()
        child.reap()


class KillAt:
    """Kills its own process just before the N-th step of the protocol, counted from now on."""

    def __init__(self, number: int, shared: Shared, *, looks: bool) -> None:
        self._number = number
        self._shared = shared
        self._looks = looks
        self._pid = os.getpid()
        shared.words[0] = 0

    def __call__(self, name: str) -> None:
        if not self._looks and name.startswith(LOOKS):
            return
        self._shared.words[0] += 1
        if self._shared.words[0] == self._number:
            self._shared.note = name
            os.kill(self._pid, signal.SIGKILL)

    @staticmethod
    def steps(shared: Shared) -> int:
        """Steps that a victim made."""
        return shared.words[0]


class Baton:
    """Lets a victim and its parent take turns; a death gives the turn back too."""

    def __init__(self) -> None:
        self._to_child = os.pipe()
        self._to_parent = os.pipe()

    def in_child(self) -> None:
        """To be called first in the child, so that deaths are seen."""
        os.close(self._to_child[1])
        os.close(self._to_parent[0])

    def in_parent(self) -> None:
        """To be called first in the parent."""
        os.close(self._to_child[0])
        os.close(self._to_parent[1])

    def pass_to_parent(self) -> None:
        """The child waits until the parent has had its turn."""
        os.write(self._to_parent[1], b"x")
        os.read(self._to_child[0], 1)

    def turns(self) -> Iterator[int]:
        """The parent's turns, counted from 0; ends with the child's death."""
        turn = 0
        while os.read(self._to_parent[0], 1):
            yield turn
            turn += 1
            with contextlib.suppress(BrokenPipeError):
                os.write(self._to_child[1], b"x")
        os.close(self._to_child[1])
        os.close(self._to_parent[0])


def kill_at(number: int, shared: Shared, *, looks: bool) -> None:
    """From now on, this process dies just before its N-th step."""
    words.watch(KillAt(number, shared, looks=looks))
