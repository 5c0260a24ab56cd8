# SPDX-License-Identifier: Apache-2.0
"""``shmconn drain``: from joining a ring to the summary at the end.

The main thread joins, then only watches: signals, progress, limits. The writers of each output do
the work (`reader.lane`). How a drain ends decides what becomes of its groups: at the end of the
stream, and at a limit of the user's, a group is left; in every other case its place is held, with
all that it has not read, until the same drain is run again or ``shmconn groups rm``.
"""

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import shmconn
from reader.lane import Lane, Limits, reason
from reader.notify import notify
from reader.progress import Progress, Snapshot
from reader.sinks import Sink, SinkOptions, open_sink
from reader.words import count
from shmconn.directory import groups as groups_of
from shmconn.errors import OptionError, ShmConnError
from shmconn.handle import format_size

if TYPE_CHECKING:
    from shmconn.sample import Sample

EXIT_ALL_READ = 0
EXIT_BAD_INPUT = 2
EXIT_LOST = 3
EXIT_PRODUCER_DIED = 4
EXIT_GAVE_UP = 5
EXIT_SIGNAL = 128  # plus the signal's number

_LOOK_S = 0.1  # between two looks at the writers
_SHOW_S = 0.5  # between two looks at the rings

log = logging.getLogger("shmconn.drain")


@dataclass(frozen=True)
class Output:
    """Where a drain writes to.

    Attributes:
        sink: its folder, and how to write there.
        format: of the files.
        group: that it joins; None takes one made from the folder's path.
    """

    sink: SinkOptions
    format: str = "safetensors"
    group: str | None = None


@dataclass(frozen=True)
class DrainOptions:
    """What the user asked of a drain.

    Attributes:
        ring: its name.
        outputs: each gets every sample.
        follow: go on with the next generation when the producer ends.
        wait_s: seconds to wait for the ring to appear.
        writers: threads per output.
        limits: where to stop, and how fast to go.
        stop_s: seconds that a stop waits for samples that are being written.
    """

    ring: str
    outputs: Sequence[Output]
    follow: bool = False
    wait_s: float = 0.0
    writers: int = 2
    limits: Limits = field(default_factory=Limits)
    stop_s: float = 10.0


@dataclass
class Outcome:
    """How a drain ended.

    Attributes:
        code: exit code of the process.
        lines: summary for people.
        unreleased: samples whose lease goes back only with the end of this process. Whoever holds
            this object must keep it until then: a sample that is dropped counts as delivered.
    """

    code: int
    lines: list[str]
    unreleased: list["Sample"]


class _Signals:
    """Notes what the process was told.

    A handler runs between any two steps of the main thread, which may hold any lock just then: so
    it takes none, and wakes nobody. A threading.Event has a lock, and a SimpleQueue of Python up
    to 3.12 may wait for ever where it should wait for a moment.
    """

    def __init__(self, reopen: Callable[[], None] | None) -> None:
        self.received: int | None = None
        self._reopen = reopen
        self._hung_up = False

    def sleep(self, seconds: float) -> None:
        """Sleeps, whatever comes meanwhile; then opens the logs anew if that was asked for."""
        time.sleep(seconds)
        if self._hung_up and self._reopen is not None:
            self._hung_up = False
            self._reopen()

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(EXIT_SIGNAL + number)  # told twice: no more waiting, leases die with us
        self.received = number

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._reopen is not None:
            self._hung_up = True
        else:
            self._end(number, frame)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP meanwhile; under ``nohup`` SIGHUP stays ignored.

        In a thread that is not the main one signals are left to whoever has that one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._end),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._end),
        }
        if self._reopen is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            old[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def default_group(path: str) -> str:
    """The group of an output folder: the same for the same folder, whatever it is called."""
    real = os.path.realpath(path).encode("utf-8", "surrogateescape")
    return f"files-{hashlib.sha256(real).hexdigest()[:8]}"


def run(
    options: DrainOptions,
    progress: Progress,
    *,
    reopen_logs: Callable[[], None] | None = None,
    observe: Callable[[list[Snapshot]], None] | None = None,
) -> Outcome:
    """Drain a ring until its end, a limit, a signal or an error.

    Args:
        options: what to do.
        progress: shows how it goes.
        reopen_logs: called after SIGHUP; None makes that a signal to stop.
        observe: called with each look at the outputs.

    Raises:
        ShmConnError: the drain could not begin; nothing was joined.
    """
    return _Drain(options, progress, observe).run(reopen_logs)


class _Drain:
    """One run of the service."""

    def __init__(
        self,
        options: DrainOptions,
        progress: Progress,
        observe: Callable[[list[Snapshot]], None] | None,
    ) -> None:
        self._options = options
        self._progress = progress
        self._observe = observe
        self._lanes: list[Lane] = []
        self._told_ends = 0
        self._blind = ""

    def run(self, reopen_logs: Callable[[], None] | None) -> Outcome:
        signals = _Signals(reopen_logs)
        with signals.installed():
            sinks = self._open_sinks()
            try:
                self._join(sinks)
            except BaseException:
                for lane in self._lanes:
                    self._keep_place(lane)
                for sink in sinks:
                    try:
                        sink.close()  # and so finish what a drain that was killed left open
                    except OSError as error:
                        log.error("cannot finish %s: %s", sink.path, reason(error))
                raise
            notify("READY=1")
            started = time.monotonic()
            for lane in self._lanes:
                lane.start()
            with self._progress:
                self._watch(signals)
            return self._finish(signals, time.monotonic() - started)

    @staticmethod
    def _keep_place(lane: Lane) -> None:
        """Of a group that joined before another could not: to leave would give samples up."""
        subscription = lane.subscription
        subscription.abandon()
        log.warning(
            "group %s of ring %s has joined and keeps its place; give it up with "
            "`shmconn groups rm %s %s`",
            subscription.group,
            subscription.name,
            subscription.name,
            subscription.group,
        )

    def _open_sinks(self) -> list[Sink]:
        """Every output ready for writing, before anything is joined.

        Raises:
            OptionError: one of them is not; says why.
        """
        paths = [os.path.realpath(output.sink.path) for output in self._options.outputs]
        for path in paths:
            if paths.count(path) > 1:
                raise OptionError(f"{path} was given twice: each output needs its own folder")
        sinks = []
        for output in self._options.outputs:
            try:
                sinks.append(open_sink(output.format, output.sink))
            except OSError as error:
                raise OptionError(
                    f"cannot begin {output.format} in {output.sink.path!r}: {reason(error)}"
                ) from None
        return sinks

    def _join(self, sinks: Sequence[Sink]) -> None:
        options = self._options
        name = options.ring
        for output, sink in zip(options.outputs, sinks, strict=True):
            subscription = shmconn.subscribe(
                name,
                group=output.group or default_group(output.sink.path),
                wait_s=options.wait_s,
                follow=options.follow,
            )
            name = subscription.name
            lane = Lane(subscription, sink, writers=options.writers, limits=options.limits)
            self._lanes.append(lane)
            log.info(
                "group %s of ring %s writes to %s",
                subscription.group,
                name,
                sink.path,
            )

    @property
    def _name(self) -> str:
        return self._lanes[0].subscription.name

    def _watch(self, signals: _Signals) -> None:
        """Look at the writers until they are done or we are told to stop."""
        shown = 0.0
        while signals.received is None and any(lane.running for lane in self._lanes):
            signals.sleep(_LOOK_S)
            if time.monotonic() - shown >= _SHOW_S:
                shown = time.monotonic()
                self._look()
        self._look()
        if signals.received is None:
            return
        name = signal.Signals(signals.received).name
        notify("STOPPING=1")
        log.info("%s: finishing the samples that are being written", name)
        for lane in self._lanes:
            lane.stop()
        deadline = time.monotonic() + self._options.stop_s
        for lane in self._lanes:
            lane.join(max(0.0, deadline - time.monotonic()))

    def _look(self) -> None:
        """Show how it goes. That a ring cannot be looked at ends nothing: its writers will tell."""
        try:
            self._show()
        except (OSError, ShmConnError) as error:
            if str(error) != self._blind:
                log.warning("cannot see how it goes: %s", error)
            self._blind = str(error)

    def _show(self) -> None:
        rings = [ring for ring in shmconn.rings(self._name) if ring.problem is None]
        pages = sum(ring.pages for ring in rings)
        fill = 1 - sum(ring.free_pages for ring in rings) / pages if pages else None
        snapshots = [
            Snapshot(
                output=lane.sink.path,
                samples=lane.counts.samples,
                bytes=lane.counts.bytes,
                unread=lane.subscription.unread(),
                held=lane.held,
                lost=lane.subscription.lost,
                fill=fill,
                total=self._options.limits.samples,
            )
            for lane in self._lanes
        ]
        self._tell_ends()
        self._progress.update(snapshots)
        if self._observe is not None:
            self._observe(snapshots)

    def _tell_ends(self) -> None:
        """Say once how each ring ended; a drain that follows has no other place for it."""
        ends = self._lanes[0].subscription.ends
        for end in ends[self._told_ends :]:
            if end.died:
                log.warning(
                    "the producer of generation %s died; %d of the requests it had accepted were "
                    "never published",
                    end.generation[:8],
                    max(0, end.accepted - end.settled),
                )
            else:
                log.info("generation %s ended", end.generation[:8])
        self._told_ends = len(ends)

    def _finish(self, signals: _Signals, seconds: float) -> Outcome:
        code = self._code(signals)
        lines = [line for lane in self._lanes for line in self._summary(lane, seconds)]
        lines += self._losses_text()
        lines += [lane.died for lane in self._lanes[:1] if lane.died is not None]
        unreleased = [sample for lane in self._lanes for sample in lane.unreleased()]
        for lane in self._lanes:
            lines += self._leave(lane, told=signals.received is not None)
            if lane.running:
                continue
            try:
                lane.sink.close()
            except OSError as error:
                lines.append(
                    f"error: cannot finish {lane.sink.path}: {reason(error)}; every sample is "
                    "there: mend that and run the same command again, which finishes it even if "
                    "the ring is gone"
                )
                if code in (EXIT_ALL_READ, EXIT_LOST, EXIT_PRODUCER_DIED):
                    code = EXIT_GAVE_UP
        return Outcome(code, lines, unreleased)

    def _code(self, signals: _Signals) -> int:
        lanes = self._lanes
        if signals.received is not None:
            return EXIT_SIGNAL + signals.received
        if any(lane.error is not None for lane in lanes):
            return EXIT_BAD_INPUT
        if any(lane.gave_up for lane in lanes):
            return EXIT_GAVE_UP
        if any(lane.subscription.lost for lane in lanes):
            return EXIT_LOST
        if any(lane.died is not None for lane in lanes):
            return EXIT_PRODUCER_DIED
        return EXIT_ALL_READ

    def _summary(self, lane: Lane, seconds: float) -> list[str]:
        if lane.missing:
            earlier = self._lanes[: self._lanes.index(lane)]
            return [] if any(other.missing for other in earlier) else [f"error: {lane.error}"]
        counts = lane.counts
        rate = counts.samples / seconds if seconds else 0.0
        text = (
            f"{count(counts.samples, 'sample')}, {format_size(counts.bytes)} in "
            f"{count(counts.files, 'file')} to {lane.sink.path} in {seconds:.1f} s "
            f"({rate:.1f} samples/s, "
            f"{format_size(counts.bytes / seconds if seconds else 0)}/s)"
        )
        lines = [text]
        if counts.skipped:
            lines.append(f"{counts.skipped:,} of them were there already and were left as they are")
        if lane.error is not None:
            lines.append(f"error: {lane.error}")
        if lane.gave_up:
            left = len(lane.unreleased())
            lines.append(
                f"gave up: {lane.sink.path} refused a sample for {self._options.limits.give_up_s:g}"
                f" s; {count(left, 'sample')} {'is' if left == 1 else 'are'} kept in the ring, "
                "nothing is lost"
            )
        return lines

    def _losses_text(self) -> list[str]:
        """What was lost; the groups of one ring saw the same, the first one joined first."""
        lost = self._lanes[0].subscription.lost_by_reason
        if not lost:
            return []
        return ["no sample came of: " + ", ".join(f"{n} {why}" for why, n in lost.items())]

    def _leave(self, lane: Lane, *, told: bool) -> list[str]:
        """Leave the group, or keep its place; says which, and how to go on."""
        subscription = lane.subscription
        undone = bool(lane.unreleased()) or lane.error is not None
        ended = subscription.ended or (lane.limited and not told)
        if lane.missing or (ended and not undone):
            subscription.close()
            return []
        unread = subscription.unread() + len(lane.unreleased())
        subscription.abandon()
        try:
            kept = subscription.group in {group.name for group in groups_of(subscription.name)}
        except ShmConnError:
            kept = False  # no ring ever came: there is no place to keep
        if not kept:
            return []
        return [
            f"group {subscription.group} keeps its place with {count(unread, 'sample')} unread: "
            f"run the same command again to go on, or give them up with "
            f"`shmconn groups rm {subscription.name} {subscription.group}`"
        ]
