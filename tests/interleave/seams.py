# SPDX-License-Identifier: Apache-2.0
"""Tells the scheduler what each step of the shipped code touches, and what it sees.

The methods below only look: each calls the one that ships. Time stands still, names are not
random, and a ring has three groups, three members, two slots: all else is as it is for users.
"""

import mmap
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from interleave.scheduler import Killed, Place, Run
from shmconn import doorbell, layout, segment, words
from shmconn.headroom import Headroom
from shmconn.liveness import LockFile
from shmconn.segment import ShmFile
from shmconn.words import Words

GROUPS, MEMBERS, TOMBSTONES, PAGE = 3, 3, 4, 4096
NAMES: Place = "names"

run: Run | None = None
_tags: dict[int, str] = {}  # inode -> name and how often it was made
_made: dict[str, int] = {}
_there: set[str] = set()


def begin(new: Run | None) -> None:
    """Another schedule, or none; takes away what the last one left in /dev/shm."""
    global run
    run = new
    for name in _there:
        os.unlink(f"{layout.SHM_DIR}/{name}")
    _there.clear()
    _tags.clear()
    _made.clear()
    secrets.begin()
    clock.now = 1000.0


class _Time:
    """Time that stands still; whoever sleeps waits for another actor."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 10**18

    def time(self) -> float:
        return 1e9

    def sleep(self, _: float) -> None:
        if run is None:
            raise AssertionError("only actors may wait")
        run.wait_for("lock")


class _Secrets:
    """Names that depend on who asks, and for the how many-th time."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    def token_bytes(self, count: int) -> bytes:
        who = run.current.name if run is not None and run.current is not None else "setup"
        self._asked[who] = self._asked.get(who, 0) + 1
        return f"{who}{self._asked[who]}".encode().ljust(count, b".")[:count]

    def begin(self) -> None:
        self._asked.clear()


clock = _Time()
secrets = _Secrets()


class TaggedMap(mmap.mmap):
    """A mapping that knows which file it is of."""

    tag: str

    def __new__(cls, fd: int, *args: Any, **options: Any) -> "TaggedMap":
        made = super().__new__(cls, fd, *args, **options)
        made.tag = _tags.get(os.fstat(fd).st_ino, "?")
        return made


class _Os:
    """Stands for the module ``os`` in segment.py: lists our own names without the host's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: str) -> list[str]:
        return sorted(_there)


class _Mmap:
    """Stands for the module ``mmap`` in segment.py."""

    MAP_SHARED = mmap.MAP_SHARED
    mmap = TaggedMap
    # Tiny segments are in memory anyway.
    MAP_POPULATE = 0


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the seams in, until ``patch`` is undone."""
    _shrink(patch)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("shmconn."):
            for name, stand_in in (("time", clock), ("secrets", secrets)):
                if isinstance(getattr(module, name, None), ModuleType):
                    patch.setattr(module, name, stand_in)
    patch.setattr(segment, "mmap", _Mmap)
    patch.setattr(segment, "os", _Os())
    # Doorbells only save time, and time stands still.
    patch.setattr(doorbell.Doorbell, "open", lambda self: False)
    patch.setattr(doorbell, "unlink", lambda name: True)
    patch.setattr(doorbell.Doorbell, "post", lambda self: None)
    patch.setattr(doorbell.Doorbell, "clear", lambda self: None)
    patch.setattr(segment, "headroom", lambda: Headroom(1 << 40))
    _see_words(patch)
    _see_files(patch)
    patch.setattr(sys, "unraisablehook", _unraisable)
    words.watch(_step)


def _shrink(patch: pytest.MonkeyPatch) -> None:
    sizes = {
        "GROUPS": GROUPS,
        "MEMBERS": MEMBERS,
        "TOMBSTONES": TOMBSTONES,
        "MIN_PAGE": PAGE,
        "SEQ": layout.TOMBSTONE_TABLE + TOMBSTONES * layout.TOMBSTONE,
        "REGISTRY_SIZE": layout.MEMBER_ROWS + GROUPS * MEMBERS * layout.MEMBER_ROW,
    }
    for name, value in sizes.items():
        patch.setattr(layout, name, value)


def _step(name: str) -> None:
    if run is not None:
        run.step(name)


def _unraisable(report: Any) -> None:
    if not isinstance(report.exc_value, Killed):
        sys.__unraisablehook__(report)


def _acting() -> Run | None:
    """The schedule, if it is an actor that runs here: not what comes before and after."""
    return run if run is not None and run.current is not None else None


def _about(reads: tuple[Place, ...], writes: tuple[Place, ...] = (), value: Any = None) -> None:
    """Says what the next step touches."""
    acting = _acting()
    if acting is not None:
        acting.reads, acting.writes, acting.value = reads, writes, value


def touch(step: str, reads: Place, writes: Place, value: Any) -> None:
    """A step that is no word's: the pages of a sample are filled, or looked at."""
    _about((reads,) if reads else (), (writes,) if writes else (), value)
    words.step(step)


def _saw(*what: Any) -> None:
    acting = _acting()
    if acting is not None:
        acting.observe(*what)


def _see_words(patch: pytest.MonkeyPatch) -> None:
    load, store, copy, column = Words.load, Words.store, Words.copy, Words.column
    read, write, init = Words.read, Words.write, Words.__init__

    def see_init(self: Words, buffer: Any) -> None:
        init(self, buffer)
        self.tag = getattr(buffer, "tag", "?")  # type: ignore[attr-defined]

    def see_load(self: Any, offset: int) -> int:
        acting = _acting()
        if acting is None:
            return load(self, offset)
        acting.reads = ((self.tag, offset),)
        value = load(self, offset)
        acting.observe(offset, value)
        return value

    def see_store(self: Any, offset: int, value: int) -> None:
        _about((), ((self.tag, offset),), value)
        store(self, offset, value)

    def see_copy(self: Any, offset: int, count: int) -> Any:
        places = tuple((self.tag, offset + 8 * word) for word in range(count))
        _about(places)
        value: np.ndarray = copy(self, offset, count)
        _saw(offset, value.tobytes())
        return value

    def see_column(self: Any, offset: int, stride: int, count: int) -> Any:
        _about(tuple((self.tag, offset + stride * row) for row in range(count)))
        value: np.ndarray = column(self, offset, stride, count)
        _saw(offset, value.tobytes())
        return value

    def see_read(self: Any, offset: int, length: int) -> bytes:
        value = read(self, offset, length)
        acting = _acting()
        if acting is not None and acting.current is not None:
            # No step, but who writes there must know of it.
            acting.touched.note(acting.current.name, ((self.tag, offset),), ())
            acting.observe(offset, value)
        return value

    def see_write(self: Any, offset: int, data: bytes) -> None:
        _about((), ((self.tag, offset),), data)
        write(self, offset, data)

    for name, method in (
        ("__init__", see_init),
        ("load", see_load),
        ("store", see_store),
        ("copy", see_copy),
        ("column", see_column),
        ("read", see_read),
        ("write", see_write),
    ):
        patch.setattr(Words, name, method)


def _lock_places(file: LockFile, offset: int, length: int = 1) -> tuple[Place, ...]:
    tag = _tags.get(file.identity[1], "?")
    return tuple((tag, "lock", offset + index) for index in range(length))


def _see_files(patch: pytest.MonkeyPatch) -> None:
    try_lock, unlock, held = LockFile.try_lock, LockFile.unlock, LockFile.held
    close, init = LockFile.close, LockFile.__init__
    open_file, reserve, current = ShmFile.__init__, ShmFile.reserve, ShmFile.current
    unlink, ring_files = segment.unlink, segment.ring_files

    def any_lock(file: LockFile) -> Place:
        return (_tags.get(file.identity[1], "?"), "any lock")

    def see_init(self: LockFile, fd: int) -> None:
        init(self, fd)
        if run is not None and run.current is not None:
            run.current.files.append(self)
        elif run is not None and run.owner is not None:
            run.owner.append(self)

    def see_try_lock(self: LockFile, offset: int) -> bool:
        places = _lock_places(self, offset)
        _about((any_lock(self),), places)
        got = try_lock(self, offset)
        _saw("lock", offset, got)
        if run is not None:
            if got:
                run.note_lock(places[0], self)
            else:
                run.refused = places[0]
        return got

    def see_unlock(self: LockFile, offset: int) -> None:
        places = _lock_places(self, offset)
        _about((any_lock(self),), places)
        unlock(self, offset)
        if run is not None:
            run.forget_lock(places[0])

    def see_held(self: LockFile, offset: int, length: int = 1) -> bool:
        if length > 64:
            # Conflicts with every lock call of the file, which do not conflict with each other.
            _about((), (any_lock(self),))
        else:
            _about(_lock_places(self, offset, length))
        answer = held(self, offset, length)
        _saw("held", offset, answer)
        return answer

    def see_close(self: LockFile) -> None:
        if run is not None and self.fd >= 0:
            mine = run.locks_of(self)
            _about((any_lock(self),) if mine else (), mine)
            close(self)
            run.forget_locks(self)
        else:
            close(self)

    def see_open(self: ShmFile, name: str, flags: int = 0, mode: int = 0o600) -> None:
        places = (NAMES, ("name", name))
        _about(() if flags else places, places if flags else ())
        try:
            open_file(self, name, flags, mode)
        except BaseException as error:
            _saw("open", type(error).__name__)
            raise
        inode = os.fstat(self._fd).st_ino
        if flags or inode not in _tags:
            _made[name] = _made.get(name, 0) + 1
            _there.add(name)
            _tags[inode] = f"{name}#{_made[name]}"
            if run is not None:
                run.remember((("name", name),), _tags[inode])
        _saw("open", _tags[inode])

    def see_reserve(self: ShmFile, size: int, what: str) -> None:
        _about((), (NAMES,))
        reserve(self, size, what)
        if run is not None:
            run.remember((("size", _tags[os.fstat(self._fd).st_ino]),), size)

    def see_current(self: ShmFile) -> bool:
        _about((("name", self.name),))
        answer = current(self)
        _saw("current", answer)
        return answer

    def see_size(self: ShmFile) -> int:
        size = os.fstat(self._fd).st_size
        _saw("size", size)
        return size

    def see_unlink(file_name: str) -> bool:
        _about((), (NAMES, ("name", file_name)))
        gone = unlink(file_name)
        _there.discard(file_name)
        if run is not None:
            run.remember((("name", file_name),), 0)
        return gone

    def see_ring_files(name: str | None = None) -> list[str]:
        _about((NAMES,))
        found: list[str] = ring_files(name)
        _saw("files", tuple(found))
        return found

    for name, method in (
        ("__init__", see_init),
        ("try_lock", see_try_lock),
        ("unlock", see_unlock),
        ("held", see_held),
        ("close", see_close),
    ):
        patch.setattr(LockFile, name, method)
    patch.setattr(ShmFile, "__init__", see_open)
    patch.setattr(ShmFile, "reserve", see_reserve)
    patch.setattr(ShmFile, "current", see_current)
    patch.setattr(ShmFile, "size", property(see_size))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("shmconn."):
            if getattr(module, "unlink", None) is unlink:
                patch.setattr(module, "unlink", see_unlink)
            if getattr(module, "ring_files", None) is ring_files:
                patch.setattr(module, "ring_files", see_ring_files)
