# SPDX-License-Identifier: Apache-2.0
"""Two drains of one command share a folder, and one of them dies or is stopped amid its steps."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_processes import Process
from harness import figures
from test_drain import check, samples

import shmconn
from reader.service import default_group

# The `shmconn` command, which is killed right after a sample's line, before its release.
_KILLED = """
import os, signal
from reader.manifest import Manifest
real, left = Manifest.append, [{appends}]

def append(self, entry):
    real(self, entry)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

Manifest.append = append
from reader.cli import main
main()
"""


@pytest.fixture
def killed_drain(processes: list[Process], logs: Path) -> Callable[..., Process]:
    """Starts a drain that is killed between the line of its n-th sample and the release."""

    def start(appends: int, *words: object) -> Process:
        command = [sys.executable, "-c", _KILLED.format(appends=appends), "drain"]
        process = Process([*command, *map(str, words)], logs)
        processes.append(process)
        return process

    return start


def lines(path: Path) -> list[str]:
    """Handles of the manifest, in order."""
    text = (path / "manifest.jsonl").read_text()
    return [json.loads(line)["handle"] for line in text.splitlines()]


@pytest.mark.parametrize("form", ["safetensors", "shards", "vllm"])
def test_a_mate_writes_nothing_again_that_a_killed_drain_had_recorded(
    ring, producer, shmconn, run, killed_drain, tmp_path, form
) -> None:
    words = [ring, "--to", tmp_path, "--format", form, "--writers", 1]
    source = producer()
    mate = shmconn("drain", *words)
    mate.says("writes to")  # so it has read the manifest before the other writes
    drain = killed_drain(3, *words)
    drain.says("writes to")
    count = 0
    while drain.child.poll() is None:
        source.put(count + 1, 10)
        count += 10
    assert drain.wait() == -signal.SIGKILL
    source.close()
    assert mate.wait() == 0, mate.err
    run("groups", "rm", ring, default_group(str(tmp_path)))  # the killed one's place
    found = lines(tmp_path)
    figures.record(
        "27",
        f"a drain killed between a sample's line and its release, a mate goes on ({form})",
        trials=1,
        exercised=int("1 of them were there already" in mate.out),
        failures=abs(len(found) - count) + len(found) - len(set(found)),
    )
    assert "1 of them were there already" in mate.out
    assert len(found) == count == len(set(found))
    if form == "safetensors":
        check(tmp_path, range(1, count + 1))
    if form == "shards":
        from shmconn.shards import ShardDataset

        dataset = ShardDataset(tmp_path)
        ids = [dataset[index]["metadata"]["request_id"] for index in range(len(dataset))]
        assert sorted(ids) == sorted(f"r{number}" for number in range(1, count + 1))
        assert not list(tmp_path.glob("*.part"))


def test_a_manifest_that_a_stopped_process_keeps_locked_is_told_of_and_given_up(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--give-up", 0)
    source.put(1, 1)
    drain.until(lambda: len(samples(tmp_path)) == 1)
    with open(tmp_path / "manifest.jsonl") as file:  # only to read, as any user may
        fcntl.flock(file, fcntl.LOCK_EX)
        source.put(2, 1)
        assert drain.wait() == 5, drain.err
        assert f"manifest.jsonl has been locked for 2 s by pid {os.getpid()}" in drain.err
        assert "nothing is lost" in drain.out
        refused = run("drain", ring, "--to", tmp_path, code=2)
        assert f"by pid {os.getpid()}" in refused.err
    source.close()
    run("drain", ring, "--to", tmp_path)
    check(tmp_path, range(1, 3))
    assert len(lines(tmp_path)) == 2


def test_a_shard_that_cannot_be_sealed_at_the_end_is_told_and_sealed_by_the_same_command(
    ring, producer, shmconn, run, tmp_path
) -> None:
    words = ["drain", ring, "--to", tmp_path, "--format", "shards"]
    source = producer()
    drain = shmconn(*words)
    source.put(1, 5)
    drain.until(lambda: list(tmp_path.glob("*.part")))
    (tmp_path / "shard-00000.safetensors").write_text("a stranger's")
    source.close()
    assert drain.wait() == 5, drain.err
    assert "cannot finish" in drain.err
    assert "File exists (shard-00000.safetensors)" in drain.err
    assert "Traceback" not in drain.err
    assert (tmp_path / "shard-00000.safetensors").read_text() == "a stranger's"
    (tmp_path / "shard-00000.safetensors").unlink()
    run(*words, code=2)  # the ring is gone; the shard is sealed
    from shmconn.shards import ShardDataset

    assert len(ShardDataset(tmp_path)) == 5 == len(set(lines(tmp_path)))


def test_a_folder_of_another_run_is_refused_and_the_samples_go_elsewhere(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    source.put(1, 3)
    source.close()
    run("drain", ring, "--to", tmp_path / "out")
    other = shmconn.Producer.create(
        ring, size="4MiB", layer_ids=[3, 4], hidden_size=128, dtype="float16"
    )
    for number in range(1, 4):  # the same tags
        states = torch.zeros(5, 2, 128, dtype=torch.float16)
        other.put(states, torch.arange(5), request_id=f"r{number}", tag=f"t{number}")
    other.close()
    refused = run("drain", ring, "--to", tmp_path / "out", "--skip-tags", code=2)
    assert "holds samples of layers [2, 18], hidden size 64, float32" in refused.err
    assert "this one is of layers [3, 4], hidden size 128, float16" in refused.err
    group = default_group(str(tmp_path / "out"))
    assert f"group {group} keeps its place with 3 samples unread" in refused.out
    check(tmp_path / "out", range(1, 4))
    run("drain", ring, "--to", tmp_path / "other", "--group", group)
    assert len(samples(tmp_path / "other")) == 3
