# SPDX-License-Identifier: Apache-2.0
"""System calls on names in /dev/shm: each is one step, and orders what is before and after it."""

from __future__ import annotations

from .machine import ModelError
from .states import NAMED, NEVER, UNLINKED, Layout


class Names(Layout):
    """Registries and rings by name."""

    def open_path(self, t: bytearray, actor: int, create: int) -> int:
        """Open the registry's name, or create it; return its inode, or -1 if it is not there."""
        path = self._at["path",]
        if t[path]:
            return t[path] - 1
        if not create:
            return -1
        for i in self.registries:
            if t[self._at["inode", i]] == NEVER:
                t[self._at["inode", i]] = NAMED
                t[path] = i + 1
                return i
        raise ModelError("the model has too few registry inodes")

    def leads_to(self, t: bytearray, actor: int, i: int) -> int:
        """Does the registry's name lead to this inode?"""
        return int(t[self._at["path",]] == i + 1)

    def empty(self, t: bytearray, actor: int, i: int) -> int:
        """Set a registry's size to 0 and reserve it again: all is 0."""
        for r in self.rows:
            t[self.state(i, r)] = t[self.name(i, r)] = 0
            for m in self.members:
                t[self.joined(i, r, m)] = 0
        t[self.epoch(i)] = 0
        return 0

    def create_ring(self, t: bytearray, actor: int, i: int) -> int:
        """Create a ring under a name that was never used."""
        for g in self.rings:
            if t[self._at["exists", g]] == NEVER:
                t[self._at["exists", g]] = NAMED
                t[self._at["registry", g]] = i
                return g
        raise ModelError("the model has too few rings")

    def in_use(self, t: bytearray, actor: int, i: int) -> int:
        """Does anybody else hold any lock of the registry?"""
        return int(
            any(
                t[address] not in (0, actor + 1)
                for key, address in self._at.items()
                if key[0] in ("L", "M", "R") and key[1] == i
            )
        )

    def unlink_path(self, t: bytearray, actor: int) -> int:
        """Unlink the registry's name, wherever it leads."""
        i = t[self._at["path",]] - 1
        if i >= 0:
            t[self._at["inode", i]] = UNLINKED
            t[self._at["path",]] = 0
        return 0
