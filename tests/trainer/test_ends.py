# SPDX-License-Identifier: Apache-2.0
"""Ends before the end: what was read and not used comes again, or is said and counted."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trainer_tools import any_alive, check, numbers, put, until

from shmconn import Producer, ProducerDied, subscribe
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.directory import groups

Make = Callable[..., Producer]
SAMPLES = 12


@pytest.fixture
def ring(make: Make) -> str:
    """The name of a ring with samples."""
    producer = make(groups=["trainer"])
    for number in range(SAMPLES):
        put(producer, number)
    return producer.name


def test_an_exception_gives_back_what_was_in_use(ring: str) -> None:
    def fail() -> None:
        with subscribe(ring, "trainer") as subscription:
            first, second = subscription.next(5), subscription.next(5)
            assert first is not None and second is not None
            first.release()
            raise KeyError(second.request_id)

    with pytest.raises(KeyError) as caught:
        fail()
    del caught
    until(lambda: not any_alive(ring), "the member to leave")
    with subscribe(ring, "trainer") as subscription:
        sample = subscription.next(5)
        check(sample, 1)
        del sample
        while subscription.next(0) is not None:
            pass


def test_a_subscription_dropped_in_a_reference_cycle_says_that_its_place_is_kept(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    cycle: list[Any] = [subscribe(ring, "trainer")]
    cycle.append(cycle)
    check(cycle[0].next(5), 0)
    del cycle
    gc.collect()
    assert "group 'trainer' of ring" in caplog.text and "without close()" in caplog.text
    (group,) = groups(ring)
    assert not group.alive and sum(group.unread.values()) == SAMPLES - 1
    with subscribe(ring, "trainer") as subscription:
        while subscription.next(0) is not None:
            pass
    assert caplog.text.count("without close()") == 1


def test_another_dataset_s_death_keeps_the_place_in_this_one(ring: str) -> None:
    with pytest.raises(ProducerDied), SampleDataset(ring) as dataset:
        next(iter(dataset))
        raise ProducerDied("of the other ring in this block")
    with SampleDataset(ring) as dataset:
        assert numbers([next(iter(dataset))]) == [1]


def test_a_broken_off_pack_gives_its_half_filled_batch_back(ring: str) -> None:
    with subscribe(ring, "trainer") as subscription:
        batches = Collator(40).pack(subscription)
        assert len(next(batches)["handles"]) == 2
        # The third sample did not fit: it begins a batch that is never filled.
        batches.close()
        assert subscription.leases == 0
        sample = subscription.next(5)
        check(sample, 2)
        del sample


def test_a_pack_that_cannot_give_back_says_so(ring: str, caplog: pytest.LogCaptureFixture) -> None:
    with subscribe(ring, "trainer") as subscription:
        batches = Collator(40).pack(iter(subscription.next, None))  # type: ignore[arg-type]
        next(batches)
        batches.close()
    assert "1 samples of a batch that was never finished" in caplog.text


def test_a_loader_that_is_left_early_says_what_lay_in_its_queues(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    with SampleDataset(ring, collator=Collator(16)) as dataset:
        loader: Any = iter(DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4))
        for _ in range(2):
            dataset.record(next(loader))
        until(lambda: dataset._words.handed_over >= 5, "the worker to read ahead")
        dataset.close()
        ahead = dataset.dropped
        del loader
    assert dataset.handed_out == 2
    assert ahead >= 3
    assert f"{ahead} samples were read ahead for group 'trainer'" in caplog.text


def test_a_loader_that_is_read_to_its_end_has_none(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(groups=["trainer"])
    for number in range(SAMPLES):
        put(producer, number)
    producer.close()
    with SampleDataset(producer.name, collator=Collator(16)) as dataset:
        for batch in DataLoader(dataset, batch_size=None, num_workers=1):
            dataset.record(batch)
    assert (dataset.handed_out, dataset.dropped) == (SAMPLES, 0)
    assert "read ahead" not in caplog.text
