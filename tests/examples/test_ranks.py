# SPDX-License-Identifier: Apache-2.0
"""The example of several ranks, as torchrun starts it, on a ring without a vLLM."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shmconn import Producer

SCRIPT = Path(__file__).parents[2] / "examples" / "trainer" / "ranks.py"
# One sample a batch, and an odd number: two ranks cannot have as many.
SAMPLES = 41
TOKENS = 64


@pytest.mark.parametrize(
    ("end", "steps"), (("drop", 20), pytest.param("pad", 21, marks=pytest.mark.long))
)
def test_two_ranks_take_as_many_steps_and_learn(ring_name: str, end: str, steps: int) -> None:
    torch.manual_seed(0)
    with Producer.create(
        ring_name, size="8MiB", layer_ids=[2, 18, 30], hidden_size=32, groups=["ranks"]
    ) as producer:
        for number in range(SAMPLES):
            # All layers alike: there is something to learn.
            states = torch.randn(TOKENS, 1, 32, dtype=torch.bfloat16).expand(-1, 3, -1)
            producer.put(states, list(range(TOKENS)), request_id=f"r{number}", timeout=30)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    out = subprocess.run(
        [
            *command,
            "--standalone",
            str(SCRIPT),
            ring_name,
            "--end",
            end,
            "--batch",
            str(TOKENS),
            "--lr",
            "0.01",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert out.returncode == 0, out.stderr[-5000:]
    said = re.findall(
        r"rank \d: (\d+) steps, (\d+) of them padding, (\d+) samples, (\d+) dropped, "
        r"loss (\S+) to (\S+)",
        out.stdout,
    )
    assert len(said) == 2, out.stdout
    took, padded, samples, dropped = ([int(rank[column]) for rank in said] for column in range(4))
    assert took == [steps, steps]
    assert sum(padded) == 2 * steps - sum(samples) and sum(samples) + sum(dropped) == SAMPLES
    assert all(float(rank[5]) < float(rank[4]) for rank in said)
