# SPDX-License-Identifier: Apache-2.0
"""Rows 2, 3 and 12: processes of another PID namespace that shares /dev/shm, as containers do.

There every reader may be pid 1, and a pid of here names somebody else there.
"""

import os
import time

import pytest
from crash.survivors import SLOTS, Reader, create
from harness import figures, payload
from harness.processes import Child, Shared

from places.namespaces import ended, in_pid_namespace, reached, until
from shmconn import layout
from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.registry import Registry
from shmconn.segment import ring_files
from shmconn.subscription import subscribe

pytestmark = pytest.mark.usefixtures("namespaces")

TRIALS = 20


def produce(name: str, samples: int, shared: Shared) -> None:
    """Publishes so many samples, then waits to be told to close."""
    with create(name) as producer:
        for number in range(samples):
            until(lambda: payload.put(producer), "room")
            shared.words[0] = number + 1
        until(lambda: shared.words[1], "the word to go on")


def hold(name: str, holds: int, shared: Shared) -> None:
    """Claims so many samples and waits."""
    subscription = subscribe(name, "pair", wait_s=60)
    held = [subscription.next(60) for _ in range(holds)]
    shared.words[0] = len(held)
    until(lambda: shared.words[1], "the word to go on")
    for sample in held:
        assert sample is not None
        assert payload.problems(sample, payload.slot_of(subscription, sample)) == []
        sample.release()
    subscription.close()


def test_a_producer_of_another_pid_namespace_is_seen_alive_and_its_death_is_told(
    ring: str,
) -> None:
    problems: list[str] = []
    recovery_s = []
    for trial in range(TRIALS):
        producer = in_pid_namespace(produce, ring, 1 + trial % SLOTS)
        with ended(producer):
            reached(producer, 1 + trial % SLOTS, "samples")
            (info,) = rings(ring)
            assert info.live and info.pid == 1 != producer.pid
            reader = Reader(subscribe(ring, "group"), problems)
            reader.read(1)
            assert not reader.over
            # Neither a start nor a forced clean-up removes what lives there.
            create(f"{ring}-2").close()
            create(ring).close()
            assert remove_rings(ring, force=True).removed == []
            assert info.file in ring_files(ring)
            producer.kill()
        reader.read_until("the end", lambda reader=reader: reader.over)
        recovery_s.append(time.monotonic() - producer.died_at)
        if reader.died is None or reader.got[info.generation] != list(range(1, 2 + trial % SLOTS)):
            problems.append(f"trial {trial}: {reader.died}, {dict(reader.got)}")
        reader.subscription.close()
        assert ring_files(ring) == []
    figures.record(
        "2",
        "producer of another PID namespace killed",
        trials=TRIALS,
        exercised=len(recovery_s),
        failures=len(problems),
        recovery_s=recovery_s,
    )
    assert problems == []


def test_leases_of_a_reader_killed_in_another_pid_namespace_go_to_its_mate(ring: str) -> None:
    problems: list[str] = []
    recovery_s = []
    producer = create(ring, ("pair",))
    mate = Reader(subscribe(ring, "pair"), problems)
    for trial in range(TRIALS):
        while payload.put(producer) is not None:
            pass
        holds = 1 + trial % SLOTS
        victim = in_pid_namespace(hold, ring, holds)
        with ended(victim):
            reached(victim, holds, "leases")
            (group,) = groups(ring)
            there = [member for member in group.members if member.pid == 1]
            assert [(member.alive, member.leases) for member in there] == [(True, holds)]
            # While it lives, its mate is not given what it holds.
            mate.read()
            assert producer.reclaim() == SLOTS - holds
            assert f"held by pid 1 on {os.uname().nodename} (alive)" in producer.stall_text()
            victim.kill()
        mate.read_until("its leases", lambda: producer.reclaim() and producer.free_slots == SLOTS)
        recovery_s.append(time.monotonic() - victim.died_at)
    got = mate.got[producer.generation]
    if sorted(got) != list(range(1, producer.published + 1)):
        problems.append(f"of {producer.published} samples {len(set(got))} came, {len(got)} times")
    figures.record(
        "3",
        "reader of another PID namespace killed while it holds 1 to all slots",
        trials=TRIALS,
        exercised=len(recovery_s),
        failures=len(problems),
        recovery_s=recovery_s,
    )
    producer.close()
    mate.subscription.close()
    remove_group(ring, "pair")
    assert problems == []


def test_liveness_by_pid_would_be_seen(damaged_ring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = damaged_ring

    def alive(self: Registry, group: int, member: int) -> bool:
        pid = self.member_word(group, member, layout.MEMBER_PID)
        return bool(pid) and os.path.exists(f"/proc/{pid}")

    problems: list[str] = []
    monkeypatch.setattr("crash.survivors.PATIENCE_S", 0.5)
    monkeypatch.setattr(Registry, "alive", alive)
    producer = create(ring, ("pair",))
    mate = Reader(subscribe(ring, "pair"), problems)
    payload.put(producer)
    victim = in_pid_namespace(hold, ring, 1)
    with ended(victim):
        reached(victim, 1, "a lease")
        victim.kill()
    mate.read_until("its lease", producer.reclaim)
    figures.detected("3", "kills in another PID namespace", 1, [] if problems else ["by pid"])
    assert problems


def test_two_members_that_are_both_pid_1_are_told_apart(ring: str) -> None:
    problems: list[str] = []
    producer = create(ring, ("pair",))
    for _ in range(SLOTS):
        payload.put(producer)
    dies, stays = in_pid_namespace(hold, ring, 1), in_pid_namespace(hold, ring, 1)
    with ended(dies, stays):
        for reader in (dies, stays):
            reached(reader, 1, "a lease")
        (group,) = groups(ring)
        assert [(member.pid, member.alive) for member in group.members] == [(1, True), (1, True)]
        dies.kill()
        (group,) = groups(ring)
        assert sorted(member.alive for member in group.members) == [False, True]
        # A mate takes the dead one's sample and the unclaimed ones, not the living one's.
        mate = Reader(subscribe(ring, "pair"), problems)
        mate.read_until("the others", lambda: len(mate.got[producer.generation]) == SLOTS - 1)
        assert mate.read() == 0
        stays.shared.words[1] = 1
        stays.finish()
    producer.close()
    mate.read_until("the end", lambda: mate.over)
    mate.subscription.close()
    assert problems == []


def test_a_start_in_another_pid_namespace_removes_no_live_ring_of_here(ring: str) -> None:
    def start(name: str, shared: Shared) -> None:
        create(f"{name}-2").close()
        create(name).close()
        assert remove_rings(name, force=True).removed == []
        shared.words[0] = 1

    producer = create(ring)
    payload.put(producer)
    visitor = in_pid_namespace(start, ring)
    with ended(visitor):
        visitor.finish()
        (file_name,) = ring_files(ring)
        assert file_name.endswith(producer.generation)

        # And what died here is cleared by a start there.
        def die(shared: Shared) -> None:
            create(ring)
            shared.words[0] = 1
            until(lambda: False, "the kill")

        shared = Shared()
        dead = Child(lambda: die(shared), shared)
        reached(dead, 1, "a second ring")
        dead.kill()
        assert len(ring_files(ring)) == 2
        cleaner = in_pid_namespace(start, ring)
        cleaner.finish()
        assert ring_files(ring) == [file_name]
    with subscribe(ring, "group") as subscription:
        producer.close()
        assert [sample.seq for sample in subscription] == [1]
