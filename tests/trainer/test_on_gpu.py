# SPDX-License-Identifier: Apache-2.0
"""Batches straight from a pinned ring onto the device. Needs a CUDA device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_tools import ids, put, states, until

from shmconn import Producer
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.prefetch import CudaPrefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
COUNT = 200


def read(make: Callable[..., Producer], collator: Collator, *, pin: bool) -> None:
    """Reads through a prefetcher while the device is busy, and checks every number."""
    producer = make(size="8MiB", groups=["trainer"])
    for number in range(40):
        put(producer, number, 16)
    weight = torch.randn(2048, 2048, device="cuda")
    seen = 0
    sent = 40
    with SampleDataset(producer.name, collator=collator, pin=pin) as dataset:
        prefetcher = CudaPrefetcher(dataset, "cuda", depth=2)
        with prefetcher as batches:
            for batch in batches:
                assert batch["hidden_states"].device.type == "cuda"
                for _ in range(5):
                    weight = torch.tanh(weight @ weight)
                for index in range(len(batch["lengths"])):
                    rows = slice(16 * index, 16 * index + 16)
                    want = states(seen, 16)
                    got = batch["verifier_last_hidden_states"][0, rows].cpu()
                    assert torch.equal(got, want[:, -1]), seen
                    got = batch["hidden_states"][0, rows].cpu()
                    assert torch.equal(got, want[:, :-1].flatten(1)), seen
                    assert batch["input_ids"][0, rows].tolist() == list(range(seen, seen + 16))
                    seen += 1
                for _ in range(len(batch["lengths"])):
                    if sent < COUNT:
                        put(producer, sent, 16)
                        sent += 1
                if sent == COUNT:
                    producer.close()
    assert seen == COUNT


def test_a_collator_for_the_device_takes_samples_out_of_the_pinned_ring(
    make: Callable[..., Producer],
) -> None:
    read(make, Collator(70, device="cuda"), pin=True)


def test_pinned_batches_of_the_host_are_copied_over(make: Callable[..., Producer]) -> None:
    read(make, Collator(70, pin=True), pin=False)


def test_batches_in_plain_memory_are_copied_over(make: Callable[..., Producer]) -> None:
    read(make, Collator(70), pin=False)


def copies_made_late(producer: Producer, count: int) -> list[torch.Tensor]:
    """Token ids of each batch, copied by a stream that is far behind, each batch dropped at once.

    Where the memory of a dropped batch were used again before that copy, a later batch would show.
    """
    copies = []
    collator = Collator(40, device="cuda")
    with (
        SampleDataset(producer.name, collator=collator, pin=True) as dataset,
        CudaPrefetcher(dataset, "cuda", depth=1) as batches,
    ):
        for _ in range(count):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            batch = next(batches)
            copies.append(batch["input_ids"].clone())
            del batch
    return [copy[0, :32].cpu() for copy in copies]


def wanted(count: int) -> list[torch.Tensor]:
    """Two samples of 16 tokens each are a batch of 40."""
    return [torch.tensor([*ids(2 * at), *ids(2 * at + 1)]) for at in range(count)]


def test_a_dropped_batch_s_memory_is_not_used_again_before_work_that_was_put_on_the_stream(
    make: Callable[..., Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(size="8MiB", groups=["trainer"])
    # The last batch is full when one more sample has come.
    for number in range(41):
        put(producer, number, 16)
    assert all(map(torch.equal, copies_made_late(producer, 20), wanted(20)))

    # The same without the wait: this test sees it.
    def take(self: CudaPrefetcher, batch: Any) -> None:
        pass

    monkeypatch.setattr(CudaPrefetcher, "_take", take)
    for number in range(41):
        put(producer, number, 16)
    assert not all(map(torch.equal, copies_made_late(producer, 20), wanted(20)))


def test_close_leaves_no_lease_of_batches_that_were_ahead(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    for number in range(12):
        put(producer, number, 16)
    collator = Collator(32, device="cuda")
    with SampleDataset(producer.name, collator=collator, pin=True) as dataset:
        subscription = dataset._subscription
        assert subscription is not None
        batches = CudaPrefetcher(dataset, "cuda", depth=2)
        next(batches)
        until(lambda: subscription.unread() == 3, "the thread to be ahead")
        batches.close()
        # The dataset has begun a batch with the ninth sample; the device has read the others.
        until(lambda: subscription.leases == 1, "the device to have read them")
        producer.reclaim()
        assert producer.shape.slots - producer.free_slots == 4
        assert dataset.handed_out == 2


def test_a_pinned_batch_is_pinned(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)
    producer.close()
    (batch,) = SampleDataset(producer.name, collator=Collator(20, pin=True))
    assert batch["hidden_states"].is_pinned()
    assert torch.equal(batch["hidden_states"][0, :16], states(1)[:, :-1].flatten(1))
    assert batch["hidden_states"][0, 16:].eq(0).all()
