# SPDX-License-Identifier: Apache-2.0
"""The examples as a person runs them, each with a real vLLM of its own.

examples/demo has its tests in tests/demo, examples/offline_llm in tests/integrations.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WATCHDOG_S = 900

pytestmark = [pytest.mark.long, pytest.mark.vllm]


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """The servable model of the demo; made on first use."""
    maker = EXAMPLES / "demo" / "make_model.py"
    command = [sys.executable, str(maker), str(ROOT / ".cache" / "smollm2")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Runs an example to its end; what it printed, if it ended well and left nothing behind."""
    rings: list[str] = []

    def start(script: Path, *words: object, until: Callable[[], bool] | None = None) -> str:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rings.append(f"{script.parent.name}-example-{process.pid}")
        deadline = time.monotonic() + WATCHDOG_S
        try:
            while until and not until() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            if until:
                process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=WATCHDOG_S)
        finally:
            # It ends its server when it is interrupted; a killed one could not.
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)
        assert process.returncode == (130 if until else 0), out[-5000:]
        assert "Traceback" not in out, out
        return out

    yield start
    assert [file for file in os.listdir("/dev/shm") if any(ring in file for ring in rings)] == []


def test_the_trainer_learns_online_and_goes_on_after_a_kill(
    run: Callable[..., str], tmp_path: Path
) -> None:
    out = run(
        *(EXAMPLES / "trainer" / "run.py", "--samples", 160, "--held-out", 12),
        *("--kill-after", 8, "--out", tmp_path),
    )
    resumed = re.search(r"the trainer was killed.*\n.*resumed at batch (\d+)", out)
    assert resumed, out
    assert int(resumed[1]) >= 8
    figures = json.loads((tmp_path / "figures.json").read_text())
    # No sample was lost by the kill, and none was learnt from twice.
    handles = [handle for batch in figures["batches"] for handle in batch["handles"]]
    assert len(handles) == len(set(handles)) == 160
    # Of texts that are never learnt from.
    before, after = figures["exams"][0], figures["exams"][-1]
    assert before["batches"] == 0
    assert after["batches"] == len(figures["batches"]) > int(resumed[1])
    assert after["loss"] < 0.8 * before["loss"]
    assert before["acceptance"] < 0.05
    assert after["acceptance"] > 0.15
    plotted = (tmp_path / "progress.png").exists()
    assert f"plot: {tmp_path}" in out if plotted else "no plot (pip install matplotlib)" in out


def test_the_trainer_goes_on_with_another_server_where_it_was_interrupted(
    run: Callable[..., str], tmp_path: Path
) -> None:
    script, checkpoint = EXAMPLES / "trainer" / "run.py", tmp_path / "checkpoint.pt"
    words = ("--samples", 40, "--held-out", 4, "--out", tmp_path)
    figures = tmp_path / "figures.json"

    def begun() -> bool:
        return checkpoint.exists() and len(json.loads(figures.read_text())["batches"]) >= 4

    run(script, *words, until=begun)
    out = run(script, *words)
    assert re.search(r"resumed at batch \d+", out), out
    tags = [tag for batch in json.loads(figures.read_text())["batches"] for tag in batch["tags"]]
    assert sorted(tags) == sorted(f"learn-{number}" for number in range(40))


def test_the_probe_tells_animals_from_countries_that_it_has_not_seen(
    run: Callable[..., str], tmp_path: Path
) -> None:
    out = run(EXAMPLES / "probe" / "probe.py", "--out", tmp_path)
    found = {
        int(layer): float(right)
        for layer, right in re.findall(r"^layer +(\d+): +([\d.]+)%", out, re.M)
    }
    assert set(found) == {0, 8, 15, 22, 30}
    # The control: the embedding of a word that is the same in all prompts knows nothing.
    assert found[0] < 65
    assert max(found.values()) > 85
