# SPDX-License-Identifier: Apache-2.0
"""Many samples in one safetensors file of a chosen size; `shmconn.shards.ShardDataset` reads it.

A sample is written into a region of the open shard, then gets its line in the manifest, and only
then may be released: a killed drain goes on with the shard that it had open. A full shard is sealed
after that; where this is refused the sample is stored all the same, and the next one is refused
until it is done. Several writers fill one shard at a time, each its own region.
"""

import hashlib
import logging
import threading
from typing import TYPE_CHECKING

from reader.folder import Folder, write_at
from reader.manifest import Entry, Manifest, Place
from reader.shard_file import NAME, PART, Region, Shard, header_bytes, shard_name
from reader.sinks import SinkOptions, Stored
from reader.sinks.safetensors import metadata_of
from shmconn.checksum import BLANK, KEY, Checksum
from shmconn.errors import OptionError
from shmconn.identity import Identity

if TYPE_CHECKING:
    from shmconn.sample import Sample

_LEAST = 1 << 20  # bytes of a shard
_HEADER_SHARE = 64  # one part in so many is kept for the header
_MAX_HEADER = 16 << 20  # bytes; the library refuses headers above 100 MB

log = logging.getLogger("shmconn.drain")


class ShardsSink:
    """Writes ``shard-00000.safetensors`` and so on."""

    def __init__(self, options: SinkOptions) -> None:
        if options.shard_size < _LEAST:
            raise OptionError(f"shard size {options.shard_size} must be at least 1MiB")
        self._options = options
        self.folder = Folder(options.path, fsync=options.fsync)
        self.path = self.folder.path
        self.manifest = Manifest(self.folder, tags=options.skip_tags)
        self._lock = threading.Lock()
        self._open: list[Shard] = []
        self._regions: dict[str, tuple[Shard, Region]] = {}
        self._next = 0
        self._recover()

    def write(self, sample: "Sample") -> Stored:
        """Store a sample, or find that it is stored.

        Raises:
            OSError: the disk refused this one, or to seal what is full; the sample has no line in
                the manifest.
            OptionError: the folder holds samples of other layers, hidden size or dtype.
        """
        handle = str(sample.handle)
        ids = hashlib.sha256(sample.token_ids_bytes).hexdigest()[:16]
        with self._lock:
            self._seal_full()
            known = self._known(sample, handle, ids)
            if known is not None:
                return Stored(known.file, known.bytes, fresh=False)
            metadata = metadata_of(sample) | {KEY: BLANK}
            shard, region = self._place(sample, handle, metadata)
            first, shard.announced = not shard.announced, True
        entry = self._fill(sample, handle, ids, metadata, shard, region)
        self.manifest.append(entry)
        with self._lock:
            shard.entries.append(entry)
            del self._regions[handle]
            shard.writing -= 1
            shard.full = shard.full or shard.tail >= self._options.shard_size
            try:
                self._seal_full()
            except OSError as error:
                # This sample has its line: to refuse it now would write it twice.
                log.warning("a full shard in %s cannot be sealed yet: %s", self.path, error)
        return Stored(shard.name, region.size, fresh=True, new_file=first)

    def close(self) -> None:
        """Seal the open shards, and those of mates that died meanwhile.

        Raises:
            OSError: the disk refused; the next drain into this folder seals them.
        """
        try:
            with self._lock:
                self._recover(surely=True)
                for shard in self._open:
                    shard.full = True
                    shard.writing = 0
                self._regions.clear()
                self._seal_full()
        finally:
            self.folder.close()

    def _recover(self, *, surely: bool = False) -> None:
        """Go on with what dead drains left open; with ``surely`` only where locks tell of it."""
        parts: list[int] = []
        ours = {shard.name for shard in self._open}
        # The manifest's as well: a number is used once, though its shard may be gone by now.
        for name in [*self.folder.names(), *self.manifest.files()]:
            match = NAME.fullmatch(name)
            if match is not None:
                self._next = max(self._next, int(match[1]) + 1)
                if match[2] and shard_name(int(match[1])) not in ours:
                    parts.append(int(match[1]))
        by_file: dict[str, dict[str, Entry]] = {shard_name(number): {} for number in parts}
        for entry in self.manifest.entries() if parts else ():
            if entry is not None and entry.file in by_file:
                by_file[entry.file][entry.handle] = entry
        for number in sorted(parts):
            entries = list(by_file[shard_name(number)].values())
            shard = Shard.recover(self.folder, number, entries, surely=surely)
            if shard is not None:
                self._open.append(shard)

    def _known(self, sample: "Sample", handle: str, ids: str) -> Place | None:
        found = self.manifest.find(handle)
        self.manifest.admit(Identity.of(sample))
        if found is None and sample.tag is not None:
            found = self.manifest.find_tag(sample.tag, ids)
        if found is None:
            return None
        opened = any(shard.holds(found.offset) for shard in self._open if shard.name == found.file)
        # Not sealed: a mate's that was killed, or that lives and goes on with it.
        size = max(self.folder.size(found.file), self.folder.size(found.file + PART))
        return found if opened or size >= found.offset + found.bytes else None

    def _place(
        self, sample: "Sample", handle: str, metadata: dict[str, str]
    ) -> tuple[Shard, Region]:
        """A region of the open shard; the one it was given before, if the disk refused it."""
        if handle in self._regions:
            return self._regions[handle]
        target = self._options.shard_size
        shard = next((one for one in self._open if one.has_room(metadata, target)), None)
        if shard is None:
            for other in self._open:
                other.full = True
            header = max(min(target // _HEADER_SHARE, _MAX_HEADER), 2 * header_bytes(metadata))
            while shard is None:
                number, self._next = self._next, self._next + 1
                try:
                    shard = Shard.create(self.folder, number, header)
                except FileExistsError:
                    continue  # another drain's
            self._open.append(shard)
        data = sample.token_ids_bytes.nbytes + sample.states_bytes.nbytes
        self._regions[handle] = shard, shard.allocate(data, metadata)
        return self._regions[handle]

    def _fill(
        self,
        sample: "Sample",
        handle: str,
        ids: str,
        metadata: dict[str, str],
        shard: Shard,
        region: Region,
    ) -> Entry:
        """Write the sample's bytes and describe them."""
        digest = hashlib.sha256() if self._options.checksum else None
        summed = Checksum(metadata)
        end = region.offset
        for data in (sample.token_ids_bytes, sample.states_bytes):
            for piece in summed.pieces(data):
                end = write_at(shard.fd, piece, end)
                if digest is not None:
                    digest.update(piece)
        metadata = metadata | {KEY: str(summed)}
        data_bytes = end - region.offset
        write_at(shard.fd, bytes(region.size - data_bytes), end)
        return Entry(
            handle=handle,
            request_id=sample.request_id,
            tag=sample.tag,
            tokens=sample.tokens,
            file=shard.name,
            bytes=data_bytes,
            offset=region.offset,
            token_ids_sha256=ids,
            sha256=digest.hexdigest() if digest is not None else None,
            identity=Identity.of(sample),
            header={"dtype": sample.dtype, "shape": list(sample.shape), "metadata": metadata},
        )

    def _seal_full(self) -> None:
        """Seal every shard that is full and that no writer is busy with.

        Raises:
            OSError: the disk refused one of them; the others are sealed.
        """
        refused: OSError | None = None
        for shard in list(self._open):
            if shard.full and not shard.writing:
                try:
                    shard.seal()
                except OSError as error:
                    refused = refused or error
                else:
                    self._open.remove(shard)
        if refused is not None:
            raise refused


def open_sink(options: SinkOptions) -> ShardsSink:
    """An output of this format."""
    return ShardsSink(options)
