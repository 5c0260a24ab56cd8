# SPDX-License-Identifier: Apache-2.0
"""`shmconn verify` as a command: exit codes, and what goes to which stream."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_processes import Process
from harness.verified import Verified, make_model, make_samples

pytest.importorskip("transformers")

Run = Callable[..., Process]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model this small, threads only wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def samples(model: Path, tmp_path: Path) -> Verified:
    return make_samples(model, tmp_path / "run", "float32")


def test_honest_files_end_with_0_and_json_is_all_that_stdout_gets(
    run: Run, samples: Verified, model: Path
) -> None:
    words = ("verify", samples.directory, "--model", model, "--sends", samples.sends, "--json")
    report = json.loads(run(*words).out)
    assert report["ok"] and report["completeness_checked"]


def test_a_missing_sample_ends_with_1_and_names_it(
    run: Run, samples: Verified, model: Path
) -> None:
    samples.file("long-2").unlink()
    words = ("verify", samples.directory, "--model", model, "--sends", samples.sends)
    out = " ".join(run(*words, code=1).out.split())
    assert "off long-2: no file holds the sample shmconn:t:" in out
    assert "not verified: 1 sample off or missing" in out


def test_bad_input_ends_with_2_and_one_line(run: Run, samples: Verified, tmp_path: Path) -> None:
    for words, says in (
        ((tmp_path / "none", "--model", "m"), "cannot read the folder"),
        ((samples.directory, "--model", "./none"), "cannot load the model './none'"),
    ):
        process = run("verify", *words, code=2)
        assert says in process.err
        assert process.out == ""
