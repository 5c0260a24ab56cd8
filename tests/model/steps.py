# SPDX-License-Identifier: Apache-2.0
"""A model and its steps: what each actor may do next in a state, and what a kill does.

From each state every actor may take its next step; if it has stores in its buffer, the oldest may
reach memory; and while kills are left, an actor that may be killed may die before its step. The
kernel frees the locks of the dead after the last of its executed stores reached memory, so a kill
waits until the buffer is empty: between its last step and then a dead process cannot be told from
a slow one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .machine import (
    CALL,
    CHOOSE,
    DEAD,
    DONE,
    FENCE,
    FIRST,
    LOAD,
    LOCK,
    LOOK,
    MARK,
    SILENT,
    STORE,
    TEST,
    TRY,
    UNLOCK,
    Actor,
    ModelError,
    Op,
)
from .promises import World

Step = tuple[int, bytes]  # who moved, and the state after it


class Violation(Exception):
    """A step that breaks a promise; `state` is what it leads to."""

    def __init__(self, problem: str, actor: int, state: bytes) -> None:
        super().__init__(problem)
        self.problem, self.actor, self.state = problem, actor, state


@dataclass
class Model:
    """Actors in a world, and where they start.

    `alike` are pairs of actors that run the same program: a state and the one with the two
    exchanged are the same (programs do not know which actor runs them).
    `final` says what is wrong with a state in which all have finished.
    """

    world: World
    actors: list[Actor]
    kills: int = 0
    alike: tuple[tuple[int, int], ...] = ()
    leases: int = 1
    final: Callable[[bytes], str | None] | None = None
    initial: bytes = b""

    def __post_init__(self) -> None:
        world = self.world
        self.size = world.blocks_for(len(self.actors), self.leases)
        state = bytearray(world.first_block + self.size * len(self.actors))
        for address, value in world.preset.items():
            state[address] = value
        state[world.kills] = self.kills
        for block in world.blocks:
            state[block] = FIRST
        self.initial = bytes(state)
        self._swaps = []
        for one, two in self.alike:
            table = bytearray(range(256))
            table[one + 1], table[two + 1] = two + 1, one + 1
            self._swaps.append((world.blocks[one], world.blocks[two], bytes(table)))

    def canonical(self, state: bytes) -> bytes:
        """Return the one state that stands for all that are alike."""
        size, low, high = self.size, self.world.first_lock, self.world.last_lock
        for one, two, table in self._swaps:
            a, b = state[one : one + size], state[two : two + size]
            if a > b:
                new = bytearray(state)
                new[one : one + size] = b
                new[two : two + size] = a
                new[low:high] = state[low:high].translate(table)
                state = bytes(new)
        return state

    # ---- steps

    def steps(self, s: bytes) -> tuple[list[Step], list[Step]]:
        """Return what each actor's next step leads to, and what each kill does.

        Raises:
            Violation: a step breaks a promise.
        """
        moves: list[Step] = []
        kills: list[Step] = []
        may_kill = s[self.world.kills]
        buffer = self.world.buffer
        for a, block in enumerate(self.world.blocks):
            local = s[block] | s[block + 1] << 8
            actor = self.actors[a]
            if actor.last and not self.finished(s, a):
                continue
            waiting = s[block + 2 + self.leases] if buffer else 0
            if waiting:
                moves.append((a, self._drain(s, a, block)))
            if local <= DONE:
                if local == DONE or self._close_files(s, a, moves):
                    continue
                if actor.restarts:
                    self._come(bytearray(s), a, block, FIRST, moves)
                continue
            op = actor.automaton.ops[local]
            if may_kill and actor.killed and not waiting:
                kills.append((a, self._kill(s, a, block)))
            if waiting and (op.kind >= FENCE or (op.kind == STORE and waiting == buffer)):
                continue
            if op.kind in SILENT:
                self._come(bytearray(s), a, block, local, moves)
            else:
                self._step(s, a, block, local, op, moves)
        return moves, kills

    def _step(self, s: bytes, a: int, block: int, local: int, op: Op, moves: list[Step]) -> None:
        kind = op.kind
        problem = None
        result: object = None
        t = bytearray(s)
        if kind == LOAD:
            result = self.forwarded(s, block, op.address) if self.world.buffer else s[op.address]
        elif kind == STORE:
            if op.lease is not None:
                t[block + 2 + op.lease[0]] = op.lease[1]
            if self.world.buffer:
                waiting = block + 2 + self.leases
                t[waiting + 1 + 2 * s[waiting]] = op.address
                t[waiting + 2 + 2 * s[waiting]] = op.value
                t[waiting] += 1
            else:
                t[op.address] = op.value
                watch = self.world.watches.get(op.address)
                if watch is not None:
                    problem = watch(s, t, a)
        elif kind == LOCK:
            if s[op.address] not in (0, a + 1):
                return
            t[op.address] = a + 1
        elif kind == TRY:
            result = 1 if s[op.address] in (0, a + 1) else 0
            if result:
                t[op.address] = a + 1
        elif kind == UNLOCK:
            if s[op.address] == a + 1:
                t[op.address] = 0
        elif kind == TEST:
            result = 0 if s[op.address] in (0, a + 1) else 1
        elif kind == CALL:
            assert op.call is not None
            result = op.call(t, a, *op.many)
        if problem is None and op.check is not None:
            problem = op.check(t, a)
        if problem is not None:
            raise Violation(problem, a, bytes(t))
        self._come(t, a, block, self._after(a, local, result), moves)

    def _after(self, a: int, local: int, result: object) -> int:
        automaton = self.actors[a].automaton
        following = automaton.following[local].get(result)
        return automaton.advance(local, result) if following is None else following

    def _come(self, t: bytearray, a: int, block: int, local: int, moves: list[Step]) -> None:
        """An actor comes to a local state, and goes on through silent ones."""
        op = self.actors[a].automaton.ops[local]
        if op.kind == LOOK:
            self._come(t, a, block, self._after(a, local, self.looked(t, block, op)), moves)
        elif op.kind == CHOOSE:
            for way in range(op.value):
                self._come(bytearray(t), a, block, self._after(a, local, way), moves)
        elif op.kind == MARK:
            problem = op.check(t, a) if op.check is not None else None
            if problem is not None:
                raise Violation(problem, a, bytes(t))
            self._come(t, a, block, self._after(a, local, None), moves)
        else:
            t[block], t[block + 1] = local & 255, local >> 8
            moves.append((a, bytes(t)))

    def looked(self, t: bytes | bytearray, block: int, op: Op) -> tuple[int, ...]:
        """Return what a LOOK sees."""
        if self.world.buffer:
            return tuple([self.forwarded(t, block, address) for address in op.many])
        return tuple([t[address] for address in op.many])

    def path(self, a: int, before: bytes, after: bytes) -> list[tuple[Op, object]]:
        """Return the operations of an actor's move, the silent ones too, with their results."""
        block = self.world.blocks[a]
        start = before[block] | before[block + 1] << 8
        end = after[block] | after[block + 1] << 8
        automaton = self.actors[a].automaton
        todo: list[tuple[int, list[tuple[Op, object]]]]
        if start == DEAD:
            todo = [(FIRST, [])]
        else:
            op = automaton.ops[start]
            results = automaton.following[start].items()
            todo = [(following, [(op, result)]) for result, following in results]
        while todo:
            local, path = todo.pop()
            if local == end:
                return path
            op = automaton.ops[local]
            if op.kind not in SILENT:
                continue
            for result, following in automaton.following[local].items():
                if op.kind != LOOK or result == self.looked(after, block, op):
                    todo.append((following, [*path, (op, result)]))
        raise ModelError(f"no way from {start} to {end}")

    def forwarded(self, s: bytes | bytearray, block: int, address: int) -> int:
        """Return what a load sees: the actor's own youngest store to it, else memory."""
        waiting = block + 2 + self.leases
        for k in range(s[waiting] - 1, -1, -1):
            if s[waiting + 1 + 2 * k] == address:
                return s[waiting + 2 + 2 * k]
        return s[address]

    def _drain(self, s: bytes, a: int, block: int) -> bytes:
        waiting = block + 2 + self.leases
        t = bytearray(s)
        address = s[waiting + 1]
        t[address] = s[waiting + 2]
        end = waiting + 1 + 2 * self.world.buffer
        t[waiting + 1 : end] = s[waiting + 3 : end] + b"\0\0"
        t[waiting] -= 1
        watch = self.world.watches.get(address)
        if watch is not None:
            problem = watch(s, t, a)
            if problem is not None:
                raise Violation(problem, a, bytes(t))
        return bytes(t)

    def _kill(self, s: bytes, a: int, block: int) -> bytes:
        t = bytearray(s)
        t[block : block + 2 + self.leases] = bytes(2 + self.leases)
        t[self.world.kills] -= 1
        held = self._locks_of(s, a)
        if len(held) == 1:
            for k in held[0]:
                t[k] = 0
        return bytes(t)

    def _locks_of(self, s: bytes, a: int) -> list[list[int]]:
        """Return the locks of an actor, file by file: the ring's, the registry's."""
        first, last, middle = self.world.first_lock, self.world.last_lock, self.world.registry_locks
        if a + 1 not in s[first:last]:
            return []
        files = (
            [k for k in part if s[k] == a + 1]
            for part in (range(first, middle), range(middle, last))
        )
        return [locks for locks in files if locks]

    def _close_files(self, s: bytes, a: int, moves: list[Step]) -> bool:
        """The kernel closes the files of a dead process one after the other."""
        files = self._locks_of(s, a)
        for locks in files:
            t = bytearray(s)
            for k in locks:
                t[k] = 0
            moves.append((a, bytes(t)))
        return bool(files)

    def finished(self, s: bytes, but: int = -1) -> bool:
        """Has every actor that can go on finished, but perhaps one?"""
        for a, actor in enumerate(self.actors):
            block = self.world.blocks[a]
            local = s[block] | s[block + 1] << 8
            over = local == DONE or (local == DEAD and not actor.restarts)
            if a != but and actor.waited_for and not over:
                return False
        return True
