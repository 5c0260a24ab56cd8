# SPDX-License-Identifier: Apache-2.0
"""`shmconn serve`: layers, sizes, clashing flags, and the command that comes out."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reader import serve
from reader.model_shape import ModelShape, read_shape
from reader.serve import ServeOptions, build_command, default_layers, make_plan, parse_layers
from shmconn.errors import OptionError


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that says what a 36-layer model's says."""
    config = {"architectures": ["X"], "num_hidden_layers": 36, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def flag(command: list[str], name: str) -> Any:
    """The JSON value of a flag that stands exactly once."""
    assert command.count(name) == 1
    return json.loads(command[command.index(name) + 1])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(36, [2, 18, 33, 36]), (30, [2, 15, 27, 30]), (4, [1, 2, 4]), (2, [1, 2]), (1, [1])],
)
def test_default_layers_are_clipped_sorted_and_without_repeats(
    layers: int, expected: list[int]
) -> None:
    assert default_layers(layers) == expected


def test_layers_are_written_in_the_order_vllm_stores_them() -> None:
    assert parse_layers("30,8, 22,15", 30) == [8, 15, 22, 30]
    assert parse_layers("0", 30) == [0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a list of layer ids"),
        ("2,,3", "not a list of layer ids"),
        ("a", "not a list of layer ids"),
        ("2;3", "not a list of layer ids"),
        ("2,2", "layer 2 twice"),
        ("31", "no layer 31; ids run from 0 .* to 30 "),
        ("-1", "no layer -1"),
    ],
)
def test_a_bad_layer_list_names_the_value_and_the_remedy(text: str, says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        parse_layers(text, 30)
    assert repr(text) in str(caught.value)


def test_the_command_runs_the_server_module_with_our_configuration(model: str) -> None:
    command = build_command(
        ServeOptions(
            model,
            layers="2,18",
            ring="qwen",
            ring_size="1MiB",
            groups=("trainer",),
            settings=("no_reader_timeout_s=300", "on_full=drop"),
            vllm_flags=("--port", "9000", "--enforce-eager"),
        )
    )
    assert command[:5] == [sys.executable, "-m", serve.SERVER_MODULE, "--model", model]
    assert command[-3:] == ["--port", "9000", "--enforce-eager"]
    assert flag(command, "--speculative-config") == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18]}},
    }
    assert flag(command, "--kv-transfer-config") == {
        "kv_connector": "ShmHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "ring": "qwen",
            "ring_size": "1MiB",
            "groups": ["trainer"],
            "no_reader_timeout_s": 300,
            "on_full": "drop",
        },
    }
    assert flag(command, "--shutdown-timeout") == serve.SHUTDOWN_TIMEOUT_S


def test_without_a_ring_name_the_engine_names_it(model: str) -> None:
    extra = flag(build_command(ServeOptions(model)), "--kv-transfer-config")
    assert list(extra["kv_connector_extra_config"]) == ["ring_size"]


@pytest.mark.parametrize("given", ["--shutdown-timeout=5", "--shutdown_timeout=5"])
def test_a_shutdown_timeout_of_the_user_is_kept(model: str, given: str) -> None:
    command = build_command(ServeOptions(model, vllm_flags=(given,)))
    assert "--shutdown-timeout" not in command
    assert command[-1] == given


@pytest.mark.parametrize(
    "given",
    [
        "--kv-transfer-config",
        "--kv_transfer_config={}",
        "--kv-transfer-config.kv_connector",
        "--kv-tran",
        "--speculative-config={}",
        "-sc",
        "--spec-method=ngram",
        "--model",
        "--model=other",
    ],
)
def test_a_flag_that_serve_writes_itself_is_refused(model: str, given: str) -> None:
    with pytest.raises(OptionError, match="written by `shmconn serve` itself") as caught:
        build_command(ServeOptions(model, vllm_flags=(given, "{}")))
    assert given in str(caught.value)


def test_flags_that_only_look_like_ours_pass(model: str) -> None:
    flags = ("--model-impl", "vllm", "--specialize-active-lora", "--served-model-name", "m")
    assert build_command(ServeOptions(model, vllm_flags=flags))[-5:] == list(flags)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ring": "../x"}, "ring name"),
        ({"ring_size": "much"}, "'much' is not a size"),
        ({"ring_size": "900TiB"}, "/dev/shm is .* in all, .* free"),
        ({"groups": ("a b",)}, "group name 'a b'"),
        ({"settings": ("x",)}, "not NAME=VALUE"),
        ({"settings": ("ring=x",)}, "use --ring"),
        ({"layers": "37"}, "no layer 37"),
    ],
)
def test_bad_input_is_refused_before_vllm_starts(
    model: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        make_plan(ServeOptions(model, **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "1,x"}, "1,x"),
        ({"layers": "3,3"}, "layer 3 twice"),
        ({"ring_size": "10XB"}, "10XB"),
        ({"ring": "../x"}, "../x"),
    ],
)
def test_what_was_typed_wrong_is_told_before_the_model_hub_is_asked(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(serve, "read_shape", lambda model, **_: asked.append(model))
    with pytest.raises(OptionError, match=says.replace(".", "[.]")):
        make_plan(ServeOptions("far/away", **options))
    assert asked == []


def test_the_default_ring_is_a_quarter_of_what_is_free_shared_by_the_ranks(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(64 << 30, 48 << 30, 16 << 30)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def size(*flags: str) -> str:
        command = build_command(ServeOptions(model, vllm_flags=flags))
        extra = flag(command, "--kv-transfer-config")["kv_connector_extra_config"]
        return str(extra["ring_size"])

    assert size() == "4096MiB"
    assert size("-dp", "4") == "1024MiB"
    assert size("--data-parallel-size=4", "--data_parallel_size_local", "2") == "2048MiB"


def test_the_notes_say_how_many_tokens_the_ring_holds(model: str) -> None:
    options = ServeOptions(model, layers="2,18", ring="qwen", ring_size="1MiB")
    # 2 layers x 4096 x 2 bytes and 8 bytes of token id: 16,392 bytes each.
    assert any("about 63 tokens of 16.0 KiB" in note for note in make_plan(options).notes)
    full = ServeOptions(**{**vars(options), "vllm_flags": ("--dtype", "float32")})
    assert any("about 31 tokens of 32.0 KiB" in note for note in make_plan(full).notes)
    assert any("shmconn drain qwen --to DIR" in note for note in make_plan(options).notes)


def test_print_shows_a_command_for_the_shell_and_starts_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ServeOptions(model, ring="qwen", ring_size="1MiB", print_only=True)
    assert serve.run(options) == 0
    out = capsys.readouterr().out
    assert shlex.split(out) == build_command(options)
    assert out.count("\n") == 1


def test_a_missing_vllm_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="vLLM is not installed for"):
        serve.run(ServeOptions(model, ring_size="1MiB"))


def test_plugins_shut_out_by_the_user_do_not_lose_the_connector(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def module_path() -> object:
        config = flag(build_command(ServeOptions(model)), "--kv-transfer-config")
        return config.get("kv_connector_module_path")

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert module_path() is None
    monkeypatch.setenv("VLLM_PLUGINS", "lora,shmconn")
    assert module_path() is None
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert module_path() == "shmconn.connector"


def test_a_multimodal_configuration_gives_its_text_model(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 28, "hidden_size": 2048}
    config = {"hidden_size": 7, "num_hidden_layers": 3, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path)) == ModelShape(28, 2048)


def test_sizes_left_to_the_model_class_come_from_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_shape(str(tmp_path)) == ModelShape(32, 4096)


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "cannot read the model's"), ("[]", "not a JSON object"), (None, "without a config")],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(OptionError, match=says) as caught:
        read_shape(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_model_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(OptionError, match="model './no-such-folder'"):
        read_shape("./no-such-folder")


def test_run_becomes_the_server_so_that_signals_reach_it(model: str, tmp_path: Path) -> None:
    # A stand-in for the server's module shows who runs and with which arguments.
    for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "vllm/entrypoints/openai/api_server.py").write_text(
        "import json, os, sys\nprint(json.dumps([os.getpid(), sys.argv[1:]]))\n"
    )
    code = f"from reader.serve import *; run(ServeOptions({model!r}, ring_size='1MiB'))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    pid, arguments = json.loads(out)
    assert pid == process.pid
    assert arguments[:2] == ["--model", model]
