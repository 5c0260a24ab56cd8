# SPDX-License-Identifier: Apache-2.0
"""A trainer that holds what fills the ring is told so, in its own process, within seconds."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trainer_tools import give_up, make_producer, numbers, put

from shmconn import Producer, Sample, Standstill, standstill, subscribe
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset

Make = Callable[..., Producer]
SLOTS = 4
SAY_S = 0.3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says it sooner, so that the tests are quick."""
    monkeypatch.setattr(standstill, "SAY_AFTER_S", SAY_S)


@pytest.fixture
def full(ring_name: str) -> Iterator[str]:
    """A ring of another process, which waits for room in it, as vLLM does."""
    ready = os.pipe()
    child = os.fork()
    if child == 0:
        producer = make_producer(ring_name, slots=SLOTS, groups=["g"])
        for number in range(SLOTS):
            put(producer, number)
        os.write(ready[1], b"x")
        producer.set_held_since(time.time_ns())
        put(producer, SLOTS, timeout=60)
        producer.set_held_since(0)
        producer.close()
        os._exit(0)
    os.read(ready[0], 1)
    yield ring_name
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    give_up(ring_name)


def in_one_thread(run: Callable[[], object]) -> None:
    """Runs in a forked process: the tests' own may have other threads."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_trainer_that_accumulates_more_than_the_ring_is_refused(full: str) -> None:
    def run() -> None:
        step: list[Sample] = []
        with pytest.raises(Standstill) as caught, subscribe(full, "g") as subscription:
            for sample in subscription:
                step.append(sample)
        text = str(caught.value)
        for said in ("holds 4 samples, 256.0 KiB", "takes 4 samples", "vLLM waits", "ring_size"):
            assert said in text, text

    in_one_thread(run)


def test_so_is_a_dataset(full: str) -> None:
    def run() -> None:
        step: list[Sample] = []
        with pytest.raises(Standstill, match="holds 4 samples"), SampleDataset(full, "g") as data:
            step.extend(data)

    in_one_thread(run)


def test_so_is_a_batch_that_no_ring_fills(full: str) -> None:
    def run() -> None:
        collator = Collator(SLOTS * 16 + 1)
        with pytest.raises(Standstill, match="max_len"), subscribe(full, "g") as subscription:
            next(collator.pack(subscription))

    in_one_thread(run)


def test_another_thread_may_let_go_of_them_so_it_is_a_warning(
    full: str, caplog: pytest.LogCaptureFixture
) -> None:
    with subscribe(full, "g") as subscription:
        step = [subscription.next(5) for _ in range(SLOTS)]
        later = threading.Timer(8 * SAY_S, step.clear)
        later.start()
        sample = subscription.next(60)
        assert sample is not None and numbers([sample]) == [SLOTS]
        later.join()
        del sample
    said = [record.message for record in caplog.records if "this process holds" in record.message]
    # Once, and again after twice as long each time.
    assert 2 <= len(said) <= 4
    assert all("holds 4 samples, 256.0 KiB" in text for text in said)


def test_samples_in_reference_cycles_are_let_go_of(
    full: str, caplog: pytest.LogCaptureFixture
) -> None:
    with subscribe(full, "g") as subscription:
        for _ in range(SLOTS):
            cycle: list[Any] = [subscription.next(5)]
            cycle.append(cycle)
            del cycle
        sample = subscription.next(60)
        assert sample is not None and numbers([sample]) == [SLOTS]
        del sample
    assert "this process holds" not in caplog.text


def test_an_idle_ring_and_one_that_another_group_fills_are_no_reason(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(slots=SLOTS, groups=["g", "slow"])
    with subscribe(producer.name, "g") as subscription, subscribe(producer.name, "slow") as slow:
        put(producer, 0)
        held = subscription.next(5)
        assert subscription.next(3 * SAY_S) is None
        for number in range(1, SLOTS):
            put(producer, number)
        producer.set_held_since(time.time_ns())
        held = [subscription.next(5) for _ in range(1, SLOTS)][-1]
        assert held is not None and subscription.next(3 * SAY_S) is None
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        del held
        while (sample := slow.next(0)) is not None:
            sample.release()


def test_a_batch_larger_than_the_ring_is_told_at_the_start(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(size="2MiB", groups=["g"])
    capacity = producer.tokens_capacity
    for number in range(2):
        put(producer, number, tokens=64)
    producer.close()
    with SampleDataset(producer.name, "g", collator=Collator(capacity + 1)) as dataset:
        assert len(list(dataset)) == 1
    (said,) = [record.message for record in caplog.records]
    assert f"max_len={capacity + 1} tokens" in said and f"holds {capacity} tokens" in said


def test_one_that_fits_is_not(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer = make(size="2MiB", groups=["g"])
    put(producer, 0)
    producer.close()
    with subscribe(producer.name, "g") as subscription:
        assert len(list(Collator(producer.tokens_capacity).pack(subscription))) == 1
    assert caplog.records == []
