# SPDX-License-Identifier: Apache-2.0
"""Batches straight from a pinned ring onto the device. Needs a CUDA device."""

from collections.abc import Callable

import pytest
import torch
from trainer_tools import put, states

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


def test_a_pinned_batch_is_pinned(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)
    producer.close()
    (batch,) = SampleDataset(producer.name, collator=Collator(20, pin=True))
    assert batch["hidden_states"].is_pinned()
    assert torch.equal(batch["hidden_states"][0, :16], states(1)[:, :-1].flatten(1))
    assert batch["hidden_states"][0, 16:].eq(0).all()
