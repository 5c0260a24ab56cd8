# SPDX-License-Identifier: Apache-2.0
"""Named semaphores that wake a sleeper early. They carry no state: who hears none still looks.

``/shmconn.NAME.gN`` wakes the members of group N, ``/shmconn.NAME.GENERATION`` the producer.
"""

import contextlib
import ctypes
import errno
import os
import time

import posix_ipc

from shmconn.layout import SHM_DIR
from shmconn.words import step

# A wake-up that was lost, or never sent, costs one interval.
INTERVAL_S = 0.1
_SEM_T = 32  # bytes of the C library's sem_t on x86-64


class Doorbell:
    """A semaphore, or a plain sleep where there is none."""

    def __init__(self, name: str, *, create: bool = False, mode: int = 0o600) -> None:
        self.name = name
        self._semaphore: posix_ipc.Semaphore | None = None
        self._create = create
        self._mode = mode
        self.open()

    def open(self) -> bool:
        """Opens the semaphore if it is there; only its maker makes it."""
        if self._semaphore is None:
            step("doorbell")
            # No descriptor left (OSError): a wake-up less, never a fault in who publishes.
            with contextlib.suppress(posix_ipc.Error, OSError):
                flags = 0
                if self._create and not _make(f"sem.{self.name}", self._mode):
                    flags = posix_ipc.O_CREAT
                self._semaphore = posix_ipc.Semaphore(f"/{self.name}", flags, self._mode, 0)
                if self._create and self._mode != 0o600:
                    # It may have been there, with the mode of another ring's start.
                    os.chmod(f"{SHM_DIR}/sem.{self.name}", self._mode)
        return self._semaphore is not None

    def post(self) -> None:
        """Wakes one sleeper. Needs no lock, so a finalizer may call it."""
        step("post")
        if self._semaphore is not None:
            # A full semaphore wakes whoever looks anyway.
            with contextlib.suppress(OSError, posix_ipc.Error):
                self._semaphore.release()

    def clear(self) -> None:
        """Takes all tokens; done before looking, so that a later one is not missed."""
        step("clear")
        if self._semaphore is not None:
            with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
                while True:
                    self._semaphore.acquire(0)

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a token comes, at most ``timeout_s`` and at most one interval."""
        step("wait")
        timeout_s = max(0.0, min(timeout_s, INTERVAL_S))
        if not self.open() or self._semaphore is None:
            time.sleep(min(timeout_s, INTERVAL_S / 20))
            return
        with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
            self._semaphore.acquire(timeout_s)

    def __del__(self) -> None:
        # posix_ipc would keep it mapped for ever: a page of each ring that was ever read.
        semaphore = getattr(self, "_semaphore", None)
        if semaphore is not None:
            semaphore.close()


def _make(file_name: str, mode: int) -> bool:
    """Makes the file of a semaphore, unless it is there; false where the kernel cannot do it so.

    ``sem_open`` begins with a file of a random name, and a kill amid it would leave that one, of
    which nobody can tell whose it is. A file without a name goes with its process.
    """
    fresh = ctypes.create_string_buffer(_SEM_T)
    ctypes.CDLL(None).sem_init(fresh, 1, 0)
    folder = os.open(SHM_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            file = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
                return False
            raise
        try:
            os.fchmod(file, mode)  # the umask took the group's bits
            os.write(file, fresh.raw)
            with contextlib.suppress(FileExistsError):
                # Only with a folder's descriptor Python follows the link to the file itself.
                os.link(f"/proc/self/fd/{file}", file_name, dst_dir_fd=folder)
        finally:
            os.close(file)
    finally:
        os.close(folder)
    return True


def group_doorbell(name: str, group: int) -> str:
    """Name of the semaphore of a group."""
    return f"shmconn.{name}.g{group}"


def unlink(name: str) -> bool:
    """Takes the name of a semaphore away, if it is there; false if it is another user's."""
    step("unlink")
    try:
        posix_ipc.unlink_semaphore(f"/{name}")
    except posix_ipc.ExistentialError:
        return True
    except posix_ipc.PermissionsError:
        return False
    return True
