# SPDX-License-Identifier: Apache-2.0
"""One safetensors file per sample.

Tensors ``token_ids`` [tokens] and ``hidden_states`` [tokens, layers, hidden]; all else is text in
the header's ``__metadata__``. The bytes go from the ring's memory to the file in one copy, which
the kernel makes. The token ids come first, as safetensors itself orders types by their size, and
the header is so long that the states begin at a page, or at a cache line where they are small: in
the ring they do too, and the kernel's copy between two such places is measurably the faster one.
"""

import json
import os
import struct
from typing import TYPE_CHECKING

from reader.folder import Output, write_at
from reader.sinks import SinkOptions
from reader.sinks.files import FileSink
from shmconn import identity
from shmconn.checksum import BLANK, KEY, Checksum, checksum
from shmconn.handle import Handle

if TYPE_CHECKING:
    from shmconn.sample import Sample

DTYPES = {dtype: name for name, dtype in identity.DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
# Where the states begin: at a multiple of so many bytes, the first if they are this large.
_PAGE, _LARGE, _LINE = 4096, 1 << 20, 64


def metadata_of(sample: "Sample") -> dict[str, str]:
    """Who and what a sample is, as the text values that a safetensors header may hold."""
    handle = Handle.parse(sample.handle)
    values = {
        "request_id": sample.request_id,
        "tag": sample.tag or "",
        "handle": str(handle),
        "layer_ids": json.dumps(list(sample.layer_ids)),
        "dtype": sample.dtype,
        "shape": json.dumps(list(sample.shape)),
        "ring": handle.ring,
        "generation": handle.generation,
        "metadata": json.dumps(dict(sample.metadata)),
    }
    # A lone surrogate is no Unicode text, and the library refuses a header that has one.
    return {key: value.encode("utf-8", "replace").decode() for key, value in values.items()}


def encode_header(header: dict[str, object], before: int, states: int) -> bytes:
    """Length and JSON of a safetensors header, padded so that the states are aligned.

    Args:
        before: bytes of data that come before the states, a multiple of 8.
        states: bytes of these.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    step = _PAGE if states >= _LARGE else _LINE
    text += b" " * (-(_LENGTH.size + len(text) + before) % step)
    return _LENGTH.pack(len(text)) + text


def read_header(fd: int) -> dict[str, object] | None:
    """The header of a safetensors file; None if it is not one."""
    start = os.pread(fd, _LENGTH.size, 0)
    if len(start) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(start)
    if length > min(_MAX_HEADER, os.fstat(fd).st_size):
        return None
    try:
        header = json.loads(os.pread(fd, length, _LENGTH.size))
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


class SafetensorsSink(FileSink):
    """Writes ``{tag or request id}.safetensors``."""

    suffix = ".safetensors"

    def encode(self, sample: "Sample", output: Output) -> None:
        """Write header, token ids and states."""
        ids, states = sample.token_ids_bytes, sample.states_bytes
        metadata = metadata_of(sample)
        if output.digested:
            # A digest is of the bytes in their order, so the header must be right at once.
            output.write(self._header(sample, metadata | {KEY: checksum(metadata, ids, states)}))
            output.write(ids)
            output.write(states)
            return
        output.write(self._header(sample, metadata | {KEY: BLANK}))
        summed = Checksum(metadata)
        for part in (ids, states):
            for piece in summed.pieces(part):
                output.write(piece)
        write_at(output.fd, self._header(sample, metadata | {KEY: str(summed)}), 0)

    @staticmethod
    def _header(sample: "Sample", metadata: dict[str, str]) -> bytes:
        middle = sample.token_ids_bytes.nbytes
        states = sample.states_bytes.nbytes
        end = middle + states
        header = {
            "__metadata__": metadata,
            "token_ids": {"dtype": "I64", "shape": [sample.tokens], "data_offsets": [0, middle]},
            "hidden_states": {
                "dtype": DTYPES[sample.dtype],
                "shape": list(sample.shape),
                "data_offsets": [middle, end],
            },
        }
        return encode_header(header, middle, states)

    def owner(self, name: str) -> str | None:
        """The handle in a file's header."""
        if self.folder.size(name) < 0:
            return None  # a link, a folder, a pipe
        try:
            fd = self.folder.open(name)
        except (FileNotFoundError, PermissionError):
            return None
        try:
            header = read_header(fd) or {}
        finally:
            os.close(fd)
        metadata = header.get("__metadata__")
        handle = metadata.get("handle") if isinstance(metadata, dict) else None
        return handle if isinstance(handle, str) else None


def open_sink(options: SinkOptions) -> SafetensorsSink:
    """An output of this format."""
    return SafetensorsSink(options)
