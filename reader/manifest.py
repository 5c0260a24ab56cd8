# SPDX-License-Identifier: Apache-2.0
"""The manifest of an output folder: one JSON line for each sample that is whole on the disk.

Lines are only ever appended, each after its sample's bytes are in place, and before the sample is
released in the ring. So a drain that was killed finds what it had written, and a sample that comes
a second time is not written again. A last line that was torn by a kill or a full disk is cut off.
Drains that share a folder share its manifest: what a mate added is read before each look.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from reader.folder import Folder, lock_file, lock_holders
from shmconn.errors import OptionError
from shmconn.identity import Identity

FILE_NAME = "manifest.jsonl"
_BEGINNING = b'{"handle":'
# Whoever may read the file may lock it, and a mate may be stopped: no longer than this, in seconds.
LOCK_WAIT_S = 2.0
_LOCK_LOOKS_S = (0.0005, 0.02)  # between two looks, growing


@dataclass(frozen=True)
class Entry:
    """A sample on the disk.

    Attributes:
        handle: names the sample for ever.
        request_id: of the request that yielded it.
        tag: the name that the sender gave it, or None.
        tokens: its number of tokens.
        file: name of the file in the folder.
        bytes: of the file, or of the sample's part of it.
        offset: of that part, 0 for a file of its own.
        token_ids_sha256: first 16 hex digits for its token ids.
        sha256: of the bytes, if checksums were asked for.
        header: what a format needs to describe the sample inside a larger file.
        identity: layers, hidden size and dtype; None in a line of an earlier version.
    """

    handle: str
    request_id: str
    tag: str | None
    tokens: int
    file: str
    bytes: int
    offset: int
    token_ids_sha256: str
    sha256: str | None = None
    header: dict[str, Any] = field(default_factory=dict)
    identity: Identity | None = None


_FIELDS = {item.name for item in fields(Entry)}


class Place(NamedTuple):
    """Where a sample is: all that is kept in memory of a line."""

    file: str
    bytes: int
    offset: int


class Manifest:
    """Reads the manifest of a folder, and appends to it.

    What is appended is not kept in memory: a sample is released right after, and so never comes
    again. Only a drain that died in between leaves one that does: the next drain of the folder
    reads its line here, or a mate that shares the folder and has it delivered at once.

    Args:
        folder: the output folder.
        tags: keep tags as well, for `find_tag`.

    Raises:
        OptionError: what has the manifest's name is none, and is left as it is.

    Attributes:
        damaged: lines that could not be read.
    """

    def __init__(self, folder: Folder, *, tags: bool = False) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._places: dict[bytes, Place] = {}
        self._tags: dict[bytes, Place] | None = {} if tags else None
        self._file = (0, 0)  # device and inode of what was read
        self._read_to = 0  # bytes of it
        self._identity: Identity | None = None
        self._recorded = False  # the file says so, and a mate that began with us would see it
        self.damaged = 0
        try:
            with self._locked() as fd:
                self._check_ours(fd)
                self._repair(fd)
                end = os.fstat(fd).st_size
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise self._not_ours("it is no regular file") from None
        with self._opened() as fd:
            # Without the lock: whole lines are never changed, and there may be millions.
            self._read(fd, end)

    def entries(self) -> Iterator[Entry | None]:
        """All lines of the file, in order; None for one that cannot be read."""
        with self._opened() as fd, os.fdopen(os.dup(fd), "rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else a mate is writing it
                    yield _parse(line)

    def find(self, handle: str) -> Place | None:
        """Where a sample is that another drain wrote; the last line of a handle counts.

        Raises:
            OSError: the disk refused, or another process keeps the file locked.
        """
        with self._opened() as fd:
            found = os.fstat(fd)
        if (found.st_dev, found.st_ino, found.st_size) != (*self._file, self._read_to):
            with self._locked() as fd:
                self._read(fd, os.fstat(fd).st_size)
        return self._places.get(_key(handle))

    def files(self) -> set[str]:
        """Names of the files that other drains wrote samples to."""
        return {place.file for place in self._places.values()}

    def admit(self, identity: Identity) -> None:
        """Take a sample's identity for the folder's, unless it has one; to be called after `find`.

        Raises:
            OptionError: the folder holds samples of another; names both.
        """
        with self._lock:
            self._compare(identity)

    def _compare(self, identity: Identity) -> None:
        self._identity = self._identity or identity
        if identity != self._identity:
            raise OptionError(
                f"{self._folder.path} holds samples of {self._identity}; this one is of "
                f"{identity}. One folder holds one kind: drain into another with --to, and with "
                "this group as --group, so that what it has not read goes there"
            )

    def find_tag(self, tag: str, token_ids_sha256: str) -> Place | None:
        """Where an earlier sample with the same tag and the same token ids is."""
        return (self._tags or {}).get(_key(tag + "\0" + token_ids_sha256))

    def append(self, entry: Entry) -> None:
        """Add a line, whole or not at all.

        Raises:
            OSError: the disk refused, or another process keeps the file locked; nothing was added.
            OptionError: as `admit`, where a mate was quicker.
        """
        values = dict(vars(entry))
        if entry.sha256 is None:
            del values["sha256"]
        if not entry.header:
            del values["header"]
        if entry.identity is None:
            del values["identity"]
        else:
            values["identity"] = entry.identity._asdict()
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        with self._locked() as fd:
            self._repair(fd)
            end = os.lseek(fd, 0, os.SEEK_END)
            self._read(fd, end)
            if entry.identity is not None:
                self._compare(entry.identity)
            try:
                written = os.write(fd, line)
                if written != len(line):
                    # A short write is how a full disk shows first; the second try names the error.
                    os.write(fd, line[written:])
                    raise OSError(f"{FILE_NAME}: a line of {len(line)} bytes was cut")
                if self._folder.fsync:
                    os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, end)
                raise
            self._read_to = end + len(line)
            self._recorded = self._recorded or entry.identity is not None
            self._remember_tag(entry)

    def _read(self, fd: int, end: int) -> None:
        """Read the whole lines that were added since, up to an offset."""
        found = os.fstat(fd)
        if self._file != (found.st_dev, found.st_ino) or end < self._read_to:
            # Another file under the name: what the first one said holds no more.
            self._file, self._read_to = (found.st_dev, found.st_ino), 0
            self._places.clear()
            self._tags = None if self._tags is None else {}
            self._identity, self._recorded = None, False
        with os.fdopen(os.dup(fd), "rb") as lines:
            lines.seek(self._read_to)
            while self._read_to < end and (line := lines.readline()).endswith(b"\n"):
                self._read_to += len(line)
                entry = _parse(line)
                if entry is None:
                    self.damaged += 1
                    continue
                self._places[_key(entry.handle)] = Place(entry.file, entry.bytes, entry.offset)
                if entry.identity is not None and not self._recorded:
                    self._identity, self._recorded = entry.identity, True
                self._remember_tag(entry)

    def _remember_tag(self, entry: Entry) -> None:
        if self._tags is not None and entry.tag is not None:
            key = _key(entry.tag + "\0" + entry.token_ids_sha256)
            self._tags[key] = Place(entry.file, entry.bytes, entry.offset)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The manifest, opened anew for each use: so it follows a folder that came back."""
        fd = self._folder.open(FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The manifest, locked where the file system has locks.

        Raises:
            OSError: it stays locked; names who has it.
        """
        deadline = time.monotonic() + LOCK_WAIT_S
        if not self._lock.acquire(timeout=LOCK_WAIT_S):
            raise self._busy()
        try:
            with self._opened() as fd:
                pause, longest = _LOCK_LOOKS_S
                while lock_file(fd) is False:
                    if time.monotonic() >= deadline:
                        raise self._busy()
                    time.sleep(pause)
                    pause = min(2 * pause, longest)
                yield fd
        finally:
            self._lock.release()

    def _busy(self) -> OSError:
        with self._opened() as fd:
            who = lock_holders(fd)
        return OSError(
            errno.EBUSY,
            f"{FILE_NAME} has been locked for {LOCK_WAIT_S:g} s by {who}, which must go on or end",
        )

    def _check_ours(self, fd: int) -> None:
        """Refuse a stranger's file before its last line is cut off; a torn first line is ours."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise self._not_ours("it is no regular file")
        start = os.pread(fd, len(_BEGINNING), 0)
        if not _BEGINNING.startswith(start):
            raise self._not_ours("no drain wrote its first line")

    def _not_ours(self, why: str) -> OptionError:
        return OptionError(
            f"{self._folder.path}/{FILE_NAME} cannot be used as a drain's manifest: {why}; move it "
            "away, or choose another folder"
        )

    @staticmethod
    def _repair(fd: int) -> None:
        """Cut off a last line without its end; under the lock, its writer is dead."""
        end = os.lseek(fd, 0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 4096)
            block = os.pread(fd, position - start, start)
            found = block.rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position != end:
            os.ftruncate(fd, position)


def _key(text: str) -> bytes:
    """16 bytes instead of a text, since there may be millions."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


def _parse(line: bytes) -> Entry | None:
    """An entry from its line; None if no drain wrote it."""
    try:
        values = json.loads(line)
        if "identity" in values:
            values["identity"] = Identity.of_values(values["identity"])
        entry = Entry(**{key: value for key, value in values.items() if key in _FIELDS})
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    texts = (entry.handle, entry.request_id, entry.file, entry.token_ids_sha256)
    numbers = (entry.tokens, entry.bytes, entry.offset)
    whole = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) and number >= 0 for number in numbers)
        and isinstance(entry.tag, str | None)
        and isinstance(entry.header, dict)
        and "/" not in entry.file
    )
    return entry if whole else None
