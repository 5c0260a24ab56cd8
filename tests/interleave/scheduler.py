# SPDX-License-Identifier: Apache-2.0
"""One schedule: actors as threads, of which one runs at a time, handed on at the protocol's steps.

Each actor has registry and ring objects of its own, and open-file-description locks exclude one
``open()`` from another also inside a process, so actors exclude each other as processes would. A
killed actor raises at its next step, and at each step after that, so nothing that it would still
do reaches shared memory; its descriptors are closed, as the kernel would.

A schedule may change hands before a step only where that can matter: where the step touches a
place that another actor touches too, one of them by writing. The places are learned (``Touched``).
"""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

Place = Hashable
HANG_S = 60.0


class Killed(BaseException):
    """Ends an actor where it stands."""


class Touched:
    """Which actors ever touched a place, and whether by writing; grows with each schedule."""

    def __init__(self) -> None:
        self._by: dict[Place, dict[str, bool]] = {}
        self.contested: set[tuple[Place, str]] = set()
        self._found: set[tuple[Place, str]] = set()

    def adopt(self) -> bool:
        """From now on, what was found counts; whether there was anything new."""
        new = not self._found <= self.contested
        self.contested |= self._found
        return new

    def note(self, actor: str, reads: tuple[Place, ...], writes: tuple[Place, ...]) -> bool:
        """Takes note of an access; whether the hands may change before it."""
        shared = False
        for place in reads:
            by = self._by.get(place)
            if by is None or actor not in by:
                self._add(actor, place, False)
            shared = shared or (place, actor) in self.contested
        for place in writes:
            by = self._by.get(place)
            if by is None or not by.get(actor):
                self._add(actor, place, True)
            shared = shared or (place, actor) in self.contested
        return shared

    def _add(self, actor: str, place: Place, writes: bool) -> None:
        by = self._by.setdefault(place, {})
        by[actor] = writes
        self._judge(place, by)

    def _judge(self, place: Place, by: dict[str, bool]) -> None:
        for actor, writes in by.items():
            others = any(other != actor and (writes or theirs) for other, theirs in by.items())
            if others:
                self._found.add((place, actor))


class _Worker(threading.Thread):
    """A thread that plays one actor after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.play: Callable[[], None] = lambda: None
        self.start()

    def run(self) -> None:
        while True:
            self.gate.acquire()
            self.play()
            self.play = lambda: None
            _idle.append(self)


_idle: list[_Worker] = []


class Actor:
    """A process of the protocol, played by a thread."""

    def __init__(self, name: str, script: Callable[[], None], *, waits: bool) -> None:
        self.name = name
        self.script = script
        self.waits = waits  # whether it may wait for another process
        self.state = "ready"  # ready, lock, change, finished, killed
        self.awaits: Any = None  # the place of the lock, or the memory that must change
        self.observed = 0
        self.files: list[Any] = []
        self.worker: _Worker | None = None


class Chooser:
    """Decides who goes on. ``options`` has the running actor first, if it can go on."""

    def choose(self, run: "Run", options: list[str], current: str | None) -> str:
        """One of the options; "kill" ends the running actor; "cut" ends the schedule."""
        raise NotImplementedError


class Run:
    """One schedule, from the first step to the end of all actors."""

    def __init__(self, chooser: Chooser, touched: Touched) -> None:
        self.actors: dict[str, Actor] = {}
        self.chooser = chooser
        self.touched = touched
        self.current: Actor | None = None
        self.kills_left = 0
        self.victims: tuple[str, ...] = ()
        self.reborn: dict[str, Callable[[], None]] = {}
        self.violations: list[str] = []
        self.cut = False
        self.steps = 0
        self.switches: list[str] = []  # the schedule, to be run again
        self.again: list[str] | None = None
        self.trace: list[str] | None = None
        # What the next step touches, and stores.
        self.reads: tuple[Place, ...] = ()
        self.writes: tuple[Place, ...] = ()
        self.value: Any = None
        self.memory = 0
        self.values: dict[Place, Any] = {}
        self.locks: dict[Place, int] = {}
        self.refused: Place = None  # the lock that was last tried in vain
        self.inspect: Callable[[], list[str]] | None = None
        self.owner: list[Any] | None = None
        self._inspected: int | None = None
        self._stopping = False
        self._done = threading.Lock()
        self._done.acquire()

    # --- life -----------------------------------------------------------------------------------

    def add(
        self, name: str, script: Callable[[], None], files: list[Any], *, waits: bool = True
    ) -> None:
        """Adds an actor, with the files it has open; it begins once it is chosen."""
        actor = self.actors[name] = Actor(name, script, waits=waits)
        actor.files = files

    def go(self) -> None:
        """Runs all actors to their ends, or to a violation."""
        self._hand_on(None)
        if not self._done.acquire(timeout=HANG_S):
            raise AssertionError(f"the scheduler hangs in {self.switches[-20:]}")
        self.current = None

    def _play(self, actor: Actor) -> None:
        try:
            if not self._stopping:
                actor.script()
        except Killed:
            # Its frames, and so its leases, are still there: they must find no lock of theirs.
            self._drop(actor)
            actor.state = "killed"
        except BaseException as error:
            if not self._stopping:
                self.violations.append(f"{actor.name}: {type(error).__name__}: {error}")
            self._stopping = True
            self._drop(actor)
            actor.state = "killed"
        if actor.state != "killed":
            actor.state = "finished"
        self._hand_on(actor)

    def _hand_on(self, actor: Actor | None) -> None:
        """The running actor has ended, or waits: another goes on."""
        if self._stopping:
            self._stop_next()
            return
        ready = [a.name for a in self.actors.values() if self._ready(a)]
        if not ready:
            stuck = [a.name for a in self.actors.values() if a.state in ("lock", "change")]
            if stuck and not self._stopping:
                self.violations.append(f"{', '.join(stuck)} can never go on")
            self._stopping = True
            self._stop_next()
            return
        choice = self._choose(ready, None)
        if choice is None:
            self._stop_next()
        else:
            self._switch_to(self.actors[choice])

    def _ready(self, actor: Actor) -> bool:
        if actor.state == "lock":
            return actor.awaits not in self.locks
        return actor.state == "ready" or (actor.state == "change" and actor.awaits != self.memory)

    def _switch_to(self, actor: Actor) -> None:
        self.current = actor
        if actor.state in ("lock", "change"):
            actor.state = "ready"
        if actor.worker is None:
            actor.worker = _idle.pop() if _idle else _Worker()
            actor.worker.play = lambda: self._play(actor)
        actor.worker.gate.release()

    def _stop_next(self) -> None:
        """Ends the actors that are still there, one after the other, each where it stands."""
        self._stopping = True
        for actor in self.actors.values():
            if actor.state not in ("finished", "killed"):
                actor.state = "killed"
                if actor.worker is not None:
                    self._drop(actor)
                    self._switch_to(actor)
                    return
        self._done.release()

    # --- steps ----------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        """The hook of words.py: called just before each step."""
        actor = self.current
        if actor is None:
            return
        reads, writes, value = self.reads, self.writes, self.value
        self.reads, self.writes, self.value = (), (), None
        if self._stopping or actor.state == "killed":
            raise Killed
        self.steps += 1
        actor.observed = hash((actor.observed, name))
        contested = self.touched.note(actor.name, reads, writes) or self.again is not None
        # A store may overwrite what the inspector must have seen, be it contested yet or not.
        if contested or value is not None:
            self._look()
        if contested:
            self._may_change_hands(actor, name)
        if self.trace is not None:
            self.trace.append(f"{actor.name:10} {name:14} {writes or reads} {value or ''}")
        if value is not None:
            self.remember(writes, value)

    def remember(self, places: tuple[Place, ...], value: Any) -> None:
        """Keeps the state of shared memory, as one number."""
        for place in places:
            # What was never stored counts as 0.
            self.memory ^= hash((place, self.values.get(place, 0))) ^ hash((place, value))
            self.values[place] = value

    def observe(self, *what: Hashable) -> None:
        """The running actor has seen something: its own state is the sum of what it saw."""
        actor = self.current
        if actor is not None:
            actor.observed = hash((actor.observed, what))

    def _look(self) -> None:
        if self.inspect is not None and self._inspected != self.memory:
            self._inspected = self.memory
            self.violations += self.inspect()
        if self.violations:
            self._stopping = True
            raise Killed

    def _may_change_hands(self, actor: Actor, step: str) -> None:
        options = [actor.name]
        options += [a.name for a in self.actors.values() if a is not actor and self._ready(a)]
        if self.kills_left and actor.name in self.victims:
            options.append("kill")
        choice = self._choose(options, actor.name)
        if choice is None:
            raise Killed
        if choice == "kill":
            self._kill(actor, step)
        if choice != actor.name:
            self._switch_to(self.actors[choice])
            self._wait(actor)

    def _choose(self, options: list[str], current: str | None) -> str | None:
        if len(options) == 1:
            return options[0]
        mark = f"{self.steps}{'>' if current else '|'}"
        if self.again is not None:
            asked = bool(self.again) and self.again[0].startswith(mark)
            choice = self.again.pop(0)[len(mark) :] if asked else options[0]
            if choice not in options:
                raise AssertionError(f"{choice} is not one of {options}: is it the same code?")
        else:
            choice = self.chooser.choose(self, options, current)
        if choice == "cut":
            self.cut = self._stopping = True
            return None
        if choice != current:
            self.switches.append(f"{mark}{choice}")
        return choice

    def _wait(self, actor: Actor) -> None:
        if actor.worker is not None:
            actor.worker.gate.acquire()
        if self._stopping or actor.state == "killed":
            raise Killed

    def _kill(self, actor: Actor, step: str) -> None:
        self.kills_left -= 1
        actor.state = "killed"
        if self.trace is not None:
            self.trace.append(f"{actor.name:10} KILLED before {step}")
        self._drop(actor)
        if actor.name in self.reborn:
            self.add(f"{actor.name}'", self.reborn[actor.name], [])
        raise Killed

    def _drop(self, actor: Actor) -> None:
        """Closes what a dead process had open, as the kernel does."""
        for file in actor.files:
            if file.fd >= 0:
                self.forget_locks(file)
                with contextlib.suppress(OSError):
                    os.close(file.fd)
                file.fd = -1

    # --- waiting --------------------------------------------------------------------------------

    def still_alive(self) -> None:
        """Ends the running actor if it was killed where the end could not be raised."""
        actor = self.current
        if actor is not None and (self._stopping or actor.state == "killed"):
            raise Killed

    def wait_for(self, what: str, seen: int = 0) -> None:
        """The running actor cannot go on until a lock comes free, or memory changes.

        Args:
            what: "lock", or "change".
            seen: the memory, as it was before the actor looked in vain.
        """
        actor = self.current
        if actor is None:
            raise AssertionError("only actors may wait")
        if self._stopping or actor.state == "killed":
            raise Killed
        if not actor.waits:
            self.violations.append(f"{actor.name} waits for another process ({what})")
            self._stopping = True
            raise Killed
        actor.state = what
        actor.awaits = self.refused if what == "lock" else seen
        if self.trace is not None:
            self.trace.append(f"{actor.name:10} waits for {what} {actor.awaits}")
        self._hand_on(actor)
        self._wait(actor)

    # --- locks ----------------------------------------------------------------------------------

    def note_lock(self, place: Place, file: Any) -> None:
        """A lock was taken."""
        self.locks[place] = id(file)
        self.remember((place,), 1)

    def forget_lock(self, place: Place) -> None:
        """A lock was freed."""
        if self.locks.pop(place, None) is not None:
            self.remember((place,), 0)

    def forget_locks(self, file: Any) -> None:
        """All locks of a file were freed, since it was closed."""
        for place in self.locks_of(file):
            self.forget_lock(place)

    def locks_of(self, file: Any) -> tuple[Place, ...]:
        """Places of the locks that a file holds."""
        return tuple(place for place, holder in self.locks.items() if holder == id(file))

    def state(self) -> int:
        """Everything that the rest of the schedule depends on, as one number."""
        actors = tuple((a.name, a.state, a.awaits, a.observed) for a in self.actors.values())
        current = self.current.name if self.current else ""
        return hash((self.memory, actors, current, self.kills_left))
