# SPDX-License-Identifier: Apache-2.0
"""Other processes of these tests: `python roles.py ROLE RING ...`. They print what they did."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainer_tools import make_producer, put

from shmconn import subscribe
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.even import EvenBatches


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
    process_group(rank, store)
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


def even(ring: str, rank: str, store: str) -> None:
    """One of two ranks, of which the second is three times slower; prints what each end came to."""
    process_group(rank, store)
    pause_s = 0.01 * (1 + 2 * int(rank))
    for end in ("uneven", "drop", "pad", "nothing"):
        # Of the last ring only the first rank reads: the other has never seen a batch.
        own = SampleDataset(f"{ring}-{end}", on_death="end", collator=Collator(16))
        with own as dataset:
            source: Any = () if end == "nothing" and rank == "1" else dataset
            batches: Any = source
            if end != "uneven":
                batches = EvenBatches(source, "drop" if end == "drop" else "pad")
            steps, seen, shapes = 0, [], set()
            for batch in batches:
                steps += 1
                seen += [handle.split(":")[3] for handle in batch["handles"]]
                shapes.add(batch["hidden_states"].shape)
                assert bool((batch["document_ids"] >= 0).any()) == bool(batch["handles"])
                time.sleep(pause_s)
                if end != "uneven":
                    # What DDP does in its step: a rank without one would leave the other here.
                    torch.distributed.all_reduce(torch.ones(1))
            dropped = getattr(batches, "dropped", 0), dataset.dropped
            print(json.dumps([end, steps, seen, dropped, dataset.handed_out, len(shapes)]))
        torch.distributed.barrier()
    sys.stdout.flush()
    torch.distributed.destroy_process_group()


def process_group(rank: str, store: str) -> None:
    """The two ranks of a test; a rank that is left alone in a collective fails soon."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=60),
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
