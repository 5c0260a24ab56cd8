# SPDX-License-Identifier: Apache-2.0
"""Rows 5 and 7: SIGSTOP. Who is stopped is alive: what he holds stays his, and is told of."""

import os
import signal
import time
from typing import Any

import pytest
from crash import planted
from crash.survivors import PAGES, SLOTS, Reader, create
from harness import figures, payload
from harness.processes import Child, Shared

from places.namespaces import ended, until
from shmconn import layout, words
from shmconn.directory import remove_rings, rings
from shmconn.errors import Busy
from shmconn.member import Member
from shmconn.registry import Group
from shmconn.ring import Producer
from shmconn.segment import ring_files
from shmconn.subscription import subscribe

# seconds of the stop
SHORT, LONG = 3.0, 60.0
SECONDS = (SHORT, pytest.param(LONG, marks=pytest.mark.long))


def hold_stopped_then_read_on(name: str, group: str, holds: int, shared: Shared) -> None:
    """Claims samples, is stopped, checks them, releases them and reads to the end."""
    problems: list[str] = []
    reader = Reader(subscribe(name, group), problems)
    subscription = reader.subscription
    held = []
    for _ in range(holds):
        sample = subscription.next(60)
        assert sample is not None
        held.append((sample, payload.slot_of(subscription, sample)))
        shared.words[2 + len(held)] = sample.seq
    shared.words[0] = holds
    os.kill(os.getpid(), signal.SIGSTOP)
    shared.words[1] = 1
    while held:
        sample, slot = held.pop()
        problems += payload.problems(sample, slot)
        sample.release()
        del sample
    reader.read_until("the end", lambda: reader.over)
    shared.words[2] = sum(map(len, reader.got.values()))
    subscription.close()
    assert problems == []


def stopped(child: Child) -> bool:
    """Whether a process is stopped, by the kernel's word."""
    with open(f"/proc/{child.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def stop_beside_a_mate(ring: str, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """Stops a reader with two leases while its mate and another group go on.

    Returns:
        What was wrong, and figures.
    """
    problems: list[str] = []
    producer = create(ring, ("pair", "single"))
    mate, other = (Reader(subscribe(ring, group), problems) for group in ("pair", "single"))
    shared = Shared()
    for _ in range(2):
        payload.put(producer)
    child = Child(lambda: hold_stopped_then_read_on(ring, "pair", 2, shared), shared)
    told = looks = 0
    longest = 0.0
    with ended(child):
        until(lambda: stopped(child), "the stop", child)
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            before = time.monotonic()
            put = payload.put(producer)
            longest = max(longest, time.monotonic() - before)
            mate.read()
            other.read()
            if put is None:
                problems.append(f"the ring is stuck: {producer.stall_text()}")
                break
            if producer.published % 50 == 0:
                blockers = producer.blockers()
                looks += 1
                who = [(blocker.group, blocker.pid, blocker.alive) for blocker in blockers]
                named = f"held by pid {child.pid} on" in producer.stall_text()
                told += named and who == [("pair", child.pid, True)]
        flowed = producer.published - 2
        assert stopped(child)
        child.signal(signal.SIGCONT)
        until(lambda: shared.words[1], "to go on", child)
        producer.close()
        # It reads to the end, as the others do.
        for reader in (mate, other):
            reader.read_until("the end", lambda reader=reader: reader.over)
        child.wait()
        child.reap()
        if child.status:
            problems.append(f"the stopped one ended with {child.status}: {shared.note}")
    held = [shared.words[3], shared.words[4]]
    generation = producer.generation
    if sorted(other.got[generation]) != list(range(1, flowed + 3)):
        problems.append(f"group single was given {len(other.got[generation])} of {flowed + 2}")
    if set(mate.got[generation]) & set(held):
        problems.append(f"held by the stopped one, and given to its mate: {held}")
    if len(mate.got[generation]) + shared.words[2] + len(held) != flowed + 2:
        problems.append("group pair was not given every sample once")
    for reader in (mate, other):
        reader.subscription.close()
    if told != looks:
        problems.append(f"told of in {told} of {looks} looks")
    return problems, {
        "flowed": flowed,
        "looks": looks,
        "longest_put_ms": round(1000 * longest, 1),
    }


@pytest.mark.parametrize("seconds", SECONDS)
def test_what_a_stopped_reader_holds_is_not_overwritten_while_its_mate_goes_on(
    ring: str, seconds: float
) -> None:
    problems, found = stop_beside_a_mate(ring, seconds)
    figures.record(
        "5",
        f"samples past a reader stopped for {seconds:.0f} s with 2 leases",
        trials=found["flowed"],
        exercised=found["flowed"],
        failures=len(problems),
        told_of_by_name=found["looks"],
        longest_put_ms=found["longest_put_ms"],
    )
    assert problems == []
    assert found["looks"] > 0


def test_pages_that_are_used_again_under_a_stopped_reader_would_be_seen(
    damaged_ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.a_lease_does_not_count(monkeypatch)
    problems, _ = stop_beside_a_mate(damaged_ring, 0.3)
    seen = [problem for problem in problems if "torn" in problem]
    figures.detected("5", "a stopped reader", 1, [] if seen else ["a lease does not count"])
    assert seen


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_ring_full_of_what_a_stopped_reader_holds_waits_for_it_and_says_so(
    ring: str, seconds: float
) -> None:
    producer = create(ring, ("alone",))
    shared = Shared()
    while payload.put(producer):
        pass
    full = producer.published
    child = Child(lambda: hold_stopped_then_read_on(ring, "alone", full, shared), shared)
    tries = longest = 0
    with ended(child):
        until(lambda: stopped(child), "the stop", child)
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            before = time.monotonic_ns()
            assert payload.put(producer) is None
            longest = max(longest, time.monotonic_ns() - before)
            producer.tick()
            assert producer.can_progress(), "a stopped reader is alive"
            text = producer.stall_text()
            for said in (
                f"holds {full} samples",
                f"0 of {SLOTS} slots are free",
                f"oldest sample {payload.request_id(producer.generation, 1)!r:.80}",
                "s old",
                f"group 'alone' needs {full} samples, the oldest is held by pid {child.pid} on",
                "(alive)",
            ):
                assert said in text, text
            tries += 1
            time.sleep(0.01)
        child.signal(signal.SIGCONT)
        until(lambda: producer.reclaim() or producer.free_slots == SLOTS, "free slots", child)
        for _ in range(10):
            until(lambda: payload.put(producer), "room", child)
        producer.close()
        child.finish()
    assert shared.words[2] == 10
    figures.record(
        "7",
        f"ring full for {seconds:.0f} s behind a stopped reader",
        trials=tries,
        exercised=tries,
        failures=0,
        longest_refusal_us=longest // 1000,
    )
    assert producer.free_pages <= PAGES


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_stopped_producer_is_alive_and_goes_on(ring: str, seconds: float) -> None:
    problems: list[str] = []
    shared = Shared()

    def produce() -> None:
        with create(ring, ("group",)) as producer:
            for number in range(60):
                until(lambda: payload.put(producer), "room")
                shared.words[0] = number + 1
                if number == 20:
                    os.kill(os.getpid(), signal.SIGSTOP)

    child = Child(produce, shared)
    with ended(child):
        reader = Reader(subscribe(ring, "group", wait_s=60), problems)
        until(lambda: reader.read() or stopped(child), "the stop", child)
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            reader.read()
            (info,) = rings(ring)
            assert info.live and not reader.over
            create(f"{ring}-2").close()
            assert remove_rings(ring, force=True).removed == []
            time.sleep(0.1)
        assert ring_files(ring) == [info.file]
        assert reader.got[info.generation] == list(range(1, 22))
        child.signal(signal.SIGCONT)
        reader.read_until("the end", lambda: reader.over)
        child.finish()
    figures.record(
        "5",
        f"producer stopped for {seconds:.0f} s under a reader",
        trials=1,
        exercised=1,
        failures=len(problems),
    )
    assert reader.died is None and reader.got[info.generation] == list(range(1, 61))
    reader.subscription.close()
    assert problems == []


def stop_at(step: str) -> None:
    """From now on this process stops itself, once, just before a step of the protocol."""

    def watch(name: str) -> None:
        if name == step:
            words.watch(None)
            os.kill(os.getpid(), signal.SIGSTOP)

    words.watch(watch)


def test_a_member_stopped_in_a_claim_stops_its_group_alone_and_is_named(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    problems: list[str] = []
    producer = create(ring, ("pair", "single"))
    mate, other = (Reader(subscribe(ring, group), problems) for group in ("pair", "single"))
    for _ in range(3):
        payload.put(producer)
    shared = Shared()

    def claim() -> None:
        subscription = subscribe(ring, "pair")
        stop_at(f"copy {layout.SEQ}")  # the group's claims are locked by then
        sample = subscription.next(60)
        assert sample is not None
        shared.words[0] = sample.seq
        sample.release()
        subscription.close()

    child = Child(claim, shared)
    with ended(child):
        until(lambda: stopped(child), "the stop", child)
        # Releases, reclaim and other groups go on.
        other.read_until("all", lambda: len(other.got[producer.generation]) == 3)
        assert mate.subscription.next(0) is None
        assert f"locked by pid {child.pid}: is that process stopped?" in caplog.text
        assert producer.reclaim() == 0 and payload.put(producer) is not None
        child.signal(signal.SIGCONT)
        child.finish()
    producer.close()
    for reader in (mate, other):
        reader.read_until("the end", lambda reader=reader: reader.over)
        reader.subscription.close()
    assert sorted([*mate.got[producer.generation], shared.words[0]]) == [1, 2, 3, 4]
    assert problems == []


def test_a_process_stopped_in_joining_delays_joins_alone_and_is_named(ring: str) -> None:
    problems: list[str] = []
    producer = create(ring, ("group",))
    reader = Reader(subscribe(ring, "group"), problems)

    def join() -> None:
        # Under lock R: the member row is about to be taken.
        stop_at(f"load {layout.member_row(0, 1)}")
        subscribe(ring, "group").close()

    child = Child(join, Shared())
    with ended(child):
        until(lambda: stopped(child), "the stop", child)
        with pytest.raises(Busy, match=f"locked by pid {child.pid}: another process is joining"):
            Member.join(
                ring, Group("group"), create=False, durable=False, background=False, wait_s=0.1
            )
        # Publishing, claims, releases and reclaim go on.
        for _ in range(3 * SLOTS):
            assert payload.put(producer) is not None
            reader.read_until("a sample", lambda: reader.got[producer.generation][-1:])
            reader.read()
        child.signal(signal.SIGCONT)
        child.finish()
    producer.close()
    reader.read_until("the end", lambda: reader.over)
    reader.subscription.close()
    assert reader.got[producer.generation] == list(range(1, 3 * SLOTS + 1))
    assert problems == []


def test_a_stopped_registrant_is_told_of_by_who_cannot_make_room(ring: str) -> None:
    """While a group is being registered nothing is reclaimed: crash table, register 4 to 6, S."""
    problems: list[str] = []
    producer: Producer = create(ring, ("group",))
    reader = Reader(subscribe(ring, "group"), problems)
    while payload.put(producer):
        pass

    def register() -> None:
        stop_at(f"store {layout.START + 8}")
        subscribe(ring, "new").close()

    child = Child(register, Shared())
    with ended(child):
        until(lambda: stopped(child), "the stop", child)
        reader.read()
        assert producer.reclaim() == 0 and payload.put(producer) is None
        assert f"pid {child.pid} is making a new group, or was stopped" in producer.stall_text()
        child.signal(signal.SIGCONT)
        until(lambda: producer.reclaim() or producer.free_slots, "room", child)
        child.finish()
    producer.close()
    reader.read_until("the end", lambda: reader.over)
    reader.subscription.close()
    assert problems == []
