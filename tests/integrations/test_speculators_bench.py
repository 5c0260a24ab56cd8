# SPDX-License-Identifier: Apache-2.0
"""The bench of speculators' `train`: what its table says; and, long, a rehearsal on the CPU."""

import argparse
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reader.bench.crew import Run
from reader.bench.speculators import Bench, lines

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


def training(course: str, backend: str, losses: list[float], **figures: Any) -> dict[str, Any]:
    record = {"part": course, "what": "training", "course": course, "backend": backend}
    return record | {"steps": len(losses), "losses": losses, "errors": 0.0} | figures


def test_the_table_tells_where_losses_part() -> None:
    same = [training("equal", backend, [3.0, 2.0, 1.0]) for backend in ("shm", "file")]
    (line,) = lines(same)
    assert "shm and file, same seed and order: 3 of 3 equal bit for bit; 3.0000 to 1.0" in line
    other = training("equal", "file", [3.0, 2.0, 1.5])
    first, second = lines([same[0], other, same[1]])
    assert "shm and file" in first
    assert "2 of 3 equal bit for bit, first at step 2, at most 0.5 apart" in first
    assert "file and file" in second
    assert "2 of 3" in second


def test_the_table_gives_both_speeds_and_what_failed() -> None:
    figures = {"tokens_s": 10.0, "waits": 0.25, "counted": 140}
    shm = training("speed", "shm", [1.0], steps_s=6.0, gpu_idle=0.5, **figures)
    file = training("speed", "file", [1.0], steps_s=2.0, gpu_idle=None, **figures)
    failed = {"part": "speed", "what": "failed", "error": "it broke"}
    table = lines([shm, file, failed])
    assert table[0] == "!! speed: it broke"
    assert "6.00 steps/s" in table[1] and "25.0 %" in table[1] and "50.0 %" in table[1]
    assert "GPU idle not read" in table[2]
    assert table[3] == "steps/s, shm / file: 6.00 / 2.00 = 3.00 x"


class Failing(Bench):
    """Trainings that fail."""

    trained: list[tuple[str, tuple[str, ...]]]

    def train(self, name: str, backends: tuple[str, ...], limit_s: float) -> None:
        self.trained.append((name, backends))
        raise RuntimeError("it broke")


def test_a_training_that_fails_does_not_keep_the_others_from_their_turns(tmp_path: Path) -> None:
    options = argparse.Namespace(
        device="cuda", tiny=False, repeats=1, out=str(tmp_path), limit_s=0.0, turn_s=60.0
    )
    options.steps, options.warm, options.workers, options.train_limit_s = 200, 60, 8, 150.0
    options.only = "equal,speed"
    bench = Failing(Run(options), options)
    bench.trained = []
    assert bench.all() == 1
    assert bench.trained == [
        ("equal", ("shm", "file")),
        ("speed", ("shm",)),
        ("speed", ("file",)),
    ]
    assert "it broke" in (tmp_path / "figures.jsonl").read_text()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None or not PYTHON.exists(),
    reason="speculators or .venv is not there: run .ci/speculators.sh",
)
def test_speculators_train_learns_the_same_from_the_ring_as_from_files(tmp_path: Path) -> None:
    # It takes some minutes; the bench has limits of its own.
    faulthandler.cancel_dump_traceback_later()
    before = set(os.listdir("/dev/shm"))
    words = ["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--limit-s", "0"]
    command = [sys.executable, "-m", "reader.bench.speculators", *words, "--ring-size", "64MiB"]
    done = subprocess.run(
        [*command, "--server-python", str(PYTHON)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    records = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert done.returncode == 0, (records[-2:], done.stderr[-3000:])
    runs = [one for one in records if one["what"] == "training"]
    by_course = [(one["course"], one["backend"]) for one in runs]
    assert sorted(by_course) == sorted(
        (course, backend) for course in ("equal", "speed") for backend in ("shm", "file")
    )
    shm, file = (one["losses"] for one in runs if one["course"] == "equal")
    assert shm == file
    for one in runs:
        assert one["errors"] == 0
        if one["backend"] == "shm":
            # Requests that the last workers had under way when the trainer was done with them.
            assert set(one["lost"]) <= {"aborted"}
    left = [entry for entry in set(os.listdir("/dev/shm")) - before if "bench-" in entry]
    assert [entry for entry in left if (Path("/dev/shm") / entry).exists()] == []
