# SPDX-License-Identifier: Apache-2.0
"""A drain of a ring that it cannot read: one line that says why, nothing joined, nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shmconn import layout


def segment(ring: str, generation: str) -> Path:
    return Path(f"/dev/shm/shmconn.{ring}.{generation}")


def patch(path: Path, at: int, data: bytes) -> bytes:
    """Overwrite bytes of a segment; returns what was there."""
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(len(data))
        file.seek(at)
        file.write(data)
    return old


def test_a_ring_of_another_layout_version_is_refused_with_both_versions(
    ring, producer, run, tmp_path
) -> None:
    source = producer()
    source.put(1, 3)
    path = segment(ring, source.generation)
    old = patch(path, layout.VERSION_AT, b"\x63")
    error = run("drain", ring, "--to", tmp_path, code=2).err
    assert "version" in error
    assert "99" in error
    patch(path, layout.VERSION_AT, old)
    source.close()
    assert "3 samples" in run("drain", ring, "--to", tmp_path).out


def test_a_truncated_ring_is_refused_and_named(ring, producer, run, tmp_path) -> None:
    source = producer()
    source.put(1, 1)
    source.kill()
    path = segment(ring, source.generation)
    os.truncate(path, path.stat().st_size // 2)
    assert path.name in run("drain", ring, "--to", tmp_path, code=2).err
    run("rm", ring, "--force")


@pytest.mark.parametrize("at", range(0, 128, 24))
def test_a_flipped_header_byte_never_ends_in_a_traceback(
    ring, producer, shmconn, run, tmp_path, at
) -> None:
    source = producer()
    source.put(1, 3)
    source.kill()
    path = segment(ring, source.generation)
    with open(path, "rb") as file:
        file.seek(at)
        byte = file.read(1)[0]
    patch(path, at, bytes([byte ^ 0x41]))
    drain = shmconn("drain", ring, "--to", tmp_path, "--max-samples", 3)
    code = drain.wait()
    assert code in (0, 2, 3, 4), drain.err  # a byte may not matter; or each sample is refused
    assert "Traceback" not in drain.err
    if code == 2:
        assert drain.err.splitlines()[-1].startswith("error: ")
        assert ring in drain.err
    shmconn("rm", ring, "--force").wait()
    for entry in os.listdir("/dev/shm"):
        if ring in entry:
            os.unlink(f"/dev/shm/{entry}")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")
def test_another_users_ring_is_refused_with_whose_it_is(ring, producer, tmp_path) -> None:
    source = producer()
    source.put(1, 1)
    code = (
        "import os, reader.cli, reader.service as service, reader.sinks.safetensors\n"
        "import shmconn.subscription, rich.live, numpy\n"
        "real = service.run\n"
        "def run(*words, **named):\n"
        "    os.setgid(65534); os.setuid(65534)\n"  # modules may be out of its reach
        "    return real(*words, **named)\n"
        "service.run = run\n"
        "reader.cli.main()"
    )
    out = tmp_path / "out"
    out.mkdir()
    for folder in (out, *out.parents[:-2]):
        folder.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", code, "drain", ring, "--to", str(out)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "user" in done.stderr
    assert "Traceback" not in done.stderr
    source.close()
    subprocess.run([sys.executable, "-c", "from reader.cli import main; main()", "rm", ring])
