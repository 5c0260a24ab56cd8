# SPDX-License-Identifier: Apache-2.0
"""Row 29: a producer and three readers under random kills for 20 minutes, and one that stays.

``SHMCONN_SOAK_S`` sets another length.
"""

import faulthandler
import os
import secrets
import time

import pytest
from crash.load import Load, fds
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared

from shmconn.subscription import subscribe
from soak.watch import Watcher, child_ready, growth

SECONDS = float(os.environ.get("SHMCONN_SOAK_S", "1200"))
SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(32)
MEAN_LIFE_S = 3.0
SEQS = 1 << 16
STAYS = "stays"
# More than this is growth: what one look may differ from another by chance.
SLACK = {"memory_kib": 2048, "descriptors": 4, "mappings": 12, "shm_kib": 8192, "shm_files": 8}
JOINED, SAMPLES, RINGS, OVER = range(4)


def stay(name: str, shared: Shared, leaks: int = 0) -> None:
    """Reads each generation in order, without a gap and once, until it is told to end.

    Args:
        leaks: bytes, and a descriptor, that it loses with each sample: a fault to be found.
    """
    last: dict[str, int] = {}
    lost: list[bytes] = []
    with subscribe(name, STAYS, wait_s=60, follow=True) as subscription:
        shared.words[JOINED] = 1
        while True:
            over = shared.words[OVER]
            sample = subscription.next(0.05)
            if sample is None:
                if over and not subscription._views.live:
                    return
                continue
            generation = sample.handle.generation
            found = payload.problems(sample, payload.slot_of(subscription, sample))
            if found or sample.seq != last.get(generation, 0) + 1:
                raise AssertionError(f"{found}, {sample.seq} after {last.get(generation, 0)}")
            last[generation] = sample.seq
            del sample
            shared.words[SAMPLES] += 1
            shared.words[RINGS] = len(last)
            if leaks:
                lost.append(os.urandom(leaks))
                os.dup(0)


def soak(ring: str, seconds: float, leaks: int = 0, every_s: float = 1.0) -> dict[str, float]:
    """Kills and restarts for so long; checks the account; returns what the one that stays took."""
    print(f"SHMCONN_SEED={SEED}")
    shared = Shared()
    stays = Child(lambda: stay(ring, shared, leaks), shared)
    child_ready(stays, lambda: shared.words[JOINED])
    lives = 64 + int(4 * seconds / MEAN_LIFE_S)
    load = Load(ring, SEED, lives, min(MEAN_LIFE_S, seconds / 8), SEQS)
    before = fds()
    watcher = Watcher(stays.pid, ring, every_s)
    began = time.monotonic()
    load.run(1 << 30, until=began + seconds)
    looks = watcher.end()
    descriptors = fds() - before
    tally = load.finish()
    shared.words[OVER] = 1
    stays.finish()
    problems = tally.problems
    if shared.words[SAMPLES] != tally.published:
        problems.append(f"who stayed was given {shared.words[SAMPLES]} of {tally.published}")
    grown = growth(looks)
    # Zombies that wait to be reaped have a descriptor each.
    if descriptors > 40:
        problems.append(f"the test itself has {descriptors} descriptors more")
    if not leaks:
        problems += [f"{what} grew by {by}" for what, by in grown.items() if by > SLACK[what]]
        figures.record(
            "29",
            "soak: producer and three readers killed at random, one reader stays",
            trials=load.killed,
            exercised=load.killed,
            failures=len(problems),
            recovery_s=tally.recovery_s,
            minutes=round((time.monotonic() - began) / 60, 1),
            samples=tally.published,
            delivered=int(load.log.total.sum()) + shared.words[SAMPLES],
            delivered_again=tally.twice,
            lives_of_the_producer=load._life + 1,
            kills_by_role={role: count for role, count in tally.kills.items()},
            readers_killed_with_a_lease=tally.holding,
            grown=grown,
            most_in_shm_mib=round(float(looks[:, 3].max()) / 1024, 1),
            looks=len(looks),
            seed=str(SEED),
        )
    remaining = left_of(ring)
    if remaining:
        problems.append(f"left in /dev/shm: {remaining}")
    assert problems == []
    return grown


@pytest.mark.long
def test_twenty_minutes_of_kills_lose_nothing_and_leave_everything_flat(ring: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    soak(ring, SECONDS)


@pytest.mark.long
def test_a_soak_sees_a_leak(ring: str) -> None:
    grown = soak(ring, 8.0, leaks=16 << 10, every_s=0.1)
    seen = {what for what in ("memory_kib", "descriptors") if grown[what] > SLACK[what]}
    figures.detected("29", "a soak", 2, sorted({"memory_kib", "descriptors"} - seen))
    assert seen == {"memory_kib", "descriptors"}
