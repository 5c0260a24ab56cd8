# SPDX-License-Identifier: Apache-2.0
"""Files of /dev/shm: create, reserve, map, check, list, unlink.

Everything found in a segment is untrusted until it is checked against the size that the kernel
tells. A name of a ring carries its generation and is never used twice; the name of a registry
lives on, so it is compared by (device, inode).
"""

import contextlib
import errno
import mmap
import os
import re
import resource
import stat
from collections.abc import Iterator
from typing import NamedTuple

import posix_ipc

from shmconn import layout
from shmconn.errors import (
    AccessDenied,
    LayoutMismatch,
    NoDescriptors,
    NoMemory,
    NoSpace,
    OptionError,
    RingMissing,
    SegmentCorrupt,
)
from shmconn.handle import format_size
from shmconn.headroom import headroom
from shmconn.layout import RingShape
from shmconn.liveness import LockFile
from shmconn.words import Words, step

_RING = re.compile(r"shmconn\.([A-Za-z0-9_-]{1,64})\.([0-9a-f]{32})")
_REGISTRY = re.compile(r"shmconn\.([A-Za-z0-9_-]{1,64})")
_FILES_GONE = {
    "This process already has the maximum number of files open": errno.EMFILE,
    "The system limit on the total number of open files has been reached": errno.ENFILE,
}
# posix_fallocate of tmpfs cannot be interrupted: 1 GiB is a fifth of a second.
_RESERVE_CHUNK = 1 << 30


class ShmFile:
    """An open segment: a descriptor to reserve and map by, and a lock file beside it."""

    # Kept here for __del__ at interpreter exit, when the module's names are gone.
    _close_fd = staticmethod(os.close)

    def __init__(self, name: str, flags: int = 0, mode: int = 0o600) -> None:
        """Opens ``/dev/shm/NAME``, or makes it empty if ``flags`` say so.

        Raises:
            RingMissing: it is not there.
            FileExistsError: it is there, and ``flags`` ask for a new one.
            AccessDenied: it is another user's.
        """
        self.name = name
        step("open")
        try:
            memory = posix_ipc.SharedMemory(f"/{name}", flags=flags, mode=mode)
        except posix_ipc.ExistentialError as error:
            if flags & posix_ipc.O_CREX == posix_ipc.O_CREX:
                raise FileExistsError(errno.EEXIST, "segment exists", name) from error
            raise RingMissing(f"there is no segment {name!r} in {layout.SHM_DIR}") from error
        except (posix_ipc.PermissionsError, PermissionError) as error:
            raise AccessDenied(_access_text(name)) from error
        except (OSError, ValueError) as error:
            # /dev/shm is everybody's: a link or a folder may stand where a segment should.
            if _is_regular(name):
                raise
            raise SegmentCorrupt(name, "type", "is not a regular file") from error
        self._fd: int = memory.fd
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise SegmentCorrupt(name, "type", "is not a regular file")
            if flags:
                os.fchmod(self._fd, mode)
            self.locks = LockFile(self._fd)
        except BaseException:
            # Not by os.close: __del__ would close the number again, maybe another's by then.
            self.close_descriptor()
            raise

    @property
    def size(self) -> int:
        """Bytes, as the kernel has it."""
        return os.fstat(self._fd).st_size

    @property
    def mode(self) -> int:
        """Who may open it, as chmod has it."""
        return stat.S_IMODE(os.fstat(self._fd).st_mode)

    def current(self) -> bool:
        """Whether the name still leads to this very file."""
        step("stat")
        mine = os.fstat(self._fd)
        try:
            named = os.stat(path_of(self.name), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return mine.st_nlink > 0 and (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)

    def reserve(self, size: int, what: str) -> None:
        """Empties the file, which nobody uses, then takes ``size`` bytes of real memory for it.

        ``ftruncate`` would succeed on a full tmpfs, and the first touch would be SIGBUS.

        Raises:
            NoSpace: /dev/shm, or the memory limit of the control group, is too small.
        """
        step("reserve")
        os.ftruncate(self._fd, 0)
        room = headroom()
        if size > room.free:
            raise NoSpace(room.refusal(what, size))
        done = 0
        try:
            while done < size:
                chunk = min(_RESERVE_CHUNK, size - done)
                os.posix_fallocate(self._fd, done, chunk)
                done += chunk
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            room = headroom()
            raise NoSpace(room._replace(shm=room.shm + done).refusal(what, size)) from error

    def map(self, length: int) -> mmap.mmap:
        """The first ``length`` bytes; page tables are filled at once.

        Raises:
            NoMemory: this process may map no more.
        """
        step("map")
        try:
            return mmap.mmap(self._fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise NoMemory(_memory_text(self.name, length)) from error

    def close_descriptor(self) -> None:
        """Closes the descriptor to map by; the locks stay."""
        if self._fd >= 0:
            self._close_fd(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Closes both descriptors, which drops the locks."""
        self.close_descriptor()
        self.locks.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close_descriptor()


class RingSegment:
    """A ring that was mapped and checked. All its offsets come from ``shape``."""

    def __init__(self, file: ShmFile, *, whole: bool) -> None:
        """Checks and maps an open ring: its control area, or the ``whole`` of it.

        Raises:
            SegmentCorrupt: a field is out of its bounds, or the file is truncated.
            LayoutMismatch: another version of shmconn made it.
        """
        self.file = file
        self.name, self.generation = split_ring_name(file.name)
        size = file.size
        if size < layout.SEQ:
            raise SegmentCorrupt(file.name, "size", f"is {size} bytes: the file is truncated")
        head = Words(file.map(layout.SEQ))
        self.shape = self._check(head, size)
        self.dtype = layout.DTYPE_NAMES[head.load(layout.DTYPE)]
        self.hidden_size = head.load(layout.HIDDEN_SIZE)
        count = head.load(layout.LAYERS)
        self.layer_ids = tuple(head.load(layout.LAYER_IDS + 8 * i) for i in range(count))
        self.registry_id = head.read(layout.RING_REGISTRY_ID, 16)
        # Each mapping takes a descriptor.
        del head
        self.map = file.map(self.shape.size if whole else self.shape.data)
        self.words = Words(self.map)
        file.close_descriptor()

    def _check(self, head: Words, size: int) -> RingShape:
        def bounded(field: str, at: int, low: int, high: int) -> int:
            value = head.load(at)
            if not low <= value <= high:
                detail = f"is {value}, allowed are {low} to {high}"
                raise SegmentCorrupt(self.file.name, field, detail)
            return value

        bounded("magic", layout.MAGIC, layout.RING_MAGIC, layout.RING_MAGIC)
        version = head.load(layout.VERSION_AT)
        if version != layout.VERSION:
            raise LayoutMismatch(
                f"ring {self.name!r} has layout version {version}, this shmconn reads "
                f"{layout.VERSION}: use the same shmconn in vLLM and in the reader"
            )
        page_size = bounded("page size", layout.PAGE_SIZE, layout.MIN_PAGE, 1 << 40)
        if page_size & (page_size - 1):
            raise SegmentCorrupt(self.file.name, "page size", f"is {page_size}, no power of two")
        shape = RingShape(
            page_size,
            bounded("pages", layout.PAGES, 1, 1 << 40),
            bounded("slots", layout.SLOTS, 1, layout.MAX_SLOTS),
        )
        bounded("size", layout.SIZE_AT, shape.size, shape.size)
        if size != shape.size:
            raise SegmentCorrupt(
                self.file.name, "size", f"is {size} bytes, its header says {shape.size}"
            )
        bounded("data offset", layout.DATA, shape.data, shape.data)
        bounded("largest sample", layout.MAX_SAMPLE, shape.max_sample, shape.max_sample)
        bounded("dtype", layout.DTYPE, 1, max(layout.DTYPE_NAMES))
        bounded("hidden size", layout.HIDDEN_SIZE, 1, 1 << 24)
        layers = bounded("layers", layout.LAYERS, 1, layout.MAX_LAYERS)
        for index in range(layers):
            bounded("layer id", layout.LAYER_IDS + 8 * index, 0, 1 << 20)
        bounded("engine id length", layout.ENGINE_ID_LENGTH, 0, layout.ENGINE_ID_BYTES)
        bounded("host length", layout.HOST_LENGTH, 0, layout.HOST_BYTES)
        if head.read(layout.GENERATION, 16).hex() != self.generation:
            raise SegmentCorrupt(self.file.name, "generation", "is not that of its name")
        return shape

    @classmethod
    def attach(cls, file_name: str, *, whole: bool) -> "RingSegment | None":
        """Opens a ring by the name of its file; None while it is being made or is gone.

        Raises:
            SegmentCorrupt, LayoutMismatch, AccessDenied: see the classes.
        """
        try:
            file = ShmFile(file_name)
        except RingMissing:
            return None
        try:
            if file.size >= layout.SEQ:
                made = Words(file.map(layout.SEQ)).load(layout.MAGIC) != 0
            else:
                # A ring without its bytes is being made while its producer lives, or was left
                # half made; a truncated one is told apart by nobody holding P.
                made = file.size > 0 and not file.locks.held(layout.LOCK_P)
            if not made:
                file.close()
                return None
            return cls(file, whole=whole)
        except BaseException:
            file.close()
            raise

    def text(self, at: int, length_at: int, limit: int) -> str:
        """A text of the header, for people."""
        return self.words.read(at, min(self.words.load(length_at), limit)).decode(errors="replace")

    def producer_alive(self) -> bool:
        """Whether somebody else holds the producer's lock."""
        return self.file.locks.held(layout.LOCK_P)


class RingName(NamedTuple):
    """The two parts of the file name of a ring."""

    name: str
    generation: str


def path_of(file_name: str) -> str:
    """Where the kernel shows a segment."""
    return f"{layout.SHM_DIR}/{file_name}"


def registry_file(name: str) -> str:
    """File name of a registry."""
    return f"{layout.PREFIX}{name}"


def ring_file(name: str, generation: str) -> str:
    """File name of a ring."""
    return f"{layout.PREFIX}{name}.{generation}"


def split_ring_name(file_name: str) -> RingName:
    """Name and generation out of a ring's file name."""
    match = _RING.fullmatch(file_name)
    if match is None:
        raise OptionError(f"{file_name!r} is not the file name of a ring")
    return RingName(match[1], match[2])


def ring_files(name: str | None = None) -> list[str]:
    """File names of the rings of one name, or of all."""
    step("list")
    found = (file for file in os.listdir(layout.SHM_DIR) if _RING.fullmatch(file))
    return sorted(file for file in found if name is None or split_ring_name(file).name == name)


def registry_names() -> list[str]:
    """Names of all registries on this host."""
    matches = (_REGISTRY.fullmatch(file) for file in os.listdir(layout.SHM_DIR))
    return sorted(match[1] for match in matches if match)


def unlink(file_name: str) -> bool:
    """Takes the name away; whoever has the segment mapped keeps it.

    Returns:
        Whether the name is gone; another user's file stays (/dev/shm is sticky).
    """
    step("unlink")
    try:
        posix_ipc.unlink_shared_memory(f"/{file_name}")
    except posix_ipc.ExistentialError:
        return True
    except posix_ipc.PermissionsError:
        return False
    return True


@contextlib.contextmanager
def descriptors_named(what: str) -> Iterator[None]:
    """Says "too many open files" as an error that names who wants to open one, and what helps.

    Raises:
        NoDescriptors: what runs inside could open no file.
    """
    try:
        yield
    except OSError as error:
        # posix_ipc gives words in place of a number.
        number = error.errno or _FILES_GONE.get(str(error))
        if number not in _FILES_GONE.values() or isinstance(error, NoDescriptors):
            raise
        if number == errno.ENFILE:
            text = "this host may open no more files: raise the sysctl fs.file-max"
        else:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            text = (
                f"this process may have no more than {most} files open: raise that (ulimit -n), or "
                f"close some; /proc/{os.getpid()}/fd shows which they are"
            )
        raise NoDescriptors(f"{what} takes a file descriptor, and {text}") from error


def _is_regular(name: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path_of(name)).st_mode)
    except FileNotFoundError:
        return True


def _memory_text(name: str, length: int) -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        why = "raise the sysctl vm.max_map_count, or free memory of this host"
    else:
        why = (
            f"it may have {format_size(most)} of addresses: raise that (ulimit -v; in systemd "
            "LimitAS=), or make the ring smaller (ring_size)"
        )
    return f"this process cannot map {format_size(length)} of segment {name!r}: {why}"


def _access_text(name: str) -> str:
    try:
        status = os.stat(path_of(name))
        owner = f"it belongs to uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    except OSError:
        owner = f"{layout.SHM_DIR} does not let this user make it"
    return (
        f"segment {name!r} may not be opened by uid {os.getuid()}: {owner}. Run the reader as the "
        "user of vLLM, or start vLLM with the connector option mode=0660 and a common group"
    )
