# SPDX-License-Identifier: Apache-2.0
"""One folder holds samples of one kind: the same layers, hidden size and dtype."""

import json
import shutil
from pathlib import Path

import pytest

from reader.sinks import SinkOptions, open_sink
from reader.verify.files import read_samples
from shmconn.errors import OptionError
from shmconn.shards import ShardDataset

FORMATS = ["safetensors", "shards", "vllm", "modelopt"]
OTHERS = [{"layers": 3}, {"hidden": 16}, {"dtype": "float16"}]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_sample_of_another_kind_is_refused_and_both_are_named(
    tmp_path: Path, make_sample, form: str, other: dict[str, object]
) -> None:
    options = SinkOptions(path=str(tmp_path), skip_tags=True)
    first, second = make_sample("x", tokens=5, number=1), make_sample("x", **other)
    mates = open_sink(form, options)
    sink = open_sink(form, options)
    sink.write(first)
    for later in (sink, mates):  # in the same run, and by a mate that began with an empty folder
        with pytest.raises(OptionError, match=r"holds samples of layers \[1, 2\], hidden size 8"):
            later.write(second)
    sink.close()
    mates.close()
    again = open_sink(form, options)
    with pytest.raises(OptionError, match="One folder holds one kind: drain into another"):
        again.write(second)
    # Not even where the tag and the token ids are the same.
    with pytest.raises(OptionError, match="One folder holds one kind"):
        again.write(make_sample("x", tokens=5, number=1, generation="1" * 32, **other))
    assert not again.write(first).fresh
    again.close()
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("form", ["safetensors", "shards", "vllm"])
def test_of_two_drains_that_begin_together_the_second_kind_leaves_no_sample(
    tmp_path: Path, make_sample, form: str
) -> None:
    options = SinkOptions(path=str(tmp_path))
    ours, mates = open_sink(form, options), open_sink(form, options)
    real = ours.manifest.append

    def late(entry) -> None:
        mates.write(make_sample())  # after our look, before our line
        real(entry)

    ours.manifest.append = late
    with pytest.raises(OptionError, match="One folder holds one kind"):
        ours.write(make_sample(dtype="float32"))
    ours.close()
    mates.close()
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 1
    samples, bad = read_samples(tmp_path)
    assert [sample.dtype for sample in samples] == ["bfloat16"]
    assert bad == []


def test_lines_of_an_earlier_version_are_gone_on_with(tmp_path: Path, make_sample) -> None:
    options = SinkOptions(path=str(tmp_path))
    sink = open_sink("safetensors", options)
    old = make_sample()
    sink.write(old)
    sink.close()
    path = tmp_path / "manifest.jsonl"
    line = json.loads(path.read_text())
    del line["identity"]
    path.write_text(json.dumps(line, separators=(",", ":")) + "\n")
    sink = open_sink("safetensors", options)
    assert not sink.write(old).fresh
    assert sink.write(make_sample()).fresh
    sink.close()


def test_shards_of_two_kinds_in_one_folder_are_no_dataset(tmp_path: Path, make_sample) -> None:
    for name, values in (("a", {}), ("b", {"dtype": "float16"})):
        sink = open_sink("shards", SinkOptions(path=str(tmp_path / name)))
        sink.write(make_sample(**values))
        sink.close()
    shard = "shard-00000.safetensors"
    shutil.copy(tmp_path / "b" / shard, tmp_path / "a" / "shard-00001.safetensors")
    with pytest.raises(OptionError, match="more than one kind, shard-00000.*bfloat16; shard-00001"):
        ShardDataset(tmp_path / "a")
