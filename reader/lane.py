# SPDX-License-Identifier: Apache-2.0
"""One output of a drain: a group's subscription, a sink, and the threads between them.

Each writer thread takes a sample out of the ring, stores it, and releases it; one at a time may
ask the ring. A sample that the disk refuses keeps its lease and is tried again later, while the
others go on. A sample is released only after the sink has it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reader.sinks import Sink, Stored
from shmconn.errors import Busy, ProducerDied, RingMissing, ShmConnError
from shmconn.handle import format_size

if TYPE_CHECKING:
    from shmconn.sample import Sample
    from shmconn.subscription import Subscription

# A sample that the disk refused waits this long, doubled each time; seconds.
_FIRST_RETRY_S = 0.25
_LAST_RETRY_S = 5.0
# So many refused samples may be held at once; then nothing more is taken out of the ring.
MAX_HELD = 16
# One look into the ring lasts this long, so that a stop is seen; seconds.
_LOOK_S = 0.2
# A repeated complaint about the disk comes after this long at first, doubled each time; seconds.
_FIRST_REMINDER_S = 10.0

log = logging.getLogger("shmconn.drain")


@dataclass(frozen=True)
class Limits:
    """Where the user wants a drain to stop, and how fast it may go.

    Attributes:
        samples: stop after so many.
        bytes: stop after about so many bytes in the output.
        rate: bytes per second.
        give_up_s: stop when the disk has refused a sample for so long; None waits for ever.
    """

    samples: int | None = None
    bytes: int | None = None
    rate: float | None = None
    give_up_s: float | None = None


@dataclass
class _Held:
    """A sample that the disk refused, with its lease."""

    sample: "Sample"
    since: float
    due: float
    tries: int = 1


@dataclass
class Counts:
    """What an output has done so far."""

    samples: int = 0
    files: int = 0
    bytes: int = 0
    skipped: int = 0
    refused: int = 0


class Lane:
    """One output of a drain.

    Attributes:
        counts: what was done so far.
        limited: it ended because of a limit of the user's.
        gave_up: it ended because the disk refused for too long.
        error: what ended it, if anything did: a sample that the format can never hold, or damage.
        missing: no ring came in time.
        died: the producer died and all that it had published was read.
    """

    def __init__(
        self,
        subscription: "Subscription",
        sink: Sink,
        *,
        writers: int,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.subscription = subscription
        self.sink = sink
        self.counts = Counts()
        self.limited = False
        self.gave_up = False
        self.missing = False
        self.error: str | None = None
        self.died: str | None = None
        self._limits = limits or Limits()
        self._clock = clock
        self._turn = threading.Lock()  # to ask the ring
        self._state = threading.Lock()  # counts, held, leased
        self._stop = threading.Event()
        self._ended = False
        self._taken = 0
        self._taken_bytes = 0
        self._credit_at = clock()
        self._held: list[_Held] = []
        self._leased: dict[int, Sample] = {}
        self._trouble_since: float | None = None
        self._reminder = 0.0
        self._reminder_gap = _FIRST_REMINDER_S
        self._threads = [
            threading.Thread(target=self._work, name=f"writer-{index}", daemon=True)
            for index in range(writers)
        ]

    def start(self) -> None:
        """Begin to take samples out of the ring."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take nothing more out of the ring; what is being written is finished."""
        self._stop.set()

    @property
    def running(self) -> bool:
        """Whether a writer is still at work."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        """Wait for the writers; false if one is still at work after the timeout."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.running

    def unreleased(self) -> list["Sample"]:
        """Samples whose lease we still have: refused by the disk, or in a write that hangs."""
        with self._state:
            return [*(held.sample for held in self._held), *self._leased.values()]

    @property
    def held(self) -> int:
        """Samples that wait for the disk."""
        with self._state:
            return len(self._held)

    def _work(self) -> None:
        try:
            while (job := self._take()) is not None:
                self._store(job)
                del job  # the last reference to the sample's bytes: its lease ends here
        except RingMissing as error:
            self.missing = True
            self.error = self.error or str(error)  # said once, at the end
            self._stop.set()
        except ShmConnError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("a writer for %s failed", self.sink.path)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        if self.error is None:
            self.error = text
            log.error("%s: %s", self.sink.path, text)
        self._stop.set()

    def _take(self) -> _Held | None:
        """The next sample to store, or None at the end."""
        with self._turn:
            while not self._stop.is_set():
                held = self._due()
                if held is not None:
                    return held
                waits = self.held
                full = waits >= MAX_HELD
                if self._ended or full or self._over_limit():
                    if not waits and not full:
                        return None
                    self._stop.wait(0.05)
                    continue
                pause = self._credit_at - self._clock()
                if pause > 0:
                    self._stop.wait(min(pause, _LOOK_S))
                    continue
                sample = self._next()
                if sample is not None:
                    return self._lease(sample)
        return None

    def _next(self) -> "Sample | None":
        try:
            sample = self.subscription.next(timeout=_LOOK_S)
        except ProducerDied as error:
            self.died = str(error)
            self._ended = True
            return None
        except Busy as error:
            # A mate that was stopped holds the lock; we look again for as long as it takes.
            log.warning("%s", error)
            return None
        if sample is None and self.subscription.ended:
            self._ended = True
        return sample

    def _lease(self, sample: "Sample") -> _Held:
        now = self._clock()
        self._taken += 1
        self._taken_bytes += sample.nbytes
        if self._limits.rate:
            # Credit is at most one second old, so that an idle time is not made up for in a burst.
            self._credit_at = max(self._credit_at, now - 1) + sample.nbytes / self._limits.rate
        with self._state:
            self._leased[id(sample)] = sample
        return _Held(sample, now, now, tries=0)

    def _over_limit(self) -> bool:
        limits = self._limits
        over = (limits.samples is not None and self._taken >= limits.samples) or (
            limits.bytes is not None and self._taken_bytes >= limits.bytes
        )
        self.limited = self.limited or over
        return over

    def _due(self) -> _Held | None:
        now = self._clock()
        with self._state:
            for position, held in enumerate(self._held):
                if held.due <= now:
                    del self._held[position]
                    self._leased[id(held.sample)] = held.sample
                    return held
        return None

    def _store(self, job: _Held) -> None:
        try:
            stored = self.sink.write(job.sample)
        except OSError as error:
            self._refused(job, error)
            return
        with self._state:
            del self._leased[id(job.sample)]
        job.sample.release()
        self._count(stored)

    def _count(self, stored: Stored) -> None:
        with self._state:
            self.counts.samples += 1
            if stored.fresh:
                self.counts.bytes += stored.bytes
                self.counts.files += stored.new_file
            else:
                self.counts.skipped += 1
            since = self._trouble_since if not self._held else None
            if since is not None:
                self._trouble_since = None
        if since is not None:
            log.info("%s takes samples again after %.0f s", self.sink.path, self._clock() - since)

    def _refused(self, job: _Held, error: OSError) -> None:
        """Keep the sample, say why, and try again later."""
        now = self._clock()
        if job.tries == 0:
            job.since = now
        job.due = now + min(_FIRST_RETRY_S * 2**job.tries, _LAST_RETRY_S)
        job.tries += 1
        with self._state:
            self.counts.refused += 1
            del self._leased[id(job.sample)]
            self._held.append(job)
            count = len(self._held)
            first = self._trouble_since is None
            if first:
                self._trouble_since = now
                self._reminder_gap = _FIRST_REMINDER_S
            say = first or now >= self._reminder
            if say:
                self._reminder = now + self._reminder_gap
                self._reminder_gap *= 2
            oldest = min(held.since for held in self._held)
        if say:
            log.warning(
                "cannot write to %s: %s; %d sample%s kept in the ring, tried again until it works "
                "(request %s, %s)",
                self.sink.path,
                reason(error),
                count,
                "" if count == 1 else "s",
                job.sample.request_id[:80],
                format_size(job.sample.nbytes),
            )
        give_up = self._limits.give_up_s
        if give_up is not None and now - oldest >= give_up:
            self.gave_up = True
            self._stop.set()


def reason(error: OSError) -> str:
    """Why a disk refused, and which file it was, where the error knows."""
    text = error.strerror or str(error)
    return f"{text} ({error.filename})" if error.filename else text
