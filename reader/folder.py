# SPDX-License-Identifier: Apache-2.0
"""The output folder: files appear in it whole or not at all, and nothing leads out of it.

Every call names a file inside the folder by a descriptor of the folder and a plain name; no link is
followed. A file is written under a temporary name with a lock on it, then renamed. A drain that was
killed leaves at most temporary files without a lock, which the next one removes.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from shmconn.errors import OptionError

_TEMPORARY = re.compile(r"\.shmconn-[0-9a-f]{16}\.tmp")
_CHUNK = 64 << 20  # bytes per write call: measured best on tmpfs, and bounds the delay of a stop
_RENAME_NOREPLACE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Writer(Protocol):
    """What a format writes its bytes to."""

    def write(self, data: Any, /) -> int: ...


class Output:
    """A temporary file that is being written.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, fd: int, name: str, digest: bool) -> None:
        self.fd = fd
        self.name = name
        self.size = 0
        self._digest = hashlib.sha256() if digest else None

    def write(self, data: Any, /) -> int:
        """Write all of a bytes-like object, straight from its memory."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            rest = view[start : start + _CHUNK]
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        if self._digest is not None:
            self._digest.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here."""

    @property
    def digested(self) -> bool:
        """Whether a digest of all that is written was asked for."""
        return self._digest is not None

    @property
    def sha256(self) -> str | None:
        """Hex digest of all that was written, if one was asked for."""
        return self._digest.hexdigest() if self._digest is not None else None


class Folder:
    """A folder that samples are written to.

    Raises:
        OptionError: it cannot be made or written to; says why.
    """

    def __init__(self, path: str, *, fsync: bool = False) -> None:
        self.fsync = fsync
        self._lock = threading.Lock()
        self._left: list[int] = []
        try:
            os.makedirs(path, exist_ok=True)
            self.path = os.path.realpath(path)
            self._fd = self._open()
            with self.temporary():
                pass
        except OSError as error:
            raise OptionError(
                f"cannot write to {path!r}: {_why(path, error)}; choose a folder that this user "
                "can write to, on a file system with room"
            ) from None
        self.sweep()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """A descriptor of the folder that stands at the path now.

        A volume that was unmounted and mounted again is another folder under the same path.

        Raises:
            OSError: there is no folder at the path.
        """
        with self._lock:
            here = os.stat(self.path, follow_symlinks=False)
            mine = os.fstat(self._fd)
            if (here.st_dev, here.st_ino) != (mine.st_dev, mine.st_ino):
                fresh = self._open()
                self._left.append(self._fd)  # another thread may be in a call with it
                self._fd = fresh
            return self._fd

    def close(self) -> None:
        """Close the folder's descriptors."""
        for fd in (self._fd, *self._left):
            os.close(fd)

    @contextlib.contextmanager
    def temporary(self, *, digest: bool = False) -> Iterator[Output]:
        """A new locked temporary file, removed at the end unless it was published."""
        name = f".shmconn-{secrets.token_hex(8)}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = self.fd
        fd = os.open(name, flags, 0o666, dir_fd=folder)
        output = Output(fd, name, digest)
        try:
            lock_file(fd)
            yield output
        finally:
            with contextlib.suppress(OSError):
                os.close(output.fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)

    def publish(self, output: Output, name: str, *, replace: bool) -> None:
        """Give a written file its name, in one step.

        Raises:
            FileExistsError: the name is taken and ``replace`` is false.
            OSError: the disk refused.
        """
        folder = self.fd
        if self.fsync:
            os.fsync(output.fd)
        fd, output.fd = output.fd, -1
        os.close(fd)  # a network file system reports failed writes here
        if replace:
            os.rename(output.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            _rename_new(folder, output.name, name)
        if self.fsync:
            os.fsync(folder)

    def rename(self, old: str, new: str) -> None:
        """Rename a file of the folder, never over another.

        Raises:
            FileExistsError: the new name is taken.
        """
        _rename_new(self.fd, old, new)

    def names(self) -> list[str]:
        """All names in the folder."""
        return os.listdir(self.fd)

    def exists(self, name: str) -> bool:
        """Whether anything, a dangling link included, has that name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Bytes of a regular file; -1 if there is none of that name."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return -1
        return found.st_size if stat.S_ISREG(found.st_mode) else -1

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file in the folder; no link is followed, no pipe waited for."""
        return os.open(
            name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=self.fd
        )

    def lock(self, fd: int, name: str) -> bool | None:
        """`lock_file`; false as well if the name is another file's by now, or nobody's.

        Between an open and its lock somebody else may have had the lock, and removed or renamed it.
        """
        locked = lock_file(fd)
        if locked is False:
            return False
        mine = os.fstat(fd)
        try:
            there = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return locked if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino) else False

    def sweep(self) -> int:
        """Remove the temporary files of drains that are dead; returns how many."""
        removed = 0
        for name in os.listdir(self.fd):
            if _TEMPORARY.fullmatch(name) is None:
                continue
            try:
                fd = self.open(name, os.O_RDWR)
            except OSError:
                continue
            try:
                if lock_file(fd):
                    os.unlink(name, dir_fd=self.fd)
                    removed += 1
            except FileNotFoundError:
                pass
            finally:
                os.close(fd)
        return removed


def _why(path: str, error: OSError) -> str:
    """What is wrong with a path: of a link to nowhere `os.makedirs` only says that it exists."""
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)!r}, which leads nowhere"
    if isinstance(error, FileExistsError):
        return "it is no folder"
    return error.strerror or str(error)


def lock_file(fd: int) -> bool | None:
    """Lock a file for as long as it is open: true; false if another has it; None if locks are
    refused here (NFS without its lock service)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lock_holders(fd: int) -> str:
    """Who has a file locked, as far as the kernel tells us."""
    found = os.fstat(fd)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    pids = []
    with contextlib.suppress(OSError), open("/proc/locks") as lines:
        for line in lines:
            words = line.split()
            if words[1] == "FLOCK" and words[5] == place:
                pids.append(int(words[4]))
    names = [f"pid {pid} ({_command(pid)})" for pid in pids if pid > 0]
    return " and ".join(names) or "a process that cannot be seen from here (another container?)"


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "it has ended"


def write_at(fd: int, data: Any, offset: int) -> int:
    """Write all of a bytes-like object at an offset; returns the offset after it."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _CHUNK):
        rest = view[start : start + _CHUNK]
        while rest:
            done = os.pwrite(fd, rest, offset)
            offset += done
            rest = rest[done:]
    return offset


def _rename_new(folder: int, old: str, new: str) -> None:
    """Rename within a folder, never over a name that exists."""
    done = _LIBC.renameat2(folder, old.encode(), folder, new.encode(), _RENAME_NOREPLACE)
    if done == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), new)
    # Such a file system (NFS) cannot refuse in the same step: look first.
    with contextlib.suppress(FileNotFoundError):
        os.stat(new, dir_fd=folder, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
