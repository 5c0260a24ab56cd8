# SPDX-License-Identifier: Apache-2.0
"""Progress of a drain: a live line on a terminal, plain lines every few seconds elsewhere."""

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reader.words import count
from shmconn.handle import format_size

# Rates are taken over this window; seconds.
_WINDOW_S = 10.0
# Seconds between plain lines while something moves, and while nothing does.
_PLAIN_S = 5.0
_IDLE_S = 60.0

log = logging.getLogger("shmconn.drain")


@dataclass(frozen=True)
class Snapshot:
    """What an output has done at one moment.

    Attributes:
        output: its folder.
        samples: stored or found there.
        bytes: written.
        unread: samples of the ring that its group has not claimed.
        held: samples that wait for the disk.
        lost: samples lost while joined.
        fill: share of the rings' pages in use, 0 to 1; None before there is a ring.
        total: samples that will have been read at the end, where that is known.
    """

    output: str
    samples: int
    bytes: int
    unread: int
    held: int
    lost: int
    fill: float | None = None
    total: int | None = None


class Rate:
    """Samples and bytes per second over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()

    def add(self, now: float, samples: int, size: int) -> tuple[float, float]:
        """Note the counts of a moment; returns the rates."""
        self._points.append((now, samples, size))
        while len(self._points) > 2 and now - self._points[0][0] > _WINDOW_S:
            self._points.popleft()
        then, samples_then, size_then = self._points[0]
        span = max(now - then, 1e-9)
        if len(self._points) < 2:
            return 0.0, 0.0
        return (samples - samples_then) / span, (size - size_then) / span


def describe(now: Snapshot, rates: tuple[float, float]) -> list[str]:
    """The parts of a progress line."""
    parts = [
        f"{now.samples:,} of {count(now.total, 'sample')}"
        if now.total
        else count(now.samples, "sample"),
        format_size(now.bytes),
        f"{rates[0]:.1f}/s",
        f"{format_size(rates[1])}/s",
        f"{now.unread:,} unread",
    ]
    if now.fill is not None:
        parts.append(f"ring {now.fill:.0%} full")
    if now.held:
        parts.append(f"{now.held} waiting for the disk")
    if now.lost:
        parts.append(f"{now.lost} lost")
    if now.total and rates[0] > 0:
        left = max(0, now.total - now.samples) / rates[0]
        parts.append(f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left")
    return parts


class Progress:
    """Shows snapshots until it is left.

    Args:
        console: where the live line goes, if it is a terminal.
        live: show one; else lines go to the log.
        quiet: show nothing.
    """

    def __init__(self, console: Console, *, live: bool = True, quiet: bool = False) -> None:
        self._console = console
        self._wants_live = live and console.is_terminal and not quiet
        self._quiet = quiet
        self._rates: dict[str, Rate] = {}
        self._live: Live | None = None
        self._shown_at = time.monotonic()
        self._shown: list[Snapshot] = []

    def __enter__(self) -> "Progress":
        if self._wants_live:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, snapshots: list[Snapshot]) -> None:
        """Show where each output is now."""
        now = time.monotonic()
        lines = []
        for snapshot in snapshots:
            rate = self._rates.setdefault(snapshot.output, Rate())
            rates = rate.add(now, snapshot.samples, snapshot.bytes)
            lines.append((snapshot.output, describe(snapshot, rates)))
        if self._live is not None:
            self._live.update(_table(lines, self._console))
        elif not self._quiet:
            moved = [(s.samples, s.unread, s.held) for s in snapshots] != [
                (s.samples, s.unread, s.held) for s in self._shown
            ]
            if now - self._shown_at >= (_PLAIN_S if moved else _IDLE_S):
                self._shown_at, self._shown = now, snapshots
                for snapshot, (output, parts) in zip(snapshots, lines, strict=True):
                    log.info("%s: %s", output, ", ".join(parts), extra={"fields": asdict(snapshot)})


def _table(lines: list[tuple[str, list[str]]], console: Console) -> RenderableType:
    """One line for each output; where it is too narrow for them, as many as it takes."""
    table = Table.grid(padding=(0, 2))
    for output, parts in lines:
        table.add_row(Text(output, style="bold", no_wrap=True), *parts)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= (
        console.width
    ):
        return table
    return Group(*(line for output, parts in lines for line in _wrapped(output, parts, console)))


def _wrapped(output: str, parts: list[str], console: Console) -> list[Text]:
    """The parts on as many lines as they take; none is broken."""
    lines = [Text(output, style="bold", no_wrap=True, overflow="ellipsis")]
    for part in parts:
        if len(lines) == 1 or lines[-1].cell_len + 2 + len(part) > console.width:
            lines.append(Text(f"  {part}", no_wrap=True, overflow="ellipsis"))
        else:
            lines[-1].append(f"  {part}")
    return lines
