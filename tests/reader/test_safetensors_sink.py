# SPDX-License-Identifier: Apache-2.0
"""One safetensors file per sample: whole, in its folder, under its own name."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from reader.folder import Folder
from reader.sinks import SinkOptions, open_sink
from reader.sinks.safetensors import SafetensorsSink
from shmconn.errors import OptionError


def make_sink(path: Path, **options: object) -> SafetensorsSink:
    sink = open_sink("safetensors", SinkOptions(path=str(path), **options))
    assert isinstance(sink, SafetensorsSink)
    return sink


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != "manifest.jsonl")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_library_reads_back_every_byte(tmp_path, make_sample, dtype, tokens) -> None:
    sample = make_sample("hs_1", dtype=dtype, tokens=tokens)
    stored = make_sink(tmp_path).write(sample)
    found = load_file(tmp_path / "hs_1.safetensors")
    assert stored.file == "hs_1.safetensors"
    assert stored.bytes == (tmp_path / "hs_1.safetensors").stat().st_size
    assert torch.equal(found["hidden_states"], sample.hidden_states)
    assert found["hidden_states"].dtype == sample.hidden_states.dtype
    assert torch.equal(found["token_ids"], sample.token_ids)


def test_the_header_says_who_and_what_the_sample_is(tmp_path, make_sample) -> None:
    sample = make_sample("a", request_id="cmpl-ż\0\ud800", metadata={"positions": [1, 2]})
    make_sink(tmp_path).write(sample)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["handle"] == str(sample.handle)
    assert metadata["request_id"] == "cmpl-ż\0?"
    assert metadata["tag"] == "a"
    assert json.loads(metadata["layer_ids"]) == [1, 2]
    assert json.loads(metadata["shape"]) == list(sample.shape)
    assert metadata["dtype"] == "bfloat16"
    assert metadata["ring"] == "q"
    assert metadata["generation"] == "0" * 32
    assert json.loads(metadata["metadata"]) == {"positions": [1, 2]}


@pytest.mark.parametrize(("tokens", "step"), [(3, 64), (1 << 18, 4096)])
def test_data_is_aligned_for_a_mapping_and_a_copy(tmp_path, make_sample, tokens, step) -> None:
    sample = make_sample("a", tokens=tokens)
    assert (sample.nbytes > 1 << 20) == (step == 4096)
    make_sink(tmp_path).write(sample)
    with open(tmp_path / "a.safetensors", "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    # Ids and states for a load by mmap, and the states, behind the ids, for a fast copy.
    assert header % 8 == 0 and (8 + header + tokens * 8) % step == 0


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "x" * 300, "a\0b", "żółw", "..", "."])
def test_a_hostile_request_id_stays_in_the_folder(tmp_path, make_sample, name) -> None:
    out = tmp_path / "out"
    sample = make_sample(request_id=name)
    stored = make_sink(out).write(sample)
    digest = hashlib.sha256(str(sample.handle).encode()).hexdigest()[:8]
    assert stored.file.endswith(f"-{digest}.safetensors")
    assert files(out) == [stored.file]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_same_tag_twice_gives_two_files(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    first, second = make_sample("x"), make_sample("x")
    sink.write(first)
    sink.write(second)
    digest = hashlib.sha256(str(second.handle).encode()).hexdigest()[:8]
    assert files(tmp_path) == [f"x-{digest}.safetensors", "x.safetensors"]
    assert torch.equal(load_file(tmp_path / "x.safetensors")["token_ids"], first.token_ids)


def test_a_tag_may_not_take_the_name_that_another_sample_got(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    first, second = make_sample("x"), make_sample("x")
    sink.write(first)
    taken = sink.write(second).file
    thief = make_sample(taken.removesuffix(".safetensors"))
    sink.write(thief)
    assert torch.equal(load_file(tmp_path / taken)["token_ids"], second.token_ids)
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("keep_manifest", [True, False])
def test_a_sample_that_comes_again_keeps_its_one_file_untouched(
    tmp_path, make_sample, keep_manifest
) -> None:
    first, again = make_sample("x"), make_sample("x")
    sink = make_sink(tmp_path)
    sink.write(first)
    stored = sink.write(again)
    before = (tmp_path / stored.file).stat()
    sink.close()
    if not keep_manifest:
        (tmp_path / "manifest.jsonl").unlink()
    repeated = make_sink(tmp_path).write(again)
    after = (tmp_path / stored.file).stat()
    assert repeated == type(repeated)(stored.file, stored.bytes, fresh=False)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(files(tmp_path)) == 2


def test_a_sample_whose_file_was_cut_is_written_again_in_place(tmp_path, make_sample) -> None:
    sample = make_sample("x", tokens=50)
    make_sink(tmp_path).write(sample)
    os.truncate(tmp_path / "x.safetensors", 900)
    stored = make_sink(tmp_path).write(sample)
    assert stored.fresh
    assert files(tmp_path) == ["x.safetensors"]
    assert torch.equal(load_file(tmp_path / "x.safetensors")["token_ids"], sample.token_ids)


def test_a_link_with_the_samples_name_is_neither_followed_nor_replaced(
    tmp_path, make_sample
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("keep me")
    (out / "x.safetensors").symlink_to(victim)
    (out / "y.safetensors").symlink_to(tmp_path / "nowhere")
    sink = make_sink(out)
    for tag in "xy":
        assert sink.write(make_sample(tag)).file != f"{tag}.safetensors"
    assert victim.read_text() == "keep me"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_or_pipe_with_the_samples_name_is_left_alone(tmp_path, make_sample) -> None:
    (tmp_path / "x.safetensors").mkdir()
    os.mkfifo(tmp_path / "y.safetensors")
    sink = make_sink(tmp_path)
    assert sink.write(make_sample("x")).file.startswith("x-")
    assert sink.write(make_sample("y")).file.startswith("y-")


def test_a_folder_that_is_a_link_is_resolved_once(tmp_path, make_sample) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    make_sink(tmp_path / "link").write(make_sample("x"))
    assert files(tmp_path / "real") == ["x.safetensors"]


def test_an_output_that_is_a_file_is_an_error_with_its_path(tmp_path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OptionError, match="cannot write to .*out"):
        make_sink(tmp_path / "out")


def test_an_unknown_format_lists_the_known_ones(tmp_path) -> None:
    with pytest.raises(OptionError, match="safetensors"):
        open_sink("pickle", SinkOptions(path=str(tmp_path)))


def test_a_full_disk_leaves_nothing_and_the_sample_can_be_written_later(
    tmp_path, make_sample, monkeypatch
) -> None:
    sink = make_sink(tmp_path)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 500:
            real(fd, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    sample = make_sample("x", tokens=100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            sink.write(sample)
    assert files(tmp_path) == []
    assert sink.write(sample).file == "x.safetensors"


def test_only_the_temporary_files_of_the_dead_are_swept(tmp_path) -> None:
    folder = Folder(str(tmp_path))
    (tmp_path / ".shmconn-0123456789abcdef.tmp").write_text("half")
    (tmp_path / ".other.tmp").write_text("not ours")
    with folder.temporary() as output:
        second = Folder(str(tmp_path))
        assert files(tmp_path) == sorted([".other.tmp", output.name])
        second.close()
    folder.close()


def test_a_folder_that_was_replaced_is_opened_anew(tmp_path, make_sample) -> None:
    out = tmp_path / "out"
    sink = make_sink(out)
    sink.write(make_sample("x"))
    out.rename(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        sink.write(make_sample("y"))
    out.mkdir()
    sink.write(make_sample("y"))
    assert files(out) == ["y.safetensors"]


def test_writers_of_one_process_never_share_a_name(tmp_path, make_sample) -> None:
    from concurrent.futures import ThreadPoolExecutor

    sink = make_sink(tmp_path)
    samples = [make_sample("same") for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(sink.write, samples))
    assert len({item.file for item in stored}) == 40
    for sample, item in zip(samples, stored, strict=True):
        assert torch.equal(load_file(tmp_path / item.file)["token_ids"], sample.token_ids)
