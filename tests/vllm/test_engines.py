# SPDX-License-Identifier: Apache-2.0
"""Modes of vLLM that need an engine of their own; what each must show stands in `modes`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rings import remove_ring

pytestmark = [pytest.mark.vllm, pytest.mark.long]
HERE = Path(__file__).parent


def run(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One mode in a process of its own; it leaves no ring, whatever becomes of it."""
    done = subprocess.run(
        [sys.executable, str(HERE / "modes.py"), name, str(folder)],
        env={**os.environ, "PYTHONPATH": str(HERE), **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    for ring in re.findall(r"^RING (\S+)$", done.stdout, re.M):
        remove_ring(ring)
    return done


@pytest.mark.parametrize(
    "name", ["plain", "smollm", "apart", "lora", "pooling", "sleep", "mla", "example", "held"]
)
def test_this_mode_yields_one_right_sample_for_each_request(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0 and f"DONE {name}" in done.stdout, done.stdout + done.stderr


def test_a_sleep_that_waits_for_readers_says_so(tmp_path: Path) -> None:
    done = run("held_apart", tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "DONE held_apart" in done.stdout, output
    assert "a sleep or a drain of vLLM waits for them" in output.partition("WAITS")[0] + done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runner_v2", "Model Runner V2 requires Triton"),
        ("offloading", "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"),
        # The ring is made and its group of KV caches found; the first step ends in vLLM's kernel.
        ("hybrid", "must be contiguous at last dimension"),
        ("prompt_embeds", "that token was provided via prompt_embeds, and its ID is unknown"),
    ],
)
def test_this_mode_is_refused_by_vllm_itself_here_or_works(
    name: str, said: str, tmp_path: Path
) -> None:
    done = run(name, tmp_path, VLLM_USE_V2_MODEL_RUNNER=str(int(name == "runner_v2")))
    output = done.stdout + done.stderr
    assert f"DONE {name}" in output if done.returncode == 0 else said in output, output
