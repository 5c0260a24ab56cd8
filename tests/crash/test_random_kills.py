# SPDX-License-Identifier: Apache-2.0
"""Rows 2, 3 and 22: SIGKILL at random times, under load, and of readers that hold leases."""

import faulthandler
import os
import random
import secrets
import time
from collections.abc import Callable

import pytest
from harness import figures, payload
from harness.isolation import remove_left
from harness.processes import Child, Shared

from crash import load, planted
from crash.survivors import PAGES, SLOTS, Reader, create
from shmconn.subscription import subscribe

MANY = int(os.environ.get("SHMCONN_KILLS", "50000"))
SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(32)


def kill_at_random(ring: str, kills: int, round_kills: int) -> None:
    """Rounds of kills, each on a name of its own, so that each can be accounted for."""
    print(f"SHMCONN_SEED={SEED}")
    rounds = -(-kills // round_kills)
    tallies = [load.run(f"{ring}-{n}", SEED + n, round_kills) for n in range(rounds)]
    total = load.Tally()
    for tally in tallies:
        total.kills += tally.kills
        total.phases += tally.phases
        total.problems += tally.problems
        total.recovery_s += tally.recovery_s
        total.published += tally.published
        total.holding += tally.holding
        total.twice += tally.twice
    figures.record(
        "2",
        "producer killed at random under load",
        trials=total.kills["producer"],
        exercised=sum(total.phases[phase] for phase in ("allocates", "fills", "publishes")),
        failures=len(total.problems),
        recovery_s=total.recovery_s,
        killed_while={phase: total.phases[phase] for phase in load.PHASES},
        published=total.published,
        seed=str(SEED),
    )
    figures.record(
        "3",
        "reader killed at random under load",
        trials=total.kills["reader"],
        exercised=total.holding,
        failures=len(total.problems),
        delivered_again=total.twice,
        seed=str(SEED),
    )
    assert total.problems == []
    # A run in which nobody was killed at work proves nothing.
    assert total.phases["fills"] > total.kills["producer"] // 10
    assert total.holding > total.kills["reader"] // 10


def test_random_kills_under_load_lose_and_tear_nothing(ring: str) -> None:
    kill_at_random(ring, 500, 250)


@pytest.mark.parametrize(
    "fault", (planted.a_lease_does_not_count, planted.released_at_the_claim, planted.no_sweep)
)
def test_random_kills_find_a_planted_fault(
    ring: str, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crash.survivors.PATIENCE_S", 1.0)
        fault(patch)
        tally = load.run(ring, SEED, 60)
    remove_left(ring)
    missed = [] if tally.problems else [fault.__name__]
    figures.detected("2", "random kills", 1, missed)
    assert tally.problems


@pytest.mark.long
def test_many_random_kills_under_load_lose_and_tear_nothing(ring: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    kill_at_random(ring, MANY, 1000)


def test_leases_of_a_killed_reader_come_free_unreaped_or_not(ring: str) -> None:
    dice = random.Random(SEED)
    problems: list[str] = []
    producer = create(ring, ("group",))
    mate = Reader(subscribe(ring, "group"), problems)
    recovery_s = []
    trials = 200
    zombies: list[Child] = []
    for trial in range(trials):
        for _ in range(SLOTS):
            payload.put(producer)
        holds = 1 + trial % SLOTS
        shared = Shared()

        def victim(holds: int = holds, shared: Shared = shared) -> None:
            subscription = subscribe(ring, "group")
            held = [subscription.next(0) for _ in range(holds)]
            shared.words[0] = len(held)
            time.sleep(60)

        child = Child(victim, shared)
        while child.running and not shared.words[0]:
            time.sleep(0.0002)
        child.kill(reap=dice.random() < 0.5)
        zombies.append(child)
        # Checked by a mate that was there before; the dead one's samples come among the rest.
        mate.read_until("free slots", lambda: producer.reclaim() and producer.free_slots == SLOTS)
        recovery_s.append(time.monotonic() - child.died_at)
        if problems or shared.words[0] != holds or producer.free_pages != PAGES:
            problems.append(f"trial {trial}: {shared.note} {producer.stall_text()}")
            break
        if len(zombies) == 16:
            for zombie in zombies:
                zombie.reap()
            zombies.clear()
    for zombie in zombies:
        zombie.reap()
    got = mate.got[producer.generation]
    if sorted(got) != list(range(1, producer.published + 1)):
        problems.append(f"of {producer.published} samples {len(set(got))} came, {len(got)} times")
    figures.record(
        "3",
        "reader killed while it holds 1 to all slots, half of them unreaped",
        trials=trials,
        exercised=len(recovery_s),
        failures=len(problems),
        recovery_s=recovery_s,
    )
    # The dead rows are taken and left; until then the group would stay.
    subscribe(ring, "group").close()
    producer.close()
    mate.subscription.close()
    assert problems == []


def test_a_reader_stays_through_the_deaths_of_its_producers(ring: str) -> None:
    dice = random.Random(SEED)
    problems: list[str] = []
    restarts = 100
    log = load.Log(restarts)
    readers = [
        Reader(subscribe(ring, group, wait_s=60, follow=True), problems) for group in load.GROUPS
    ]
    recovery_s = []
    child, killed_at = None, 0.0
    for life in range(restarts):
        seed = dice.getrandbits(32)
        child = Child(lambda life=life, seed=seed: load.produce(ring, log, life, seed), Shared(1))
        lives_s = dice.uniform(0.002, 0.03)
        give_up = time.monotonic() + 60
        while child.running and child.cpu_s < lives_s and time.monotonic() < give_up:
            for reader in readers:
                reader.read(1)
            if killed_at and log.generations[life, 0] and readers[0].got[_hex(log, life)]:
                recovery_s.append(time.monotonic() - killed_at)
                killed_at = 0.0
        if not child.running:
            problems.append(f"producer {life} ended by itself: {child.shared.note}")
        child.kill()
        killed_at = killed_at or time.monotonic()
    for reader in readers:
        reader.read_until("the last end", lambda reader=reader: not reader.subscription._views.live)
    published = 0
    for life in range(restarts):
        if not log.generations[life, 0]:
            continue
        for reader in readers:
            got = reader.got[_hex(log, life)]
            acked = int(log.acked[life])
            published += len(got)
            if got != list(range(1, len(got) + 1)) or not acked <= len(got) <= acked + 1:
                problems.append(f"life {life}: published {acked}, given {got[-5:]}")
    for reader in readers:
        reader.subscription.close()
    figures.record(
        "22",
        "producer killed and started again under load, the readers stay",
        trials=restarts,
        exercised=len(recovery_s),
        failures=len(problems),
        recovery_s=recovery_s,
        delivered=published,
        delivered_twice=0 if not problems else None,
    )
    assert problems == []


def _hex(log: load.Log, life: int) -> str:
    high, low = log.generations[life]
    return f"{int(high):016x}{int(low):016x}"
