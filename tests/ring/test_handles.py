# SPDX-License-Identifier: Apache-2.0
"""get(): one request's sample, or the reason why there is none."""

import os
import threading
import time
from collections.abc import Callable

import pytest
from ring_tools import check, put, wait

from shmconn import (
    Handle,
    NotReady,
    OptionError,
    Producer,
    ProducerDied,
    SampleGone,
    SampleLost,
    subscribe,
)

Make = Callable[..., Producer]
Fork = Callable[..., int]


def test_samples_come_in_the_order_in_which_they_are_asked_for(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        handles = [put(producer, number) for number in range(6)]
        for number in (4, 0, 5, 1):
            sample = subscription.get({"handle": str(handles[number])}, timeout=5)
            check(sample, number)
            assert sample.handle == handles[number]
        del sample
        with pytest.raises(OptionError, match="is by handle"):
            subscription.next(0)


def test_get_and_iteration_share_one_group(make: Make, ring_name: str) -> None:
    producer = make()
    handles = [put(producer, number) for number in range(4)]
    producer.close()
    with subscribe(ring_name, "g") as subscription:
        check(subscription.get(handles[2], timeout=1), 2)
        assert [sample.number for sample in subscription] == [1, 2, 4]


def test_get_waits_for_a_sample_that_is_on_its_way(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        handle = Handle.make(ring_name, producer.generation, 1, "r0")
        with pytest.raises(NotReady, match=r"did not come within 0.05 s.*not published"):
            subscription.get(handle, timeout=0.05)
        timer = threading.Timer(0.2, put, (producer, 0))
        timer.start()
        check(subscription.get(handle, timeout=20), 0)
        timer.join()


@pytest.mark.parametrize(
    ("reason", "retry"),
    [("aborted", True), ("short", True), ("oversized", False), ("no_reader", True)]
    + [("dropped", True), ("fault", True), ("shutdown", True)],
)
def test_a_lost_request_fails_at_once_with_its_reason(
    make: Make, ring_name: str, reason: str, retry: bool
) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        producer.accept(1)
        producer.bury(1, "r0", reason)
        handle = Handle.make(ring_name, producer.generation, 1, "r0")
        with pytest.raises(SampleLost, match=f"has no sample: {reason}") as caught:
            subscription.get(handle)
        assert (caught.value.reason, caught.value.retry) == (reason, retry)
        assert subscription.lost == (reason != "aborted")


def test_a_sample_is_given_to_a_group_once(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        handle = put(producer, 0)
        subscription.get(handle, timeout=1).release()
        with pytest.raises(SampleGone, match="already delivered"):
            subscription.get(handle)


def test_a_sample_that_a_mate_holds_is_waited_for_and_its_holder_named(
    make: Make, ring_name: str
) -> None:
    producer = make()
    with (
        subscribe(ring_name, "probe", by_handle=True) as one,
        subscribe(ring_name, "probe", by_handle=True) as other,
    ):
        handle = put(producer, 0)
        held = one.get(handle, timeout=1)
        with pytest.raises(NotReady, match=f"pid {os.getpid()} of group 'probe' holds it"):
            other.get(handle, timeout=0.05)
        with pytest.raises(NotReady, match="this process holds it already"):
            one.get(handle, timeout=0.05)
        del held


def test_a_request_that_the_ring_never_took_in_fails_when_the_ring_ends(
    make: Make, ring_name: str, fork: Fork
) -> None:
    producer = make()
    generation = producer.generation
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        producer.close()
        with pytest.raises(ProducerDied, match="before it took this request in"):
            subscription.get(Handle.make(ring_name, generation, 7, "r6"))


def test_a_handle_of_another_ring_or_generation_is_refused(make: Make, ring_name: str) -> None:
    make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        with pytest.raises(OptionError, match="is of ring 'elsewhere'"):
            subscription.get(Handle.make("elsewhere", "0" * 32, 1, "r"))
        with pytest.raises(SampleGone, match="generation 0000"):
            subscription.get(Handle.make(ring_name, "0" * 32, 1, "r"))


def test_a_handle_with_another_request_id_is_not_that_sample(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        put(producer, 0)
        with pytest.raises(SampleGone):
            subscription.get(Handle.make(ring_name, producer.generation, 1, "somebody else"))


def test_what_nobody_asks_for_is_released_after_its_time_and_leaves_a_reason(
    make: Make, ring_name: str
) -> None:
    producer = make(slots=2, unclaimed_ttl_s=0.05)
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        handles = [put(producer, number) for number in range(2)]
        held = subscription.get(handles[1], timeout=1)
        time.sleep(0.1)
        producer.tick()
        assert producer.free_slots == 1
        assert producer.lost["expired"] == 1
        with pytest.raises(SampleLost, match="expired"):
            subscription.get(handles[0])
        check(held, 1)
        del held


def test_the_reason_is_forgotten_after_4096_others_but_nobody_waits_in_vain(
    make: Make, ring_name: str
) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        for number in range(1, 4100):
            producer.accept(number)
            producer.bury(number, f"r{number}", "dropped")
        with pytest.raises(SampleGone, match="too old"):
            subscription.get(Handle.make(ring_name, producer.generation, 1, "r1"))
        with pytest.raises(SampleLost, match="dropped"):
            subscription.get(Handle.make(ring_name, producer.generation, 4099, "r4099"))


def test_requests_settled_out_of_turn_move_settled_only_over_what_is_whole(make: Make) -> None:
    producer = make()
    for number in (1, 2, 3):
        producer.accept(number)
    producer.bury(3, "r3", "dropped")
    producer.bury(1, "r1", "dropped")
    assert (producer.accepted, producer.settled) == (3, 1)
    producer.bury(2, "r2", "dropped")
    assert producer.settled == 3


def test_close_buries_what_was_accepted_and_never_settled(make: Make, ring_name: str) -> None:
    producer = make()
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        handle = Handle.make(ring_name, producer.generation, 1, "r1")
        producer.accept(1)
        producer.close()
        with pytest.raises(SampleLost, match="shutdown"):
            subscription.get(handle)


def test_a_killed_holder_hands_its_sample_to_whoever_asks(
    make: Make, ring_name: str, fork: Fork
) -> None:
    producer = make()
    handle = put(producer, 0)

    def hold_and_die() -> None:
        subscription = subscribe(ring_name, "probe", by_handle=True)
        held = subscription.get(handle, timeout=5)
        check(held, 0)
        os.kill(os.getpid(), 9)

    assert wait(fork(hold_and_die)) == -9
    with subscribe(ring_name, "probe", by_handle=True) as subscription:
        check(subscription.get(handle, timeout=5), 0)
