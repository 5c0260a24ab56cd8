# SPDX-License-Identifier: Apache-2.0
"""Row 15: random operations, each compared with a plain account of what must be."""

import contextlib
import faulthandler
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from crash import planted
from harness import figures
from harness.isolation import remove_left

from faults.operations import World
from shmconn.directory import remove_rings
from shmconn.errors import RingMissing

SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(31)
MANY = int(os.environ.get("SHMCONN_OPERATIONS", "1000000"))
A_SEED = 4000  # tries of operations; some find nothing to do


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaves with samples unread are what happens here all the time."""
    # By its own call: loggers remember what is enabled, and only this makes them forget.
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def operate(ring: str, operations: int) -> None:
    """Runs seed after seed, each on a ring of its own."""
    print(f"SHMCONN_SEED={SEED}")
    mix: Counter[str] = Counter()
    full = samples = seeds = 0
    while sum(mix.values()) < operations:
        name = f"{ring}-{seeds}"
        world = World(name, SEED + seeds)
        seeds += 1
        for _ in range(A_SEED):
            world.step()
        samples += world.producer.published
        world.end()
        with contextlib.suppress(RingMissing):
            remove_rings(name)
        mix += world.mix
        full += world.full
    figures.record(
        "15",
        "random operations beside a plain account",
        trials=sum(mix.values()),
        exercised=sum(mix.values()),
        failures=0,
        seeds=seeds,
        samples=samples,
        times_full=full,
        mix=dict(mix.most_common()),
        seed=str(SEED),
    )
    assert full > operations // 1000 and samples > operations // 20


def test_random_operations_agree_with_a_plain_account(ring: str) -> None:
    operate(ring, 10_000)


@pytest.mark.long
def test_many_random_operations_agree_with_a_plain_account(ring: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    operate(ring, MANY)


def goes_wrong(ring: str, seed: int) -> bool:
    """Whether the ring and the account come to differ."""
    world = World(ring, seed)
    try:
        for _ in range(A_SEED):
            world.step()
    except AssertionError:
        return True
    finally:
        remove_left(ring)
    return False


@pytest.mark.parametrize(
    "fault", (planted.a_lease_does_not_count, planted.released_at_the_claim, planted.no_sweep)
)
def test_random_operations_find_a_planted_fault(
    damaged_ring: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    found = any(goes_wrong(f"{damaged_ring}-{seed}", seed) for seed in range(10))
    figures.detected("15", "random operations", 1, [] if found else [fault.__name__])
    assert found
