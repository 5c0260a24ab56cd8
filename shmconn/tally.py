# SPDX-License-Identifier: Apache-2.0
"""What the worker counted since it was last asked; drained by the engine's main thread."""

import threading
import time
from collections import Counter
from typing import Any

# Durations of one interval that are kept one by one; more than these only count in the totals.
MAX_OBSERVED = 1024


class Tally:
    """Counts of one ring. Two threads write, one of them drains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = False
        self._samples = 0
        self._bytes = 0
        self._lost: Counter[str] = Counter()
        self._copy_s: list[float] = []
        self._hold_s: list[float] = []
        self._held = 0
        self._held_since: float | None = None
        self._fill = 0.0

    def published(self, nbytes: int, copy_s: float) -> None:
        """A sample is in the ring: bytes of its states, seconds of its copy."""
        with self._lock:
            self._samples += 1
            self._bytes += nbytes
            if len(self._copy_s) < MAX_OBSERVED:
                self._copy_s.append(copy_s)
            self._changed = True

    def lost(self, reason: str) -> None:
        """A request yielded no sample."""
        with self._lock:
            self._lost[reason] += 1
            self._changed = True

    def waited(self, hold_s: float) -> None:
        """A request that had been held got room, or was lost."""
        with self._lock:
            if len(self._hold_s) < MAX_OBSERVED:
                self._hold_s.append(hold_s)
            self._changed = True

    def state(self, held: int, held_since: float | None, fill: float) -> None:
        """How many requests are held now, since when (monotonic), and how full the ring is."""
        with self._lock:
            self._changed |= (held, fill) != (self._held, self._fill)
            self._held, self._held_since, self._fill = held, held_since, fill

    def drain(self) -> dict[str, Any] | None:
        """What changed since the last call, as plain data; ``None`` if nothing did."""
        if not self._changed and not self._held:
            return None
        with self._lock:
            since = self._held_since
            data = {
                "samples": self._samples,
                "bytes": self._bytes,
                "lost": dict(self._lost),
                "copy_s": self._copy_s,
                "hold_s": self._hold_s,
                "held": self._held,
                "oldest_held_s": 0.0 if since is None else time.monotonic() - since,
                "ring_fill": self._fill,
            }
            self._samples = self._bytes = 0
            self._lost = Counter()
            self._copy_s, self._hold_s = [], []
            self._changed = False
            return data
