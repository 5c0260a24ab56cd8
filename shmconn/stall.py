# SPDX-License-Identifier: Apache-2.0
"""Who is in the way of a full ring: for the decision to hold, and for people."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from shmconn import layout
from shmconn.handle import format_size
from shmconn.need import needs, wanted
from shmconn.registry import Registry
from shmconn.segment import RingSegment
from shmconn.slots import Slots
from shmconn.unlinked import unlinked


@dataclass(frozen=True)
class Blocker:
    """A group that needs the oldest sample of the ring.

    Attributes:
        group: its name, or "" for samples that nobody has subscribed to yet, or while it is made.
        row: its row in the registry.
        by_handle: whether it gets its samples by handle only.
        pid, host: of the member that holds the oldest sample, 0 and "" if nobody claimed it; of a
            group that is being made, the pid of who makes it.
        alive: whether that member, or else any member of the group, is alive.
        samples: published samples that the group still needs.
        joining: the group is being made; until it is, nothing can be taken back.
    """

    group: str
    row: int
    by_handle: bool
    pid: int
    host: str
    alive: bool
    samples: int
    joining: bool = False

    def text(self, ring: str) -> str:
        """What it is and what helps, for people."""
        if self.joining:
            return (
                f"pid {self.pid} is making a new group, or was stopped while it did: continue or "
                "end it"
            )
        if not self.group:
            return f"nobody has subscribed yet: start a reader, as `shmconn drain {ring} --to DIR`"
        who = f"group {self.group!r} needs {self.samples} samples"
        give_up = (
            f"start it again, or give its samples up with `shmconn groups rm {ring} {self.group}`"
        )
        if self.pid:
            holder = f"the oldest is held by pid {self.pid} on {self.host}"
            if self.alive:
                return f"{who}, {holder} (alive): if that process is stuck, continue or end it"
            return f"{who}, {holder} (dead): {give_up}"
        if self.alive:
            return f"{who}, the oldest is unclaimed, its members are alive"
        return f"{who} and has no live member: {give_up}"


def _engine_pids() -> set[int]:
    """This process, its parent, and on upwards through processes that only work for theirs.

    vLLM's worker may be a child of its engine core, which is a child of the process that calls
    ``LLM.generate`` or serves; whoever started that one is somebody else.
    """
    pids = {os.getpid(), os.getppid()}
    pid = os.getppid()
    try:
        while _works_for_parent(pid):
            # The name may hold anything; the parent is the second field after it.
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
            pids.add(pid)
    except OSError:
        pass  # An ancestor has ended meanwhile, so it reads nothing.
    return pids


def _works_for_parent(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return command.startswith(b"VLLM::") or b"multiprocessing" in command


class Stall:
    """Looks at a ring through the eyes of its producer."""

    def __init__(self, registry: Registry, ring: RingSegment) -> None:
        self._registry = registry
        self._ring = ring
        self._own = _engine_pids()
        self._host = socket.gethostname()

    def counts_as_live(self, group: int) -> bool:
        """Whether a live member of the group can release samples while the producer holds.

        A subscription in a process that the engine works for cannot, unless it drains in a thread
        of its own: ``LLM.generate(...)`` and only then reading would wait for itself.
        """
        registry = self._registry
        if not registry.any_alive(group):
            return False
        for member in registry.joined(group):
            own = (
                registry.member_word(group, member, layout.MEMBER_PID) in self._own
                and not registry.member_word(group, member, layout.MEMBER_BACKGROUND)
                and registry.host(group, member) == self._host
            )
            if not own and registry.alive(group, member):
                return True
        return False

    def can_progress(self, slots: Slots) -> bool:
        """Whether some published slot is needed only by groups with a live member."""
        free = slots.seqs != 0
        for group, state in enumerate(self._registry.states()):
            if state != layout.FREE and not self.counts_as_live(group):
                if state == layout.REGISTERING:
                    return False
                free &= ~wanted(self._ring, group, slots.seqs)
        return bool(free.any())

    def blockers(self, slots: Slots) -> list[Blocker]:
        """The groups that need the oldest sample."""
        if not slots.stored:
            return []
        slot, oldest = next(iter(slots.stored.items()))
        return [
            self._blocker(group, slot, slots)
            for group in range(layout.GROUPS)
            if needs(self._registry, self._ring, group, slot, oldest.seq)
        ]

    def _blocker(self, group: int, slot: int, slots: Slots) -> Blocker:
        registry, ring, stored = self._registry, self._ring, slots.stored
        if registry.state(group) == layout.REGISTERING:
            maker = registry.words.load(layout.NOTE_R)
            return Blocker("", group, False, maker, "", True, len(stored), joining=True)
        samples = int(wanted(ring, group, slots.seqs).sum())
        word = ring.words.load(ring.shape.hold_at(group, slot))
        code = word & 0xFFFF
        claimed = word >> 16 == stored[slot].seq and 1 <= code <= layout.MEMBERS
        return Blocker(
            group=registry.group_name(group) if registry.state(group) == layout.ACTIVE else "",
            row=group,
            by_handle=registry.by_handle(group),
            pid=registry.member_word(group, code - 1, layout.MEMBER_PID) if claimed else 0,
            host=registry.host(group, code - 1) if claimed else "",
            alive=registry.alive(group, code - 1) if claimed else registry.any_alive(group),
            samples=samples,
        )

    def text(self, slots: Slots) -> str:
        """One line: how full the ring is, which sample is oldest, who holds it, what helps."""
        shape = self._ring.shape
        name = self._ring.name
        stored = slots.stored
        used = format_size((shape.pages - slots.pages.free) * shape.page_size)
        line = (
            f"ring {name!r} holds {len(stored)} samples, {used} of "
            f"{format_size(shape.pages * shape.page_size)}, {len(slots.free)} of {shape.slots} "
            f"slots are free{self._fragmentation(slots)}"
        )
        if unlinked(self._ring.file, self._registry.file):
            line += "; its name is gone from /dev/shm, so that no reader can come to it any more"
        if stored:
            oldest = next(iter(stored.values()))
            age = time.monotonic() - oldest.since
            line += f"; oldest sample {oldest.request_id[:80]!r} is {age:.0f} s old"
        blockers = "; ".join(blocker.text(name) for blocker in self.blockers(slots))
        return f"{line}; {blockers or 'nobody needs it any more'}"

    def _fragmentation(self, slots: Slots) -> str:
        """Why a sample waits though its bytes are free: not in one run."""
        pages, page_size = slots.pages, self._ring.shape.page_size
        if not slots.free or not slots.refused or slots.refused > pages.free:
            return ""
        return (
            f"; the next sample needs {format_size(slots.refused * page_size)} in one run: "
            f"{format_size(pages.free * page_size)} are free, but the longest run is "
            f"{format_size(pages.longest() * page_size)}, since samples that are still held lie "
            "between (fragmentation): it comes when they are released, or take a larger ring_size"
        )
