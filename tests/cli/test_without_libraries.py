# SPDX-License-Identifier: Apache-2.0
"""Without torch a ring can be served, watched and drained; what a feature needs, it names."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from cli_processes import WATCHDOG_S
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]


def without(*names: str, words: list[object]) -> subprocess.CompletedProcess[str]:
    """A command in a Python that does not have these packages."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in names)
    code = f"import sys; {hide}from reader.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )


@pytest.mark.parametrize(
    "form",
    ["safetensors", *(pytest.param(name, marks=pytest.mark.long) for name in ("shards", "vllm"))],
)
def test_a_drain_needs_no_torch(ring, producer, tmp_path, form) -> None:
    source = producer()
    source.put(1, 5)
    source.close()
    words = ["drain", ring, "--to", tmp_path, "--format", form]
    done = without("torch", "prometheus_client", "PIL", "transformers", words=words)
    assert done.returncode == 0, done.stderr
    assert "5 samples" in done.stdout


@pytest.mark.parametrize(
    ("package", "words", "says"),
    [
        ("torch", ["inspect", "{file}"], "shmconn[torch]"),
        pytest.param(
            "torch", ["verify", "{tmp}", "--model", "m"], "shmconn[torch]", marks=pytest.mark.long
        ),
        pytest.param("torch", ["bench", "files"], "shmconn[torch]", marks=pytest.mark.long),
        ("torch", ["drain", "r", "--to", "{tmp}", "--format", "modelopt"], "shmconn[torch]"),
        ("prometheus_client", ["drain", "r", "--to", "{tmp}", "--metrics-port", "0"], "[metrics]"),
        pytest.param(
            "PIL",
            ["inspect", "{file}", "--png", "{tmp}/x.png"],
            "shmconn[png]",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_feature_names_the_extra_that_it_needs(tmp_path, package, words, says) -> None:
    file = tmp_path / "x.safetensors"
    ids, states = np.arange(3), np.ones((3, 2, 4), np.float32)
    save_file({"token_ids": ids, "hidden_states": states}, file)
    done = without(package, words=[word.format(file=file, tmp=tmp_path) for word in words])
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_extra_that_is_named_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"torch", "verify", "metrics", "png"} <= set(extras)
