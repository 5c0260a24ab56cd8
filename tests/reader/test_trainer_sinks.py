# SPDX-License-Identifier: Apache-2.0
"""Files for trainers, each read by the consumer's own loader in a process of its own.

Where a consumer is not installed its test is skipped; what the files hold is tested anyway.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reader.final_norm import FinalNorm
from reader.loss_masks import LossMasks
from reader.sinks import SinkOptions, open_sink
from shmconn.errors import OptionError, ShmConnError

HIDDEN = 8
LAYERS = 3  # of the tiny model; the samples have layers 1, 2, 3
NOT_INSTALLED = 77


def consume(code: str, *words: object) -> str:
    """Run a consumer; its own warnings are no concern of ours."""
    text = f"import sys\ntry:\n{_indent(code)}\nexcept ImportError as e:\n  print(e); sys.exit(77)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == NOT_INSTALLED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


def _indent(code: str) -> str:
    return "\n".join(f"  {line}" for line in code.strip().splitlines())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, with a norm that does something."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
    )
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


def save(model: torch.nn.Module, folder: Path) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_f" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    model.save_pretrained(folder)
    return folder


def masks_file(folder: Path, **masks: list[int]) -> str:
    path = folder / "masks.jsonl"
    lines = [json.dumps({"tag": tag, "loss_mask": mask}) for tag, mask in masks.items()]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def normed(model: Path, states: torch.Tensor) -> torch.Tensor:
    """RMSNorm by its formula, for the tiny Llama."""
    weight = load_file(model / "model.safetensors")["model.norm.weight"].double()
    wide = states.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel"])
def test_the_final_norm_is_the_models_own(tmp_path, name) -> None:
    import transformers

    config = getattr(transformers, name).config_class(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = getattr(transformers, name)(config).eval()
    save(model, tmp_path)
    norm = getattr(model.base_model, "norm", None) or model.base_model.ln_f
    seen = []
    norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.no_grad():
        model(torch.arange(9)[None])
    before, after = seen[0]
    ours = FinalNorm(str(tmp_path))
    torch.testing.assert_close(ours(before), after)
    assert not torch.allclose(before, after)
    assert ours.layers == 2


def test_a_last_layer_that_is_not_the_models_last_is_refused(model) -> None:
    with pytest.raises(OptionError, match="last layer is 2, the last of .* is 3"):
        FinalNorm(str(model)).check((1, 2))


def test_a_model_that_is_no_folder_is_refused(tmp_path) -> None:
    with pytest.raises(OptionError, match="not a folder with a config"):
        FinalNorm(str(tmp_path))


def test_a_mask_may_be_one_longer_than_the_sample_and_no_more(tmp_path, make_sample) -> None:
    masks = LossMasks(masks_file(tmp_path, a=[0, 1, 1], b=[1] * 4, c=[1]))
    assert masks.of(make_sample("a", tokens=3)).tolist() == [0, 1, 1]
    assert masks.of(make_sample("a", tokens=2)).tolist() == [0, 1]
    for tag in "bc":
        with pytest.raises(ShmConnError, match=f"loss mask of tag '{tag}'"):
            masks.of(make_sample(tag, tokens=2))


def test_a_sample_without_a_mask_is_named(tmp_path, make_sample) -> None:
    masks = LossMasks(masks_file(tmp_path, a=[1]))
    with pytest.raises(ShmConnError, match="no loss mask for tag 'zz'"):
        masks.of(make_sample("zz"))


@pytest.mark.parametrize(
    "line", ["x", "[]", '{"tag": "a"}', '{"tag": "a", "loss_mask": [2]}', '{"tag": 1}']
)
def test_a_bad_line_of_the_masks_is_named(tmp_path, line) -> None:
    path = tmp_path / "masks.jsonl"
    path.write_text('{"tag": "a", "loss_mask": [1]}\n' + line + "\n")
    with pytest.raises(OptionError, match="line 2"):
        LossMasks(str(path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "--loss-masks"),
        ({"loss_masks": "all"}, "--model"),
        ({"loss_masks": "all", "strategy": "eagle9"}, "eagle9"),
        ({"loss_masks": "nowhere.jsonl", "strategy": "dflash"}, "nowhere.jsonl"),
    ],
)
def test_specforge_says_what_it_needs_before_it_joins(tmp_path, options, says) -> None:
    with pytest.raises(OptionError, match=says):
        open_sink("specforge", SinkOptions(str(tmp_path), **options))


def specforge(tmp_path, make_sample, model, strategy: str):
    sample = make_sample("c1", tokens=6, layers=LAYERS)
    options = SinkOptions(
        str(tmp_path / "out"),
        model=str(model),
        loss_masks=masks_file(tmp_path, c1=[0, 0, 1, 1, 1, 1]),
        strategy=strategy,
    )
    stored = open_sink("specforge", options).write(sample)
    assert stored.file == "c1.ckpt"
    return sample, torch.load(tmp_path / "out" / "c1.ckpt", weights_only=True, mmap=True)


def test_specforge_eagle3_has_the_last_layer_after_the_norm(tmp_path, make_sample, model) -> None:
    sample, found = specforge(tmp_path, make_sample, model, "eagle3")
    aux = sample.hidden_states[:, :-1].reshape(1, 6, 2 * HIDDEN)
    last = normed(model, sample.hidden_states[:, -1])
    assert torch.equal(found["aux_hidden_state"], aux)
    torch.testing.assert_close(found["hidden_state"][0].double(), last, rtol=0.01, atol=0.01)
    assert torch.equal(found["input_ids"], sample.token_ids)
    assert found["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1]
    assert found["input_ids"].dtype == found["loss_mask"].dtype == torch.int64
    consume(
        """
import torch
from specforge.data.preprocessing import process_offline_eagle3_sample
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
refs = OfflineManifestReader(sys.argv[1], validate_files=True).read()
assert [ref.num_tokens for ref in refs] == [6], refs
batch = process_offline_eagle3_sample(load_feature_file(sys.argv[1] + "/c1.ckpt"), 2048)
assert batch["hidden_state"].shape == (1, 6, 16), batch["hidden_state"].shape
assert batch["target"].shape == (1, 6, 8)
assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 1, 0]]
""",
        tmp_path / "out",
    )


def test_specforge_dflash_keeps_all_layers_side_by_side(tmp_path, make_sample, model) -> None:
    sample, found = specforge(tmp_path, make_sample, model, "dflash")
    assert torch.equal(found["hidden_states"], sample.hidden_states.flatten(1)[None])
    consume(
        """
from specforge.data.preprocessing import process_offline_dflash_sample
from specforge.runtime.data_plane.feature_store import load_feature_file
batch = process_offline_dflash_sample(load_feature_file(sys.argv[1] + "/c1.ckpt"), 2048)
assert batch["hidden_states"].shape == (1, 6, 24)
""",
        tmp_path / "out",
    )


def test_specforge_dspark_has_both(tmp_path, make_sample, model) -> None:
    sample, found = specforge(tmp_path, make_sample, model, "dspark")
    assert torch.equal(found["hidden_states"][0], sample.hidden_states[:, :-1].flatten(1))
    last = normed(model, sample.hidden_states[:, -1])
    torch.testing.assert_close(
        found["target_last_hidden_states"][0].double(), last, rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("prenorm", [True, False])
def test_modelopt_says_whether_the_last_layer_is_before_the_norm(
    tmp_path, make_sample, model, prenorm
) -> None:
    sample = make_sample("c1", tokens=6, layers=LAYERS)
    options = SinkOptions(
        str(tmp_path / "out"),
        model=None if prenorm else str(model),
        loss_masks=masks_file(tmp_path, c1=[0, 0, 1, 1, 1, 1]),
    )
    assert open_sink("modelopt", options).write(sample).file == "c1.pt"
    found = torch.load(tmp_path / "out" / "c1.pt", weights_only=True)
    last = sample.hidden_states[:, -1]
    assert found["hidden_states_prenorm"] is prenorm
    assert torch.equal(found["hidden_states"], last) is prenorm
    assert torch.equal(found["aux_hidden_states"], sample.hidden_states[:, :-1].flatten(1))
    assert found["conversation_id"] == "c1"
    consume(
        f"""
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
item = OfflineSupervisedDataset([sys.argv[1] + "/c1.pt"], answer_only_loss=True)[0]
assert item["base_hidden_prenorm"] is {prenorm}
assert item["aux_hidden_states"].shape == (6, 16)
assert item["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1]
""",
        tmp_path / "out",
    )


def test_one_layer_is_too_few_for_a_format_with_auxiliary_ones(tmp_path, make_sample) -> None:
    sink = open_sink("modelopt", SinkOptions(str(tmp_path)))
    with pytest.raises(ShmConnError, match="auxiliary layers"):
        sink.write(make_sample("a", layers=1))


@pytest.mark.parametrize("keep_manifest", [True, False])
def test_a_torch_file_of_the_sample_itself_is_left_as_it_is(
    tmp_path, make_sample, keep_manifest
) -> None:
    first, second = make_sample("x"), make_sample("x")
    sink = open_sink("modelopt", SinkOptions(str(tmp_path)))
    names = [sink.write(first).file, sink.write(second).file]
    (tmp_path / "y.pt").write_text("not of torch")
    if not keep_manifest:
        (tmp_path / "manifest.jsonl").unlink()
    sink = open_sink("modelopt", SinkOptions(str(tmp_path)))
    assert [sink.write(first), sink.write(second)] == [
        type(sink.write(first))(name, (tmp_path / name).stat().st_size, fresh=False)
        for name in names
    ]
    assert sink.write(make_sample("y")).file.startswith("y-")


def test_speculators_takes_the_files_as_its_own(tmp_path, make_sample) -> None:
    sink = open_sink("safetensors", SinkOptions(str(tmp_path / "hidden_states")))
    for index in range(3):
        sink.write(make_sample(f"hs_{index}", tokens=4 + index, layers=4))
    consume(
        """
from pathlib import Path
from hs_connectors import HiddenStatesBackend
from speculators.data_generation.offline import (
    check_hidden_states, get_existing_hidden_state_indices,
)
from argparse import Namespace
folder = Path(sys.argv[1])
assert get_existing_hidden_state_indices(folder / "hidden_states") == [0, 1, 2]
backend = HiddenStatesBackend.registry["file"]
args = Namespace(hidden_states_path=None)
transfer = backend.from_train_args(args, str(folder))
for index in range(3):
    data = transfer.get_cached(index)
    check_hidden_states(data, data["token_ids"].tolist())
    assert data["hidden_states"].shape == (4 + index, 4, 8)
""",
        tmp_path,
    )


def test_vllms_own_loader_reads_the_files(tmp_path, make_sample) -> None:
    sink = open_sink("vllm", SinkOptions(str(tmp_path)))
    sample = make_sample(request_id="cmpl-1", tokens=5)
    assert sink.write(sample).file == "cmpl-1.safetensors"
    assert (tmp_path / "cmpl-1.safetensors.lock").read_bytes() == b""
    consume(
        """
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states, load_hidden_states,
)
import os
path = sys.argv[1] + "/cmpl-1.safetensors"
data = load_hidden_states(path)
assert set(data) == {"hidden_states", "token_ids"}, data.keys()
assert data["hidden_states"].shape == (5, 2, 8)
assert data["token_ids"].tolist() == [int(word) for word in sys.argv[2].split(",")]
cleanup_hidden_states(path)
assert os.listdir(sys.argv[1]) == ["manifest.jsonl"], os.listdir(sys.argv[1])
""",
        tmp_path,
        ",".join(map(str, sample.token_ids.tolist())),
    )
    assert sink.write(sample).fresh


def test_vllms_lock_goes_when_the_disk_refuses_the_file(tmp_path, make_sample, monkeypatch) -> None:
    import errno
    import os

    sink = open_sink("vllm", SinkOptions(str(tmp_path)))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("reader.folder._rename_new", refuse)
        with pytest.raises(OSError, match="Input/output"):
            sink.write(make_sample("x"))
    assert os.listdir(tmp_path) == ["manifest.jsonl"]


def test_null_keeps_nothing(tmp_path, make_sample) -> None:
    sample = make_sample(tokens=3)
    assert open_sink("null", SinkOptions("null")).write(sample).bytes == sample.nbytes
