# SPDX-License-Identifier: Apache-2.0
"""The protocol as a model: searches that must find nothing, and seeded faults that must be found.

`pytest tests/model` takes about a minute; `pytest tests/model -m long` is all of it. Each search
prints how many states it saw and how deep it went; a counterexample is printed step by step.
"""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Callable
from functools import partial

import pytest
from harness import figures

from .cases import LONG, MORE_SEEDED, PUSH, SEEDED, Case
from .faults import Fault
from .machine import DEAD, DONE, FIRST, LOCK, Actor, Automaton, Op, Program, fence, load, store
from .promises import World
from .search import Found, search
from .steps import Model

# With so many states as by default a search takes less than 4 GB.
MOST_STATES = int(os.environ.get("SHMCONN_STATES", "12_000_000"))
# Longest time for one large search; how far it came by then is told.
SEARCH_S = float(os.environ.get("SHMCONN_SEARCH_S", "inf"))


def _say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        print(f"\n{line}", end="", flush=True)


def _hold(case: Case, found: Found) -> None:
    figures.record(
        "16",
        "searches of the model",
        trials=1,
        exercised=int(found.complete),
        failures=int(found.problem is not None),
        states=found.states,
        most_states=found.states,
        most_deep=found.depth,
        all_can_finish=int(bool(found.can_finish)),
        not_to_the_end=[] if found.complete else [case.name],
    )
    assert found.problem is None, "\n".join([case.name, *found.trace])
    assert found.complete or case.partial, f"{case.name}: cut after {found.states:,} states"
    assert found.can_finish or not (case.finish and found.complete)


@pytest.mark.parametrize("case", PUSH, ids=lambda case: case.name)
def test_the_protocol_holds(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    found = search(case.model(), limit=MOST_STATES, finish=case.finish)
    _say(capsys, f"{case.name}: {found}")
    _hold(case, found)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_the_protocol_holds_in_large_searches(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    # Minutes are not a hang here: what bounds a search is its number of states.
    faulthandler.cancel_dump_traceback_later()
    found = search(case.model(), limit=MOST_STATES, finish=case.finish, seconds=SEARCH_S)
    _say(capsys, f"{case.name}: {found}")
    _hold(case, found)


def _detect(
    seeded: dict[Fault, Case], harm_only: bool, capsys: pytest.CaptureFixture[str], how: str
) -> list[Fault]:
    missed = []
    for fault, case in seeded.items():
        found = search(case.model(fault, harm_only=harm_only))
        _say(capsys, f"fault {fault.value:3} {fault.name.lower().replace('_', ' ')}: {found}")
        if found.problem is None:
            missed.append(fault)
    _say(capsys, f"detected {len(seeded) - len(missed)} of {len(seeded)} seeded faults")
    figures.detected("16", how, len(seeded), [fault.name for fault in missed])
    return missed


def test_each_seeded_fault_of_section_6_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {fault.value.rstrip("ab") for fault in SEEDED}
    assert rows == {str(row) for row in range(1, 21)}
    assert _detect(SEEDED, False, capsys, "the model") == []


def test_each_seeded_fault_of_section_6_harms_somebody(capsys: pytest.CaptureFixture[str]) -> None:
    assert _detect(SEEDED, True, capsys, "the model, by their harm") == []


def test_each_further_rule_is_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {*SEEDED, *MORE_SEEDED} == set(Fault)
    assert _detect(MORE_SEEDED, False, capsys, "the model, further rules") == []


def test_a_fault_is_seeded_into_a_case_that_holds_without_it() -> None:
    for fault, case in {**SEEDED, **MORE_SEEDED}.items():
        found = search(case.model(), limit=20_000)
        assert found.problem is None, "\n".join([fault.name, *found.trace])


def test_a_counterexample_reads_as_steps() -> None:
    found = search(SEEDED[Fault.TAKEOVER_WITHOUT_RELOAD].model(Fault.TAKEOVER_WITHOUT_RELOAD))
    text = "\n".join(found.trace)
    assert "claim 4: hold                      hold[0,0] is (1, member 0)" in text
    assert "release 2                          hold[0,0] = (1, released)" in text
    assert "member A1    KILLED before: end 1: closed" in text
    assert found.trace[-2].endswith("claim 6                            hold[0,0] = (1, member 1)")
    assert found.trace[-1] == "=> a released hold word of sample 1 is overwritten (invariant 5)"


def test_a_search_says_that_it_was_cut() -> None:
    found = search(PUSH[1].model(), limit=1000)
    assert not found.complete
    assert found.can_finish is None
    assert "cut" in str(found)


@pytest.mark.parametrize("case", PUSH, ids=lambda case: case.name)
def test_the_running_producer_never_waits_for_a_lock(case: Case) -> None:
    """Invariant 8. Only a start and a clean-up wait, and both for R."""
    model = case.model()
    search(model, limit=50_000, finish=False)
    waits = {
        op.label
        for actor in model.actors
        if actor.name.startswith("producer")
        for op in actor.automaton.ops
        if op.kind == LOCK
    }
    assert waits <= {
        "open 2",
        "start 4",
        "start 9: R",
        "undo start",
        "clean up: R",
    }
    if not model.world.lifecycle:
        assert not waits


# ---- the model's own machinery


@pytest.mark.parametrize("case", PUSH, ids=lambda case: case.name)
def test_the_tables_say_what_the_programs_say(case: Case) -> None:
    """Walk at random, with each program running beside its table of local states."""
    model = case.model()
    dice = random.Random(1)
    for _ in range(20):
        state = model.initial
        running: list[Program | None] = [_begun(actor) for actor in model.actors]
        for _ in range(400):
            moves, kills = model.steps(state)
            steps = [(a, t) for a, t in moves] + [(a, t) for a, t in kills if dice.random() < 0.05]
            if not steps:
                break
            a, after = dice.choice(steps)
            _follow(model, running, a, state, after)
            state = after


def _begun(actor: Actor) -> Program:
    program = actor.automaton.program()
    next(program)
    return program


def _local(model: Model, state: bytes, a: int) -> int:
    block = model.world.blocks[a]
    return state[block] | state[block + 1] << 8


def _follow(
    model: Model,
    running: list[Program | None],
    a: int,
    before: bytes,
    after: bytes,
) -> None:
    was, now = _local(model, before, a), _local(model, after, a)
    automaton = model.actors[a].automaton
    block = model.world.blocks[a]
    buffer = block + 2 + model.leases
    if model.world.buffer and before[buffer] > after[buffer]:
        return  # a store that reached memory
    if now == DEAD:
        running[a] = None
        return
    if was == DEAD:
        running[a] = _begun(model.actors[a])
    program = running[a]
    assert program is not None
    op: Op | None = None
    for _, result in model.path(a, before, after):
        try:
            op = program.send(result)
        except StopIteration:
            op = None
    if op is None:
        assert now in (DONE, FIRST)
    else:
        assert op[:5] == automaton.ops[now][:5]
        assert op.lease == automaton.ops[now].lease


def test_actors_that_are_alike_may_be_exchanged() -> None:
    """The reduced search sees exactly the classes of what the whole one sees."""
    case = Case("", PUSH[1].scenario, {"groups": (2,), "kills": 1, "samples": 1})
    model = case.model()
    seen = {model.initial}
    todo = [model.initial]
    while todo:
        moves, kills = model.steps(todo.pop())
        for _, state in moves + kills:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    classes = {model.canonical(state) for state in seen}
    assert len(classes) < 0.6 * len(seen)
    assert search(case.model()).states == len(classes)


def _store_then_load(mine: int, other: int, result: int, fenced: bool) -> Program:
    yield store(mine, 1, "store")
    if fenced:
        yield fence("fence")
    value = yield load(other, "load")
    yield store(result, value + 1, "result")


def _two_stores(first: int, second: int) -> Program:
    yield store(first, 1, "first store")
    yield store(second, 1, "second store")


def _two_loads(first: int, second: int, results: tuple[int, int]) -> Program:
    one = yield load(first, "first load")
    two = yield load(second, "second load")
    yield store(results[0], one + 1, "first result")
    yield store(results[1], two + 1, "second result")


def _outcome(
    w: World,
    one: Callable[[], Program],
    two: Callable[[], Program],
    results: tuple[int, int],
) -> set[bytes]:
    """Return the values of both results (0: none, else value + 1) in all final states."""
    seen: set[bytes] = set()

    def final(s: bytes) -> None:
        if not any(s[block + 3] for block in w.blocks):
            seen.add(bytes(s[address] for address in results))

    actors = [Actor("one", Automaton(one)), Actor("two", Automaton(two))]
    found = search(Model(w, actors, final=final))
    assert found.complete
    return seen


def test_a_store_and_a_later_load_may_swap_unless_both_sides_have_a_fence() -> None:
    w = World(buffer=3)
    x, y, a, b = w.epoch(0), w.settled(0), w.closed(0), w.at("buried", 0)
    for one_fenced in (False, True):
        for two_fenced in (False, True):
            seen = _outcome(
                World(buffer=3),
                partial(_store_then_load, x, y, a, one_fenced),
                partial(_store_then_load, y, x, b, two_fenced),
                (a, b),
            )
            both_missed = bytes([1, 1])
            assert (both_missed in seen) == (not (one_fenced and two_fenced))
            assert {bytes([1, 2]), bytes([2, 1]), bytes([2, 2])} <= seen


def test_stores_stay_in_order_and_so_do_loads() -> None:
    w = World(buffer=3)
    x, y, a, b = w.epoch(0), w.settled(0), w.closed(0), w.at("buried", 0)
    seen = _outcome(w, partial(_two_stores, x, y), partial(_two_loads, y, x, (a, b)), (a, b))
    assert seen == {bytes([1, 1]), bytes([1, 2]), bytes([2, 2])}
