# SPDX-License-Identifier: Apache-2.0
"""`shmconn verify` as a command: exit codes, and what goes to which stream."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_processes import Process
from harness.verified import Verified, make_model, make_samples
from safetensors import safe_open

from reader.sinks import SinkOptions, open_sink
from reader.verify import VerifyOptions
from reader.verify import run as verify
from shmconn.errors import OptionError
from shmconn.handle import Handle

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


def pack(samples: Verified, folder: Path, spoil: str = "") -> Path:
    """The same samples in shards, as a drain writes them; one may have two rows exchanged."""
    sink = open_sink("shards", SinkOptions(str(folder), shard_size=1 << 20))
    for path in sorted(samples.directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
        if path.stem == spoil:
            states[[2, 3]] = states[[3, 2]]
        sink.write(
            SimpleNamespace(
                handle=Handle.parse(metadata["handle"]),
                request_id=metadata["request_id"],
                tag=metadata["tag"],
                tokens=len(ids),
                shape=tuple(states.shape),
                dtype=metadata["dtype"],
                layer_ids=json.loads(metadata["layer_ids"]),
                metadata={},
                token_ids_bytes=memoryview(ids.numpy()).cast("B"),
                states_bytes=memoryview(states.view(torch.uint8).numpy()).cast("B"),
            )
        )
    sink.close()
    return folder


def test_shards_are_judged_as_files_are(
    samples: Verified, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(list(samples.directory.glob("*.safetensors")))

    def report(folder: Path, code: int) -> dict[str, Any]:
        options = VerifyOptions(folder, str(model), sends=samples.sends, json=True)
        assert verify(options) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    good = report(pack(samples, tmp_path / "good"), 0)
    assert next(c for c in good["checks"] if c["name"] == "files are samples")["checked"] == count
    bad = report(pack(samples, tmp_path / "bad", spoil="long-2"), 1)
    assert any(fault["sample"].startswith("shard-00000") for fault in bad["faults"])


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("shard-00000.safetensors.part", "is not sealed yet"),
        ("a.pt", "files of format modelopt, which verify does not read"),
        ("a.ckpt", "files of format specforge, which verify does not read"),
    ],
)
def test_what_verify_does_not_read_is_named(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(OptionError, match=says):
        verify(VerifyOptions(tmp_path, "m"))
