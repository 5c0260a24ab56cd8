# SPDX-License-Identifier: Apache-2.0
"""Rings in use whose names were removed from /dev/shm.

Whoever has such a ring open goes on with it; nobody else can find it, and the kernel gives a file
without a name no new one. So each end says it once, and who looks for a ring is told of those that
live without a name.
"""

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shmconn import layout
from shmconn.errors import OptionError
from shmconn.liveness import LockFile
from shmconn.segment import ShmFile, path_of, split_ring_name
from shmconn.words import Words

CAUSE = "by hand (rm), or by logind at the last logout of the user that it belongs to (RemoveIPC)"
REMEDY = (
    "restart vLLM, as a system user, with RemoveIPC=no in logind.conf, or after `loginctl "
    "enable-linger USER` (`shmconn doctor` says whether logind removes shared memory here)"
)

_log = logging.getLogger("shmconn")
_LOOK_EVERY_S = 1.0
_DELETED = " (deleted)"  # what the kernel puts behind a name that is gone


def unlinked(*files: ShmFile) -> list[str]:
    """Names of those files that have lost theirs."""
    return [file.name for file in files if file.locks.unlinked()]


class NameWatch:
    """Says once that names are gone.

    Args:
        who: whose names they are, and what that means for others.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._look_at = 0.0  # monotonic seconds

    def look(self, gone: Callable[[], list[str]]) -> None:
        """Looks, at most once a second.

        Args:
            gone: the names that are gone.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        if names := gone():
            self._look_at = float("inf")
            paths = ", ".join(map(path_of, names))
            _log.warning("%s: %s was removed %s. To mend it %s", self._who, paths, CAUSE, REMEDY)


@dataclass(frozen=True)
class UnlinkedRing:
    """A ring without a name whose producer lives. ``pid`` is the producer's."""

    name: str
    generation: str
    pid: int

    @property
    def text(self) -> str:
        """What it is, for people."""
        return (
            f"ring {self.name!r} of pid {self.pid} is in use, but its file was removed from "
            f"{layout.SHM_DIR} {CAUSE}, so that it cannot be joined"
        )


def unlinked_rings(name: str | None = None) -> list[UnlinkedRing]:
    """Rings without a name, of all or of one ring name, in the processes that we may look into."""
    found: dict[str, UnlinkedRing] = {}
    for link, file_name in _links():
        # Another file than a ring; or closed meanwhile.
        with contextlib.suppress(OptionError, OSError):
            ring, generation = split_ring_name(file_name)
            if file_name in found or name not in (None, ring):
                continue
            pid = _producer(link)
            if pid is not None:
                found[file_name] = UnlinkedRing(ring, generation, pid)
    return sorted(found.values(), key=lambda ring: (ring.name, ring.generation))


def _links() -> Iterator[tuple[str, str]]:
    """Descriptors of segments without a name: the link in /proc, and the name that it had."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # Another user's, or ended.
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(FileNotFoundError):
                    folder, _, name = os.readlink(link).rpartition("/")
                    if folder == layout.SHM_DIR and name.endswith(_DELETED):
                        yield link, name.removesuffix(_DELETED)


def _producer(link: str) -> int | None:
    """The pid that a ring's header names, if the producer lives."""
    fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    try:
        locks = LockFile(fd)
        try:
            if not locks.unlinked() or not locks.held(layout.LOCK_P):
                return None
        finally:
            locks.close()
        if os.fstat(fd).st_size < layout.SEQ:
            return None
        return Words(mmap.mmap(fd, layout.SEQ)).load(layout.PRODUCER_PID)
    finally:
        os.close(fd)
