# SPDX-License-Identifier: Apache-2.0
"""Other processes of these tests: `python roles.py ROLE RING ...`. They print what they did."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

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
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    for sample in loader:
        print(sample.request_id, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
