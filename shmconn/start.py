# SPDX-License-Identifier: Apache-2.0
"""The start of a ring: checked options, a name under lock R, reserved memory, a header.

In this order: R; dead rings go; the ring's name and lock P, so that a ring without P is dead and
never newborn; its doorbell; R is freed; the memory is reserved; the header; R again; the groups
that the options name, epoch, and magic last. A start that fails has registered nothing: a group
that it took back could be one that another producer counts on.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import posix_ipc

from shmconn import layout
from shmconn.cleanup import clean_up, sweep_others
from shmconn.doorbell import Doorbell
from shmconn.doorbell import unlink as unlink_doorbell
from shmconn.errors import OptionError
from shmconn.handle import check_name, format_size, parse_size
from shmconn.layout import RingShape
from shmconn.registry import Group, Registry
from shmconn.segment import RingSegment, ShmFile, ring_file, unlink
from shmconn.words import Words


def parse_groups(groups: Iterable[object]) -> list[Group]:
    """Groups from names or ``{"name": ..., "by_handle": ...}``.

    Raises:
        OptionError: another form, or a name that is not allowed.
    """
    parsed = []
    for group in groups:
        if isinstance(group, str):
            group = {"name": group}
        if not isinstance(group, Mapping) or not {"name"} <= set(group) <= {"name", "by_handle"}:
            raise OptionError(
                f"group {group!r} must be a name or {{'name': ..., 'by_handle': ...}}"
            )
        by_handle = group.get("by_handle", False)
        if not isinstance(by_handle, bool):
            raise OptionError(f"by_handle {by_handle!r} of group {group['name']!r} must be a bool")
        parsed.append(Group(check_name(group["name"], "group"), by_handle))
    return parsed


@dataclass(frozen=True)
class Plan:
    """The checked options of a new ring."""

    name: str
    shape: RingShape
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    groups: list[Group]
    mode: int
    engine_id: str

    @classmethod
    def checked(
        cls,
        name: str,
        size: int | str,
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: str,
        page_size: int | str,
        slots: int | None,
        groups: Iterable[object],
        mode: int,
        engine_id: str,
    ) -> "Plan":
        """The plan of options that were checked.

        Raises:
            OptionError: an option is wrong.
        """
        return cls(
            check_name(name),
            _check_shape(size, page_size, slots, layer_ids, hidden_size, dtype),
            tuple(layer_ids),
            hidden_size,
            dtype,
            parse_groups(groups),
            mode,
            engine_id,
        )


@dataclass(frozen=True)
class Started:
    """A ring that was just made, with lock P held. ``left``: dead rings that groups wait for."""

    ring: RingSegment
    registry: Registry
    bell: Doorbell
    left: list[str]


def start(plan: Plan) -> Started:
    """Makes a ring.

    Raises:
        NoSpace, Busy, RegistryFull, AccessDenied: see the classes; nothing is left behind.
    """
    registry = Registry.open(plan.name, mode=plan.mode)
    try:
        left = clean_up(registry, backlog_counts=False).waiting
        if not registry.file.current():
            # The clean-up found nothing in use and took the registry too.
            registry.unlock()
            registry.close()
            registry = Registry.open(plan.name, mode=plan.mode)
        ring, bell = _make(registry, plan)
    except BaseException:
        registry.close()
        raise
    sweep_others(plan.name)
    return Started(ring, registry, bell, left)


def _check_shape(
    size: int | str,
    page_size: int | str,
    slots: int | None,
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: str,
) -> RingShape:
    size = parse_size(size, "ring size")
    page_size = parse_size(page_size, "page size")
    if page_size < layout.MIN_PAGE or page_size & (page_size - 1):
        raise OptionError(f"page size {page_size} must be a power of two, 65536 or more")
    if slots is not None and not 1 <= slots <= layout.MAX_SLOTS:
        raise OptionError(f"slots {slots} must be 1 to {layout.MAX_SLOTS}")
    if not 1 <= len(layer_ids) <= layout.MAX_LAYERS:
        raise OptionError(f"{len(layer_ids)} layers: a ring takes 1 to {layout.MAX_LAYERS}")
    if any(not isinstance(layer, int) or not 0 <= layer <= 1 << 20 for layer in layer_ids):
        raise OptionError(f"layer ids {list(layer_ids)} must be whole numbers from 0 up")
    if not 1 <= hidden_size <= 1 << 24:
        raise OptionError(f"hidden size {hidden_size} must be 1 to {1 << 24}")
    if dtype not in layout.DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(layout.DTYPES)}")
    shape = RingShape.of_size(size, page_size, slots)
    if shape.pages < 3:
        least = RingShape(page_size, 3, slots or 3).size
        raise OptionError(
            f"ring size {format_size(size)} is too small: three pages of "
            f"{format_size(page_size)} and the tables need {format_size(least)}"
        )
    return shape


def _make(registry: Registry, plan: Plan) -> tuple[RingSegment, Doorbell]:
    """Makes the ring; R is held on entry and free on return, also after an error."""
    generation = secrets.token_bytes(16)
    file_name = ring_file(plan.name, generation.hex())
    file = None
    try:
        # The name and lock P come under R, so that a ring without P is dead, never newborn.
        file = ShmFile(file_name, posix_ipc.O_CREX, plan.mode)
        file.locks.try_lock(layout.LOCK_P)
        bell = Doorbell(file_name, create=True, mode=plan.mode)
        registry.check(plan.groups)
    except BaseException:
        _undo(registry, file_name, file)
        registry.unlock()
        raise
    registry.unlock()
    try:
        file.reserve(plan.shape.size, f"ring {plan.name!r}")
        head = _write_head(file, registry, plan, generation)
        with registry.exclusive():
            registry.check(plan.groups)
            for wish in plan.groups:
                registry.register(wish)
            registry.words.store(layout.EPOCH, registry.words.load(layout.EPOCH) + 1)
            head.store(layout.MAGIC, layout.RING_MAGIC)
        # What registered groups must not fail for want of the descriptor that this mapping takes.
        del head
        return RingSegment(file, whole=True), bell
    except BaseException:
        with registry.exclusive():
            _undo(registry, file_name, file)
        raise


def _undo(registry: Registry, file_name: str, file: ShmFile | None) -> None:
    """Takes back a ring that could not be made. Under R."""
    # Also a file that was made and could not be opened twice: nobody else has this name.
    unlink_doorbell(file_name)
    unlink(file_name)
    if file is not None:
        file.close()
    clean_up(registry, backlog_counts=True)


def _write_head(file: ShmFile, registry: Registry, plan: Plan, generation: bytes) -> Words:
    """Writes all of the header but its magic."""
    words = Words(file.map(layout.TOMBSTONE_TABLE))
    engine_id = plan.engine_id.encode()[: layout.ENGINE_ID_BYTES]
    host = socket.gethostname().encode()[: layout.HOST_BYTES]
    for at, value in (
        (layout.VERSION_AT, layout.VERSION),
        (layout.SIZE_AT, plan.shape.size),
        (layout.PAGE_SIZE, plan.shape.page_size),
        (layout.PAGES, plan.shape.pages),
        (layout.SLOTS, plan.shape.slots),
        (layout.DATA, plan.shape.data),
        (layout.DTYPE, layout.DTYPES[plan.dtype]),
        (layout.HIDDEN_SIZE, plan.hidden_size),
        (layout.LAYERS, len(plan.layer_ids)),
        (layout.PRODUCER_PID, os.getpid()),
        (layout.PRODUCER_STARTED, time.time_ns()),
        (layout.ENGINE_ID_LENGTH, len(engine_id)),
        (layout.HOST_LENGTH, len(host)),
        (layout.MAX_SAMPLE, plan.shape.max_sample),
        (layout.FREE_PAGES, plan.shape.pages),
        (layout.FREE_SLOTS, plan.shape.slots),
        *((layout.LAYER_IDS + 8 * i, layer) for i, layer in enumerate(plan.layer_ids)),
    ):
        words.store(at, value)
    words.write(layout.GENERATION, generation)
    words.write(layout.RING_REGISTRY_ID, registry.id)
    words.write(layout.ENGINE_ID, engine_id)
    words.write(layout.HOST, host)
    return words
