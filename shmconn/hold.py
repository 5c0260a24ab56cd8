# SPDX-License-Identifier: Apache-2.0
"""How long a request may wait for room in the ring, and what is said meanwhile.

Holding costs the engine the request's KV blocks, and gives the slowest reader its say over the
pace. It is worth it as long as a live reader can make room. When none can, a timer runs; once it
is over, every request that does not fit is lost at once, until room is made again.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("vllm.shmconn")

FIRST_GAP_S = 10.0
LONGEST_GAP_S = 300.0


class Ring(Protocol):
    """What is read of the producer."""

    @property
    def published(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    def can_progress(self) -> bool: ...
    def stall_text(self) -> str: ...


class Hold:
    """The policy of one ring; used by the thread that fills it.

    Args:
        on_full: ``hold`` or ``drop``.
        no_reader_timeout_s: how long to hold while no live reader can make room.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ring: Ring,
        *,
        on_full: str,
        no_reader_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ring = ring
        self._drop = on_full == "drop"
        self._timeout = no_reader_timeout_s
        self._clock = clock
        self._since: float | None = None
        self._full_since: float | None = None
        self._stuck_since: float | None = None
        self._reclaimed = -1
        self._gap = FIRST_GAP_S
        self._say_at = 0.0

    @property
    def since(self) -> float | None:
        """When the request at the head began to wait, by the clock; ``None``: none waits."""
        return self._since

    def full(self, waiting: int) -> str | None:
        """There is no room for the next request: hold it, or why it is lost.

        Args:
            waiting: requests held now, this one included.

        Returns:
            ``None`` to hold it and ask again soon, or ``dropped`` or ``no_reader``.
        """
        if self._drop:
            return "dropped"
        now = self._clock()
        if self._since is None:
            self._since = now
        if self._full_since is None:
            self._full_since = now
            self._gap, self._say_at = FIRST_GAP_S, now + FIRST_GAP_S
        # Rises with every slot that comes free, also when it was taken again since.
        reclaimed = self._ring.published + self._ring.free_slots
        if self._ring.can_progress():
            self._stuck_since = None
        elif self._stuck_since is None or reclaimed > self._reclaimed:
            self._stuck_since = now
        self._reclaimed = max(self._reclaimed, reclaimed)
        if self._stuck_since is not None and now - self._stuck_since >= self._timeout:
            return "no_reader"
        if now >= self._say_at:
            logger.warning(
                "shmconn has held finished requests for %.0f s, now %d, the oldest for %.0f s, and "
                "until there is room, a pause, a sleep or a drain of vLLM waits for them: %s",
                now - self._full_since,
                waiting,
                now - self._since,
                self._ring.stall_text(),
            )
            self._gap = min(2 * self._gap, LONGEST_GAP_S)
            self._say_at = now + self._gap
        return None

    def settled(self) -> float:
        """The request at the head got room or was lost.

        Returns:
            Seconds that it was held.
        """
        held = 0.0 if self._since is None else self._clock() - self._since
        self._since = None
        return held

    def drained(self) -> None:
        """Nothing is held any more."""
        if self._full_since is not None and self._gap > FIRST_GAP_S:
            logger.info("shmconn holds no request any more")
        self._full_since = None


class Throttle:
    """Lets one line of a kind through per interval and counts what it kept back."""

    def __init__(
        self, interval_s: float = FIRST_GAP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._kept: dict[str, int] = {}

    def admit(self, kind: str) -> int | None:
        """How many of this kind were kept back since the last line, or ``None`` to be silent."""
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) < self._interval:
            self._kept[kind] = self._kept.get(kind, 0) + 1
            return None
        self._last[kind] = now
        return self._kept.pop(kind, 0)
