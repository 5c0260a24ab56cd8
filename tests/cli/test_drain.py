# SPDX-License-Identifier: Apache-2.0
"""`shmconn drain` beside real producers: everything arrives, once, and every end is told apart."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cli_producer import LAYERS, ids_of, states_of, tokens_of
from safetensors import safe_open

from reader.service import default_group


def samples(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def check(path: Path, numbers: range, tokens: int | None = None) -> None:
    """The folder holds exactly these samples, each byte-equal to what was put."""
    found = []
    for file in samples(path):
        with safe_open(file, "np") as opened:
            metadata = opened.metadata()
            number = int(metadata["request_id"].removeprefix("r"))
            found.append(number)
            count = tokens or tokens_of(number)
            np.testing.assert_array_equal(opened.get_tensor("token_ids"), ids_of(number, count))
            states = opened.get_tensor("hidden_states")
            np.testing.assert_array_equal(states, states_of(number, count))
            assert json.loads(metadata["layer_ids"]) == list(LAYERS)
            assert metadata["tag"] == file.stem
    assert sorted(found) == list(numbers)
    left = {p.name for p in path.iterdir()} - {p.name for p in samples(path)}
    assert left <= {"manifest.jsonl"}


def test_all_samples_become_files_and_the_drain_ends_with_the_stream(
    ring, producer, shmconn, tmp_path
) -> None:
    source = producer()
    source.put(1, 5)
    drain = shmconn("drain", ring, "--to", tmp_path / "out")
    source.put(6, 95)
    source.close()
    assert drain.wait() == 0, drain.err
    check(tmp_path / "out", range(1, 101))
    assert "100 samples" in drain.out
    assert "100 files" in drain.out


def test_a_drain_may_wait_for_its_ring_and_misses_nothing(
    ring, producer, shmconn, tmp_path
) -> None:
    drain = shmconn("drain", ring, "--to", tmp_path, "--wait", 60)
    drain.says("writes to")
    source = producer()
    source.put(1, 20)
    source.close()
    assert drain.wait() == 0, drain.err
    check(tmp_path, range(1, 21))


def test_a_wait_in_vain_ends_with_2_and_leaves_nothing(ring, run, tmp_path) -> None:
    drain = run("drain", ring, "--to", tmp_path, "--wait", 0.5, code=2)
    assert drain.err.count(f"there is no ring '{ring}'") == 1
    assert drain.out == ""
    assert not [entry for entry in os.listdir("/dev/shm") if ring in entry]


def test_a_ring_that_is_not_there_is_named_with_those_that_are(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    drain = run("drain", ring + "x", "--to", tmp_path, code=2)
    assert f"error: there is no ring '{ring}x'" in drain.err
    assert ring in drain.err.split("there are:")[1]
    source.close()


def test_an_output_that_cannot_be_written_is_told_before_joining(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    (tmp_path / "file").write_text("")
    drain = run("drain", ring, "--to", tmp_path / "file", code=2)
    assert "error: cannot write to" in drain.err
    assert str(tmp_path / "file") in drain.err
    groups = json.loads(run("groups", ring, "--json").out)
    assert [group["name"] for group in groups] == [""]
    source.close()


def test_two_outputs_both_get_everything(ring, producer, shmconn, tmp_path) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path / "a", "--to", tmp_path / "b")
    drain.until(lambda: drain.err.count("writes to") == 2)
    source.put(1, 50)
    source.close()
    assert drain.wait() == 0, drain.err
    check(tmp_path / "a", range(1, 51))
    check(tmp_path / "b", range(1, 51))


def test_a_lost_sample_is_counted_by_reason_and_ends_with_3(
    ring, producer, shmconn, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path)
    drain.says("writes to")
    source.put(1, 3)
    source.bury(4, "short")
    source.bury(5, "aborted")
    source.close()
    assert drain.wait() == 3, drain.err
    assert "1 short" in drain.out
    check(tmp_path, range(1, 4))


def test_an_aborted_request_is_no_loss(ring, producer, shmconn, tmp_path) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path)
    drain.says("writes to")
    source.bury(1, "aborted")
    source.close()
    assert drain.wait() == 0, drain.err


def test_a_killed_producer_is_told_after_all_it_published_was_written(
    ring, producer, shmconn, tmp_path
) -> None:
    source = producer()
    source.put(1, 30)
    source.kill()
    drain = shmconn("drain", ring, "--to", tmp_path)
    assert drain.wait() == 4, drain.err
    assert "died" in drain.out
    check(tmp_path, range(1, 31))


def test_a_drain_that_follows_goes_on_with_the_next_generation(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--follow")
    source.put(1, 10)
    source.kill()
    drain.says("died")
    source = producer()
    source.put(11, 10)
    drain.until(lambda: len(samples(tmp_path)) == 20)
    drain.signal(signal.SIGTERM)
    assert drain.wait() == 143, drain.err
    check(tmp_path, range(1, 21))
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_what_is_written_and_keeps_the_place(
    ring, producer, shmconn, run, tmp_path, number, code
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path)
    source.put(1, 10)
    drain.until(lambda: len(samples(tmp_path)) == 10)
    drain.signal(number)
    assert drain.wait() == code, drain.err
    assert "run the same command again" in drain.out
    assert f"shmconn groups rm {ring} {default_group(str(tmp_path))}" in drain.out
    source.put(11, 10)
    source.close()
    again = shmconn("drain", ring, "--to", tmp_path)
    assert again.wait() == 0, again.err
    check(tmp_path, range(1, 21))


def test_a_killed_drain_goes_on_where_it_was_and_rewrites_nothing(
    ring, producer, shmconn, tmp_path
) -> None:
    source = producer(size="32MiB")
    source.put(1, 100)
    drain = shmconn("drain", ring, "--to", tmp_path)
    drain.until(lambda: len(samples(tmp_path)) >= 10)
    drain.kill()
    before = {file.name: file.stat().st_mtime_ns for file in samples(tmp_path)}
    source.put(101, 50)
    source.close()
    again = shmconn("drain", ring, "--to", tmp_path)
    assert again.wait() == 0, again.err
    check(tmp_path, range(1, 151))
    after = {file.name: file.stat().st_mtime_ns for file in samples(tmp_path)}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("request_id", ["../x", "/etc/x", "y" * 300, "a\0b", "żółw"])
def test_a_hostile_request_id_stays_in_the_folder(
    ring, producer, shmconn, tmp_path, request_id
) -> None:
    source = producer()
    source.put(1, 2, request_id=request_id, tag=None)
    source.close()
    drain = shmconn("drain", ring, "--to", tmp_path / "deep" / "out")
    assert drain.wait() == 0, drain.err
    assert len(samples(tmp_path / "deep" / "out")) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out"]


def test_max_samples_stops_after_exactly_so_many(ring, producer, shmconn, tmp_path) -> None:
    source = producer()
    source.put(1, 50)
    drain = shmconn("drain", ring, "--to", tmp_path, "--max-samples", 7, "--writers", 4)
    assert drain.wait() == 0, drain.err
    assert len(samples(tmp_path)) == 7
    source.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-rate", "fast"], "--max-rate 'fast' is not a size"),
        (["--format", "pickle"], "format 'pickle' is unknown"),
        (["--group", "a/b"], "group name 'a/b' is not allowed"),
        (["--to", "{out}"], "was given twice"),
        (["--log-format", "xml"], "--log-format 'xml' is unknown"),
        (["--format", "safetensors", "--format", "safetensors"], "--format was given 2 times"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(ring, producer, run, tmp_path, words, says) -> None:
    source = producer()
    words = [word.format(out=tmp_path) for word in words]
    drain = run("drain", ring, "--to", tmp_path, *words, code=2)
    assert says in drain.err
    assert len(drain.err.splitlines()) == 1
    source.close()


def test_without_an_output_it_says_which_option_is_missing(ring, run) -> None:
    assert "--to DIR" in run("drain", ring, code=2).err


def test_json_logs_are_one_object_a_line(ring, producer, run, tmp_path) -> None:
    source = producer()
    source.put(1, 3)
    source.close()
    drain = run("drain", ring, "--to", tmp_path, "--log-format", "json")
    lines = [json.loads(line) for line in drain.err.splitlines()]
    assert any("writes to" in line["message"] for line in lines)
    assert {"time", "level", "message"} <= set(lines[0])


def test_shards_and_files_both_get_everything_across_a_kill(
    ring, producer, shmconn, tmp_path
) -> None:
    from shmconn.shards import ShardDataset

    words = ["drain", ring, "--to", tmp_path / "files", "--to", tmp_path / "shards"]
    words += ["--format", "safetensors", "--format", "shards", "--shard-size", "1MiB"]
    source = producer(size="64MiB")
    drain = shmconn(*words)
    drain.until(lambda: drain.err.count("writes to") == 2)
    source.put(1, 100)
    drain.until(lambda: len(samples(tmp_path / "files")) >= 10)
    drain.kill()
    source.put(101, 50)
    source.close()
    drain = shmconn(*words)
    assert drain.wait() == 0, drain.err
    check(tmp_path / "files", range(1, 151))
    dataset = ShardDataset(tmp_path / "shards")
    numbers = []
    for index in range(len(dataset)):
        item = dataset[index]
        number = int(item["metadata"]["request_id"].removeprefix("r"))
        numbers.append(number)
        states = states_of(number, tokens_of(number))
        np.testing.assert_array_equal(item["hidden_states"].numpy(), states)
    assert sorted(numbers) == list(range(1, 151))
    assert not list((tmp_path / "shards").glob("*.part"))


def test_a_group_that_joined_before_another_could_not_keeps_its_samples(
    ring, producer, run, tmp_path
) -> None:
    source = producer(groups=["first", {"name": "second", "by_handle": True}])
    source.put(1, 5)
    words = ["drain", ring, "--to", tmp_path / "a", "--group", "first"]
    drain = run(*words, "--to", tmp_path / "b", "--group", "second", code=2)
    assert "'second'" in drain.err
    assert "group first" in drain.err
    assert not samples(tmp_path / "a")
    run("groups", "rm", ring, "second")
    source.close()
    run(*words)
    check(tmp_path / "a", range(1, 6))
