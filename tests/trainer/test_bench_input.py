# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench input` compares ways that end in the same batch; no speed is asserted here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_collate import in_memory

from reader.bench import input as bench
from shmconn.collate import Collator


@pytest.mark.parametrize("lengths", [[5, 9, 3], [16, 16], [10, 40], [64], [40, 24, 7]])
def test_both_ways_make_the_same_batch(lengths: list[int]) -> None:
    samples = [in_memory(number, count) for number, count in enumerate(lengths)]
    items = []
    for sample in samples:
        loaded = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
        items.append(bench._item(loaded, torch.ones(sample.tokens, dtype=torch.bool)))
    theirs = bench.collate(items, 64)
    masked = Collator(64, loss_mask=lambda sample: [1] * sample.tokens, dtype="bfloat16")
    ours = masked(samples)
    assert set(theirs) == set(ours) - {"lengths", "handles", "cut_tokens"}
    for name, part in theirs.items():
        assert torch.equal(part, ours[name]), name


@pytest.mark.long
def test_bench_input_reports_both_ways_and_leaves_nothing() -> None:
    shmconn = Path(sys.executable).with_name("shmconn")
    words = ["bench", "input", "--sample-mib", "1", "--samples", "4", "--repeats", "1", "--json"]
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([shmconn, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout)
    assert len(figures) == 8
    assert all(figure["value"] > 0 for figure in figures)
    assert [figure["goal"] for figure in figures if figure["goal"]] == [3, 3]
    left = [file for file in set(os.listdir("/dev/shm")) - before if "bench-" in file]
    assert [file for file in left if (Path("/dev/shm") / file).exists()] == []
