# SPDX-License-Identifier: Apache-2.0
"""File names from tags and request ids, which are data that a client chose.

A file name is 1 to 200 bytes of ``[A-Za-z0-9._-]`` without a leading dot. A text that had to be
changed, or whose name is taken, gets ``-`` and hex digits of the SHA-256 of the sample's handle.
"""

import hashlib
import re
from collections.abc import Iterator

MAX_BYTES = 200

_FORBIDDEN = re.compile(r"[^A-Za-z0-9._-]")
_DIGEST_LENGTHS = (8, 16, 32, 64)


def safe_stem(text: str, room: int) -> str:
    """The text as a stem of a file name, of at most ``room`` bytes."""
    stem = _FORBIDDEN.sub("_", text[:room])
    if stem.startswith("."):
        stem = "_" + stem[1:]
    return stem or "sample"


def file_names(text: str, handle: str, suffix: str) -> Iterator[str]:
    """Names to try for a sample, in order; the first that is free or its own is taken.

    Args:
        text: the sample's tag, or its request id.
        handle: the sample's handle, as text.
        suffix: of the format, with its dot.
    """
    plain = safe_stem(text, MAX_BYTES - len(suffix))
    if plain == text:
        yield plain + suffix
    digest = hashlib.sha256(handle.encode()).hexdigest()
    for length in _DIGEST_LENGTHS:
        stem = safe_stem(text, MAX_BYTES - len(suffix) - 1 - length)
        yield f"{stem}-{digest[:length]}{suffix}"
