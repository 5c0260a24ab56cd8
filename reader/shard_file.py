# SPDX-License-Identifier: Apache-2.0
"""One shard: a safetensors file that samples are added to until it is sealed.

::

    | length H, 8 bytes | H bytes for the header, spaces until sealed | regions, one per sample |
    region: token ids (int64), states, up to 63 bytes of padding

The file is called ``shard-00000.safetensors.part`` until it is sealed: then the header is written
into the room that was kept for it and the file is renamed. A region that was given out and never
used, and each padding, become tensors ``gap.N``, since the format allows no holes. What a killed
drain had added is known from the manifest, which has a line for each sample that is whole.
"""

import contextlib
import errno
import json
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

from reader.folder import Folder, lock_holders, write_at
from reader.manifest import Entry
from reader.sinks.safetensors import DTYPES
from shmconn.layout import DTYPE_BYTES

PART = ".part"
SHARD_FORMAT = "shmconn-shard-"  # and its version
NAME = re.compile(r"shard-(\d{5,9})\.safetensors(\.part)?")
_ALIGNMENT = 64  # bytes; of each region
_LENGTH = 8
_GAP_ROOM = 2 * 90  # header bytes kept per sample for its padding and for an unused region

log = logging.getLogger("shmconn.drain")


@dataclass(frozen=True)
class Region:
    """Where a sample's bytes go: ``size`` bytes at ``offset`` in the file."""

    offset: int
    size: int


def shard_name(number: int) -> str:
    """The name of a sealed shard."""
    return f"shard-{number:05d}.safetensors"


def region_size(data: int) -> int:
    """Bytes of a region that holds so much data."""
    return -(-data // _ALIGNMENT) * _ALIGNMENT


def header_bytes(metadata: dict[str, str]) -> int:
    """Room that a sample needs in the header, at most."""
    # Metadata is JSON in a JSON string, and each of its own quotes is escaped once more.
    return len(json.dumps(json.dumps(metadata))) + 400 + _GAP_ROOM


class Shard:
    """A shard that is being written. The sink that owns it guards it with its lock.

    Attributes:
        name: of the file, once it is sealed.
        entries: lines of the manifest for the samples that are whole.
        writing: regions that were given out and are not whole yet.
        full: nothing more is added.
        announced: it was counted as a file.
    """

    def __init__(self, folder: Folder, fd: int, name: str, header: int) -> None:
        self.name = name
        self.entries: list[Entry] = []
        self.writing = 0
        self.full = False
        self.announced = False
        self._folder = folder
        self._fd = fd
        self._header = header
        self._header_used = 1024
        self.tail = _LENGTH + header

    @classmethod
    def create(cls, folder: Folder, number: int, header: int) -> "Shard":
        """A new shard.

        Args:
            folder: where.
            number: of the shard.
            header: bytes to keep for the header; rounded up so that regions are aligned.

        Raises:
            FileExistsError: the number is another drain's.
            OSError: the disk refused.
        """
        header = region_size(header + _LENGTH) - _LENGTH
        name = shard_name(number)
        fd = folder.open(name + PART, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if folder.lock(fd, name + PART) is False:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name + PART)
            if folder.exists(name):
                # A mate's, sealed: it had this number, and its .part gave the name free.
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            # The room for the header is taken now: a full disk must not stop the sealing.
            write_at(fd, header.to_bytes(_LENGTH, "little") + b" " * header, 0)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                if folder.lock(fd, name + PART) is not False:
                    os.unlink(name + PART, dir_fd=folder.fd)
            os.close(fd)
            raise
        return cls(folder, fd, name, header)

    @classmethod
    def recover(
        cls, folder: Folder, number: int, entries: list[Entry], *, surely: bool = False
    ) -> "Shard | None":
        """The shard that a dead drain was writing; None if it lives or left nothing whole.

        Args:
            folder: where.
            number: of the shard.
            entries: lines of the manifest for it.
            surely: leave it alone where locks are refused, and so nobody knows whether it lives.
        """
        name = shard_name(number)
        try:
            fd = folder.open(name + PART, os.O_RDWR)
        except FileNotFoundError:
            return None  # sealed just now
        locked = folder.lock(fd, name + PART)
        if locked is False or (surely and locked is None):
            if locked is False:
                log.info("%s is being written by %s", name + PART, lock_holders(fd))
            os.close(fd)
            return None
        header = int.from_bytes(os.pread(fd, _LENGTH, 0), "little")
        shard = cls(folder, fd, name, header)
        size = os.fstat(fd).st_size
        for entry in entries:
            whole = shard.tail <= entry.offset and entry.offset + entry.bytes <= size
            if whole and set(entry.header) == {"dtype", "shape", "metadata"}:
                shard.entries.append(entry)
                shard._header_used += header_bytes(entry.header["metadata"])
        if not shard.entries:
            os.unlink(name + PART, dir_fd=folder.fd)
            os.close(fd)
            return None
        shard.announced = True
        ends = (entry.offset + region_size(entry.bytes) for entry in shard.entries)
        shard.tail = max(ends)
        return shard

    @property
    def fd(self) -> int:
        """The open file."""
        return self._fd

    def holds(self, offset: int) -> bool:
        """Whether a whole sample is at the offset."""
        return any(entry.offset == offset for entry in self.entries)

    def has_room(self, metadata: dict[str, str], target: int) -> bool:
        """Whether a sample may be added to a shard that should have ``target`` bytes."""
        used = self._header_used + header_bytes(metadata)
        return not self.full and self.tail < target and used <= self._header

    def allocate(self, data: int, metadata: dict[str, str]) -> Region:
        """A region for so many bytes of data."""
        region = Region(self.tail, region_size(data))
        self.tail += region.size
        self._header_used += header_bytes(metadata)
        self.writing += 1
        return region

    def seal(self) -> None:
        """Write the header and give the file its name. May be tried again after an error."""
        text = json.dumps(self._describe(), separators=(",", ":")).encode()
        os.ftruncate(self._fd, self.tail)
        write_at(self._fd, text.ljust(self._header), _LENGTH)
        if self._folder.fsync:
            os.fsync(self._fd)
        self._folder.rename(self.name + PART, self.name)
        os.close(self._fd)

    def _describe(self) -> dict[str, Any]:
        """The header: tensors of each sample, its metadata, and gaps between them."""
        metadata: dict[str, str] = {"format": f"{SHARD_FORMAT}1"}
        header: dict[str, Any] = {"__metadata__": metadata}
        position = 0
        gaps = 0

        def tensor(name: str, dtype: str, shape: list[int], size: int) -> None:
            nonlocal position
            offsets = [position, position + size]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            position += size

        def gap(until: int) -> None:
            nonlocal gaps
            if until > position:
                tensor(f"gap.{gaps}", "U8", [until - position], until - position)
                gaps += 1

        start = _LENGTH + self._header
        for index, entry in enumerate(sorted(self.entries, key=lambda entry: entry.offset)):
            gap(entry.offset - start)
            tokens, layers, hidden = entry.header["shape"]
            dtype = entry.header["dtype"]
            states = tokens * layers * hidden * DTYPE_BYTES[dtype]
            tensor(f"{index}.token_ids", "I64", [tokens], 8 * tokens)
            tensor(f"{index}.hidden_states", DTYPES[dtype], entry.header["shape"], states)
            metadata[str(index)] = json.dumps(entry.header["metadata"])
        gap(self.tail - start)
        return header
