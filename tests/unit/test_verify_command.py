# SPDX-License-Identifier: Apache-2.0
"""`shmconn verify` over whole folders: each planted fault makes it fail, bad input is named."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.verified import Verified, make_model, make_samples

from reader.verify import VerifyOptions, run
from shmconn.errors import OptionError

pytest.importorskip("transformers")

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For a model this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def honest(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in DTYPES}
    for dtype, folder in folders.items():
        make_samples(model, folder, dtype)
    return folders


@pytest.fixture(params=DTYPES)
def samples(request: pytest.FixtureRequest, honest: dict[str, Path], tmp_path: Path) -> Verified:
    """A copy to spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(honest[request.param], folder)
    return Verified(folder / "files", folder / "sends.jsonl")


@pytest.fixture
def verify(
    samples: Verified, model: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command on the copy; exit code and report."""

    def check(**options: Any) -> tuple[int, dict[str, Any]]:
        options = {"sends": samples.sends, **options}
        capsys.readouterr()
        code = run(VerifyOptions(samples.directory, str(model), json=True, **options))
        return code, json.loads(capsys.readouterr().out)

    return check


Verify = Callable[..., tuple[int, dict[str, Any]]]


def test_honest_samples_hold_in_every_check(verify: Verify) -> None:
    code, report = verify()
    assert report["faults"] == []
    assert code == 0 and report["ok"] and report["completeness_checked"]
    assert {check["name"]: check["checked"] for check in report["checks"]} == {
        "files are samples": 6,
        "layers, size, dtype alike": 6,
        "promised samples are there": 6,
        "samples were promised": 6,
        "name, tag, ids as replied": 6,
        "states are the model's": 6,
        "sends of a prompt agree": 3,
        "last layer to next token": 6,
    }


def test_without_a_log_states_are_checked_and_the_gap_is_said(verify: Verify) -> None:
    code, report = verify(sends=None)
    assert code == 0 and not report["completeness_checked"]
    assert [check["name"] for check in report["checks"]] == [
        "files are samples",
        "layers, size, dtype alike",
        "names are the samples' own",
        "states are the model's",
        "sends of a prompt agree",
    ]


def test_without_a_log_two_files_that_changed_names_are_seen(
    verify: Verify, samples: Verified
) -> None:
    swap_two_files(samples)
    code, report = verify(sends=None)
    assert code == 1
    faults = [fault for fault in report["faults"] if "were files renamed" in fault["text"]]
    assert len(faults) == 2


def test_a_sample_of_another_kind_is_named(verify: Verify, samples: Verified) -> None:
    def halve(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["hidden_states"] = tensors["hidden_states"].half()
        metadata["dtype"] = "float16"

    samples.change("short-1", halve)
    code, report = verify(sends=None)
    assert code == 1
    odd = [fault for fault in report["faults"] if fault["check"] == "layers, size, dtype alike"]
    assert [fault["sample"] for fault in odd] == ["short-1.safetensors"]
    assert "float16, most are of layers" in odd[0]["text"]


def swap_two_files(samples: Verified) -> None:
    one, two = samples.file("short-1"), samples.file("long-1")
    kept = one.rename(one.with_suffix(".kept"))
    two.rename(one)
    kept.rename(two)


def mix_up_requests(samples: Verified) -> None:
    """The states and ids of one prompt under the name of another."""
    other: dict[str, Any] = {}
    samples.change("long-1", lambda tensors, metadata: other.update(tensors))

    def take(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors.update(other)
        metadata["shape"] = json.dumps(list(other["hidden_states"].shape))

    samples.change("short-1", take)


def change_handle(samples: Verified) -> None:
    samples.change("long-1", lambda tensors, metadata: metadata.update(handle="x"))


def copy_a_file(samples: Verified) -> None:
    shutil.copy(samples.file("long-1"), samples.file("again"))


def change_an_id(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["token_ids"][2] += 1


def id_outside_the_vocabulary(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["token_ids"][2] = 1 << 40


def drop_the_last_token(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["token_ids"] = tensors["token_ids"][:-1].clone()
    tensors["hidden_states"] = tensors["hidden_states"][:-1].clone()
    metadata["shape"] = json.dumps(list(tensors["hidden_states"].shape))


def swap_rows(states: torch.Tensor) -> torch.Tensor:
    states[[3, 4]] = states[[4, 3]]
    return states


def swap_layers(states: torch.Tensor) -> torch.Tensor:
    return states[:, [1, 0, 2]]


def zero_row(states: torch.Tensor) -> torch.Tensor:
    states[4] = 0
    return states


FAULTS: dict[str, Callable[[Verified], None]] = {
    "a missing sample": lambda samples: samples.file("short-2").unlink(),
    "an extra sample": copy_a_file,
    "a sample of another run": change_handle,
    "two requests mixed up": mix_up_requests,
    "a token id changed": lambda samples: samples.change("long-1", change_an_id),
    "a wild token id": lambda samples: samples.change("long-1", id_outside_the_vocabulary),
    "the last token missing": lambda samples: samples.change("output-1", drop_the_last_token),
    "two files renamed": swap_two_files,
    "another tag": lambda samples: samples.change("long-1", lambda t, m: m.update(tag="x")),
    "other layer ids": lambda samples: samples.change(
        "long-1", lambda t, m: m.update(layer_ids="[1, 3, 4]")
    ),
    "a layer that is not there": lambda samples: samples.change(
        "long-1", lambda t, m: m.update(layer_ids="[1, 2, 5]")
    ),
    "rows swapped": lambda samples: samples.change_states("long-1", swap_rows),
    "layers swapped": lambda samples: samples.change_states("long-1", swap_layers),
    "a zero row": lambda samples: samples.change_states("long-2", zero_row),
    "another hidden size": lambda samples: samples.change_states("long-2", lambda s: s[..., 1:]),
    "another dtype": lambda samples: samples.change_states("long-2", lambda s: s.double()),
    "a layer missing": lambda samples: samples.change_states("long-2", lambda s: s[:, 1:]),
    "a truncated file": lambda samples: samples.file("long-1").write_bytes(
        samples.file("long-1").read_bytes()[:-100]
    ),
    "an empty file": lambda samples: samples.file("long-1").write_bytes(b""),
    "another next token": lambda samples: samples.change_send("short-1", token_ids=[3]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_folder(samples: Verified, verify: Verify, fault: str) -> None:
    FAULTS[fault](samples)
    code, report = verify()
    assert code == 1
    assert not report["ok"]
    assert report["faults"]


def test_a_generated_token_that_the_states_do_not_lead_to_is_found(
    samples: Verified, verify: Verify
) -> None:
    lines = map(json.loads, samples.sends.read_text().splitlines())
    line = next(line for line in lines if line["tag"] == "output-1")
    wrong = [*line["token_ids"][:-1], (line["token_ids"][-1] + 1) % 97]
    samples.change_send("output-1", token_ids=wrong)
    code, report = verify()
    assert code == 1
    assert [fault["check"] for fault in report["faults"]] == ["last layer to next token"]


def test_tokens_that_were_drawn_are_not_held_against_the_states(
    samples: Verified, verify: Verify
) -> None:
    samples.change_send("short-1", token_ids=[3], temperature=1.0)
    assert verify()[0] == 0


def test_two_sends_that_differ_within_the_models_noise_are_found(
    samples: Verified, verify: Verify
) -> None:
    # Each alone passes for the model's; a server that computes the same twice differs less.
    def shift(states: torch.Tensor, by: float) -> torch.Tensor:
        return (states.double() * (1 + by)).to(states.dtype)

    by = 9e-5 if "float32" in samples.sends.read_text() else 0.03
    samples.change_states("long-1", lambda states: shift(states, by))
    samples.change_states("long-2", lambda states: shift(states, -by))
    code, report = verify()
    assert code == 1
    assert {fault["check"] for fault in report["faults"]} == {"sends of a prompt agree"}


def test_the_table_shows_checks_noise_and_faults(
    samples: Verified, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples.change_states("long-1", swap_rows)
    options = VerifyOptions(samples.directory, str(model), samples.sends)
    assert run(options) == 1
    out = capsys.readouterr().out
    assert "promised samples are there" in out
    assert "layer 4" in out
    assert "off long-1.safetensors: layer 1" in " ".join(out.split())
    assert "not verified: " in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: .*JSON"),
        ('{"handle": "h", "token_ids": []}', "line 2: prompt_token_ids: Field required"),
        ('{"handle": "h", "prompt_token_ids": ["a"], "token_ids": []}', "prompt_token_ids.0"),
        ("again", "line 2: the handle of line 1 again"),
    ],
)
def test_a_line_that_is_no_send_is_named(
    samples: Verified, verify: Verify, line: str, says: str
) -> None:
    first = samples.sends.read_text().splitlines()[0]
    samples.sends.write_text(f"{first}\n{first if line == 'again' else line}\n")
    with pytest.raises(OptionError, match=says):
        verify()


def test_bad_input_is_named(samples: Verified, verify: Verify, tmp_path: Path) -> None:
    def text(directory: Path, model: str = "no-model", **options: Any) -> str:
        with pytest.raises(OptionError) as caught:
            run(VerifyOptions(directory, model, **options))
        return str(caught.value)

    assert "cannot read the folder" in text(tmp_path / "none")
    assert "there is no .safetensors file in" in text(tmp_path)
    assert "cannot read the sender's log" in text(samples.directory, sends=tmp_path / "none")
    (tmp_path / "empty").touch()
    assert "is empty: there is nothing to verify" in text(
        samples.directory, sends=tmp_path / "empty"
    )
    assert "cannot load the model './no-model'" in text(samples.directory, model="./no-model")


def test_an_empty_folder_with_a_log_lacks_every_sample(samples: Verified, verify: Verify) -> None:
    for file in samples.directory.iterdir():
        file.unlink()
    code, report = verify()
    assert code == 1
    assert len(report["faults"]) == 6
