# SPDX-License-Identifier: Apache-2.0
"""``shmconn top``: rings and groups, live. It only looks; it joins nothing and locks nothing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from reader.show import age, fill_of, group_state
from reader.tables import Column, Row, console_of_width, fitted
from reader.words import count
from shmconn.directory import GroupInfo, RingInfo
from shmconn.directory import groups as groups_of
from shmconn.directory import rings as rings_of
from shmconn.errors import RingMissing
from shmconn.handle import format_size
from shmconn.which import missing_text

_BAR = 10  # columns


@dataclass(frozen=True)
class Look:
    """All that was there at one moment; ``when`` is monotonic, in seconds."""

    when: float
    rings: Sequence[RingInfo]
    groups: dict[str, list[GroupInfo]]


@dataclass(frozen=True)
class Rates:
    """What a ring published per second between two looks."""

    samples: float
    bytes: float


def look(name: str | None) -> Look:
    """What is there now."""
    rings = rings_of(name)
    groups = {}
    for ring_name in sorted({ring.name for ring in rings}):
        try:
            groups[ring_name] = groups_of(ring_name)
        except RingMissing:
            groups[ring_name] = []
    return Look(time.monotonic(), rings, groups)


def rates(before: Look | None, now: Look) -> dict[str, Rates]:
    """Rates by generation; a ring that was not there before has none yet."""
    if before is None:
        return {}
    span = max(now.when - before.when, 1e-9)
    old = {ring.generation: ring for ring in before.rings}
    return {
        ring.generation: Rates(
            (ring.published - old[ring.generation].published) / span,
            (ring.published_bytes - old[ring.generation].published_bytes) / span,
        )
        for ring in now.rings
        if ring.generation in old
    }


def staller(ring: RingInfo, groups: Sequence[GroupInfo]) -> GroupInfo | None:
    """The group that a held ring waits for: the one that needs the oldest sample."""
    waiting = [group for group in groups if group.oldest_ns and group.needed.get(ring.generation)]
    if not ring.held_since_ns or not ring.live or not waiting:
        return None
    return min(waiting, key=lambda group: group.oldest_ns)


def stall_text(ring: RingInfo, group: GroupInfo) -> str:
    """Who stalls a ring, since when, and what helps."""
    held = f"vLLM has been held for {age(ring.held_since_ns)}"
    if not group.name:
        return f"{held}: nobody reads. Start a reader: shmconn drain {ring.name} --to DIR"
    who = f"group {group.name}, oldest sample {group.oldest_request_id} of {age(group.oldest_ns)}"
    leasing = [member for member in group.members if member.leases]
    if group.alive:
        pids = ", ".join(
            f"pid {member.pid} ({count(member.leases, 'lease')})" for member in leasing
        )
        return f"{held} by {who}{f', {pids}' if pids else ''}"
    return f"{held} by {who}, which is dead: start it again, or shmconn groups rm {ring.name} " + (
        group.name
    )


def render(now: Look, before: Look | None, console: Console) -> RenderableType:
    """One screen for a console of this width."""
    if not now.rings:
        return Text(f"{missing_text(None)}.")
    speed = rates(before, now)
    parts: list[RenderableType] = [fitted(_RINGS, _ring_rows(now, speed), console)]
    for ring in now.rings:
        group = staller(ring, now.groups.get(ring.name, ()))
        if group is not None:
            text = Text(f"{ring.name}: {stall_text(ring, group)}", style="yellow")
            parts.append(Padding(text, (0, 0, 0, 1)))
    rows = [row for name, groups in now.groups.items() for row in _group_rows(name, groups)]
    if rows:
        parts.append(fitted(_GROUPS, rows, console))
    return Group(*parts)


_RINGS = (
    Column("RING"),
    Column("LIFE", rank=9),
    Column("STATE", width=6),
    Column("FULL", rank=7),
    Column("", right=True, width=4),
    Column("SAMPLES", right=True, rank=6),
    Column("/S", right=True, rank=2, width=5),
    Column("GB/S", right=True, rank=8),
    Column("WAIT", right=True, rank=4),
    Column("LOST", right=True, rank=3),
)
_GROUPS = (
    Column("GROUP"),
    Column("STATE", rank=3, width=7),
    Column("LAG", right=True, rank=1, width=3),
    Column("LEASES", right=True, rank=4),
    Column("OLDEST", right=True, rank=5),
    Column("READ", right=True, rank=7, width=4),
    Column("BYTES", right=True, rank=8, width=9),
    Column("SINCE", right=True, rank=9, width=5),
)


def _ring_rows(now: Look, speed: dict[str, Rates]) -> list[Row]:
    rows: list[Row] = []
    for ring in now.rings:
        fill = fill_of(ring)
        found = speed.get(ring.generation, Rates(0, 0))
        style = "red" if fill > 0.9 else "yellow" if fill > 0.7 else "green"
        rows.append(
            (
                ring.name,
                ring.generation[:8],
                Text(ring.state, style="yellow" if ring.state == "dead" else ""),
                ProgressBar(total=1, completed=fill, width=_BAR, complete_style=style),
                f"{fill:.0%}",
                f"{ring.published:,}",
                f"{found.samples:,.1f}",
                f"{found.bytes / 1e9:.2f}",
                f"{ring.accepted - ring.settled:,}",
                Text(f"{ring.lost:,}", style="red" if ring.lost else ""),
            )
        )
    return rows


def _group_rows(name: str, groups: Sequence[GroupInfo]) -> list[Row]:
    """The ring's name, then each group, then its members, each further in."""
    rows: list[Row] = []
    for group in groups:
        unread, needed = sum(group.unread.values()), sum(group.needed.values())
        if not group.name and not needed:
            continue
        state = group_state(group)
        rows.append(
            (
                f"  {group.name or '(no group yet)'}",
                Text(state, style="yellow" if state == "dead" else ""),
                f"{unread:,}",
                f"{needed - unread:,}",
                age(group.oldest_ns),
                *[""] * 3,
            )
        )
        for member in group.members:
            rows.append(
                (
                    f"    pid {member.pid} on {member.host}",
                    "" if member.alive else Text("dead", style="yellow"),
                    "",
                    f"{member.leases:,}",
                    "",
                    f"{member.released:,}",
                    format_size(member.bytes_claimed),
                    age(member.started_ns),
                )
            )
    return [(Text(name, style="bold"), *[""] * 7), *rows] if rows else []


def run(name: str | None, *, interval_s: float, once: bool) -> None:
    """Show rings and groups until Ctrl-C; with ``once``, one screen after one interval."""
    console = console_of_width()
    before = look(name)
    if once:
        time.sleep(interval_s)
        console.print(render(look(name), before, console))
        return
    with Live(
        render(before, None, console), console=console, screen=True, auto_refresh=False
    ) as live:
        try:
            while True:
                time.sleep(interval_s)
                now = look(name)
                live.update(render(now, before, console), refresh=True)
                before = now
        except KeyboardInterrupt:
            return
