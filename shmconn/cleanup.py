# SPDX-License-Identifier: Apache-2.0
"""Removes the rings of dead producers that no group waits for, and registries without use.

Everything here runs under lock R of the registry. A ring's name and its producer's lock both come
into being under R, so a ring without that lock is dead, never newborn. The doorbell goes before
the name: while the name is there, the rest can be found.
"""

import contextlib
import os
from dataclasses import dataclass, field

from shmconn import doorbell, layout
from shmconn.errors import Busy, NoDescriptors, RingMissing, ShmConnError
from shmconn.need import needs
from shmconn.registry import Registry
from shmconn.segment import (
    RingSegment,
    ShmFile,
    descriptors_named,
    path_of,
    registry_file,
    registry_names,
    ring_files,
    unlink,
)

# Names that the connector makes up carry this; they never come again.
AUTOMATIC = "auto-"


@dataclass(frozen=True)
class Swept:
    """What a clean-up did, by file names of rings.

    Attributes:
        removed: those that went.
        waiting: dead ones that stay for a group, or because they are damaged.
        foreign: dead ones of another user, which only that user may remove.
    """

    removed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def clean_up(registry: Registry, *, backlog_counts: bool, force: bool = False) -> Swept:
    """Unlinks dead rings, then the registry if nothing uses it. Under R.

    Args:
        backlog_counts: whether samples that nobody has subscribed to yet are a reason to stay.
        force: remove dead rings although groups wait for their samples.
    """
    swept = Swept()
    if not registry.file.current():
        # The name leads to another registry by now: what lies there is not ours to judge.
        return swept
    registry.undo_dead_registrants()
    for file_name in ring_files(registry.name):
        state = _state(registry, file_name, backlog_counts)
        goes = state == "gone" or (force and state == "waiting")
        if goes and doorbell.unlink(file_name) and unlink(file_name):
            swept.removed.append(file_name)
        elif goes:
            swept.foreign.append(file_name)
        elif state == "waiting":
            swept.waiting.append(file_name)
    _remove_unused(registry)
    return swept


def _state(registry: Registry, file_name: str, backlog_counts: bool) -> str:
    """live, waiting (dead, but a group needs it) or gone."""
    try:
        file = ShmFile(file_name)
    except (RingMissing, ShmConnError):
        return "live"
    try:
        if file.locks.held(layout.LOCK_P):
            return "live"
    finally:
        file.close()
    try:
        ring = RingSegment.attach(file_name, whole=False)
    except ShmConnError:
        # Dead and damaged: only a person may decide.
        return "waiting"
    if ring is None or ring.registry_id != registry.id:
        return "gone"
    published = ring.words.load(layout.PUBLISHED)
    for slot in range(ring.shape.slots):
        seq = ring.words.load(ring.shape.seq_at(slot))
        if 0 < seq <= published and _waits(registry, ring, slot, seq, backlog_counts):
            return "waiting"
    return "gone"


def _waits(
    registry: Registry, ring: RingSegment, slot: int, seq: int, backlog_counts: bool
) -> bool:
    return any(
        needs(registry, ring, group, slot, seq)
        for group in range(layout.GROUPS)
        if backlog_counts or registry.state(group) != layout.NAMELESS
    )


def _remove_unused(registry: Registry) -> None:
    """Unlinks the registry if no ring is left and no group or process uses it. Under R."""
    states = (registry.state(group) for group in range(layout.GROUPS))
    if layout.ACTIVE in states:
        return
    # Whoever waits for R holds none, and finds by the link count that the name has gone.
    if ring_files(registry.name) or registry.locks.held(layout.LOCK_R + 1, layout.LOCK_R):
        return
    bells = [doorbell.group_doorbell(registry.name, group) for group in range(layout.GROUPS)]
    # While a doorbell is left, so is the name by which its owner's next clean-up finds it.
    if all([doorbell.unlink(bell) for bell in bells]):
        unlink(registry.file.name)


def sweep_others(own: str) -> list[str]:
    """Cleans under this user's other names, each by a single try of its R; what was removed."""
    removed: list[str] = []
    for name in registry_names():
        with contextlib.suppress(OSError, ShmConnError):
            if name == own or os.stat(path_of(registry_file(name))).st_uid != os.getuid():
                continue
            removed += clean_name(name, backlog_counts=not name.startswith(AUTOMATIC)).removed
    return removed


def clean_name(
    name: str, *, backlog_counts: bool, force: bool = False, wait_s: float = 0.0
) -> Swept:
    """Cleans under one name.

    Raises:
        RingMissing: there is no registry of that name.
        Busy: R could not be had within ``wait_s``.
    """
    registry = Registry.open(name, create=False, wait_s=wait_s)
    try:
        return clean_up(registry, backlog_counts=backlog_counts, force=force)
    finally:
        registry.unlock()
        registry.close()


def try_clean(registry: Registry, wait_s: float = 1.0) -> None:
    """The clean-up with which every leave and close ends.

    It gives way, to the next one, if R is not to be had or this process may open no more files.
    """
    gives_way = contextlib.suppress(Busy, NoDescriptors)
    with gives_way, descriptors_named("a clean-up"), registry.exclusive(wait_s):
        clean_up(registry, backlog_counts=True)
