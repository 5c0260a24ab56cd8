# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind at once, ended in every way; what must be left stands in `storm`."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rings import remove_ring

HERE = Path(__file__).parent
# The runner that vLLM has for CPUs beside this module answers wrongly with async scheduling: hence
# vLLM turns it off there.
OLD_RUNNER = importlib.util.find_spec("vllm.v1.worker.cpu_model_runner") is not None
REQUESTS = os.environ.get("SHMCONN_STORM", "300")


def run_storm(folder: Path, *options: str, requests: str = REQUESTS) -> str:
    """One storm in a process of its own; what it prints. It leaves no ring behind."""
    done = subprocess.run(
        [sys.executable, str(HERE / "storm.py"), str(folder), requests, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400 + 6 * int(requests),
    )
    for ring in re.findall(r"^RING (\S+)$", done.stdout, re.M):
        remove_ring(ring)
    assert done.returncode == 0 and "DONE" in done.stdout, done.stdout[-4000:] + done.stderr[-9000:]
    print("\n".join(re.findall(r"^[A-Z]{4,} .*", done.stdout, re.M)))
    return done.stdout


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize(
    "options",
    [(), ("--async-scheduling",), ("--ranks", "2"), ("--data-parallel", "2")],
    ids=["plain", "asynchronous", "two ranks", "two engines"],
)
def test_every_request_of_a_storm_is_settled_and_every_row_is_right(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    if "--async-scheduling" in options and OLD_RUNNER:
        pytest.skip("this vLLM's runner for CPUs cannot schedule asynchronously")
    run_storm(tmp_path, *options)
