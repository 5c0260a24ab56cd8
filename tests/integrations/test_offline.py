# SPDX-License-Identifier: Apache-2.0
"""LLM.generate with a ring smaller than the data, with a real vLLM in the script's own process."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2"
ROLES = Path(__file__).with_name("offline_roles.py")
EXAMPLE = ROOT / "examples" / "offline_llm" / "offline.py"
WATCHDOG_S = 420

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def model() -> Path:
    """The servable model of the demo; made on first use."""
    maker = ROOT / "examples" / "demo" / "make_model.py"
    subprocess.run([sys.executable, str(maker), str(MODEL)], check=True, stdout=subprocess.DEVNULL)
    return MODEL


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    """Runs a script to its end; what it printed, if it ended well and left nothing behind."""
    before = set(os.listdir("/dev/shm"))

    def start(*words: object) -> str:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
        }
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=WATCHDOG_S,
            env=environment,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    yield start
    left = [entry for entry in set(os.listdir("/dev/shm")) - before if "shmconn.offline-" in entry]
    assert left == []


@pytest.mark.parametrize("where", ["memory", pytest.param("folder", marks=pytest.mark.long)])
def test_the_example_reads_more_than_its_ring_holds(
    run: Callable[..., str], tmp_path: Path, where: str
) -> None:
    options = [] if where == "memory" else ["--folder", tmp_path]
    out = run(EXAMPLE, MODEL, "--prompts", 24, "--ring-size", "2MiB", *options)
    found = re.search(r"24 prompts, .* (\d+\.\d) MiB in all through a ring of 2MiB", out)
    assert found, out
    assert float(found[1]) > 4
    # The example cleans up after itself.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("apart", [pytest.param("1", marks=pytest.mark.long), "0"])
def test_the_bound_of_memory_ends_generate_at_once_and_the_engine_goes_on(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, apart: str
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", apart)
    out = run(ROLES, "bound", MODEL)
    assert ("RESET" in out) is (apart == "0")
    assert re.search(r"^FULL \d+ samples .* over the bound of 3\.0 MiB\. Generate fewer", out, re.M)
    assert "LOADED 6 [64, 4, 576]" in out


@pytest.mark.long
def test_without_a_drain_nothing_hangs_and_the_error_says_what_to_change(
    run: Callable[..., str],
) -> None:
    out = run(ROLES, "no_drain", MODEL)
    loaded = re.search(r"^LOADED (\d+)$", out, re.M)
    assert loaded and 0 < int(loaded[1]) < 30
    assert re.search(
        r"^LOST .*no_reader.* needs `from shmconn.integrations.vllm import LLM`", out, re.M
    )
