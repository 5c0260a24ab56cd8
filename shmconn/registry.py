# SPDX-License-Identifier: Apache-2.0
"""The registry of a ring name: its groups and their members.

It is shared by all rings of that name: data-parallel ranks, dead generations and the next one. So
a new generation owes every known group every sample from its first one. Groups and members change
only under lock R; that somebody is alive is said by a lock of the kernel, never by a word.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import posix_ipc

from shmconn import layout
from shmconn.doorbell import Doorbell, group_doorbell
from shmconn.errors import (
    AccessDenied,
    LayoutMismatch,
    OptionError,
    RegistryFull,
    RingMissing,
    SegmentCorrupt,
)
from shmconn.segment import RingSegment, ShmFile, path_of, registry_file, ring_files
from shmconn.words import WORD, Words, step


@dataclass(frozen=True)
class Group:
    """What a group is called, and how its samples are asked for."""

    name: str
    by_handle: bool = False


class Registry:
    """An open registry. Each member and each producer has one of its own."""

    def __init__(self, file: ShmFile) -> None:
        self.file = file
        self.name = file.name.removeprefix(layout.PREFIX)
        self._check()
        self.words = Words(file.map(layout.REGISTRY_SIZE))
        self.locks = file.locks
        # Locks of one open file do not exclude its own threads.
        self._thread = threading.RLock()

    def _check(self) -> None:
        size = self.file.size
        if size < layout.NOTE_R:
            raise SegmentCorrupt(self.file.name, "size", f"is {size} bytes: the file is truncated")
        head = Words(self.file.map(layout.NOTE_R))
        if head.load(layout.MAGIC) != layout.REGISTRY_MAGIC:
            raise SegmentCorrupt(self.file.name, "magic", "is not that of a registry")
        version = head.load(layout.VERSION_AT)
        if version != layout.REGISTRY_VERSION:
            raise LayoutMismatch(_version_text(self.name, version))
        if size != layout.REGISTRY_SIZE or head.load(layout.SIZE_AT) != size:
            raise SegmentCorrupt(self.file.name, "size", f"is {size}, not {layout.REGISTRY_SIZE}")

    @property
    def id(self) -> bytes:
        """128 random bits: a ring of another registry of this name is refused by them."""
        return self.words.read(layout.REGISTRY_ID, 16)

    @classmethod
    def open(
        cls, name: str, *, create: bool = True, wait_s: float = 5.0, mode: int = 0o600
    ) -> "Registry":
        """Opens, or makes, the registry of a name. Returns with lock R held.

        Raises:
            RingMissing: there is none, and ``create`` is false.
            Busy: R could not be had within ``wait_s``.
        """
        deadline = time.monotonic() + wait_s
        while True:
            file = cls._open_file(name, create, mode)
            try:
                file.locks.lock(layout.LOCK_R, deadline, partial(_busy_text, name, file))
                if file.current():
                    break
            except BaseException:
                file.close()
                raise
            file.close()
        try:
            if _magic(file) == 0:
                # Nobody else is making it, for we hold R: its maker died, or it is ours to make.
                # By the magic only: to empty one of another size could be SIGBUS for its users.
                cls._refuse_used(name, file)
                cls._make(file)
            registry = cls(file)
        except BaseException:
            file.close()
            raise
        registry._thread.acquire()
        registry.words.store(layout.NOTE_R, os.getpid())
        return registry

    @classmethod
    def peek(cls, name: str) -> "Registry | None":
        """Opens a registry to look at it, without any lock; None if it is not there yet."""
        try:
            file = cls._open_file(name, False, 0)
        except RingMissing:
            return None
        if _magic(file) == 0:
            file.close()
            return None
        return cls(file)

    @staticmethod
    def _open_file(name: str, create: bool, mode: int) -> ShmFile:
        file_name = registry_file(name)
        while True:
            with contextlib.suppress(RingMissing):
                return ShmFile(file_name)
            if not create:
                raise RingMissing(f"there is no ring {name!r}")
            with contextlib.suppress(FileExistsError):
                return ShmFile(file_name, posix_ipc.O_CREX, mode)

    @staticmethod
    def _refuse_used(name: str, file: ShmFile) -> None:
        """A half-made registry has no ring and no member; one with either has lost its magic.

        To make that anew would take its users' groups, and the pages under their leases.
        """
        if file.size and (ring_files(name) or file.locks.held(layout.LOCK_R + 1, layout.LOCK_R)):
            raise SegmentCorrupt(file.name, "magic", "is 0, and there are rings or members of it")

    @staticmethod
    def _make(file: ShmFile) -> None:
        file.reserve(layout.REGISTRY_SIZE, f"the registry {file.name!r}")
        words = Words(file.map(layout.REGISTRY_SIZE))
        words.store(layout.VERSION_AT, layout.REGISTRY_VERSION)
        words.store(layout.SIZE_AT, layout.REGISTRY_SIZE)
        words.write(layout.REGISTRY_ID, secrets.token_bytes(16))
        words.store(layout.GROUP_STATES, layout.NAMELESS)
        words.store(layout.MAGIC, layout.REGISTRY_MAGIC)

    # --- lock R ---------------------------------------------------------------------------------

    def unlock(self) -> None:
        """Frees lock R."""
        self.words.store(layout.NOTE_R, 0)
        self.locks.unlock(layout.LOCK_R)
        self._thread.release()

    @contextlib.contextmanager
    def exclusive(self, wait_s: float = 5.0) -> Iterator[None]:
        """Holds lock R.

        Raises:
            Busy: it could not be had within ``wait_s``; names the holder.
        """
        with self._thread:
            deadline = time.monotonic() + wait_s
            self.locks.lock(layout.LOCK_R, deadline, lambda: _busy_text(self.name, self.file))
            self._thread.acquire()
            self.words.store(layout.NOTE_R, os.getpid())
            try:
                yield
            finally:
                self.unlock()

    # --- rows -----------------------------------------------------------------------------------

    def state(self, group: int) -> int:
        """State of a group row, by one load."""
        return self.words.load(layout.GROUP_STATES + 8 * group)

    def set_state(self, group: int, state: int) -> None:
        """Stores a state. Under R."""
        self.words.store(layout.GROUP_STATES + 8 * group, state)

    def states(self) -> list[int]:
        """A copy of all states: a hint."""
        return self.words.copy(layout.GROUP_STATES, layout.GROUPS).tolist()  # type: ignore[no-any-return]

    def group_name(self, group: int) -> str:
        """Name of an active group; meaningless in other states."""
        row = layout.group_row(group)
        length = min(self.words.load(row + layout.GROUP_NAME_LENGTH), 64)
        return self.words.read(row + layout.GROUP_NAME, length).decode("ascii", "replace")

    def by_handle(self, group: int) -> bool:
        """Whether the group gets its samples by handle only."""
        return self.words.load(layout.group_row(group) + layout.GROUP_KIND) == layout.BY_HANDLE

    def durable(self, group: int) -> bool:
        """Whether the group stays when everybody has left."""
        return self.words.load(layout.group_row(group) + layout.GROUP_DURABLE) != 0

    def member_word(self, group: int, member: int, field: int) -> int:
        """One word of a member row."""
        return self.words.load(layout.member_row(group, member) + field)

    def joined(self, group: int) -> list[int]:
        """Member rows that have joined and not left cleanly; they may be dead."""
        return [
            member
            for member in range(layout.MEMBERS)
            if self.member_word(group, member, layout.MEMBER_JOINED)
        ]

    def host(self, group: int, member: int) -> str:
        """Host name that a member wrote, for people."""
        row = layout.member_row(group, member)
        length = min(self.words.load(row + layout.MEMBER_HOST_LENGTH), layout.HOST_BYTES)
        return self.words.read(row + layout.MEMBER_HOST, length).decode(errors="replace")

    def alive(self, group: int, member: int) -> bool:
        """Whether somebody else holds the member's lock."""
        return self.locks.held(layout.member_lock(group, member))

    def any_alive(self, group: int) -> bool:
        """Whether any member of the group, other than ourselves, is alive."""
        return self.locks.held(layout.member_lock(group, 0), layout.MEMBERS)

    def find(self, name: str) -> int | None:
        """Row of the active group of that name. Under R."""
        for group in range(layout.GROUPS):
            if self.state(group) == layout.ACTIVE and self.group_name(group) == name:
                return group
        return None

    # --- groups; all under R --------------------------------------------------------------------

    def check(self, wishes: list[Group]) -> None:
        """Whether all groups can be registered, before any of them is. Under R.

        Raises:
            OptionError: a group is there with the other kind.
            RegistryFull: too few rows are free.
        """
        self.undo_dead_registrants()
        new = 0
        for wish in wishes:
            group = self.find(wish.name)
            if group is None:
                new += 1
            elif self.by_handle(group) != wish.by_handle:
                kinds = ("of every sample", "by handle")
                raise OptionError(
                    f"group {wish.name!r} of ring {self.name!r} is {kinds[not wish.by_handle]}, "
                    f"you ask for one {kinds[wish.by_handle]}: take another group name, or "
                    f"`shmconn groups rm {self.name} {wish.name}` first"
                )
        taken = sum(self.state(group) == layout.ACTIVE for group in range(layout.GROUPS))
        if taken + new > layout.GROUPS:
            raise RegistryFull(_full_text(self))

    def register(self, wish: Group) -> int:
        """Row of a group, which is made if it is not there. Under R.

        A new group takes over what nobody has subscribed to yet, if there is such; else it starts
        with the next sample of each ring.

        Raises:
            OptionError, RegistryFull: see ``check``.
        """
        self.check([wish])
        group = self.find(wish.name)
        if group is not None:
            return group
        states = [self.state(group) for group in range(layout.GROUPS)]
        if layout.NAMELESS in states:
            group = states.index(layout.NAMELESS)
            self._describe(group, wish)
        else:
            group = states.index(layout.FREE)
            self._describe(group, wish)
            self.set_state(group, layout.REGISTERING)
            # A fence between the state and the loads of `published`: what is published after
            # them is published with this row in sight.
            self.locks.held(layout.LOCK_R)
            self.start_after_published(group)
        self.set_state(group, layout.ACTIVE)
        return group

    def _describe(self, group: int, wish: Group) -> None:
        row = layout.group_row(group)
        name = wish.name.encode("ascii")
        kind = layout.BY_HANDLE if wish.by_handle else layout.EVERY_SAMPLE
        self.words.store(row + layout.GROUP_KIND, kind)
        self.words.store(row + layout.GROUP_DURABLE, 0)
        self.words.store(row + layout.GROUP_NAME_LENGTH, len(name))
        self.words.write(row + layout.GROUP_NAME, name)
        # Whoever may open the registry is to ring it too.
        Doorbell(group_doorbell(self.name, group), create=True, mode=self.file.mode)

    def start_after_published(self, group: int) -> None:
        """Makes a group need only what will be published from now on. Under R."""
        for file_name in ring_files(self.name):
            try:
                ring = RingSegment.attach(file_name, whole=False)
            except (SegmentCorrupt, LayoutMismatch, AccessDenied):
                # Damaged, or a stranger put it there: it keeps no group from coming and going.
                continue
            if ring is not None and ring.registry_id == self.id:
                published = ring.words.load(layout.PUBLISHED)
                ring.words.store(layout.START + 8 * group, published + 1)

    def undo_dead_registrants(self) -> None:
        """Frees rows that are being registered: we hold R, so whoever did it is dead. Under R.

        Done before any decision by the states: counting such a row as used could leave no row at
        all that needs what comes next.
        """
        for group in range(layout.GROUPS):
            if self.state(group) == layout.REGISTERING:
                self.set_state(group, layout.FREE)

    def dissolve(self, group: int) -> None:
        """Removes a group without members; its unread samples are given up. Under R."""
        self.undo_dead_registrants()
        others = (self.state(other) for other in range(layout.GROUPS) if other != group)
        if any(state != layout.FREE for state in others):
            self.set_state(group, layout.FREE)
        else:
            # The backlog needs a row at any time; it begins after what was given up.
            self.start_after_published(group)
            self.set_state(group, layout.NAMELESS)

    # --- members; all under R -------------------------------------------------------------------

    def join(self, group: int, *, durable: bool, background: bool) -> int:
        """Takes a member row of a group, a dead member's first. Under R.

        Raises:
            RegistryFull: all member rows are taken by live members.
        """
        joined = self.joined(group)
        free = sorted(set(range(layout.MEMBERS)).difference(joined))
        for member in joined + free:
            lock = layout.member_lock(group, member)
            # A lock of ours would look free: one registry object joins once.
            if not self.locks.held(lock) and self.locks.try_lock(lock):
                break
        else:
            raise RegistryFull(
                f"group {self.group_name(group)!r} of ring {self.name!r} has "
                f"{layout.MEMBERS} live members, no more fit: each rank and each DataLoader worker "
                "is one, so start fewer workers (num_workers). Another group would be given every "
                "sample once more"
            )
        row = layout.member_row(group, member)
        host = socket.gethostname().encode()[: layout.HOST_BYTES]
        self.words.store(row + layout.MEMBER_PID, os.getpid())
        self.words.store(row + layout.MEMBER_STARTED, time.time_ns())
        self.words.store(row + layout.MEMBER_BACKGROUND, int(background))
        for counter in (layout.MEMBER_CLAIMED, layout.MEMBER_RELEASED, layout.MEMBER_BYTES):
            self.words.store(row + counter, 0)
        self.words.store(row + layout.MEMBER_HOST_LENGTH, len(host))
        self.words.write(row + layout.MEMBER_HOST, host)
        self.words.store(row + layout.MEMBER_JOINED, 1)
        if durable:
            self.words.store(layout.group_row(group) + layout.GROUP_DURABLE, 1)
        return member

    def leave(self, group: int, member: int) -> bool:
        """Ends a membership cleanly; returns whether the group went with it. Under R."""
        self.words.store(layout.member_row(group, member) + layout.MEMBER_JOINED, 0)
        last = not self.joined(group) and not self.durable(group)
        if last:
            self.dissolve(group)
        return last

    # --- a group's claims -----------------------------------------------------------------------

    def lock_claims(self, group: int, deadline: float) -> None:
        """Takes lock L of a group."""
        self.locks.lock(layout.LOCK_L + group, deadline, lambda: self._claims_text(group))
        self.words.store(layout.NOTE_L + 8 * group, os.getpid())

    def try_lock_claims(self, group: int) -> bool:
        """Takes lock L of a group by one try."""
        if not self.locks.try_lock(layout.LOCK_L + group):
            return False
        self.words.store(layout.NOTE_L + 8 * group, os.getpid())
        return True

    def unlock_claims(self, group: int) -> None:
        """Frees lock L of a group."""
        self.words.store(layout.NOTE_L + 8 * group, 0)
        self.locks.unlock(layout.LOCK_L + group)

    def _claims_text(self, group: int) -> str:
        holder = self.words.load(layout.NOTE_L + 8 * group)
        return (
            f"the claims of group {self.group_name(group)!r} of ring {self.name!r} are locked"
            f"{f' by pid {holder}' if holder else ''}: is that process stopped?"
        )

    def close(self) -> None:
        """Drops all locks and descriptors."""
        self.file.close()


def _magic(file: ShmFile) -> int:
    step("magic")
    return Words(file.map(WORD)).load(layout.MAGIC) if file.size >= WORD else 0


def _busy_text(name: str, file: ShmFile) -> str:
    holder = 0
    if file.size >= layout.REGISTRY_SIZE:
        holder = Words(file.map(layout.REGISTRY_SIZE)).load(layout.NOTE_R)
    return (
        f"the registry of ring {name!r} is locked"
        f"{f' by pid {holder}' if holder else ''}: another process is joining, leaving or starting "
        "there, or was stopped (SIGSTOP, a debugger) while it did; continue or end it"
    )


def _version_text(name: str, version: int) -> str:
    file = registry_file(name)
    return (
        f"the registry of ring {name!r} has layout version {version}, this shmconn reads "
        f"{layout.REGISTRY_VERSION}: use the same shmconn in vLLM and in the reader. If nothing of "
        "the other version runs any more, remove what it left: rm -f "
        f"{path_of(file)} {path_of(file)}.* {layout.SHM_DIR}/sem.shmconn.{name}.*"
    )


def _full_text(registry: Registry) -> str:
    groups = []
    for group in range(layout.GROUPS):
        dead = "" if registry.any_alive(group) else " (no live member)"
        groups.append(f"{registry.group_name(group)}{dead}")
    return (
        f"ring {registry.name!r} has {layout.GROUPS} groups, no more fit: {', '.join(groups)}. "
        f"Remove one with `shmconn groups rm {registry.name} GROUP`"
    )
