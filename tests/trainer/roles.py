# SPDX-License-Identifier: Apache-2.0
"""Other processes of these tests: `python roles.py ROLE RING ...`. They print what they did."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainer_tools import make_producer, put

from shmconn import subscribe
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset


def produce_and_die(ring: str, count: str, accepted: str) -> None:
    """Puts samples, takes in more requests, and is killed."""
    producer = make_producer(ring)
    for number in range(int(count)):
        put(producer, number)
    producer.accept(producer.accepted + int(accepted))
    os.kill(os.getpid(), signal.SIGKILL)


def hold(ring: str, count: str) -> None:
    """Reads samples, holds them, says so, and waits to be killed."""
    dataset = SampleDataset(ring, "trainer")
    samples = iter(dataset)
    held = [next(samples) for _ in range(int(count))]
    print(len(held), dataset.state_dict(), flush=True)
    time.sleep(600)


def half_a_batch(ring: str) -> None:
    """Copies one sample into a batch that is not full, says so, and waits to be killed."""
    subscription = subscribe(ring, "trainer")
    sample = next(subscription)
    packing = Collator(64).start(sample)
    packing.add(sample)
    print("half", flush=True)
    time.sleep(600)


def train_with_workers(ring: str, method: str) -> None:
    """Reads with two workers and waits for more than comes."""
    dataset = SampleDataset(ring, "trainer")
    # In order, a worker that waits for its next sample would hold back what the other has read.
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=method, in_order=False
    )
    for sample in loader:
        print(sample.request_id, flush=True)


def ddp(ring: str, rank: str, store: str) -> None:
    """One of two ranks that train one weight together; prints its samples and the weight."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=2
    )
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    # Ranks get unequal numbers of samples: Join has the early one follow the other's steps.
    with Join([model]):
        for sample in SampleDataset(ring):
            seen.append(sample.request_id[1:])
            loss = (model(sample.hidden_states[:1, 0, :1] * 0 + 1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del sample
    print(",".join(seen) or ",", model.module.weight.item(), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
