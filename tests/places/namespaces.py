# SPDX-License-Identifier: Apache-2.0
"""Other places to run in: a /dev/shm of one's own, another PID or time namespace, another user."""

import contextlib
import ctypes
import os
import signal
import stat
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from harness.processes import HANG_S, Child, Shared

NEWTIME, NEWNS, NEWPID = 0x80, 0x20000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_PR_SET_PDEATHSIG = 1
_PID = 63  # word of the shared memory: pid of the process inside, as it is outside

_libc = ctypes.CDLL(None, use_errno=True)

sticky = pytest.mark.skipif(
    os.geteuid() != 0 or not os.stat("/dev/shm").st_mode & stat.S_ISVTX,
    reason="changes its user, which only root may, and looks at a sticky /dev/shm",
)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def unshare(flags: int) -> None:
    """Leaves namespaces; those of PIDs and time are entered by the next child."""
    _check(_libc.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(result, f"mount {target}")


def own_mounts() -> None:
    """From now on what this process mounts is seen by itself and its children only."""
    unshare(NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)


def own_shm(mib: int) -> None:
    """Gives this process and its children an empty /dev/shm of that many MiB."""
    own_mounts()
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={mib}m,mode=1777")


def become(user: int, group: int) -> None:
    """Makes this process another user's."""
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)


def _try(flags: int) -> bool:
    child = Child(lambda: unshare(flags))
    child.wait()
    return child.status == 0


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where this process may not make namespaces."""
    if os.geteuid() != 0 or not _try(NEWNS | NEWPID):
        pytest.skip("makes namespaces, which only root may, and not in every container")


@pytest.fixture(scope="session")
def time_namespace() -> None:
    """Skips where this process may not make a namespace of time."""
    if os.geteuid() != 0 or not _try(NEWTIME):
        pytest.skip("makes a namespace of time, which only root may, on Linux 5.6 or newer")


class Inside:
    """A function that runs in a child of a process that has left namespaces."""

    def __init__(
        self,
        run: Callable[..., object],
        args: tuple[object, ...],
        flags: int,
        before: Callable[[], None],
    ) -> None:
        self.shared = Shared()
        self._run = partial(run, *args, self.shared)
        self._flags = flags
        self._before = before
        self._outer = Child(self._outside, self.shared)

    def _outside(self) -> None:
        unshare(self._flags)
        self._before()
        pid = os.fork()
        if pid == 0:
            self._inside()
        self.shared.words[_PID] = pid
        _, status = os.waitpid(pid, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)))

    def _inside(self) -> None:
        code = 1
        try:
            _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
            if self._flags & NEWPID:
                own_mounts()
                _mount("proc", "/proc", "proc", 0, None)
            self._run()
            code = 0
        except BaseException:
            self.shared.note = traceback.format_exc()
        finally:
            os._exit(code)

    @property
    def pid(self) -> int:
        """Its pid as the test sees it."""
        until(lambda: self.shared.words[_PID], "the process inside", self)
        return self.shared.words[_PID]

    @property
    def running(self) -> bool:
        """Whether it has not died yet."""
        return self._outer.running

    @property
    def died_at(self) -> float:
        """Monotonic seconds at which its death was seen."""
        return self._outer.died_at

    def kill(self) -> None:
        """SIGKILL from outside, and its death."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()

    def finish(self) -> None:
        """Waits for a good end."""
        self._outer.finish()


def in_pid_namespace(run: Callable[..., object], *args: object) -> Inside:
    """Runs a function as process 1 of a PID namespace, with a /proc of its own.

    Args:
        run: gets ``args``, and the memory that it shares with the test.
    """
    return Inside(run, args, NEWPID, lambda: None)


def in_time_namespace(offset_s: int, run: Callable[..., object], *args: object) -> Inside:
    """Runs a function where the monotonic clock and the time since boot are ahead."""

    def set_clocks() -> None:
        with open("/proc/self/timens_offsets", "w") as file:
            file.write(f"monotonic {offset_s} 0\nboottime {offset_s} 0\n")

    return Inside(run, args, NEWTIME, set_clocks)


def until(done: Callable[[], object], what: str, *alive: "Child | Inside") -> None:
    """Waits for a condition; ends with an error if a process that must bring it about died."""
    give_up = time.monotonic() + HANG_S
    while not done():
        for child in alive:
            if not child.running and not done():
                raise AssertionError(f"died before {what}: {child.shared.note}")
        assert time.monotonic() < give_up, f"timed out waiting for {what}"
        time.sleep(0.001)


@contextlib.contextmanager
def ended(*children: "Child | Inside") -> Iterator[None]:
    """Kills what is left of the children, whatever happens inside."""
    try:
        yield
    finally:
        for child in children:
            child.kill()


def reached(child: "Child | Inside", count: int, what: str) -> None:
    """Waits until a child has counted so far in the first word that it shares."""
    until(lambda: child.shared.words[0] >= count, what, child)
