# SPDX-License-Identifier: Apache-2.0
"""``shmconn top``: rings and groups, live. It only looks; it joins nothing and locks nothing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reader.show import age, fill_of, group_state
from shmconn.directory import GroupInfo, RingInfo
from shmconn.directory import groups as groups_of
from shmconn.directory import rings as rings_of
from shmconn.errors import RingMissing
from shmconn.handle import format_size
from shmconn.subscription import missing_text

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
        pids = ", ".join(f"pid {member.pid} ({member.leases} leases)" for member in leasing)
        return f"{held} by {who}{f', {pids}' if pids else ''}"
    return f"{held} by {who}, which is dead: start it again, or shmconn groups rm {ring.name} " + (
        group.name
    )


def render(now: Look, before: Look | None) -> RenderableType:
    """One screen."""
    if not now.rings:
        return Text(f"{missing_text(None)}.")
    speed = rates(before, now)
    parts: list[RenderableType] = [_rings_table(now, speed)]
    for ring in now.rings:
        group = staller(ring, now.groups.get(ring.name, ()))
        if group is not None:
            parts.append(Text(f"  {ring.name}: {stall_text(ring, group)}", style="yellow"))
    for name, groups in now.groups.items():
        parts.append(_groups_table(name, groups))
    return Group(*parts)


def _rings_table(now: Look, speed: dict[str, Rates]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("RING", overflow="fold")  # the only one that a narrow terminal squeezes
    for column in ("LIFE", "STATE"):
        table.add_column(column, no_wrap=True, min_width=6)
    table.add_column("FULL", min_width=_BAR)
    for column in ("", "SAMPLES", "/S", "GB/S", "WAIT", "LOST"):
        table.add_column(column, justify="right", no_wrap=True, min_width=4)
    for ring in now.rings:
        fill = fill_of(ring)
        found = speed.get(ring.generation, Rates(0, 0))
        style = "red" if fill > 0.9 else "yellow" if fill > 0.7 else "green"
        table.add_row(
            ring.name,
            ring.generation[:8],
            ring.state,
            ProgressBar(total=1, completed=fill, width=_BAR, complete_style=style),
            f"{fill:.0%}",
            f"{ring.published:,}",
            f"{found.samples:,.1f}",
            f"{found.bytes / 1e9:.2f}",
            f"{ring.accepted - ring.settled:,}",
            Text(f"{ring.lost:,}", style="red" if ring.lost else ""),
        )
    return table


def _groups_table(name: str, groups: Sequence[GroupInfo]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(f"GROUPS OF {name}", overflow="fold")
    table.add_column("STATE", no_wrap=True, min_width=7)
    table.add_column("MEMBER", overflow="fold")
    for column in ("LAG", "LEASES", "READ", "", "AGE"):
        table.add_column(column, justify="right", no_wrap=True, min_width=3)
    for group in groups:
        unread, needed = sum(group.unread.values()), sum(group.needed.values())
        if not group.name and not needed:
            continue
        state = group_state(group)
        table.add_row(
            group.name or "(not subscribed yet)",
            Text(state, style="yellow" if state == "dead" else ""),
            "",
            f"{unread:,}",
            f"{needed - unread:,}",
            "",
            "",
            age(group.oldest_ns),
        )
        for member in group.members:
            table.add_row(
                "",
                "" if member.alive else Text("dead", style="yellow"),
                f"pid {member.pid} on {member.host}",
                "",
                f"{member.leases:,}",
                f"{member.released:,}",
                format_size(member.bytes_claimed),
                age(member.started_ns),
            )
    return table


def run(name: str | None, *, interval_s: float, once: bool) -> None:
    """Show rings and groups until Ctrl-C; with ``once``, one screen after one interval."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    before = look(name)
    if once:
        time.sleep(interval_s)
        console.print(render(look(name), before))
        return
    with Live(render(before, None), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                now = look(name)
                live.update(render(now, before), refresh=True)
                before = now
        except KeyboardInterrupt:
            return
