# SPDX-License-Identifier: Apache-2.0
"""The only loads and stores of words that two processes share.

A shared word is an aligned unsigned 64-bit integer. Indexing a ``memoryview`` of format "Q"
compiles to one 8-byte move, so a word is never seen half written. ``struct.pack_into`` zeroes its
destination first and is forbidden on a segment.

Every access, and every lock call or other step of the protocol, passes ``step``. Tests put a
function there that kills the process at the N-th step, or hands over to a scheduler: what they
kill and interleave is the code that ships.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WORD = 8
MASK = (1 << 64) - 1

_step: Callable[[str], None] | None = None


def step(name: str) -> None:
    """Marks one step of the protocol; does nothing unless a test watches."""
    if _step is not None:
        _step(name)


def watch(function: Callable[[str], None] | None) -> None:
    """Calls ``function`` with the name of each step, just before it; None ends it."""
    global _step
    _step = function


class Words:
    """The words of a mapped segment, indexed by their byte offset."""

    def __init__(self, buffer: Any) -> None:
        view = memoryview(buffer)
        usable = view.nbytes // WORD * WORD
        self._words = view[:usable].cast("Q")
        self._bytes = view

    def load(self, offset: int) -> int:
        """One word, by one load."""
        if _step is not None:
            _step(f"load {offset}")
        return self._words[offset >> 3]

    def store(self, offset: int, value: int) -> None:
        """One word, by one store. The caller is the word's only writer."""
        if _step is not None:
            _step(f"store {offset}")
        self._words[offset >> 3] = value & MASK

    def copy(self, offset: int, count: int) -> "npt.NDArray[np.uint64]":
        """A private copy of ``count`` words: a hint of where to look, never a proof."""
        import numpy as np

        if _step is not None:
            _step(f"copy {offset}")
        start = offset >> 3
        return np.array(self._words[start : start + count], dtype=np.uint64)

    def column(self, offset: int, stride: int, count: int) -> "npt.NDArray[np.uint64]":
        """A private copy of one word of each of ``count`` rows ``stride`` bytes apart: a hint."""
        import numpy as np

        if _step is not None:
            _step(f"copy {offset}")
        rows = self._words[offset >> 3 : (offset + stride * count) >> 3 : stride >> 3]
        return np.array(rows, dtype=np.uint64)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes that are immutable, or whole because a word says so."""
        return bytes(self._bytes[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        """Bytes that nobody may look at yet."""
        if _step is not None:
            _step(f"write {offset}")
        self._bytes[offset : offset + len(data)] = data
