# SPDX-License-Identifier: Apache-2.0
"""A tensor's life is the lease: pages under a live one are never used again."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from ring_tools import check, give_up, put, states, until, wait

from shmconn import Closed, ForkedError, Producer, ProducerDied, subscribe

Make = Callable[..., Producer]
Fork = Callable[..., int]


def _alias(sample: Any, how: str) -> Any:
    return {
        "tensor": lambda: sample.hidden_states,
        "slice": lambda: sample.hidden_states[3:5, 1],
        "slice of a slice": lambda: sample.hidden_states[2:][1:3, :, ::2],
        "numpy": lambda: sample.hidden_states.numpy(),
        "numpy slice": lambda: sample.hidden_states.numpy()[1:],
        "token ids": lambda: sample.token_ids[1:],
        "bytes": lambda: sample.states_bytes,
        "storage": lambda: sample.hidden_states.untyped_storage(),
    }[how]()


@pytest.mark.parametrize(
    "how",
    [
        "tensor",
        "slice",
        "slice of a slice",
        "numpy",
        "numpy slice",
        "token ids",
        "bytes",
        "storage",
    ],
)
def test_any_alias_keeps_the_pages_until_it_is_gone(make: Make, ring_name: str, how: str) -> None:
    producer = make(slots=1)
    put(producer, 0)
    subscription = subscribe(ring_name, "g")
    sample = subscription.next(1)
    alias = _alias(sample, how)
    assert sample is not None
    sample.release()
    subscription.close()
    del sample, subscription
    gc.collect()
    assert put(producer, 1) is None, "the pages were given away under a live alias"
    del alias
    gc.collect()
    until(lambda: put(producer, 1), "the slot")
    give_up(producer)


def test_a_view_still_shows_its_sample_after_everything_else_is_closed(
    make: Make, ring_name: str
) -> None:
    producer = make(size="1MiB")
    put(producer, 0, tokens=40)
    with subscribe(ring_name, "g") as subscription:
        sample = subscription.next(1)
        assert sample is not None
        view = sample.hidden_states
        del sample
    for number in range(1, 200):
        put(producer, number, tokens=40)
    producer.close()
    assert view.equal(states(0, 40))
    del view


def test_a_released_sample_says_so(make: Make, ring_name: str) -> None:
    producer = make()
    put(producer, 0)
    with subscribe(ring_name, "g") as subscription:
        sample = subscription.next(1)
        assert sample is not None
        copy = sample.clone()
        sample.release()
        with pytest.raises(Closed, match=r"'r0' was released: clone\(\)"):
            _ = sample.hidden_states
        check(copy, 0)
        assert subscription.leases == 0


def test_close_with_live_tensors_lets_the_group_go_with_the_last_of_them(
    make: Make, ring_name: str
) -> None:
    producer = make(groups=["other"])
    subscription = subscribe(ring_name, "g")
    put(producer, 0)
    held = subscription.next(1)
    subscription.close()
    from shmconn.directory import groups, remove_group

    assert [group.name for group in groups(ring_name) if group.alive] == ["g"]
    check(held, 0)
    del held
    until(lambda: "g" not in [g.name for g in groups(ring_name)], "the group to go")
    remove_group(ring_name, "other")


def test_a_killed_member_s_leases_go_to_its_mate(make: Make, ring_name: str, fork: Fork) -> None:
    producer = make()
    for number in range(4):
        put(producer, number)

    def hold_two_and_die() -> None:
        subscription = subscribe(ring_name, "g")
        kept = [subscription.next(1), subscription.next(1)]
        check(kept[1], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    with subscribe(ring_name, "g") as mate:
        assert wait(fork(hold_two_and_die)) == -signal.SIGKILL
        producer.close()
        assert [sample.number for sample in mate] == [1, 2, 3, 4]
    give_up(producer)


def test_a_killed_group_s_place_is_kept_for_its_return(
    make: Make, ring_name: str, fork: Fork
) -> None:
    producer = make(slots=4)

    def take_one_and_die() -> None:
        subscription = subscribe(ring_name, "g")
        held = subscription.next(5)
        check(held, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(4):
        put(producer, number)
    assert wait(fork(take_one_and_die)) == -signal.SIGKILL
    assert put(producer, 4) is None
    assert "has no live member" in producer.stall_text() or "(dead)" in producer.stall_text()
    assert not producer.can_progress()
    with subscribe(ring_name, "g") as subscription:
        producer.close()
        assert [sample.number for sample in subscription] == [1, 2, 3, 4]


def test_a_killed_producer_s_samples_are_read_then_its_death_is_told(
    make: Make, ring_name: str, fork: Fork
) -> None:
    def publish_three_and_die() -> None:
        producer = make()
        for number in range(3):
            put(producer, number)
        producer.accept(5)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(publish_three_and_die)) == -signal.SIGKILL
    seen = []
    with (
        pytest.raises(ProducerDied, match="accepted 5 requests; 2 of them") as caught,
        subscribe(ring_name, "g") as subscription,
    ):
        for sample in subscription:
            check(sample, sample.number - 1)
            seen.append(sample.number)
            del sample
    assert seen == [1, 2, 3]
    assert (caught.value.accepted, caught.value.settled, caught.value.unpublished) == (5, 3, 2)


def test_a_stopped_member_is_alive_and_keeps_its_pages(
    make: Make, ring_name: str, fork: Fork
) -> None:
    producer = make(slots=1)
    put(producer, 0)

    def hold() -> None:
        subscription = subscribe(ring_name, "g")
        held = subscription.next(5)
        os.kill(os.getpid(), signal.SIGSTOP)
        check(held, 0)
        held = None
        subscription.close()

    child = fork(hold)
    os.waitpid(child, os.WUNTRACED)
    for _ in range(50):
        assert put(producer, 1) is None
    assert f"held by pid {child}" in producer.stall_text()
    os.kill(child, signal.SIGCONT)
    assert wait(child) == 0
    assert put(producer, 1) is not None
    give_up(producer)


def test_a_forked_child_owns_nothing(make: Make, ring_name: str, fork: Fork) -> None:
    producer = make(slots=2)
    put(producer, 0)
    with subscribe(ring_name, "g") as subscription:
        held = [subscription.next(1)]

        def use_what_is_not_ours() -> None:
            for use in (lambda: subscription.next(0), lambda: put(producer, 1)):
                with pytest.raises(ForkedError, match="in the parent"):
                    use()
            held.clear()
            gc.collect()
            subscription.close()
            producer.close()

        assert wait(fork(use_what_is_not_ours)) == 0
        assert put(producer, 1) is not None
        assert put(producer, 2) is None, "the child released the parent's lease"
        check(held[0], 0)
        held.clear()
        assert put(producer, 2) is not None


def test_a_child_that_lives_on_does_not_keep_a_dead_producer_alive(
    make: Make, ring_name: str, fork: Fork
) -> None:
    def leave_a_child_behind() -> None:
        producer = make()
        put(producer, 0)
        if os.fork() == 0:
            import time

            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(leave_a_child_behind)) == -signal.SIGKILL
    with subscribe(ring_name, "g") as subscription:
        check(subscription.next(1), 0)
        with pytest.raises(ProducerDied):
            subscription.next(2)


@pytest.mark.parametrize("how", ["close", "abandon", "dropped"])
def test_the_interpreter_exits_quietly_with_tensors_alive(
    make: Make, ring_name: str, how: str
) -> None:
    producer = make()
    put(producer, 0)
    code = textwrap.dedent(f"""
        import shmconn
        subscription = shmconn.subscribe({ring_name!r}, "g")
        sample = subscription.next(5)
        view = sample.hidden_states[1:]
        if {how != "dropped"}:
            getattr(subscription, {how!r})()
    """)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    producer.reclaim()
    # Closed: released and left. Else: a death, the sample waits for the group.
    assert (producer.free_slots == producer.shape.slots) == (how == "close")
    with subscribe(ring_name, "g") as subscription:
        assert (subscription.next(0) is None) == (how == "close")
