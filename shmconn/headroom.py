# SPDX-License-Identifier: Apache-2.0
"""How much shared memory can be taken now: by /dev/shm, and by the control groups' limits.

Pages of a tmpfs are charged to the control group of the process that takes them. A group at its
limit answers by killing, not by ENOSPC, so its limit is looked at before.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shmconn import layout
from shmconn.handle import format_size

# What a version of control groups calls its limit, its use, and its page cache.
_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63


@dataclass(frozen=True)
class MemoryLimit:
    """A control group's limit. ``left``: bytes that it still allows; its cache can give way."""

    path: str
    limit: int
    left: int


class Headroom(NamedTuple):
    """Bytes that /dev/shm has free, and the control group that allows least."""

    shm: int
    group: MemoryLimit | None = None

    @property
    def free(self) -> int:
        """Bytes that can be taken."""
        return self.shm if self.group is None else min(self.shm, self.group.left)

    def refusal(self, what: str, size: int) -> str:
        """Why ``size`` bytes cannot be had, and what helps."""
        group = self.group
        if group is not None and group.left < self.shm:
            return (
                f"{what} needs {format_size(size)} of memory; control group {group.path} allows "
                f"{format_size(group.limit)}, of which {format_size(group.left)} are left (shared "
                "memory counts there, and too much of it is a kill, not an error). Make the ring "
                "smaller (ring_size), or give the container more (docker run --memory=..., "
                "Kubernetes resources.limits.memory, systemd MemoryMax=)"
            )
        return (
            f"{what} needs {format_size(size)} in {layout.SHM_DIR}, {format_size(self.shm)} are "
            "free. Make the ring smaller, give the container more (docker run --shm-size=..., or "
            "--ipc=host), or free what `shmconn ls` shows as dead with `shmconn rm`"
        )


def headroom(root: Path = Path("/")) -> Headroom:
    """What can be taken now.

    Args:
        root: the folder of /proc and /sys, for tests.
    """
    status = os.statvfs(layout.SHM_DIR)
    return Headroom(status.f_bavail * status.f_frsize, memory_limit(root))


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Of this process's control groups and their parents the one that leaves least, if any."""
    limits = [
        limit for folder, names in _folders(root) if (limit := _limit(folder, *names)) is not None
    ]
    return min(limits, key=lambda limit: limit.left, default=None)


def _folders(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """Folders of this process's memory groups, each with what its files are called."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        ours = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        for version, top, mounted in mounts:
            if version != ours:
                continue
            folder = top
            # A mount shows the tree below its own root; a container often sees itself as that.
            below = os.path.relpath(path, mounted)
            if not below.startswith(".."):
                folder = top / below
            while True:
                if folder.is_dir():
                    yield folder, _V2 if version == 2 else _V1
                if folder == top:
                    break
                folder = folder.parent


def _mounts(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Where control groups are mounted: version, folder, and the group that the folder shows."""
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        folder = root / fields[4].lstrip("/")
        if kinds[0] == "cgroup2":
            yield 2, folder, fields[3]
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            yield 1, folder, fields[3]


def _limit(
    folder: Path, limit_file: str, used_file: str, cache_keys: tuple[str, ...]
) -> MemoryLimit | None:
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    cache = 0
    for line in _lines(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key in cache_keys and value.isdigit():
            cache += int(value)
    return MemoryLimit(str(folder), limit, max(0, limit - max(0, used - cache)))


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says ``max``."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    # Not every kernel and container shows every file.
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
