# SPDX-License-Identifier: Apache-2.0
"""Rows 7 and 8: a /dev/shm of 64 MiB, as containers have it."""

import faulthandler
import gc
import os
import random
import signal
from functools import partial

import pytest
from crash.survivors import Reader
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared, kill_at

from places.namespaces import own_shm, until
from shmconn.errors import NoSpace
from shmconn.handle import format_size
from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.segment import ShmFile
from shmconn.subscription import subscribe

pytestmark = pytest.mark.usefixtures("namespaces")

MIB = 1 << 20
LAYERS = list(range(32))  # 8 KiB a token
WRAPS = 20


def create(name: str, size: int, groups: tuple[str, ...] = ()) -> Producer:
    return Producer.create(
        name,
        size=size,
        layer_ids=LAYERS,
        hidden_size=payload.HIDDEN,
        dtype="float32",
        groups=groups,
    )


def free() -> int:
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def read_all(name: str, group: str, shared: Shared) -> None:
    problems: list[str] = []
    reader = Reader(subscribe(name, group), problems)
    reader.read_until("the end", lambda: reader.over)
    reader.subscription.close()
    (got,) = reader.got.values()
    assert problems == []
    assert got == list(range(1, len(got) + 1))
    shared.words[0] = len(got)


def test_a_ring_in_64_mib_wraps_many_times_though_the_rest_is_filled_up(ring: str) -> None:
    shared = Shared()

    def run() -> None:
        own_shm(64)
        dice = random.Random(1)
        producer = create(ring, 48 * MIB, ("one", "two"))
        logs = [Shared(), Shared()]
        readers = [
            Child(lambda group=group, log=log: read_all(ring, group, log), log)
            for group, log in zip(("one", "two"), logs, strict=True)
        ]
        area = producer.shape.pages * producer.shape.page_size
        written = 0
        filler = -1
        while written < WRAPS * area:
            tokens = dice.randint(1, 120)
            while payload.put(producer, tokens) is None:
                shared.words[1] += 1
                producer.wait(0.1)
            written += tokens * producer.bytes_per_token
            if filler < 0 and written > area:
                # Whatever else takes the rest of the memory, the ring has its own.
                filler = os.open("/dev/shm/filler", os.O_CREAT | os.O_RDWR)
                os.posix_fallocate(filler, 0, free())
        assert free() == 0
        producer.close()
        for reader, log in zip(readers, logs, strict=True):
            reader.finish()
            assert log.words[0] == producer.published
        assert left_of(ring) == []
        shared.words[0] = producer.published

    Child(run, shared).finish()
    figures.record(
        "8",
        "samples through a ring of 48 MiB in a full /dev/shm of 64 MiB, two groups",
        trials=shared.words[0],
        exercised=shared.words[0],
        failures=0,
        wraps=WRAPS,
        times_full=shared.words[1],
    )
    assert shared.words[1] > 0


def test_every_size_around_the_limit_fits_whole_or_is_refused_with_the_sizes(ring: str) -> None:
    shared = Shared()
    page = 65536

    def run() -> None:
        own_shm(64)
        gc.freeze()  # so that collections look at what came since only
        room = free() // page * page
        for around in (room // 2, room, 2 * room):
            for pages in range(-6, 7):
                size = around + pages * page
                before = free()
                shared.words[0] += 1
                try:
                    producer = create(ring, size)
                except NoSpace as error:
                    shared.words[1] += 1
                    assert format_size(RingShape.of_size(size, page, None).size) in str(error)
                    for said in ("are free", "--shm-size", "smaller"):
                        assert said in str(error)
                else:
                    # Each page is there: a touch of one that is not would be SIGBUS.
                    producer.data_area[:: page // 2] = bytes(len(producer.data_area[:: page // 2]))
                    producer.close()
                    del producer
                    gc.collect()
                assert os.listdir("/dev/shm") == [], f"left at {size}: {os.listdir('/dev/shm')}"
                assert free() == before

    child = Child(run, shared)
    child.finish()
    tried, refused = shared.words[0], shared.words[1]
    figures.record(
        "8",
        "sizes of a ring around what /dev/shm holds",
        trials=tried,
        exercised=refused,
        failures=0,
        signals=0,
    )
    assert 0 < refused < tried


def test_creators_that_race_for_the_room_get_it_whole_or_leave_nothing(ring: str) -> None:
    shared = Shared()
    rounds = 16

    def run() -> None:
        own_shm(64)
        for round_ in range(rounds):
            go, arrived = os.pipe(), Shared(8)

            def race(racer: int, round_: int, go: tuple[int, int], arrived: Shared) -> None:
                # Half of the rounds under one name, half under names of their own.
                name = ring if round_ % 2 else f"{ring}-{racer}"
                os.read(go[0], 1)
                try:
                    producer = create(name, 24 * MIB)
                except NoSpace:
                    return
                arrived.words[racer] = 1
                producer.data_area[::4096] = bytes(len(producer.data_area[::4096]))
                os.read(go[0], 1)
                producer.close()

            racers = [Child(partial(race, n, round_, go, arrived), Shared(1)) for n in range(4)]
            os.write(go[1], b"x" * 8)
            for racer in racers:
                racer.finish()
            os.close(go[0])
            os.close(go[1])
            won = sum(arrived.words[:4])
            shared.words[0] += won > 0
            shared.words[1] += 0 < won < 4
            left = os.listdir("/dev/shm")
            assert left == [], f"round {round_}: left {left}"

    Child(run, shared).finish()
    figures.record(
        "8",
        "four creators race for room for two",
        trials=rounds,
        exercised=shared.words[1],
        failures=0,
        rounds_in_which_somebody_won=shared.words[0],
    )
    assert shared.words[1] > rounds // 2


def test_twenty_killed_producers_in_a_row_leave_room_for_the_next(ring: str) -> None:
    """A ring takes three quarters of /dev/shm: two never fit, so each start clears the last."""
    shared = Shared()
    cycles = 20

    def live_until_killed(log: Shared, step: int) -> None:
        if step:
            kill_at(step, log, looks=True)
        producer = create(ring, 48 * MIB)
        while True:
            if payload.put(producer, 100) is None:
                producer.wait(0.1)
            log.words[2] += 1

    def run() -> None:
        own_shm(64)
        dice = random.Random(2)
        for cycle in range(cycles):
            log = Shared()
            # Some in their start, most at work.
            step = dice.randint(1, 120) if cycle % 4 == 0 else 0
            child = Child(partial(live_until_killed, log, step), log)
            until(lambda log=log, child=child: log.words[2] > 9 or not child.running, "work")
            child.kill()
            child.reap()
            assert child.status == -9, log.note
            shared.words[1] += log.words[2] > 0
            rings = [name for name in left_of(ring) if not name.startswith("sem.")]
            assert len(rings) <= 2, f"cycle {cycle}: {rings}"  # one ring, one registry
        create(ring, 48 * MIB).close()
        gc.collect()
        assert left_of(ring) == []
        shared.words[0] = cycles

    Child(run, shared).finish()
    figures.record(
        "12",
        "start and SIGKILL in a /dev/shm that holds one ring",
        trials=shared.words[0],
        exercised=shared.words[1],
        failures=0,
    )


def test_a_ring_that_is_not_reserved_would_be_seen_as_a_signal(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmFile, "reserve", lambda self, size, what: os.ftruncate(self._fd, size))

    def run() -> None:
        faulthandler.disable()  # the signal is what is looked for
        own_shm(64)
        producer = create(ring, 128 * MIB)
        producer.data_area[::4096] = bytes(len(producer.data_area[::4096]))

    child = Child(run)
    assert child.wait()
    child.reap()
    figures.detected("8", "touching every page", 1, [] if child.status == -signal.SIGBUS else ["x"])
    assert child.status == -signal.SIGBUS
