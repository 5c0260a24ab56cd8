# SPDX-License-Identifier: Apache-2.0
"""A drain in an unfriendly place: folders that are none, streams that close, mates that share."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_processes import WATCHDOG_S, until
from test_drain import check, samples
from test_drain_disk import LARGE

from reader.service import default_group
from reader.sinks import SinkOptions, open_sink
from shmconn.errors import OptionError

MAIN = "from reader.cli import main; main()"
FOREIGN = b"my notes\nlast line without an end"


def manifest_lines(path: Path) -> list[str]:
    return [
        json.loads(line)["handle"] for line in (path / "manifest.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("form", ["safetensors", "shards"])
@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "foreign"])
def test_what_only_has_the_manifests_name_is_left_as_it_is(tmp_path, kind, form) -> None:
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    out.mkdir()
    foreign.write_bytes(FOREIGN)
    name = out / "manifest.jsonl"
    if kind == "folder":
        name.mkdir()
    elif kind == "link":
        name.symlink_to(foreign)
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        name.write_bytes(FOREIGN)
    with pytest.raises(OptionError, match=f"{name} cannot be used as a drain's manifest"):
        open_sink(form, SinkOptions(str(out)))
    assert foreign.read_bytes() == FOREIGN
    if kind == "foreign":
        assert name.read_bytes() == FOREIGN


def test_a_stranger_under_the_manifests_name_ends_with_2_before_joining(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    (tmp_path / "manifest.jsonl").write_bytes(FOREIGN)
    error = run("drain", ring, "--to", tmp_path, code=2).err
    assert len(error.splitlines()) == 1
    assert [group["name"] for group in json.loads(run("groups", ring, "--json").out)] == [""]
    source.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("ln -s b a && ln -s a b", "'b', which leads nowhere"),
        ("ln -s gone a", "'gone', which leads nowhere"),
        ("touch a", "it is no folder"),
    ],
)
def test_a_path_that_leads_to_no_folder_says_why(tmp_path, make, says) -> None:
    subprocess.run(["sh", "-c", make], cwd=tmp_path, check=True)
    with pytest.raises(OptionError, match=says):
        open_sink("safetensors", SinkOptions(str(tmp_path / "a")))


def test_a_log_file_that_cannot_be_opened_ends_with_2(ring, producer, run, tmp_path) -> None:
    source = producer()
    log = tmp_path / "none" / "log"
    error = run("drain", ring, "--to", tmp_path / "out", "--log-file", log, code=2).err
    assert f"cannot write to --log-file '{log}'" in error
    source.close()


def test_a_log_whose_folder_vanishes_costs_lines_and_no_sample(
    ring, producer, shmconn, tmp_path
) -> None:
    source = producer()
    logs = tmp_path / "logs"
    logs.mkdir()
    drain = shmconn("drain", ring, "--to", tmp_path / "out", "--log-file", logs / "log")
    drain.until(lambda: (logs / "log").exists() and "writes to" in (logs / "log").read_text())
    logs.rename(tmp_path / "away")
    drain.signal(signal.SIGHUP)
    source.put(1, 5)
    source.bury(6, "aborted")
    source.close()
    assert drain.wait() == 0, drain.err
    check(tmp_path / "out", range(1, 6))


@pytest.mark.parametrize("form", ["text", pytest.param("json", marks=pytest.mark.long)])
def test_a_drain_outlives_whoever_read_its_log(ring, producer, run, tmp_path, form) -> None:
    source = producer()
    words = ["drain", ring, "--to", str(tmp_path), "--follow", "--log-format", form]
    drain = subprocess.Popen(
        [sys.executable, "-c", MAIN, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert b"writes to" in drain.stderr.readline()
        drain.stderr.close()
        drain.stdout.close()
        source.put(1, 3)
        source.kill()  # which it says, to nobody
        source = producer()
        source.put(4, 3)
        until(lambda: len(samples(tmp_path)) == 6 or drain.poll() is not None)
        drain.send_signal(signal.SIGTERM)
        assert drain.wait(WATCHDOG_S) == 143
    finally:
        drain.kill()
        drain.wait()
    check(tmp_path, range(1, 7))
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path)))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which only root may")
def test_what_a_full_disk_refused_is_kept_when_nobody_reads_the_last_words(
    ring, producer, run, tmp_path
) -> None:
    source = producer(size="16MiB")
    source.put(1, 3, tokens=LARGE)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=300k tmpfs {disk} && exec "$@"'
    words = ["drain", ring, "--to", str(disk), "--group", "files", "--give-up", "1"]
    read, write = os.pipe()
    os.close(read)  # each write to it is an error
    drain = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", MAIN, *words],
        stdout=write,
        stderr=write,
    )
    os.close(write)
    assert drain.wait(WATCHDOG_S) == 5
    source.close()
    run("drain", ring, "--to", tmp_path / "large", "--group", "files")
    check(tmp_path / "large", range(1, 4), tokens=LARGE)


def test_streams_that_are_closed_from_the_start_get_no_files_descriptor(
    ring, producer, tmp_path
) -> None:
    source = producer()
    source.put(1, 5)
    source.close()
    command = f'exec "{sys.executable}" -c "{MAIN}" drain {ring} --to {tmp_path} <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command], timeout=WATCHDOG_S).returncode == 0
    check(tmp_path, range(1, 6))


def test_two_drains_of_one_folder_share_its_samples(ring, producer, shmconn, tmp_path) -> None:
    source = producer()
    drains = [shmconn("drain", ring, "--to", tmp_path, "--writers", 1) for _ in range(2)]
    for drain in drains:
        drain.says("writes to")
    source.put(1, 100)
    source.close()
    assert [drain.wait() for drain in drains] == [0, 0]
    check(tmp_path, range(1, 101))
    handles = manifest_lines(tmp_path)
    assert len(handles) == len(set(handles)) == 100


@pytest.mark.long
def test_two_groups_into_one_folder_write_each_file_once(ring, producer, shmconn, tmp_path) -> None:
    source = producer()
    drains = [shmconn("drain", ring, "--to", tmp_path, "--group", group) for group in "ab"]
    for drain in drains:
        drain.says("writes to")
    source.put(1, 60)
    source.close()
    assert [drain.wait() for drain in drains] == [0, 0]
    check(tmp_path, range(1, 61))


def test_a_terminal_that_closes_ends_its_drain_and_keeps_the_place(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    main, terminal = os.openpty()
    words = [sys.executable, "-c", MAIN, "drain", ring, "--to", str(tmp_path), "--follow"]
    # Under nohup the tests would hand an ignored SIGHUP down, which a drain respects.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    drain = subprocess.Popen(words, stderr=terminal, stdout=terminal, start_new_session=True)
    signal.signal(signal.SIGHUP, ignored)
    os.close(terminal)
    try:
        source.put(1, 3)
        until(lambda: len(samples(tmp_path)) == 3 or drain.poll() is not None)
        os.close(main)
        drain.send_signal(signal.SIGHUP)  # as the kernel does for a session's own terminal
        assert drain.wait(WATCHDOG_S) == 128 + signal.SIGHUP
    finally:
        drain.kill()
        drain.wait()
    source.put(4, 3)
    source.close()
    run("drain", ring, "--to", tmp_path)
    check(tmp_path, range(1, 7))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_signals_at_odd_moments_lose_nothing_and_show_no_traceback(
    ring, producer, shmconn, run, tmp_path, seed
) -> None:
    moments = random.Random(seed)
    source = producer(size="32MiB", groups=["files"])
    source.put(1, 100)
    words = ["drain", ring, "--to", tmp_path, "--group", "files", "--max-rate", "10KiB"]
    for _ in range(2 if seed == 0 else 20):
        drain = shmconn(*words)
        for number in moments.choices([signal.SIGHUP, signal.SIGTERM, signal.SIGINT], k=2):
            time.sleep(moments.uniform(0, 1.2))
            with contextlib.suppress(ProcessLookupError):
                drain.signal(number)
        drain.signal(signal.SIGTERM)
        # Before the drain begins, Python's own handlers end it, an interrupt with a traceback.
        code = drain.wait()
        early = "writes to" not in drain.err
        assert code in (143, 130) or (early and code in (1, -1, -2, -15)), (code, drain.err)
        assert early or "Traceback" not in drain.err
    source.close()
    run("drain", ring, "--to", tmp_path, "--group", "files")
    check(tmp_path, range(1, 101))
    handles = manifest_lines(tmp_path)
    assert len(handles) == len(set(handles)) == 100
