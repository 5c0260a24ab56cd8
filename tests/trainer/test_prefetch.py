# SPDX-License-Identifier: Apache-2.0
"""The prefetching thread, on the CPU; test_on_gpu.py has what needs a device."""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader
from trainer_tools import give_up, numbers, put, until

from shmconn import OptionError, Producer
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.prefetch import CudaPrefetcher


def test_batches_come_in_order_and_only_those_taken_are_handed_out(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(8):
        put(producer, number, 10)
    producer.close()
    with SampleDataset(producer.name, collator=Collator(20)) as dataset:
        with CudaPrefetcher(dataset, "cpu", depth=2) as batches:
            first = next(batches)
            until(lambda: batches._ready.full(), "two batches to be ready")
            assert dataset.handed_out == 2
            rest = list(batches)
        assert dataset.handed_out == 8
    starts = [int(batch["input_ids"][0, 0]) for batch in [first, *rest]]
    assert starts == [0, 2, 4, 6]


def test_what_the_source_raises_comes_after_its_batches() -> None:
    def source() -> Iterator[dict[str, torch.Tensor]]:
        yield {"a": torch.ones(2)}
        yield {"a": torch.ones(3)}
        raise ValueError("broken source")

    batches = CudaPrefetcher(source(), "cpu", depth=1)
    assert [len(next(batches)["a"]) for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="broken source"):
        next(batches)
    batches.close()


def test_close_ends_a_thread_that_waits_for_a_sample(make: Callable[..., Producer]) -> None:
    producer = make()
    with SampleDataset(producer.name) as dataset:
        batches = CudaPrefetcher(dataset, "cpu")
        put(producer, 1)
        sample = next(batches)
        assert sample.request_id == "r1"
        batches.close()
        assert "shmconn-prefetch" not in {thread.name for thread in threading.enumerate()}
        assert list(batches) == []
        del sample


@pytest.mark.parametrize("max_len", [None, 32])
def test_close_leaves_no_lease_of_what_was_ahead(
    make: Callable[..., Producer], max_len: int | None
) -> None:
    producer = make(groups=["trainer"])
    for number in range(12):
        put(producer, number, 16)
    collator = Collator(max_len) if max_len else None
    with SampleDataset(producer.name, collator=collator) as dataset:
        subscription = dataset._subscription
        assert subscription is not None
        batches = CudaPrefetcher(dataset, "cpu", depth=2)
        first = next(batches)
        until(batches._ready.full, "the thread to be ahead")
        # One more is in the thread's hand; a batch is full when the next sample has come.
        until(lambda: subscription.unread() == (3 if max_len else 8), "the thread to wait")
        batches.close()
        del first
        # The dataset has begun a batch with the sample that did not fit into the last.
        assert subscription.leases == (1 if max_len else 0)
        producer.reclaim()
        assert producer.shape.slots - producer.free_slots == (4 if max_len else 11)
        assert dataset.handed_out == (2 if max_len else 1)
        rest = list(itertools.islice(dataset, 1))
        assert (rest[0]["handles"] if max_len else [str(rest[0].handle)])[0].split(":")[3] == (
            "9" if max_len else "2"
        )
        del rest


def test_close_ends_a_thread_that_waits_for_the_consumer() -> None:
    batches = CudaPrefetcher(({"a": torch.ones(1)} for _ in range(1000)), "cpu", depth=1)
    next(batches)
    batches.close()
    assert "shmconn-prefetch" not in {thread.name for thread in threading.enumerate()}


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(OptionError, match="device 'meta' must be"):
        CudaPrefetcher([], "meta")
    with pytest.raises(OptionError, match="depth 0"):
        CudaPrefetcher([], "cpu", depth=0)
    with pytest.raises(OptionError, match="a dataset without a collator gives samples"):
        CudaPrefetcher(SampleDataset("x"))
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="no CUDA device"):
            CudaPrefetcher([])


def test_an_error_in_the_step_is_not_held_up_by_a_loader_that_waits(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)

    def train() -> None:
        with SampleDataset(producer.name) as dataset:
            loader = DataLoader(dataset, batch_size=None, num_workers=1, in_order=False)
            with CudaPrefetcher(loader, "cpu") as batches:
                for _ in batches:
                    raise ValueError("a bug in the step")

    with pytest.raises(ValueError, match="a bug in the step"):
        train()
    until(
        lambda: "shmconn-prefetch" not in {thread.name for thread in threading.enumerate()},
        "the thread to end with its loader",
    )
    give_up(producer.name)


def test_a_close_before_the_thread_has_joined_ends_it(
    make: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    may_go = threading.Event()
    unrecorded = SampleDataset.unrecorded

    def late(dataset: SampleDataset, stop: threading.Event) -> Iterator[object]:
        may_go.wait(30)
        return unrecorded(dataset, stop)

    monkeypatch.setattr(SampleDataset, "unrecorded", late)
    with SampleDataset(producer.name) as dataset:
        batches = CudaPrefetcher(dataset, "cpu")
        closing = threading.Thread(target=batches.close)
        closing.start()
        until(batches._stop.is_set, "the close to begin")
        may_go.set()
        closing.join(20)
        assert not closing.is_alive()


def used(producer: Producer) -> int:
    """Slots that somebody still needs."""
    producer.reclaim()
    return producer.shape.slots - producer.free_slots


def test_what_was_ahead_is_said_and_counted_or_given_back(
    make: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(groups=["trainer"])
    for number in range(8):
        put(producer, number)
    with SampleDataset(producer.name, collator=Collator(16)) as dataset:
        batches = CudaPrefetcher(dataset, "cpu", depth=2)
        taken = next(batches)["handles"]
        # Two are ready, one waits for its place.
        until(lambda: used(producer) == 4, "the leases to end")
        batches.close()
        assert (len(taken), dataset.handed_out, dataset.dropped) == (1, 1, 3)
        assert "3 samples were read ahead for group 'trainer' and are not used" in caplog.text
        # Samples still have their leases: nothing of them is lost.
        samples = SampleDataset(producer.name)
        with samples:
            batches = CudaPrefetcher(samples, "cpu", depth=2)
            until(lambda: batches._ready.full(), "samples ahead")
            batches.close()
            assert samples.dropped == 0
            assert numbers(samples._open().next(5) for _ in range(3)) == [5, 6, 7]
