# SPDX-License-Identifier: Apache-2.0
"""Shards: many samples in one file, whole after any death, read back at random."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from reader import shard_file
from reader.folder import Folder
from reader.sinks import SinkOptions, Stored, open_sink
from reader.sinks.shards import ShardsSink
from shmconn.errors import OptionError, SegmentCorrupt
from shmconn.shards import ShardDataset

MIB = 1 << 20


def make_sink(path: Path, **options: object) -> ShardsSink:
    sink = open_sink("shards", SinkOptions(path=str(path), shard_size=MIB, **options))
    assert isinstance(sink, ShardsSink)
    return sink


def shards(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != "manifest.jsonl")


def check(path: Path, samples: list) -> None:
    """The dataset holds exactly these samples, and the library can read the files."""
    dataset = ShardDataset(path)
    found = {item["metadata"]["handle"]: item for item in (dataset[i] for i in range(len(dataset)))}
    assert len(dataset) == len(found)
    assert set(found) == {str(sample.handle) for sample in samples}
    for sample in samples:
        item = found[str(sample.handle)]
        assert torch.equal(item["hidden_states"], sample.hidden_states)
        assert item["hidden_states"].dtype == sample.hidden_states.dtype
        assert torch.equal(item["token_ids"], sample.token_ids)
        assert item["metadata"]["request_id"] == sample.request_id
    total = 0
    for name in shards(path):
        with safe_open(path / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                total += file.get_tensor(key).numel() > 0 and key.endswith("token_ids")
    assert total == sum(sample.tokens > 0 for sample in samples)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_samples_of_all_sizes_and_dtypes_come_back_from_shards(
    tmp_path, make_sample, dtype
) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(f"t{i}", dtype=dtype, tokens=i * i % 97, hidden=33) for i in range(300)]
    stored = [sink.write(sample) for sample in samples]
    sink.close()
    check(tmp_path, samples)
    assert {item.file for item in stored} == set(shards(tmp_path))
    assert sum(item.new_file for item in stored) == len(shards(tmp_path)) > 1


def test_several_writers_fill_shards_without_a_hole(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(tokens=1 + i % 300, hidden=33) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sink.write, samples))
    sink.close()
    check(tmp_path, samples)


def die(sink: ShardsSink) -> None:
    """End like a kill: nothing is sealed, descriptors close."""
    for shard in sink._open:
        os.close(shard.fd)


@pytest.mark.parametrize("torn", [0, 1, 100])
def test_a_killed_drains_open_shard_is_gone_on_with(tmp_path, make_sample, torn) -> None:
    samples = [make_sample(tokens=20) for _ in range(10)]
    sink = make_sink(tmp_path)
    for sample in samples[:5]:
        sink.write(sample)
    die(sink)
    with open(tmp_path / "shard-00000.safetensors.part", "ab") as file:
        file.write(b"?" * torn)  # a sample that was being written at the kill
    sink = make_sink(tmp_path)
    assert sink.write(samples[4]) == Stored("shard-00000.safetensors", 20 * (8 + 32), fresh=False)
    for sample in samples[5:]:
        sink.write(sample)
    sink.close()
    assert shards(tmp_path) == ["shard-00000.safetensors"]
    check(tmp_path, samples)


def test_a_kill_while_sealing_is_finished_by_the_next_drain(
    tmp_path, make_sample, monkeypatch
) -> None:
    samples = [make_sample(tokens=20) for _ in range(3)]
    sink = make_sink(tmp_path)
    for sample in samples:
        sink.write(sample)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sink.folder, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            sink.close()
    die(sink)
    make_sink(tmp_path).close()
    assert shards(tmp_path) == ["shard-00000.safetensors"]
    check(tmp_path, samples)


def test_an_open_shard_of_a_living_drain_is_left_alone(tmp_path, make_sample) -> None:
    first, second = make_sink(tmp_path), make_sink(tmp_path)
    a, b = make_sample(tokens=5), make_sample(tokens=6)
    first.write(a)
    third = make_sink(tmp_path)
    second.write(b)
    third.close()
    assert shards(tmp_path) == ["shard-00000.safetensors.part", "shard-00001.safetensors.part"]
    first.close()
    second.close()
    check(tmp_path, [a, b])


def test_a_shard_without_one_whole_sample_is_removed(tmp_path, make_sample, monkeypatch) -> None:
    sink = make_sink(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("reader.sinks.shards.write_at", full)
    with pytest.raises(OSError, match="No space"):
        sink.write(make_sample())
    die(sink)
    make_sink(tmp_path).close()
    assert shards(tmp_path) == []


def test_a_sample_that_the_disk_refused_leaves_its_room_to_its_own_retry(
    tmp_path, make_sample, monkeypatch
) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(tokens=20) for _ in range(3)]
    real = shard_file.write_at

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sink.write(samples[0])
    monkeypatch.setattr("reader.sinks.shards.write_at", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            sink.write(samples[1])
    monkeypatch.setattr("reader.sinks.shards.write_at", real)
    sink.write(samples[2])
    sink.write(samples[1])
    tail = sink._open[0].tail
    sink.close()
    assert tail - 8 - sink_header(tmp_path) == 3 * shard_file.region_size(20 * 40)
    check(tmp_path, samples)


def sink_header(path: Path) -> int:
    with open(path / "shard-00000.safetensors", "rb") as file:
        return int.from_bytes(file.read(8), "little")


def test_a_sample_whose_shard_cannot_be_sealed_is_stored_and_the_next_write_seals_it(
    tmp_path, make_sample, monkeypatch, caplog
) -> None:
    sink = make_sink(tmp_path)
    large = make_sample(tokens=40_000)
    small = make_sample()
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(5, "EIO")))
        assert sink.write(large).fresh
        assert "cannot be sealed yet" in caplog.text
        with pytest.raises(OSError, match="EIO"):
            sink.write(small)
    sink.write(small)
    assert "shard-00000.safetensors" in shards(tmp_path)
    sink.close()
    check(tmp_path, [large, small])
    assert handles(tmp_path) == [str(large.handle), str(small.handle)]


def handles(path: Path) -> list[str]:
    """The manifest's, in order."""
    lines = (path / "manifest.jsonl").read_text().splitlines()
    return [json.loads(line)["handle"] for line in lines]


def test_a_taken_name_holds_the_next_sample_back_and_repeats_none(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    large, small = make_sample(tokens=40_000), make_sample()
    first = make_sample()
    sink.write(first)
    (tmp_path / "shard-00000.safetensors").write_text("a stranger's")
    assert sink.write(large).fresh
    for _ in range(3):
        with pytest.raises(FileExistsError) as refused:
            sink.write(small)
        assert refused.value.filename == "shard-00000.safetensors"
    (tmp_path / "shard-00000.safetensors").unlink()
    sink.write(small)
    sink.close()
    check(tmp_path, [first, large, small])
    assert handles(tmp_path) == [str(sample.handle) for sample in (first, large, small)]


def test_of_two_shards_that_wait_one_that_cannot_be_sealed_keeps_no_other(
    tmp_path, make_sample
) -> None:
    first, second = make_sink(tmp_path), make_sink(tmp_path)
    a, b = make_sample(tokens=20), make_sample(tokens=20)
    first.write(a)
    second.write(b)
    die(first)
    die(second)
    (tmp_path / "shard-00000.safetensors").write_text("a stranger's")
    sink = make_sink(tmp_path)
    with pytest.raises(FileExistsError):
        sink.close()
    assert "shard-00001.safetensors" in shards(tmp_path)
    die(sink)
    (tmp_path / "shard-00000.safetensors").unlink()
    make_sink(tmp_path).close()
    check(tmp_path, [a, b])


def test_what_a_mate_that_was_killed_had_recorded_is_not_written_again(
    tmp_path, make_sample
) -> None:
    first, second = make_sink(tmp_path), make_sink(tmp_path)
    samples = [make_sample(tokens=20) for _ in range(3)]
    first.write(samples[0])
    second.write(samples[1])
    first.write(samples[2])
    die(first)
    assert not second.write(samples[2]).fresh
    second.close()  # the killed one's shard, too
    check(tmp_path, samples)
    assert handles(tmp_path) == [str(sample.handle) for sample in samples]


def test_a_number_that_a_mate_has_sealed_is_not_taken_again(tmp_path, make_sample) -> None:
    sinks = [make_sink(tmp_path), make_sink(tmp_path)]
    samples = [make_sample(tokens=40_000) for _ in range(6)]
    for number, sample in enumerate(samples):
        sinks[number % 2].write(sample)
    for sink in sinks:
        sink.close()
    assert len(shards(tmp_path)) == 6
    check(tmp_path, samples)


def test_a_new_shard_that_a_mate_takes_for_a_dead_ones_gets_another_number(
    tmp_path, make_sample, monkeypatch
) -> None:
    sink = make_sink(tmp_path)
    real, looks = Folder.lock, []

    def lock(folder: Folder, fd: int, name: str) -> bool | None:
        if not looks:
            looks.append(name)
            make_sink(tmp_path).close()  # sweeps what is not locked yet
        return real(folder, fd, name)

    monkeypatch.setattr(Folder, "lock", lock)
    sample = make_sample()
    sink.write(sample)
    sink.close()
    assert looks == ["shard-00000.safetensors.part"]
    assert shards(tmp_path) == ["shard-00001.safetensors"]
    check(tmp_path, [sample])


def test_a_shard_that_a_mate_seals_between_look_and_lock_is_left_alone(
    tmp_path, make_sample, monkeypatch
) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(), make_sample()]
    sink.write(samples[0])
    die(sink)
    real, looks = Folder.lock, []

    def lock(folder: Folder, fd: int, name: str) -> bool | None:
        if not looks:
            looks.append(name)
            make_sink(tmp_path).close()
        return real(folder, fd, name)

    monkeypatch.setattr(Folder, "lock", lock)
    sink = make_sink(tmp_path)
    sink.write(samples[1])
    sink.close()
    assert shards(tmp_path) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    check(tmp_path, samples)


def test_a_number_whose_shard_was_taken_away_is_not_used_again(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    gone = make_sample(tokens=20)
    sink.write(gone)
    sink.close()
    (tmp_path / "shard-00000.safetensors").unlink()
    sink = make_sink(tmp_path)
    fresh = make_sample(tokens=20)
    sink.write(fresh)
    die(sink)
    make_sink(tmp_path).close()
    assert shards(tmp_path) == ["shard-00001.safetensors"]
    check(tmp_path, [fresh])


def test_metadata_above_the_usual_room_gets_a_shard_that_holds_it(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(metadata={"text": '"' * 50_000}) for _ in range(4)]
    for sample in samples:
        sink.write(sample)
    sink.close()
    check(tmp_path, samples)


def test_the_manifest_says_where_in_its_shard_a_sample_is(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path, checksum=True)
    samples = [make_sample(tokens=20) for _ in range(3)]
    for sample in samples:
        sink.write(sample)
    sink.close()
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    for line, sample in zip(lines, samples, strict=True):
        entry = json.loads(line)
        with open(tmp_path / entry["file"], "rb") as file:
            file.seek(entry["offset"])
            data = file.read(entry["bytes"])
        assert data == bytes(sample.token_ids_bytes) + bytes(sample.states_bytes)


def test_a_dataset_works_in_worker_processes(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    samples = [make_sample(tokens=3 + i) for i in range(6)]
    for sample in samples:
        sink.write(sample)
    sink.close()
    loader = torch.utils.data.DataLoader(
        ShardDataset(tmp_path), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    found = [item["token_ids"].tolist() for item in loader]
    assert found == [sample.token_ids.tolist() for sample in samples]


def test_changing_a_tensor_in_place_changes_no_file(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    sample = make_sample(tokens=3)
    sink.write(sample)
    sink.close()
    ShardDataset(tmp_path)[0]["hidden_states"].zero_()
    check(tmp_path, [sample])


def test_every_flipped_header_byte_is_an_error_or_harmless(tmp_path, make_sample) -> None:
    sink = make_sink(tmp_path)
    sample = make_sample(tokens=3)
    sink.write(sample)
    sink.close()
    source = (tmp_path / "shard-00000.safetensors").read_bytes()
    length = len(source[8 : 8 + sink_header(tmp_path)].rstrip(b" ")) + 8
    out = tmp_path / "flipped"
    outcomes = {"error": 0, "harmless": 0}
    for position in range(0, length, 3):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        data = bytearray(source)
        data[position] ^= 0x15
        (out / "shard-00000.safetensors").write_bytes(data)
        try:
            dataset = ShardDataset(out)
            for index in range(len(dataset)):
                dataset[index]
            outcomes["harmless"] += 1
        except (SegmentCorrupt, json.JSONDecodeError):
            outcomes["error"] += 1
    assert outcomes["error"] > 50


def test_a_folder_without_shards_says_so(tmp_path) -> None:
    with pytest.raises(OptionError, match=r"no shard-\*.safetensors"):
        ShardDataset(tmp_path)


def test_a_shard_size_too_small_is_refused(tmp_path) -> None:
    with pytest.raises(OptionError, match="at least 1MiB"):
        open_sink("shards", SinkOptions(path=str(tmp_path), shard_size=1000))
