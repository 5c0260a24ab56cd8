# SPDX-License-Identifier: Apache-2.0
"""Registration of a ring's pages with CUDA (or ROCm), so that a copy to or from them is one DMA.

The pages are registered in chunks, and a copy must not cross the edge of one: the driver refuses
it. So whoever copies asks for the lengths of the pieces.
"""

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmconn.handle import format_size

_log = logging.getLogger("shmconn")

CHUNK = 1 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: for all of the process's contexts


class Pinned:
    """Host memory that is registered with the device. It keeps the memory mapped."""

    def __init__(self, area: memoryview, chunk: int = CHUNK) -> None:
        """Registers ``area``, all of it or nothing.

        Raises:
            RuntimeError: the driver refused; nothing is registered.
        """
        self._memory = np.frombuffer(area, np.uint8)
        self._chunk = chunk
        self._pid = os.getpid()
        self._start: int = self._memory.ctypes.data
        self._registered: list[int] = []
        cudart = _cudart()
        for at in range(0, self._memory.nbytes, chunk):
            size = min(chunk, self._memory.nbytes - at)
            result = cudart.cudaHostRegister(self._start + at, size, _PORTABLE)
            if result.value != 0:
                self.close()
                _take_error()
                raise RuntimeError(f"cudaHostRegister of {format_size(size)}: {result}")
            self._registered.append(self._start + at)

    @classmethod
    def try_register(cls, area: memoryview, what: str, chunk: int = CHUNK) -> "Pinned | None":
        """Registers ``area``; if that cannot be done, says so once and returns None.

        Args:
            area: whole pages of memory.
            what: whose they are, and what becomes of copies without it; for the log.
        """
        if not torch.cuda.is_available():
            _log.warning("%s: torch has no CUDA device here", what)
            return None
        try:
            return cls(area, chunk)
        except RuntimeError as error:
            _log.warning("%s: %s", what, error)
            return None

    def pieces(self, address: int, length: int) -> Iterator[tuple[int, int]]:
        """Parts (offset, length) of a range of addresses, none of which crosses an edge."""
        at = 0
        while at < length:
            left = self._chunk - (address + at - self._start) % self._chunk
            size = min(left, length - at)
            yield at, size
            at += size

    def edges(self, offset: int, length: int) -> tuple[int, ...]:
        """Where edges lie inside a run of the area, counted from the run's start."""
        pieces = list(self.pieces(self._start + offset, length))
        return tuple(at for at, _ in pieces[1:])

    def close(self) -> None:
        """Unregisters; to be called before the memory is unmapped. Idempotent.

        A child of a fork owns no registration and does nothing.
        """
        registered, self._registered = self._registered, []
        if os.getpid() != self._pid:
            return
        for address in registered:
            result = _cudart().cudaHostUnregister(address)
            if result.value != 0:
                _take_error()
                _log.warning("cudaHostUnregister: %s", result)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _take_error() -> None:
    """Clears the error of a failed call, which the next kernel launch would report as its own."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        _log.debug("taken: %s", error)
