# SPDX-License-Identifier: Apache-2.0
"""The manifest of an output folder: one JSON line for each sample that is whole on the disk.

Lines are only ever appended, each after its sample's bytes are in place, and before the sample is
released in the ring. So a drain that was killed finds what it had written, and a sample that comes
a second time is not written again. A last line that was torn by a kill or a full disk is cut off.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from reader.folder import Folder
from shmconn.errors import OptionError

FILE_NAME = "manifest.jsonl"
_BEGINNING = b'{"handle":'


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


_FIELDS = {item.name for item in fields(Entry)}


class Place(NamedTuple):
    """Where a sample is: all that is kept in memory of a line."""

    file: str
    bytes: int
    offset: int


class Manifest:
    """Reads the manifest of a folder at the start, and appends to it.

    What is appended is not kept in memory: a sample is released right after, and so never comes
    again. Only a drain that died in between leaves one that does, and the next drain reads it here.

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
        self.damaged = 0
        try:
            with self._opened() as fd:
                self._check_ours(fd)
                self._repair(fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise self._not_ours("it is no regular file") from None
        for entry in self.entries():
            if entry is None:
                self.damaged += 1
                continue
            self._places[_key(entry.handle)] = Place(entry.file, entry.bytes, entry.offset)
            self._remember_tag(entry)

    def entries(self) -> Iterator[Entry | None]:
        """All lines of the file, in order; None for one that cannot be read."""
        with self._opened() as fd, os.fdopen(os.dup(fd), "rb") as lines:
            for line in lines:
                yield _parse(line)

    def find(self, handle: str) -> Place | None:
        """Where a sample is that was there at the start; the last line of a handle counts."""
        return self._places.get(_key(handle))

    def find_tag(self, tag: str, token_ids_sha256: str) -> Place | None:
        """Where an earlier sample with the same tag and the same token ids is."""
        with self._lock:
            return (self._tags or {}).get(_key(tag + "\0" + token_ids_sha256))

    def append(self, entry: Entry) -> None:
        """Add a line, whole or not at all.

        Raises:
            OSError: the disk refused; nothing was added.
        """
        values = dict(vars(entry))
        if entry.sha256 is None:
            del values["sha256"]
        if not entry.header:
            del values["header"]
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        with self._lock, self._opened() as fd:
            self._repair(fd)
            end = os.lseek(fd, 0, os.SEEK_END)
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
            self._remember_tag(entry)

    def _remember_tag(self, entry: Entry) -> None:
        if self._tags is not None and entry.tag is not None:
            key = _key(entry.tag + "\0" + entry.token_ids_sha256)
            self._tags[key] = Place(entry.file, entry.bytes, entry.offset)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The manifest, locked where the file system has locks, opened anew for each use.

        So it follows a folder that vanished and came back.
        """
        fd = self._folder.open(FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

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
        entry = Entry(**{key: value for key, value in values.items() if key in _FIELDS})
    except (ValueError, TypeError, AttributeError):
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
