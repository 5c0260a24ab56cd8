# SPDX-License-Identifier: Apache-2.0
"""Kernel-held locks: who is alive, and who may change what.

Open-file-description locks (``F_OFD_SETLK``) belong to one ``open()``. The kernel drops them when
its last descriptor is closed, so also when the process is killed, is a zombie, or lives in another
PID namespace. A stopped process keeps them: it is alive.

A forked child inherits the descriptor and would keep a dead parent alive, so it is closed there.
It must never be unlocked there: that would free the parent's lock.
"""

import contextlib
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable

from shmconn.errors import Busy, Closed, ForkedError
from shmconn.words import step

# struct flock on Linux x86-64: type, whence, start, length, pid; l_pid must be 0.
_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_GETLK = 36
_F_OFD_SETLK = 37
_RETRY_S = 0.0005
_MAX_RETRY_S = 0.02

_open_files: "weakref.WeakSet[LockFile]" = weakref.WeakSet()


class LockFile:
    """One ``open()`` of a segment that carries locks. It is never mapped and never shared.

    Its own locks look free to it and can be taken again: whoever needs a lock against himself
    (threads of one member) adds a ``threading.Lock``.
    """

    # Kept here for __del__ at interpreter exit, when the module's names are gone.
    _close_fd = staticmethod(os.close)

    def __init__(self, fd: int) -> None:
        # A description of our own: `fd` may be shared with a mapping.
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self.identity = (status.st_dev, status.st_ino)
        self.forked = False
        _open_files.add(self)

    def try_lock(self, offset: int) -> bool:
        """Takes the lock at ``offset`` if nobody else has it. Never waits."""
        step("lock")
        self.check_process()
        try:
            fcntl.fcntl(self.fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def lock(self, offset: int, deadline: float, who: Callable[[], str]) -> None:
        """Takes the lock, trying until ``deadline`` (monotonic seconds).

        Raises:
            Busy: the deadline passed; ``who()`` describes the holder.
        """
        pause = _RETRY_S
        while not self.try_lock(offset):
            if time.monotonic() >= deadline:
                raise Busy(who())
            time.sleep(pause)
            pause = min(pause * 2, _MAX_RETRY_S)

    def unlock(self, offset: int) -> None:
        """Frees a lock of ours."""
        step("unlock")
        self.check_process()
        fcntl.fcntl(self.fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))

    def held(self, offset: int, length: int = 1) -> bool:
        """Whether another open file holds a lock in the range.

        A call on a file on which we hold a lock is also a store-load barrier on x86-64.
        """
        step("test")
        self.check_process()
        answer = fcntl.fcntl(
            self.fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, length, 0)
        )
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def intact(self) -> bool:
        """Whether the descriptor is still ours: not closed behind our back, not inherited."""
        if self.forked or self.fd < 0:
            return False
        try:
            status = os.fstat(self.fd)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def unlinked(self) -> bool:
        """Whether the file has lost its name."""
        # After a close, also by others behind our back, it is not known.
        with contextlib.suppress(OSError):
            status = os.fstat(self.fd)
            return status.st_nlink == 0 and (status.st_dev, status.st_ino) == self.identity
        return False

    def close(self) -> None:
        """Drops all locks of this file."""
        if self.fd >= 0:
            step("close")
            self._close_fd(self.fd)
            self.fd = -1

    def check_process(self) -> None:
        """Raises ForkedError in a forked child, Closed after close()."""
        if self.forked:
            raise ForkedError(
                "this ring was opened in the parent process and cannot be used in a forked "
                "child; subscribe or create again in the child"
            )
        if self.fd < 0:
            raise Closed("this ring, or this subscription, was closed")

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self._close_fd(self.fd)
            self.fd = -1


def _close_in_child() -> None:
    for file in list(_open_files):
        file.forked = True
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1


os.register_at_fork(after_in_child=_close_in_child)
