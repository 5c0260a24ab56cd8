# SPDX-License-Identifier: Apache-2.0
"""Programs of the model: a generator that yields one load, store or lock call at a time.

A program is written like the code that it models. It is run once for each way it can go, not once
for each state of a search: `Automaton` turns it into a table of *local states* (where it stands,
and what its local variables hold) and, for each result of the pending step, the next local state.

Two histories that end at the same place with the same local variables are the same local state.
So a program keeps what it knows in local variables that can be hashed, and loops only over ranges
and tuples of distinct values, whose loop variable says how far it is.
`test_model.py` walks at random and compares the table with the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

# What a step does. LOOK, CHOOSE and MARK are silent: nobody else can see them or be seen by them,
# so they are one with the step before. Those from FENCE on order stores before with loads after.
LOAD, STORE, TEST, LOOK, CHOOSE, MARK, FENCE, LOCK, TRY, UNLOCK, CALL = range(11)
SILENT = (LOOK, CHOOSE, MARK)

DEAD, DONE, FIRST = 0, 1, 2  # local states that every automaton has

Check = Callable[[bytearray, int], "str | None"]


class Op(NamedTuple):
    """One step: one load, store or lock call."""

    kind: int
    label: str
    address: int = 0
    value: int = 0
    many: tuple[int, ...] = ()
    call: Callable[..., int] | None = None
    lease: tuple[int, int] | None = None  # (which of the actor's leases, its new value)
    check: Check | None = None  # told the state after the step, says what is wrong with it


Result = Any  # int, or a tuple of ints for LOOK
Program = Generator[Op, Result, Any]


def load(address: int, label: str, check: Check | None = None) -> Op:
    """One load."""
    return Op(LOAD, label, address, check=check)


def look(many: tuple[int, ...], label: str) -> Op:
    """Several loads, of words that nobody else can write meanwhile."""
    return Op(LOOK, label, many=many)


def store(
    address: int,
    value: int,
    label: str,
    lease: tuple[int, int] | None = None,
    check: Check | None = None,
) -> Op:
    """One store. `lease` changes together with it: the actor's own view."""
    return Op(STORE, label, address, value, lease=lease, check=check)


def lock(address: int, label: str) -> Op:
    """Wait for a lock: the tries that fail are left out."""
    return Op(LOCK, label, address)


def trylock(address: int, label: str) -> Op:
    """One try: 1 if the lock is ours now."""
    return Op(TRY, label, address)


def unlock(address: int, label: str, check: Check | None = None) -> Op:
    """Give a lock back."""
    return Op(UNLOCK, label, address, check=check)


def test(address: int, label: str) -> Op:
    """Does another one hold this lock? No barrier: `F_OFD_GETLK` may skip it."""
    return Op(TEST, label, address)


def fence(label: str) -> Op:
    """A barrier between the stores before and the loads after."""
    return Op(FENCE, label)


def choose(ways: int, label: str) -> Op:
    """Go on in any of several ways."""
    return Op(CHOOSE, label, value=ways)


def mark(label: str, check: Check) -> Op:
    """No step of the protocol: a place where something must hold."""
    return Op(MARK, label, check=check)


def call(function: Callable[..., int], label: str, *arguments: int) -> Op:
    """One system call: `function(state, actor, *arguments)` changes the state and has a result."""
    return Op(CALL, label, many=arguments, call=function)


class ModelError(Exception):
    """The model itself is wrong, not the protocol."""


def _place(generator: Any) -> tuple[Any, ...]:
    """Where a generator stands: the code, the place in it and the local variables, all frames."""
    place: list[Any] = []
    while generator is not None:
        frame = generator.gi_frame
        place.append((frame.f_code, frame.f_lasti, tuple(frame.f_locals.items())))
        generator = generator.gi_yieldfrom
    return tuple(place)


def _same(one: Op, two: Op) -> bool:
    return one[:5] == two[:5] and one.lease == two.lease


class Automaton:
    """A program as a table, made as the search asks for it.

    `ops[n]` is the pending step of local state n, `following[n]` the next local state for each
    result known so far.
    """

    def __init__(self, program: Callable[[], Program]) -> None:
        self.program = program
        idle = Op(FENCE, "nothing")
        self.ops: list[Op] = [idle, idle]
        self.following: list[dict[Result, int]] = [{}, {}]
        self._came: list[tuple[int, Result]] = [(0, None), (0, None)]
        self._numbers: dict[Any, int] = {}
        self._number(self.program(), (FIRST, None), first=True)

    def _number(self, generator: Program, came: tuple[int, Result], first: bool = False) -> int:
        try:
            op = next(generator) if first else generator.send(came[1])
        except StopIteration:
            return DONE
        place = _place(generator)
        number = self._numbers.get(place)
        if number is None:
            number = len(self.ops)
            self._numbers[place] = number
            self.ops.append(op)
            self.following.append({})
            self._came.append(came)
        elif not _same(self.ops[number], op):
            raise ModelError(f"{self.ops[number].label} and {op.label} are one place: {place}")
        return number

    def replay(self, local: int) -> Program:
        """Return a generator that stands at a local state."""
        results: list[Result] = []
        at = local
        while at != FIRST:
            at, result = self._came[at]
            results.append(result)
        generator = self.program()
        next(generator)
        for result in reversed(results):
            generator.send(result)
        return generator

    def advance(self, local: int, result: Result) -> int:
        """Return the local state after the pending step of `local` gave `result`."""
        known = self.following[local].get(result)
        if known is None:
            generator = self.replay(local)
            known = self._number(generator, (local, result))
            self.following[local][result] = known
        return known


class Actor(NamedTuple):
    """One process: a program, and whether it may be killed and then started again.

    `waited_for`: all can finish only if this one can. `last`: it begins when all others finished.
    """

    name: str
    automaton: Automaton
    killed: bool = False
    restarts: bool = True
    waited_for: bool = True
    last: bool = False
