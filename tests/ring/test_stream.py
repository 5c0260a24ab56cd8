# SPDX-License-Identifier: Apache-2.0
"""What groups and members receive, and in which order."""

import logging
import os
import threading
from collections.abc import Callable

import pytest
from ring_tools import HIDDEN, LAYERS, check, put, states, until, wait

from shmconn import (
    Closed,
    NotReady,
    OptionError,
    Oversized,
    Producer,
    RingMissing,
    SegmentCorrupt,
    subscribe,
)
from shmconn.directory import groups, remove_group
from shmconn.registry import Registry

Make = Callable[..., Producer]
Fork = Callable[..., int]


def test_a_group_gets_every_sample_once_in_order_then_the_end(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "g") as subscription:
        for number in range(30):
            put(producer, number, tokens=1 + number, tag=f"tag{number}", metadata={"n": number})
        producer.close()
        for number, sample in enumerate(subscription):
            check(sample, number)
            assert sample.shape == (1 + number, len(LAYERS), HIDDEN)
            assert (sample.tag, sample.metadata) == (f"tag{number}", {"n": number})
            assert (sample.seq, sample.number) == (number + 1, number + 1)
        assert subscription.ended
        assert number == 29
        assert [end.died for end in subscription.ends] == [False]
        del sample


def test_two_groups_each_get_everything_and_two_members_share(make: Make, ring_name: str) -> None:
    producer = make(groups=["a", "b"])
    for number in range(20):
        put(producer, number)
    producer.close()
    with (
        subscribe(ring_name, "a") as one,
        subscribe(ring_name, "a") as other,
        subscribe(ring_name, "b") as lone,
    ):
        shared = []
        for _ in range(10):
            shared += [one.next(1).number, other.next(1).number]  # type: ignore[union-attr]
        assert sorted(shared) == list(range(1, 21))
        assert [sample.number for sample in lone] == list(range(1, 21))


def test_the_first_group_gets_what_came_before_it_and_a_later_one_what_comes_after(
    make: Make, ring_name: str
) -> None:
    producer = make()
    put(producer, 0)
    with subscribe(ring_name, "early") as early, subscribe(ring_name, "late") as late:
        put(producer, 1)
        producer.close()
        assert [sample.number for sample in early] == [1, 2]
        assert [sample.number for sample in late] == [2]


def test_a_slot_is_reused_only_when_all_groups_have_released_it(make: Make, ring_name: str) -> None:
    producer = make(slots=1, groups=["a", "b"])
    with subscribe(ring_name, "a") as a, subscribe(ring_name, "b") as b:
        assert put(producer, 0)
        sample = a.next(1)
        assert sample is not None
        sample.release()
        assert put(producer, 1) is None
        sample = b.next(1)
        assert sample is not None
        assert put(producer, 1) is None
        sample.release()
        assert put(producer, 1) is not None


def test_put_waits_for_a_reader_and_says_who_stalls_when_it_gives_up(
    make: Make, ring_name: str
) -> None:
    producer = make(slots=1)
    put(producer, 0)
    with subscribe(ring_name, "slow") as subscription:
        held = subscription.next(1)
        assert held is not None
        message = rf"group 'slow' needs 1 samples, the oldest is held by pid {os.getpid()}"
        with pytest.raises(TimeoutError, match=message):
            producer.put(states(1), range(16), request_id="r1", timeout=0.3)
        timer = threading.Timer(0.2, held.release)
        timer.start()
        producer.put(states(1), range(1, 17), request_id="r1", timeout=20)
        timer.join()
        sample = subscription.next(1)
        check(sample, 1)
        del sample


def test_a_stream_many_times_the_ring_arrives_whole(make: Make, ring_name: str, fork: Fork) -> None:
    producer = make(size="1MiB", groups=["g"])
    count = 2000

    def read() -> None:
        with subscribe(ring_name, "g") as subscription:
            seen = 0
            for sample in subscription:
                check(sample, seen)
                seen += 1
            assert seen == count
            del sample

    child = fork(read)
    for number in range(count):
        tokens = 1 + number % 40
        ids = list(range(number, number + tokens))
        producer.put(states(number, tokens), ids, request_id=f"r{number}", timeout=30)
    producer.close()
    assert wait(child) == 0


def test_a_member_that_leaves_in_order_takes_its_group_along_and_warns_of_the_unread(
    make: Make, ring_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(slots=2, groups=["other"])
    with caplog.at_level(logging.WARNING, "shmconn"), subscribe(ring_name, "g"):
        put(producer, 0)
    assert "1 samples unread" in caplog.text
    with subscribe(ring_name, "other") as other:
        assert other.unread() == 1
        sample = other.next(1)
        del sample
        put(producer, 1)
        assert put(producer, 2) is not None


def test_a_durable_group_keeps_what_it_has_not_read(make: Make, ring_name: str) -> None:
    producer = make(groups=["other"])
    with subscribe(ring_name, "g", durable=True):
        put(producer, 0)
    with subscribe(ring_name, "g") as subscription:
        sample = subscription.next(1)
        check(sample, 0)
        del sample
    assert "g" in [group.name for group in groups(ring_name)]
    remove_group(ring_name, "g")
    assert [group.name for group in groups(ring_name)] == ["other"]
    remove_group(ring_name, "other")


def test_an_exception_in_the_block_keeps_the_place(make: Make, ring_name: str) -> None:
    producer = make()
    with pytest.raises(KeyError), subscribe(ring_name, "g") as subscription:
        put(producer, 0)
        put(producer, 1)
        held = subscription.next(1)
        assert held is not None
        held.release()
        raise KeyError
    with subscribe(ring_name, "g") as subscription:
        sample = subscription.next(1)
        check(sample, 1)
        del sample


def test_a_wait_for_a_ring_sees_its_first_sample(ring_name: str, make: Make, fork: Fork) -> None:
    def read() -> None:
        with subscribe(ring_name, "g", wait_s=20) as subscription:
            assert [sample.number for sample in subscription] == [1, 2]

    child = fork(read)
    until(lambda: os.path.exists(f"/dev/shm/shmconn.{ring_name}"), "the registry")
    producer = make()
    put(producer, 0)
    put(producer, 1)
    producer.close()
    assert wait(child) == 0


def test_follow_goes_on_with_the_next_generation(make: Make, ring_name: str) -> None:
    with subscribe(ring_name, "g", wait_s=5, follow=True) as subscription:
        for life in range(3):
            producer = make()
            put(producer, life)
            producer.close()
            sample = subscription.next(5)
            check(sample, life)
            del sample
        assert not subscription.ended
        assert subscription.next(0) is None
        assert len(subscription.ends) == 3


def test_two_rings_of_one_name_are_read_by_one_subscription(make: Make, ring_name: str) -> None:
    one, other = make(engine_id="e_dp0"), make(engine_id="e_dp1")
    assert one.generation != other.generation
    for number in range(5):
        put(one, number)
        put(other, 100 + number)
    one.close()
    other.close()
    with subscribe(ring_name, "g") as subscription:
        seen = sorted(sample.request_id for sample in subscription)
    assert seen == sorted([f"r{n}" for n in range(5)] + [f"r{100 + n}" for n in range(5)])


def test_mistakes_are_named(make: Make, ring_name: str) -> None:
    with pytest.raises(RingMissing, match=f"no ring {ring_name!r}"):
        subscribe(ring_name, "g")
    producer = make()
    with pytest.raises(OptionError, match="group name 'a/b'"):
        subscribe(ring_name, "a/b")
    with pytest.raises(OptionError, match="needs a group"):
        subscribe(ring_name)
    with subscribe(ring_name, "g"), pytest.raises(OptionError, match="is of every sample"):
        subscribe(ring_name, "g", by_handle=True)
    with pytest.raises(OptionError, match=r"takes \[tokens, 2, 64\] float32"):
        producer.try_put(states(0).half(), range(16), request_id="r")
    with pytest.raises(OptionError, match="15 token ids for 16 tokens"):
        producer.try_put(states(0), range(15), request_id="r")
    with pytest.raises(OptionError, match="no JSON form"):
        put(producer, 0, metadata={"x": object()})
    with pytest.raises(Oversized, match="a third of its pages"):
        put(producer, 0, tokens=5000)
    producer.close()
    with pytest.raises(Closed):
        put(producer, 0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("size", "1KiB", "too small"),
        ("size", "8 apples", "is not a size"),
        ("page_size", 4096, "power of two"),
        ("page_size", 100_000, "power of two"),
        ("slots", 0, "slots 0"),
        ("slots", 5000, "slots 5000"),
        ("dtype", "int8", "'int8' is not one of"),
        ("groups", ["a b"], "group name 'a b'"),
        ("groups", [{"name": "a", "by_handel": True}], "must be a name or"),
        ("name", "a.b", "ring name 'a.b'"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_made(
    make: Make, option: str, value: object, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        make(**{option: value})


def test_a_mate_stopped_in_the_middle_of_a_claim_is_waited_for_and_named(
    make: Make, ring_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make()
    handle = put(producer, 0)
    with subscribe(ring_name, "g") as subscription:
        other = Registry.peek(ring_name)
        assert other is not None and other.try_lock_claims(0)
        with caplog.at_level(logging.WARNING, "shmconn"):
            assert subscription.next(0.1) is None
        assert f"are locked by pid {os.getpid()}: is that process stopped?" in caplog.text
        with pytest.raises(NotReady, match="are locked by pid"):
            subscription.get(handle, timeout=0.1)
        other.unlock_claims(0)
        check(subscription.next(5), 0)


def test_a_damaged_ring_is_told_before_the_backlog_of_its_neighbour_is_touched(
    make: Make, ring_name: str
) -> None:
    producer = make()
    put(producer, 0)
    damaged = f"/dev/shm/shmconn.{ring_name}.{'0' * 32}"
    with open(damaged, "wb") as file:
        file.write(b"x" * 10)
    with pytest.raises(SegmentCorrupt, match="truncated"):
        subscribe(ring_name, "g")
    os.unlink(damaged)
    with subscribe(ring_name, "g") as subscription:
        check(subscription.next(1), 0)
