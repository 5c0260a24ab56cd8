# SPDX-License-Identifier: Apache-2.0
"""The one thread of a worker that puts finished requests into the ring, as they came.

For each request: a slot (or hold it, and all behind it, until there is one), copy its blocks,
publish, and only then hand its id to the main thread, which reports it so that vLLM frees the
blocks. An id that is owed a report is handed over exactly once, whatever happened to its sample.
"""

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shmconn.capture import Capture
from shmconn.errors import Oversized
from shmconn.hold import Hold, Throttle
from shmconn.intake import Work
from shmconn.ring import Producer
from shmconn.seen import Seen
from shmconn.tally import Tally

logger = logging.getLogger("vllm.shmconn")

# While requests are held: how long to sleep at most on the producer's doorbell.
HOLD_INTERVAL_S = 0.1
# While nothing waits but samples are in the ring: how often to take back what readers released.
IDLE_INTERVAL_S = 1.0
# How long another thread may keep the interpreter lock while the copier waits for it.
QUICK_TURN_S = 0.00005


class Turns:
    """How soon the copier gets the interpreter lock from the engine's main thread.

    The copier needs it to wake up, and again after every wait for the device. An engine that
    steps without work, as it does while blocks are held, gives it up only every 5 ms by itself:
    as long as a whole copy takes.
    """

    def __init__(self) -> None:
        self._usual = sys.getswitchinterval()

    def hurry(self) -> None:
        """Work is there: turns are short from now on."""
        sys.setswitchinterval(min(self._usual, QUICK_TURN_S))

    def rest(self) -> None:
        """Nothing can be done now: turns are as they were."""
        sys.setswitchinterval(self._usual)


class Copier:
    """Puts finished requests into a ring."""

    def __init__(self, producer: Producer, capture: Capture, hold: Hold, tally: Tally) -> None:
        self._producer = producer
        self._capture = capture
        self._hold = hold
        self._tally = tally
        self._taken = Seen()
        self._inbox: queue.SimpleQueue[tuple[Work, Any] | None] = queue.SimpleQueue()
        self._waiting: deque[tuple[Work, Any]] = deque()
        self._done: deque[str] = deque()
        self._throttle = Throttle()
        self._turns = Turns()
        self._deadline: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shmconn-copier", daemon=True)
        self._thread.start()

    # --- the engine's main thread ---------------------------------------------------------------

    def submit(self, work: Iterable[Work]) -> None:
        """Takes finished requests in; each number once, in whatever order they come.

        What the device has been given so far is what their copies wait for.
        """
        ready: Any = None
        for one in work:
            if not self._taken.add(one.number):
                continue
            if self._closed:
                self._done.extend([one.request_id] if one.report else [])
                continue
            try:
                self._producer.accept(one.number)
                if one.reason is None and ready is None:
                    ready = self._capture.mark()
                if one.reason is None:
                    self._turns.hurry()
                self._inbox.put((one, ready))
            except Exception:
                logger.exception("shmconn lost the sample of request %r", one.request_id)
                self._settle(one, "fault")

    def take_done(self) -> set[str]:
        """Ids whose blocks may be freed now; each is given once."""
        done = set()
        while self._done:
            done.add(self._done.popleft())
        return done

    def close(self, grace_s: float) -> None:
        """Goes on for ``grace_s``, buries what is left as ``shutdown``; the thread has ended."""
        if self._closed:
            return
        self._closed = True
        self._deadline = time.monotonic() + grace_s
        self._inbox.put(None)
        self._thread.join()

    # --- the copier's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._capture.bind()
        except Exception:
            logger.exception("shmconn: the copier could not be bound to its device")
        while True:
            try:
                if self._turn():
                    return
            except Exception:
                # Faults of one request are caught where they happen; this is for the rest.
                logger.exception("shmconn: the copier goes on after a fault")
                time.sleep(IDLE_INTERVAL_S)

    def _turn(self) -> bool:
        """One look at the inbox and one try for the request at the head; whether all is over."""
        # Asked first: what came in before the close is in the inbox then, and is received.
        over = self._deadline is not None
        self._receive()
        if not self._waiting:
            return over
        self._turns.hurry()
        work, ready = self._waiting[0]
        reason = self._attempt(work, ready)
        if reason == "full":
            self._turns.rest()
            self._holding()
            self._producer.wait(HOLD_INTERVAL_S)
            self._tick()
            return False
        self._waiting.popleft()
        self._settle(work, reason)
        if self._hold.since is not None:
            self._count(self._tally.waited, self._hold.settled())
            self._producer.set_held_since(0)
        if not self._waiting:
            self._turns.rest()
            self._hold.drained()
        self._show()
        return False

    def _receive(self) -> None:
        """Moves what came in to the queue; a request without a sample is buried at once."""
        while True:
            try:
                # Python up to 3.12 may wait for ever here if the machine stands still just now: the
                # next request ends that, and takes back itself what it needs.
                item = self._inbox.get(timeout=self._patience())
            except queue.Empty:
                if not self._waiting:
                    self._tick()
                return
            if item is None:
                return
            work, ready = item
            if work.reason is None:
                self._waiting.append((work, ready))
            else:
                self._settle(work, work.reason)

    def _patience(self) -> float | None:
        if self._waiting or self._deadline is not None:
            return 0.0
        return IDLE_INTERVAL_S if self._producer.free_slots < self._producer.shape.slots else None

    def _tick(self) -> None:
        before = self._producer.lost["expired"]
        self._producer.tick()
        for _ in range(self._producer.lost["expired"] - before):
            self._count(self._tally.lost, "expired")
        self._show()

    def _attempt(self, work: Work, ready: Any) -> str | None:
        """One try: ``None`` if published, ``full`` if it must wait, else why it is lost."""
        published = self._producer.published
        try:
            return self._copy(work, ready)
        except Exception:
            if self._producer.published > published:
                # It has its sample: a tombstone beside it would count the request twice.
                logger.exception("shmconn: a fault after publishing request %r", work.request_id)
                return None
            logger.exception("shmconn lost the sample of request %r", work.request_id)
            return "fault"

    def _copy(self, work: Work, ready: Any) -> str | None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "shutdown"
        try:
            fill = self._producer.allocate(
                number=work.number,
                request_id=work.request_id,
                tokens=len(work.token_ids),
                tag=work.tag,
                metadata=work.metadata,
            )
        except Oversized as error:
            why = str(error)
            self._say("oversized", lambda: f"request {work.request_id[:80]!r} is lost: {why}")
            return "oversized"
        if fill is None:
            return self._hold.full(len(self._waiting)) or "full"
        began = time.monotonic()
        published = self._producer.published
        try:
            self._capture.copy(
                fill, work.blocks, ready, lambda: fill.write_token_ids(work.token_ids)
            )
            self._producer.publish(fill, handed_out=work.handed_out)
        except Exception:
            # Once it is published its pages belong to the readers, whatever failed afterwards.
            if self._producer.published == published:
                self._producer.discard(fill)
            raise
        self._count(self._tally.published, fill.states.nbytes, time.monotonic() - began)
        return None

    def _holding(self) -> None:
        since = self._hold.since
        if since is not None:
            self._producer.set_held_since(time.time_ns() - int((time.monotonic() - since) * 1e9))

    # --- both -----------------------------------------------------------------------------------

    def _settle(self, work: Work, reason: str | None) -> None:
        """The one end of every request: a tombstone if it is lost, then its report."""
        before: int | None = None
        try:
            if reason is not None:
                before = self._producer.lost[reason]
                self._lose(work, reason)
        except Exception:
            logger.exception("shmconn: a fault at the loss of request %r", work.request_id)
            self._bury_after_all(work, reason or "fault", before)
        finally:
            if work.report:
                self._done.append(work.request_id)

    def _bury_after_all(self, work: Work, reason: str, before: int | None) -> None:
        """A second try, if the first left no tombstone: a reader must not wait for it in vain."""
        try:
            if before is None or self._producer.lost[reason] == before:
                self._producer.bury(work.number, work.request_id, reason)
        except Exception:
            logger.exception("shmconn: the loss of request %r is not recorded", work.request_id)

    def _lose(self, work: Work, reason: str) -> None:
        self._count(self._tally.lost, reason)
        mask = 0
        try:
            mask = self._explain(work, reason)
        finally:
            self._producer.bury(work.number, work.request_id, reason, mask)

    def _explain(self, work: Work, reason: str) -> int:
        """Says why a request is lost, if an operator can act on it; the groups to blame."""
        name = repr(work.request_id[:80])
        if reason == "short":
            self._say(
                reason,
                lambda: f"request {name} is lost: not all of its tokens are in the cache any more",
            )
        if reason not in ("no_reader", "dropped"):
            return 0
        idle = "no live reader makes any" if reason == "no_reader" else "it is not waited for"
        self._say(
            reason,
            lambda: (
                f"request {name} is lost: there is no room, and {idle}: "
                f"{self._producer.stall_text()}"
            ),
        )
        return sum(1 << blocker.row for blocker in self._producer.blockers())

    def _count(self, count: Callable[..., None], *values: Any) -> None:
        """A figure for the metrics, which may be wrong but never costs a sample."""
        try:
            count(*values)
        except Exception:
            if self._throttle.admit("metrics") is not None:
                logger.exception("shmconn: the metrics are not complete")

    def _say(self, kind: str, text: Callable[[], str]) -> None:
        """A line for the log, if it is not one of many; only then its text is made."""
        kept = self._throttle.admit(kind)
        if kept is not None:
            more = f" ({kept} more like this since the last line)" if kept else ""
            logger.warning("shmconn: %s%s", text(), more)

    def _show(self) -> None:
        held = len(self._waiting) if self._hold.since is not None else 0
        fill = 1 - self._producer.free_pages / self._producer.shape.pages
        self._count(self._tally.state, held, self._hold.since, fill)
