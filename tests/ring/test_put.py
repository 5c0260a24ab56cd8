# SPDX-License-Identifier: Apache-2.0
"""What `put` copies, and by which threads."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from ring_tools import HIDDEN, LAYERS

from shmconn import Producer, subscribe

Make = Callable[..., Producer]

_COUNT = """
import os, sys
import numpy as np, torch
from shmconn import Producer
torch.set_num_threads(4)
states = torch.from_numpy(np.zeros((4096, 2, 256), np.float32))
with Producer.create(sys.argv[1], size="32MiB", layer_ids=[1, 2], hidden_size=256,
                     dtype="float32") as producer:
    producer.put(states[:1], [0], request_id="warm")
    before = len(os.listdir("/proc/self/task"))
    producer.put(states, list(range(4096)), request_id="large")
    print(len(os.listdir("/proc/self/task")) - before)
"""


def test_put_starts_no_threads_that_spin_beside_the_readers(ring_name: str) -> None:
    code = f"{_COUNT}\nfrom shmconn.directory import remove_rings\nremove_rings(sys.argv[1])\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    command = [sys.executable, "-c", code, ring_name]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["0"], f"put started {ran.stdout.strip()} threads"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_put_copies_the_bits_of_any_view(make: Make, ring_name: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    full = torch.randn(2 * HIDDEN, 40, len(LAYERS)).to(kind)
    full[0, 0, 0], full[1, 0, 0], full[2, 0, 0] = float("nan"), float("-inf"), -0.0
    views = [
        full.permute(1, 2, 0)[..., :HIDDEN],
        full.permute(1, 2, 0)[::3, :, ::2],
        full.permute(1, 2, 0)[..., :HIDDEN].contiguous().requires_grad_(),
        torch.empty(0, len(LAYERS), HIDDEN, dtype=kind),
    ]
    bits = torch.int32 if kind.itemsize == 4 else torch.int16
    producer = make(dtype=dtype, groups=["g"])
    with subscribe(ring_name, "g") as subscription:
        for view in views:
            producer.put(view, list(range(len(view))), request_id="r")
            sample = subscription.next(5)
            assert sample is not None
            want = view.detach().contiguous().view(bits)
            assert torch.equal(sample.hidden_states.view(bits), want)
            sample.release()
        producer.close()
