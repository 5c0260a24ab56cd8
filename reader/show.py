# SPDX-License-Identifier: Apache-2.0
"""``ls``, ``stat``, ``groups``, ``rm``: what is there, as tables for people or JSON for scripts."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from reader.tables import Column, Row, console_of_width, fitted
from shmconn.directory import GroupInfo, RingInfo
from shmconn.directory import groups as groups_of
from shmconn.directory import remove_group as do_remove_group
from shmconn.directory import remove_rings as do_remove_rings
from shmconn.directory import rings as rings_of
from shmconn.errors import RingMissing
from shmconn.handle import format_size
from shmconn.which import missing_text, the_only_ring

# A live group whose oldest sample waits for so long is told of.
_LATE_S = 10.0
_RINGS = (
    Column("RING"),
    Column("GENERATION", rank=4),
    Column("STATE"),
    Column("SIZE", right=True, rank=2),
    Column("FULL", right=True),
    Column("SAMPLES", right=True, rank=1),
    Column("LOST", right=True, rank=3),
    Column("PID", right=True, rank=5),
    Column("HOLDS", rank=6),
)
_GROUPS = (
    Column("GROUP"),
    Column("KIND", rank=4),
    Column("STATE", rank=1),
    Column("UNREAD", right=True),
    Column("LEASED", right=True, rank=2),
    Column("OLDEST", right=True, rank=3),
    Column("MEMBERS", rank=5),
)
_STYLES = {"live": "green", "closed": "dim", "dead": "yellow", "damaged": "red"}


def age(since_ns: int, now: float | None = None) -> str:
    """How long ago a Unix time in ns was, for people; "-" for 0."""
    if not since_ns:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - since_ns / 1e9)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def fill_of(ring: RingInfo) -> float:
    """Share of a ring's pages in use, 0 to 1."""
    return 1 - ring.free_pages / ring.pages if ring.pages else 0.0


def shape_of(ring: RingInfo) -> str:
    """Layers, hidden size and dtype of a ring's samples."""
    layers = ",".join(map(str, ring.layer_ids))
    return f"[{layers}] x {ring.hidden_size} {ring.dtype}"


def list_rings(*, as_json: bool) -> None:
    """``shmconn ls``."""
    rings = rings_of()
    if as_json:
        print(json.dumps([_plain_ring(ring) for ring in rings]))
        return
    if not rings:
        print(f"{missing_text(None)}.")
        return
    rows: list[Row] = [
        (
            ring.name,
            ring.generation[:8],
            Text(ring.state, style=_STYLES[ring.state]),
            *(
                ("", "", "", "", "", ring.problem)
                if ring.problem
                else (
                    format_size(ring.size),
                    f"{fill_of(ring):.0%}",
                    f"{ring.published:,}",
                    f"{ring.lost:,}",
                    str(ring.pid),
                    shape_of(ring),
                )
            ),
        )
        for ring in rings
    ]
    _show(_RINGS, rows)


def stat(name: str | None, *, as_json: bool) -> None:
    """``shmconn stat``."""
    name = name or the_only_ring()
    rings = rings_of(name)
    groups = _groups(name, rings)
    if as_json:
        value = {
            "name": name,
            "rings": [_plain_ring(ring) for ring in rings],
            "groups": [_plain_group(group) for group in groups],
        }
        print(json.dumps(value))
        return
    for ring in rings:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="bold")
        for label, fact in _facts(ring):
            table.add_row(label, fact)
        console_of_width().print(table)
    _show_groups(groups)
    _print_waits(name, groups)


def _facts(ring: RingInfo) -> list[tuple[str, str]]:
    """Everything about one ring, as labels and values."""
    head = [("ring", ring.name), ("generation", ring.generation), ("state", ring.state)]
    if ring.problem:
        return [*head, ("problem", ring.problem)]
    lost = ", ".join(f"{count} {why}" for why, count in ring.lost_by_reason.items()) or "none"
    used = ring.pages - ring.free_pages
    return [
        *head,
        ("producer", f"pid {ring.pid} on {ring.host}, started {age(ring.started_ns)} ago"),
        ("engine", ring.engine_id or "-"),
        ("samples are", shape_of(ring)),
        (
            "size",
            f"{format_size(ring.size)}, {ring.pages:,} pages of {format_size(ring.page_size)}, "
            f"{ring.slots:,} slots",
        ),
        ("room for", f"{ring.tokens_capacity:,} tokens of {format_size(ring.bytes_per_token)}"),
        ("in use", f"{used:,} pages ({fill_of(ring):.0%}), {ring.slots - ring.free_slots:,} slots"),
        ("published", f"{ring.published:,} samples, {format_size(ring.published_bytes)}"),
        ("accepted", f"{ring.accepted:,} requests, {ring.accepted - ring.settled:,} on their way"),
        ("lost", lost),
        ("held back", f"for {age(ring.held_since_ns)}" if ring.held_since_ns else "no"),
    ]


def list_groups(name: str | None, *, as_json: bool) -> None:
    """``shmconn groups``."""
    name = name or the_only_ring()
    groups = groups_of(name)
    if as_json:
        print(json.dumps([_plain_group(group) for group in groups]))
        return
    _show_groups(groups)
    _print_waits(name, groups)


def remove_group(name: str, group: str) -> None:
    """``shmconn groups rm``."""
    do_remove_group(name, group)
    print(f"removed group {group} of ring {name}")


def remove_rings(name: str, *, force: bool) -> None:
    """``shmconn rm``."""
    swept = do_remove_rings(name, force=force)
    live = [ring for ring in rings_of(name) if ring.live]
    for file_name in swept.removed:
        print(f"removed {file_name.lstrip('/')}")
    for file_name in swept.waiting:
        print(
            f"kept {file_name.lstrip('/')}: a group waits for its samples, or it is damaged; see "
            f"`shmconn groups {name}`, or remove it with --force"
        )
    for file_name in swept.foreign:
        print(
            f"kept {file_name.lstrip('/')}: another user made it, and only that user may remove it"
        )
    for ring in live:
        print(f"kept {ring.file.lstrip('/')}: pid {ring.pid} writes to it")
    if not (swept.removed or swept.waiting or swept.foreign or live):
        print(f"there was nothing of ring {name} to remove")


def group_state(group: GroupInfo) -> str:
    """What a group is waiting for, in a word or two."""
    if not group.name:
        return "nobody yet"
    if group.alive:
        return "reading"
    return "dead" if group.members else "no member"


class Wait(NamedTuple):
    """What waits for a group, who holds it, and the command that helps."""

    text: str
    remedy: str


def wait_for(name: str, group: GroupInfo) -> Wait | None:
    """What a ring waits for: a dead group, a first reader, or a live one that is late."""
    needed = sum(group.needed.values())
    late = time.time() - group.oldest_ns / 1e9 > _LATE_S
    if not needed or (group.alive and not late):
        return None
    oldest = f"the oldest, {group.oldest_request_id!r}, for {age(group.oldest_ns)}"
    if not group.name:
        text = f"{needed:,} samples wait for a first reader, {oldest}"
        return Wait(text, f"start one, as shmconn drain {name} --to DIR")
    holders = [
        f"pid {member.pid} on {member.host} ({'alive' if member.alive else 'dead'}) holds "
        f"{member.leases:,}"
        for member in group.members
        if member.leases
    ]
    text = "; ".join([f"{needed:,} samples wait for group {group.name}, {oldest}", *holders])
    if group.alive:
        return Wait(text, "if a reader is stuck, continue or end it: its group gets what it held")
    return Wait(text, f"start it again, or give them up with shmconn groups rm {name} {group.name}")


def _print_waits(name: str, groups: Sequence[GroupInfo]) -> None:
    for wait in filter(None, (wait_for(name, group) for group in groups)):
        print(f"{wait.text}\n  -> {wait.remedy}")


def _show_groups(groups: Sequence[GroupInfo]) -> None:
    rows: list[Row] = []
    for group in groups:
        unread, needed = sum(group.unread.values()), sum(group.needed.values())
        if not group.name and not needed:
            continue
        kind = "by handle" if group.by_handle else "every sample"
        members = [
            f"pid {member.pid} on {member.host}" + ("" if member.alive else " (dead)")
            for member in group.members
        ]
        state = group_state(group)
        rows.append(
            (
                group.name or "(not subscribed yet)",
                kind + (", durable" if group.durable else ""),
                Text(state, style="yellow" if state == "dead" and needed else ""),
                f"{unread:,}",
                f"{needed - unread:,}",
                age(group.oldest_ns),
                "\n".join(members) or "-",
            )
        )
    _show(_GROUPS, rows)


def _groups(name: str, rings: Sequence[RingInfo]) -> list[GroupInfo]:
    """The groups of a ring; of a damaged one there may be none to see."""
    try:
        return groups_of(name)
    except RingMissing:
        if not rings:
            raise
        return []


def _plain_ring(ring: RingInfo) -> dict[str, Any]:
    return dataclasses.asdict(ring) | {"state": ring.state, "full": round(fill_of(ring), 4)}


def _plain_group(group: GroupInfo) -> dict[str, Any]:
    return dataclasses.asdict(group) | {"state": group_state(group)}


def _show(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    console = console_of_width()
    console.print(fitted(columns, rows, console))
