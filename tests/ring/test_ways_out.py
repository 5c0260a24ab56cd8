# SPDX-License-Identifier: Apache-2.0
"""Ways out of a member that was given nothing: what its group is owed stays owed."""

import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest
from ring_tools import check, give_up, put, wait

from shmconn import Handle, NoMemory, Producer, ProducerDied, RingMissing, subscribe
from shmconn.directory import groups, rings
from shmconn.segment import ShmFile

Make = Callable[..., Producer]
Fork = Callable[[Callable[[], object]], int]
SAMPLES = 5
MIB = 1 << 20


def join_and_die(ring: str) -> None:
    """A member that is killed before it has read anything."""
    subscribe(ring, "g")
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_the_mapping(ring: str) -> None:
    """Ctrl-C while the ring's pages are being mapped."""
    real = ShmFile.map

    def slow(self: ShmFile, length: int) -> Any:
        if length > 16 * MIB:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, length)

    ShmFile.map = slow  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        subscribe(ring, "g")


def run_out_of_addresses(ring: str) -> None:
    """The control area still fits, the pages do not."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 24 * MIB, resource.RLIM_INFINITY))
    with pytest.raises(NoMemory, match=r"cannot map 3.*MiB of segment .* \(ulimit -v"):
        subscribe(ring, "g")


@pytest.mark.parametrize("before", ("nobody", "a member that was killed"))
@pytest.mark.parametrize("way", (interrupt_the_mapping, run_out_of_addresses))
def test_a_subscription_that_fails_after_it_joined_keeps_what_its_group_is_owed(
    make: Make, fork: Fork, before: str, way: Callable[[str], None]
) -> None:
    producer = make(size="32MiB", groups=["g"])
    for number in range(SAMPLES):
        assert put(producer, number)
    if before != "nobody":
        assert wait(fork(lambda: join_and_die(producer.name))) == -signal.SIGKILL
    assert wait(fork(lambda: way(producer.name))) == 0
    (group,) = groups(producer.name)
    assert (group.name, group.alive, sum(group.unread.values())) == ("g", False, SAMPLES)
    with subscribe(producer.name, "g") as subscription:
        for number in range(SAMPLES):
            sample = subscription.next(5)
            check(sample, number)
            del sample


def test_it_says_that_the_place_is_kept_and_how_to_give_it_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(size="32MiB")
    real = ShmFile.map

    def interrupted(self: ShmFile, length: int) -> Any:
        if length > 16 * MIB:
            raise KeyboardInterrupt
        return real(self, length)

    monkeypatch.setattr(ShmFile, "map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subscribe(producer.name, "new")
    assert f"shmconn groups rm {producer.name} new" in caplog.text
    give_up(producer)


def test_an_exception_before_a_ring_was_looked_at_keeps_the_place(
    make: Make, ring_name: str
) -> None:
    with pytest.raises(KeyError), subscribe(ring_name, "g", wait_s=60):
        producer = make()
        put(producer, 0)
        raise KeyError
    with subscribe(ring_name, "g") as subscription:
        sample = subscription.next(5)
        check(sample, 0)
        del sample


def test_an_exception_while_no_ring_is_there_leaves_nothing(ring_name: str) -> None:
    with pytest.raises(KeyError), subscribe(ring_name, "g", wait_s=60):
        raise KeyError
    assert not [file for file in os.listdir("/dev/shm") if ring_name in file]


@pytest.mark.parametrize("error", (ProducerDied, RingMissing))
def test_another_ring_s_end_keeps_the_place_in_this_one(make: Make, error: type[Exception]) -> None:
    producer = make()
    with pytest.raises(error), subscribe(producer.name, "g"):
        put(producer, 0)
        raise error("of another ring, whose subscription is in this block too")
    with subscribe(producer.name, "g") as subscription:
        sample = subscription.next(5)
        check(sample, 0)
        del sample


def test_a_handle_that_cannot_come_any_more_keeps_the_others_samples(
    make: Make, fork: Fork, ring_name: str
) -> None:
    def produce_and_die() -> None:
        producer = make(groups=[{"name": "g", "by_handle": True}])
        for number in range(2):
            put(producer, number)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(produce_and_die)) == -signal.SIGKILL
    (ring,) = rings(ring_name)
    with pytest.raises(ProducerDied), subscribe(ring_name, "g", by_handle=True) as subscription:
        subscription.get(str(Handle.make(ring_name, ring.generation, 9, "r8")), timeout=5)
    with pytest.raises(ProducerDied), subscribe(ring_name, "g", by_handle=True) as subscription:
        for number in range(2):
            handle = Handle.make(ring_name, ring.generation, number + 1, f"r{number}")
            sample = subscription.get(str(handle), timeout=5)
            check(sample, number)
            del sample
        # Now all is read: nothing is left to keep the place for.
        subscription.get(str(Handle.make(ring_name, ring.generation, 9, "r8")), timeout=5)
