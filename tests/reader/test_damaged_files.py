# SPDX-License-Identifier: Apache-2.0
"""Files that were cut, lengthened, zeroed, flipped or swapped: no reader of ours takes a wrong row.

Each damage is done to a real file of a drain's sink, and read by each of our ways to read it.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import figures

from reader.peek import look_at
from reader.sinks import SinkOptions, open_sink
from reader.verify.files import read_samples
from shmconn.errors import FileCorrupt, ShmConnError
from shmconn.integrations.vllm import load_hidden_states
from shmconn.shards import ShardDataset

SAMPLES = 4
Row = tuple[str, torch.Tensor, torch.Tensor]


def by_dataset(folder: Path) -> Iterator[Row]:
    dataset = ShardDataset(folder)
    for index in range(len(dataset)):
        item = dataset[index]
        yield item["metadata"]["handle"], item["hidden_states"], item["token_ids"]


def by_inspect_of_shards(folder: Path) -> Iterator[Row]:
    for index in range(SAMPLES):
        look = look_at(str(folder / "shard-00000.safetensors"), index)
        yield look.facts["handle"], look.states, look.token_ids


def by_inspect_of_files(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("*.safetensors")):
        look = look_at(str(path), 0)
        yield look.facts["handle"], look.states, look.token_ids


def by_verify(folder: Path) -> Iterator[Row]:
    samples, bad = read_samples(folder)
    for sample in samples:
        yield sample.handle, sample.hidden_states(), sample.token_ids
    if bad:
        raise FileCorrupt(bad[0].name, "file", bad[0].reason)


WAYS: list[tuple[str, Callable[[Path], Iterator[Row]]]] = [
    ("shards", by_dataset),
    ("shards", by_inspect_of_shards),
    ("shards", by_verify),
    ("safetensors", by_inspect_of_files),
    ("safetensors", by_verify),
    ("vllm", by_verify),
]


def damages(source: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """What may have become of a file."""
    chance = random.Random(seed)
    length = 8 + int.from_bytes(source[:8], "little")
    ends = [0, 1, 7, 8, 9, length - 1, length, length + 1, len(source) // 2, len(source) - 1]
    for end in [*ends, *(chance.randrange(len(source)) for _ in range(20))]:
        yield f"cut at {end}", source[:end]
    for extra in (b"\0", b"?" * 64, bytes(4096)):
        yield f"{len(extra)} more", source + extra
    for start in range(length - length % 4096, len(source), 4096):
        page = source[start : start + 4096]
        yield (
            f"page {start} zeroed",
            source[:start] + bytes(len(page)) + source[start + len(page) :],
        )
    for _ in range(60):
        at = chance.randrange(len(source))
        changed = bytes([source[at] ^ 1 << chance.randrange(8)])
        yield f"a bit of byte {at} flipped", source[:at] + changed + source[at + 1 :]


@pytest.mark.parametrize(("form", "way"), WAYS)
def test_no_damage_of_a_file_gives_a_wrong_row(tmp_path: Path, make_sample, form, way) -> None:
    sink = open_sink(form, SinkOptions(path=str(tmp_path)))
    wanted = {}
    for number in range(SAMPLES):
        sample = make_sample(f"s{number}", tokens=200 + number, hidden=16)
        sink.write(sample)
        wanted[str(sample.handle)] = sample.hidden_states, sample.token_ids
    sink.close()
    victim = sorted(tmp_path.glob("*.safetensors"))[0]
    source = victim.read_bytes()
    counts = {"refused": 0, "right": 0, "wrong": 0}
    wrong = []

    def look() -> str:
        try:
            for handle, states, token_ids in way(tmp_path):
                expected = wanted.get(handle)
                same = expected is not None and (
                    states.dtype == expected[0].dtype
                    and states.shape == expected[0].shape
                    and torch.equal(states, expected[0])
                    and torch.equal(token_ids, expected[1])
                )
                if not same:
                    return "wrong"
        except ShmConnError:
            return "refused"
        return "right"

    assert look() == "right"
    for what, data in damages(source, seed=6):
        if data == source:
            continue
        victim.write_bytes(data)
        outcome = look()
        counts[outcome] += 1
        wrong += [what] if outcome == "wrong" else []
    figures.record(
        "27",
        f"damaged files of format {form}, read {way.__name__}",
        trials=sum(counts.values()),
        exercised=counts["refused"],
        failures=counts["wrong"],
    )
    assert wrong == []
    assert counts["refused"] > 60
    victim.write_bytes(source)
    assert look() == "right"


@pytest.mark.parametrize("form", ["safetensors", "vllm"])
def test_a_file_that_is_damaged_is_refused_by_the_loader(tmp_path, make_sample, form) -> None:
    sink = open_sink(form, SinkOptions(path=str(tmp_path)))
    sample = make_sample("x", tokens=2000)
    sink.write(sample)
    sink.close()
    path = tmp_path / "x.safetensors"
    assert torch.equal(load_hidden_states(path)["hidden_states"], sample.hidden_states)
    source = path.read_bytes()
    refused = 0
    for what, data in damages(source, seed=7):
        path.write_bytes(data)
        try:
            loaded = load_hidden_states(path)
        except ShmConnError as error:
            assert str(path) in str(error), what
            refused += 1
            continue
        assert torch.equal(loaded["hidden_states"], sample.hidden_states), what
        assert torch.equal(loaded["token_ids"], sample.token_ids), what
    assert refused > 60


def test_a_checksum_is_the_same_with_and_without_a_digest_of_the_file(
    tmp_path, make_sample
) -> None:
    sample = make_sample("x", tokens=5000)
    files = []
    for checksum in (False, True):
        sink = open_sink(
            "safetensors", SinkOptions(path=str(tmp_path / str(checksum)), checksum=checksum)
        )
        sink.write(sample)
        sink.close()
        files.append((tmp_path / str(checksum) / "x.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_dataset_asks_for_each_checksum_once(tmp_path, make_sample, monkeypatch) -> None:
    sink = open_sink("shards", SinkOptions(path=str(tmp_path)))
    for _ in range(3):
        sink.write(make_sample())
    sink.close()
    asked = []
    monkeypatch.setattr("shmconn.shards.check", lambda file, *rest: asked.append(file))
    dataset = ShardDataset(tmp_path)
    for index in (0, 1, 2, -1, 0, 1, 2):
        dataset[index]
    assert len(asked) == 3
    with pytest.raises(IndexError):
        dataset[3]
