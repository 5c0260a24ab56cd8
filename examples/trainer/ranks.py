# SPDX-License-Identifier: Apache-2.0
"""The same kind of training on several ranks, which share the samples of one group.

    torchrun --nproc-per-node 2 examples/trainer/ranks.py RING

A linear head learns to give each sample's last layer from its other layers. What it is about is
the loop: each rank is given what it can take, and all of them take as many steps.
"""

import argparse
from datetime import timedelta

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from shmconn.collate import Batch, Collator
from shmconn.dataset import SampleDataset
from shmconn.even import EvenBatches


class Learner:
    """The head, as all ranks have it."""

    def __init__(self, batch: Batch, lr: float) -> None:
        torch.manual_seed(0)
        wide, narrow = (
            batch[name].shape[-1] for name in ("hidden_states", "verifier_last_hidden_states")
        )
        self.head = DistributedDataParallel(torch.nn.Linear(wide, narrow))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr)

    def learn(self, batch: Batch) -> float:
        """One step; the loss of this rank's batch before it."""
        real = batch["document_ids"] >= 0
        error = self.head(batch["hidden_states"]) - batch["verifier_last_hidden_states"]
        # Padding alone gives a gradient of 0, and still takes part in the ranks' common step.
        loss = (error.square().mean(-1) * real).sum() / real.sum().clamp(min=1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("ring")
    parser.add_argument("--group", default="ranks")
    parser.add_argument("--batch", type=int, default=512, help="tokens in a batch")
    parser.add_argument("--end", default="drop", help="drop or pad, where ranks end unevenly")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for the ring")
    arguments = parser.parse_args()

    # Each step waits for the rank whose next sample comes last: longer than vLLM may be idle.
    distributed.init_process_group("gloo", timeout=timedelta(hours=2))
    collator = Collator(arguments.batch, dtype="float32")
    learner: Learner | None = None
    losses = []
    with SampleDataset(
        arguments.ring, arguments.group, collator=collator, wait_s=arguments.wait
    ) as dataset:
        batches = EvenBatches(dataset, arguments.end)
        for batch in batches:
            learner = learner or Learner(batch, arguments.lr)
            loss = learner.learn(batch)
            if batch["handles"]:
                losses.append(loss)
        first, last = (losses[0], losses[-1]) if losses else (0.0, 0.0)
        print(
            f"rank {distributed.get_rank()}: {len(losses) + batches.padded} steps, "
            f"{batches.padded} of them padding, {dataset.handed_out} samples, "
            f"{batches.dropped} dropped, loss {first:.3g} to {last:.3g}\n",
            end="",  # one write, so that the ranks' lines stay apart
            flush=True,
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
