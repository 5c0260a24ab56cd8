# SPDX-License-Identifier: Apache-2.0
"""The manifest: only whole lines, each of a sample that is on the disk."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from reader import manifest as manifest_file
from reader.folder import Folder
from reader.manifest import Entry, Manifest, Place
from reader.sinks import SinkOptions, open_sink


def entry(handle: str, **values: object) -> Entry:
    fields = {
        "request_id": "r",
        "tag": None,
        "tokens": 3,
        "file": "f",
        "bytes": 10,
        "offset": 0,
        "token_ids_sha256": "0" * 16,
    }
    return Entry(handle=handle, **(fields | values))


@pytest.fixture
def folder(tmp_path: Path):
    folder = Folder(str(tmp_path))
    yield folder
    folder.close()


def lines(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]


def test_what_was_appended_is_found_by_the_next_reader(folder) -> None:
    Manifest(folder).append(entry("h1", tag="t", header={"shape": [1, 2]}))
    again = Manifest(folder, tags=True)
    assert again.find("h1") == Place("f", 10, 0)
    assert again.find_tag("t", "0" * 16) == Place("f", 10, 0)
    assert again.find_tag("t", "1" * 16) is None
    assert again.find("h2") is None
    assert list(again.entries()) == [entry("h1", tag="t", header={"shape": [1, 2]})]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_cut_off_and_the_others_stay(tmp_path, folder, cut) -> None:
    manifest = Manifest(folder)
    manifest.append(entry("h1"))
    manifest.append(entry("h2"))
    path = tmp_path / "manifest.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    again = Manifest(folder)
    assert [found.handle for found in again.entries()] == ["h1"]
    again.append(entry("h3"))
    assert [line["handle"] for line in lines(tmp_path)] == ["h1", "h3"]


def test_a_line_of_another_program_is_counted_and_skipped(tmp_path, folder) -> None:
    Manifest(folder).append(entry("h1"))
    with open(tmp_path / "manifest.jsonl", "a") as file:
        file.write('[]\n{"handle": 1}\nnot json\n')
    again = Manifest(folder)
    assert again.damaged == 3
    assert again.find("h1") == Place("f", 10, 0)


def test_a_disk_that_fills_within_a_line_leaves_whole_lines_only(
    tmp_path, folder, monkeypatch
) -> None:
    manifest = Manifest(folder)
    manifest.append(entry("h1"))
    real = os.write

    def short(fd: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:-20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space"):
            manifest.append(entry("h2"))
    assert [line["handle"] for line in lines(tmp_path)] == ["h1"]


def test_a_file_system_that_refuses_locks_is_written_all_the_same(
    tmp_path, make_sample, monkeypatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    sink = open_sink("safetensors", SinkOptions(path=str(tmp_path)))
    sink.write(make_sample("x"))
    assert [line["file"] for line in lines(tmp_path)] == ["x.safetensors"]


def test_a_checksum_is_that_of_the_files_bytes(tmp_path, make_sample) -> None:
    sink = open_sink("safetensors", SinkOptions(path=str(tmp_path), checksum=True))
    sink.write(make_sample("x", tokens=1000))
    (line,) = lines(tmp_path)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert line["sha256"] == hashlib.sha256(data).hexdigest()
    assert line["bytes"] == len(data)
    assert line["tokens"] == 1000


def test_a_rerun_may_skip_what_it_has_by_tag_and_tokens(tmp_path, make_sample) -> None:
    options = SinkOptions(path=str(tmp_path), skip_tags=True)
    open_sink("safetensors", options).write(make_sample("x", number=1, request_id="first"))
    sink = open_sink("safetensors", options)
    again = make_sample("x", number=1, request_id="second")
    other = make_sample("x", number=2)
    assert not sink.write(again).fresh
    assert sink.write(other).fresh


def test_what_a_mate_appended_since_is_found(folder) -> None:
    ours, mates = Manifest(folder, tags=True), Manifest(folder)
    ours.append(entry("h1"))
    mates.append(entry("h2", file="g", tag="t"))
    assert ours.find("h2") == Place("g", 10, 0)
    assert ours.find_tag("t", "0" * 16) == Place("g", 10, 0)
    assert mates.find("h1") == Place("f", 10, 0)
    assert ours.find("h3") is None


def test_what_was_appended_itself_is_not_kept_beside_a_mate(folder) -> None:
    ours, mates = Manifest(folder), Manifest(folder)
    for number in range(50):
        ours.append(entry(f"ours-{number}"))
        mates.append(entry(f"mates-{number}"))
        ours.find("h")
        mates.find("h")
    assert len(ours._places) == len(mates._places) == 50


def test_a_manifest_that_was_replaced_is_read_anew(tmp_path, folder) -> None:
    ours = Manifest(folder)
    mates = Manifest(folder)
    mates.append(entry("h1"))
    assert ours.find("h1")
    (tmp_path / "manifest.jsonl").rename(tmp_path / "old")
    Manifest(folder).append(entry("h2"))
    assert ours.find("h1") is None
    assert ours.find("h2")


@pytest.mark.parametrize("locks", [True, False])
def test_a_line_that_a_mate_is_writing_is_left_alone_and_read_when_it_is_whole(
    tmp_path, folder, monkeypatch, locks
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    ours = Manifest(folder)
    ours.append(entry("h1"))
    Manifest(folder).append(entry("h2"))
    path = tmp_path / "manifest.jsonl"
    whole = path.read_bytes()
    for cut in (1, 20, len(whole) // 2 - 1):
        path.write_bytes(whole[:-cut])
        assert ours.find("h2") is None
        assert path.read_bytes() == whole[:-cut]
    path.write_bytes(whole)
    assert ours.find("h2") == Place("f", 10, 0)
    assert ours.damaged == 0


_HOLDER = """
import fcntl, sys
file = open(sys.argv[1])  # only to read: whoever may do that may lock it
fcntl.flock(file, int(sys.argv[2]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_that_a_stranger_keeps_is_an_error_that_names_it(
    tmp_path, folder, monkeypatch, kind
) -> None:
    monkeypatch.setattr(manifest_file, "LOCK_WAIT_S", 0.1)
    ours, mates = Manifest(folder), Manifest(folder)
    mates.append(entry("h1"))
    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "manifest.jsonl"), str(int(kind))]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        for use in (lambda: ours.append(entry("h2")), lambda: ours.find("h1")):
            with pytest.raises(OSError, match=f"locked for 0.1 s by pid {holder.pid} ") as refused:
                use()
            assert refused.value.errno == errno.EBUSY
        holder.stdin.close()
    assert ours.find("h1")
    ours.append(entry("h2"))
    assert [line["handle"] for line in lines(tmp_path)] == ["h1", "h2"]


def test_threads_that_wait_for_a_kept_lock_wait_beside_one_another(
    tmp_path, folder, monkeypatch
) -> None:
    monkeypatch.setattr(manifest_file, "LOCK_WAIT_S", 0.3)
    ours = Manifest(folder)
    refused = []

    def append(number: int) -> None:
        try:
            ours.append(entry(f"h{number}"))
        except OSError as error:
            refused.append(error.errno)

    with open(tmp_path / "manifest.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # One after the other would take 2.4 s; the bound leaves room for a busy machine.
    assert time.monotonic() - began < 2.4
    assert refused == [errno.EBUSY] * 8
    assert lines(tmp_path) == []
