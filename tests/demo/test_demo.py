# SPDX-License-Identifier: Apache-2.0
"""The demo, whole: real prompts, a real vLLM, real kills. `make demo` runs the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from demo_run import DEMO, ROOT, DemoRun
from harness.verified import Verified

from reader.verify import VerifyOptions, run

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

MODEL = ROOT / ".cache" / "smollm2"


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """The demo's model, made once."""
    subprocess.run([sys.executable, DEMO / "make_model.py", MODEL], check=True, timeout=300)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., DemoRun]]:
    """Starts demos; their folders go when the test ends."""
    runs: list[DemoRun] = []

    def start(**environment: str) -> DemoRun:
        runs.append(DemoRun(tmp_path / f"demo{len(runs)}.log", **environment))
        return runs[-1]

    yield start
    for demo_run in runs:
        demo_run.kill()
        if "drain demo-" in demo_run.out:
            shutil.rmtree(demo_run.folder, ignore_errors=True)


Demo = Callable[..., DemoRun]


def test_the_demo_verifies_every_sample_and_leaves_nothing(demo: Demo) -> None:
    started = demo()
    started.finish(0)
    assert "48 replies" in started.out
    assert "verified: everything holds" in started.out
    hits = re.search(r"([\d,]+) of [\d,]+ prompt tokens from the prefix cache", started.out)
    # Second sends alone would hit less than this: the shared prefix hits as well.
    assert hits is not None and int(hits[1].replace(",", "")) > 2500
    names = {file.name for file in (started.folder / "files").glob("*.safetensors")}
    assert len(names) == 48 and "long-1-send1.safetensors" in names


def test_an_unknown_dtype_is_named_before_anything_starts(demo: Demo) -> None:
    started = demo(DTYPE="int8")
    assert started.process.wait(60) == 2
    assert "DTYPE=int8 is unknown: use one of float32, bfloat16" in started.out


def test_ctrl_c_while_vllm_starts_leaves_nothing(demo: Demo) -> None:
    started = demo()
    started.wait_for("$ shmconn serve")
    started.interrupt()
    started.finish(130)
    assert "interrupted: cleaning up" in started.out


@pytest.mark.long
def test_ctrl_c_while_the_engine_loads_leaves_nothing(demo: Demo) -> None:
    started = demo()
    started.wait_for("$ shmconn serve")
    log = started.folder / "server.log"
    while "Starting to load model" not in log.read_text():
        assert started.process.poll() is None, started.out
        time.sleep(0.1)
    started.interrupt()
    started.finish(130)


@pytest.mark.long
def test_ctrl_c_amid_the_sends_leaves_nothing(demo: Demo) -> None:
    started = demo()
    started.wait_for_replies(10)
    started.interrupt()
    # Impatience must not cost vLLM the time to put its own memory away.
    time.sleep(0.5)
    started.interrupt()
    started.finish(130)


@pytest.mark.long
def test_sigterm_amid_the_sends_leaves_nothing(demo: Demo) -> None:
    started = demo()
    started.wait_for_replies(1)
    started.interrupt(signal.SIGTERM)
    started.finish(130)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["3/5", "4/5"])
def test_ctrl_c_while_it_shuts_down_or_verifies_leaves_nothing(demo: Demo, stage: str) -> None:
    started = demo()
    started.wait_for(stage)
    time.sleep(2)
    started.interrupt()
    started.finish(130)


@pytest.mark.long
def test_a_killed_server_fails_the_demo_and_shows_its_log(demo: Demo) -> None:
    started = demo()
    started.wait_for_replies(10)
    pids = subprocess.run(
        ["pgrep", "-f", f"api_server.*{started.ring}"], capture_output=True, text=True, check=True
    )
    for pid in pids.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    started.finish(1)
    assert "failed:" in started.out
    assert "server.log" in started.out


@pytest.mark.long
def test_two_demos_at_once_do_not_disturb_each_other(demo: Demo) -> None:
    runs = [demo(), demo()]
    for started in runs:
        started.finish(0)


def swap_rows(states: torch.Tensor) -> torch.Tensor:
    states[[3, 4]] = states[[4, 3]]
    return states


def swap_layers(states: torch.Tensor) -> torch.Tensor:
    return states[:, [0, 2, 1, 3]]


def zero_row(states: torch.Tensor) -> torch.Tensor:
    states[5, 2] = 0
    return states


def norm_last_layer(states: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    norm = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).model.norm
    with torch.inference_mode():
        states[:, 3] = norm(states[:, 3].float()).to(states.dtype)
    return states


def stale_tail(states: torch.Tensor) -> torch.Tensor:
    states[-2:] = states[-130:-128].clone()
    return states


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faults_planted_in_the_demos_own_files_are_found_and_nothing_else(
    demo: Demo, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = demo(DTYPE=dtype)
    started.finish(0)
    folder = tmp_path / "copy"
    shutil.copytree(started.folder, folder)
    samples = Verified(folder / "files", folder / "sends.jsonl")
    other: dict[str, torch.Tensor] = {}
    samples.change("long-6-send2", lambda tensors, metadata: other.update(tensors))

    def foreign_block(states: torch.Tensor) -> torch.Tensor:
        states[128:256] = other["hidden_states"][128:256]
        return states

    def wrong_layer(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata["layer_ids"] = json.dumps([8, 15, 21, 30])

    samples.change_states("short-1-send1", swap_rows)
    samples.change_states("short-2-send1", swap_layers)
    samples.change_states("short-3-send1", zero_row)
    samples.change_states("chat-1-send1", norm_last_layer)
    samples.change_states("long-1-send1", stale_tail)
    samples.change_states("long-2-send1", foreign_block)
    samples.change("long-3-send1", wrong_layer)
    samples.file("long-4-send1").unlink()
    shutil.copy(samples.file("long-5-send1"), samples.file("extra"))
    planted = {
        "short-1-send1.safetensors",
        "short-2-send1.safetensors",
        "short-3-send1.safetensors",
        "chat-1-send1.safetensors",
        "long-1-send1.safetensors",
        "long-2-send1.safetensors",
        "long-3-send1.safetensors",
        "long-4-send1",
        "long-5-send1",
        "extra.safetensors",
    }
    capsys.readouterr()
    assert run(VerifyOptions(samples.directory, str(MODEL), samples.sends, json=True)) == 1
    report = json.loads(capsys.readouterr().out)
    found = {fault["sample"] for fault in report["faults"] if " and " not in fault["sample"]}
    assert found == planted
