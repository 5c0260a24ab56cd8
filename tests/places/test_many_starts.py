# SPDX-License-Identifier: Apache-2.0
"""Rows 12 and 13: starts beside the dead and the living, and many starts at once."""

import faulthandler
import os
import random
import time
from functools import partial

import pytest
from crash.survivors import Reader, create
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared, kill_at

from places.namespaces import ended, reached, until
from shmconn.directory import remove_rings
from shmconn.segment import ring_files
from shmconn.subscription import subscribe

CREATORS = 8
STEPS_OF_A_START = 60


def live(name: str, shared: Shared) -> None:
    """A producer that goes on until it is told to close."""
    with create(name) as producer:
        payload.put(producer)
        shared.words[0] = 1
        until(lambda: shared.words[1], "the word to go on")
        assert payload.put(producer) is not None


def test_starts_clear_every_dead_ring_and_never_a_live_one(ring: str) -> None:
    rounds, tries_a_round = 50, 20
    dice = random.Random(3)
    reclaimed = dead_rings = 0
    recovery_s = []
    shared = Shared()
    stays = Child(lambda: live(ring, shared), shared)

    def die(step: int, log: Shared) -> None:
        kill_at(step, log, looks=True)
        create(ring)
        log.words[2] = 1
        time.sleep(60)

    with ended(stays):
        reached(stays, 1, "a live ring")
        (alive,) = ring_files(ring)
        for _ in range(rounds):
            # Killed somewhere in its start, or at work; half of them stay zombies.
            log = Shared()
            child = Child(partial(die, dice.randint(1, 2 * STEPS_OF_A_START), log), log)
            until(lambda log=log, child=child: log.words[2] or not child.running, "a death")
            child.kill(reap=dice.random() < 0.5)
            left = [name for name in ring_files(ring) if name != alive]
            dead_rings += len(left)
            began = time.monotonic()
            create(ring).close()
            recovery_s.append(time.monotonic() - began)
            reclaimed += sum(name not in ring_files(ring) for name in left)
            for _ in range(tries_a_round):
                assert remove_rings(ring, force=True).removed == []
            assert ring_files(ring) == [alive]
            child.reap()
        shared.words[1] = 1
        stays.finish()
    remove_rings(ring)
    figures.record(
        "12",
        "dead rings cleared by the next start beside a live one",
        trials=dead_rings,
        exercised=dead_rings,
        failures=dead_rings - reclaimed,
        recovery_s=recovery_s,
        tries_to_remove_the_live_one=rounds * tries_a_round,
        live_ones_removed=0,
    )
    assert dead_rings > rounds // 4 and reclaimed == dead_rings


def start_together(ring: str, rounds: int) -> None:
    """Eight starts under one name at once; in half of the rounds some are killed in theirs."""
    dice = random.Random(5)
    problems: list[str] = []
    killed = worked = 0
    for round_ in range(rounds):
        go = os.pipe()
        logs = [Shared() for _ in range(CREATORS)]

        def begin(log: Shared, step: int, go: tuple[int, int]) -> None:
            os.read(go[0], 1)
            if step:
                kill_at(step, log, looks=False)
            producer = create(ring, ("group",))
            payload.put(producer)
            log.words[1] = 1
            until(lambda: log.words[3], "the word to close")
            producer.close()

        dies = [dice.randint(1, STEPS_OF_A_START) if round_ % 2 and n % 2 else 0 for n in range(8)]
        children = [
            Child(partial(begin, log, step, go), log) for log, step in zip(logs, dies, strict=True)
        ]
        os.write(go[1], b"x" * CREATORS)
        for child, log in zip(children, logs, strict=True):
            until(lambda child=child, log=log: log.words[1] or not child.running, "a start")
        # All that live have a ring of their own, and its one sample is read.
        lives = [child for child, log in zip(children, logs, strict=True) if log.words[1]]
        killed += sum(not child.running for child in children)
        worked += len(lives)
        reader = Reader(subscribe(ring, "group"), problems)
        for log in logs:
            log.words[3] = 1
        for child, step in zip(children, dies, strict=True):
            if step:
                child.wait()
                child.reap()
            else:
                child.finish()
        os.close(go[0])
        os.close(go[1])
        reader.read_until("the end", lambda reader=reader: reader.over)
        if len(reader.got) < sum(not step for step in dies):
            problems.append(f"round {round_}: {len(reader.got)} rings of {len(lives)} were read")
        reader.subscription.close()
        left = left_of(ring)
        if left:
            problems.append(f"round {round_}: left {left}")
            break
    figures.record(
        "13",
        "eight starts at once under one name, in half of the rounds four may be killed in theirs",
        trials=rounds,
        exercised=rounds,
        failures=len(problems),
        rings_made=worked,
        killed_in_a_start=killed,
    )
    assert problems == []
    assert killed > 0


def test_many_starts_at_once_get_a_ring_each_and_leave_nothing(ring: str) -> None:
    start_together(ring, 10)


@pytest.mark.long
def test_hundreds_of_rounds_of_starts_leave_nothing(ring: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    start_together(ring, 500)
