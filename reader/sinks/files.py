# SPDX-License-Identifier: Apache-2.0
"""What all formats with one file per sample share: names, resuming, and the order of the steps.

For a sample: find its name; write a temporary file; rename; add a line to the manifest. Each file
carries its sample's handle, so a file whose line is missing is known as its sample's own.
"""

import hashlib
import os
import threading
from typing import TYPE_CHECKING

from reader.folder import Folder, Output
from reader.manifest import Entry, Manifest, Place
from reader.names import file_names
from reader.sinks import SinkOptions, Stored
from shmconn.errors import OptionError, ShmConnError
from shmconn.identity import Identity

if TYPE_CHECKING:
    from shmconn.sample import Sample


class FileSink:
    """One file per sample. A format says how a file is written and whose it is.

    Attributes:
        suffix: of the format's file names, with its dot.
    """

    suffix: str

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self.folder = Folder(options.path, fsync=options.fsync)
        self.path = self.folder.path
        self.manifest = Manifest(self.folder, tags=options.skip_tags)
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def encode(self, sample: "Sample", output: Output) -> None:
        """Write the sample as one file."""
        raise NotImplementedError

    def owner(self, name: str) -> str | None:
        """The handle that a file in the folder carries; None if it carries none."""
        raise NotImplementedError

    def publish(self, output: Output, name: str, *, replace: bool) -> None:
        """Give a written file its name."""
        self.folder.publish(output, name, replace=replace)

    def write(self, sample: "Sample") -> Stored:
        """Store a sample, or find that it is stored.

        Raises:
            OSError: the disk refused; nothing of the sample is left there.
            OptionError: the folder holds samples of other layers, hidden size or dtype.
        """
        handle = str(sample.handle)
        ids = hashlib.sha256(sample.token_ids_bytes).hexdigest()[:16]
        identity = Identity.of(sample)
        known = self._known(sample, handle, ids, identity)
        if known is not None and self.folder.size(known.file) == known.bytes:
            return Stored(known.file, known.bytes, fresh=False)
        while True:
            name, own = self._reserve(sample, handle)
            try:
                return self._store(sample, handle, ids, name, own, identity)
            except FileExistsError:
                continue  # another drain took the name between the look and the rename
            finally:
                with self._lock:
                    self._busy.discard(name.casefold())

    def close(self) -> None:
        """Close the folder."""
        self.folder.close()

    def _known(self, sample: "Sample", handle: str, ids: str, identity: Identity) -> Place | None:
        found = self.manifest.find(handle)
        self.manifest.admit(identity)
        if found is None and sample.tag is not None:
            found = self.manifest.find_tag(sample.tag, ids)
        return found

    def _reserve(self, sample: "Sample", handle: str) -> tuple[str, bool]:
        """The sample's name, and whether a file of its own already has it."""
        text = sample.tag or sample.request_id
        with self._lock:
            free: str | None = None
            for name in file_names(text, handle, self.suffix):
                if name.casefold() in self._busy:
                    continue
                if self.folder.exists(name):
                    if self.owner(name) == handle:
                        self._busy.add(name.casefold())
                        return name, True
                    continue
                free = free or name
                if name != text + self.suffix:
                    break  # longer digests are only ever used once the shorter one is taken
            if free is None:
                raise ShmConnError(f"no file name is free for {handle} in {self.path}")
            self._busy.add(free.casefold())
            return free, False

    def _store(
        self,
        sample: "Sample",
        handle: str,
        ids: str,
        name: str,
        own: bool,
        identity: Identity,
    ) -> Stored:
        with self.folder.temporary(digest=self._options.checksum) as output:
            self.encode(sample, output)
            if own and self.folder.size(name) == output.size:
                fresh = False
            else:
                self.publish(output, name, replace=own)
                fresh = True
            size, sha256 = output.size, output.sha256
        entry = Entry(
            handle=handle,
            request_id=sample.request_id,
            tag=sample.tag,
            tokens=sample.tokens,
            file=name,
            bytes=size,
            offset=0,
            token_ids_sha256=ids,
            sha256=sha256,
            identity=identity,
        )
        try:
            self.manifest.append(entry)
        except OptionError:
            if fresh:
                os.unlink(name, dir_fd=self.folder.fd)  # a mate's samples of another kind are here
            raise
        return Stored(name, size, fresh, new_file=not own)
