# SPDX-License-Identifier: Apache-2.0
"""`top`, `doctor`, `inspect`, metrics, readiness: what an operator looks at."""

import json
import os
import signal
import socket
import subprocess

import pytest
import torch
from cli_producer import states_of, tokens_of
from safetensors.torch import save_file

from reader.loopback import ask
from reader.service import default_group


def remove(run, ring: str) -> None:
    """What a dead producer and the dead groups files and trainer left."""
    run("groups", "rm", ring, "files")
    run("groups", "rm", ring, "trainer")
    assert not [entry for entry in os.listdir("/dev/shm") if entry == f"shmconn.{ring}"]


def test_top_shows_rings_rates_and_who_lags(ring, producer, shmconn, run, tmp_path) -> None:
    source = producer(size="32MiB", groups=["trainer"])
    drain = shmconn("drain", ring, "--to", tmp_path, "--group", "files", "--max-rate", "1KiB")
    drain.says("writes to")
    source.put(1, 5)
    screen = shmconn("top", ring, "--once", "--interval", 2)
    source.put(6, 15)
    assert screen.wait() == 0, screen.err
    text = screen.out
    row = next(line for line in text.splitlines() if source.generation[:8] in line)
    assert "live" in row
    assert " 20 " in row
    assert any(line.strip() == ring for line in text.splitlines())  # above its groups
    assert f"pid {drain.child.pid}" in text
    trainer = next(line for line in text.splitlines() if "trainer" in line)
    assert " 20 " in trainer
    drain.signal(signal.SIGTERM)
    drain.wait()
    source.kill()
    remove(run, ring)


def test_top_without_a_ring_says_so(ring, run) -> None:
    assert "there is no ring" in run("top", ring, "--once", "--interval", 0.1).out


def test_doctor_finds_a_dead_ring_and_a_dead_group_and_says_what_helps(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer(groups=["trainer"])
    drain = shmconn("drain", ring, "--to", tmp_path, "--group", "files")
    drain.says("writes to")
    drain.kill()
    source.put(1, 2)
    source.kill()
    doctor = shmconn("doctor", "--json")
    doctor.wait()
    found = {item["subject"]: item for item in json.loads(doctor.out)}
    left = found[f"ring {ring}.{source.generation[:8]}"]
    assert left["state"] == "warn"
    assert f"shmconn rm {ring}" in left["remedy"]
    dead = found[f"group files of {ring}"]
    assert dead["state"] == "warn"
    assert f"shmconn groups rm {ring} files" in dead["remedy"]
    assert found["self-test"]["state"] == "ok"
    assert found["platform"]["state"] == "ok"
    remove(run, ring)


def test_doctor_calls_a_small_dev_shm_bad(shmconn) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts a tmpfs, which only root may")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    doctor = shmconn("doctor", wrap=["unshare", "-m", "sh", "-c", mount, "sh"])
    assert doctor.wait() == 1
    line = next(line for line in doctor.out.splitlines() if "shared memory:" in line)
    assert line.strip().startswith("bad")
    assert "--shm-size" in doctor.out


def test_doctor_reads_a_running_servers_options(shmconn) -> None:
    config = {
        "kv_connector": "ShmHiddenStatesConnector",
        "kv_connector_extra_config": {"ring": "qwen"},
    }
    words = ["vllm.entrypoints", "--kv-transfer-config", json.dumps(config)]
    server = subprocess.Popen(["sh", "-c", "sleep 60; true", *words])
    try:
        doctor = shmconn("doctor", "--json")
        doctor.wait()
        found = {item["subject"]: item for item in json.loads(doctor.out)}
        facts = found[f"server pid {server.pid}"]
        assert facts["state"] == "warn"
        assert "ring qwen" in facts["text"]
        assert "--shutdown-timeout" in facts["remedy"]
    finally:
        server.kill()
        server.wait()


def test_inspect_shows_metadata_and_norms_of_a_file(ring, producer, run, tmp_path) -> None:
    source = producer()
    source.put(1, 1)
    source.close()
    run("drain", ring, "--to", tmp_path)
    text = run("inspect", tmp_path / "t1.safetensors").out
    assert "r1" in text
    assert "layer_ids" in text
    facts = json.loads(run("inspect", tmp_path / "t1.safetensors", "--json").out)
    norms = torch.from_numpy(states_of(1, tokens_of(1))).norm(dim=-1)
    assert [layer["layer"] for layer in facts["layers"]] == [2, 18]
    assert facts["layers"][1]["median"] == pytest.approx(float(norms[1:, 1].median()))
    assert facts["layers"][0]["first"] == pytest.approx(float(norms[0, 0]))


def test_inspect_of_a_ring_takes_nothing_from_its_readers(ring, producer, run) -> None:
    source = producer()
    source.put(1, 3)
    facts = json.loads(run("inspect", ring, "--json").out)
    assert facts["metadata"]["request_id"] == "r3"
    groups = json.loads(run("groups", ring, "--json").out)
    assert [group["name"] for group in groups] == [""]
    assert sum(groups[0]["unread"].values()) == 3
    source.kill()
    run("rm", ring)


def test_inspect_of_a_shard_shows_the_sample_of_an_index(ring, producer, run, tmp_path) -> None:
    source = producer()
    source.put(1, 5)
    source.close()
    run("drain", ring, "--to", tmp_path, "--format", "shards", "--writers", 1)
    shard = tmp_path / "shard-00000.safetensors"
    facts = json.loads(run("inspect", shard, "--index", 3, "--json").out)
    assert facts["metadata"]["request_id"] == "r4"
    assert "holds no sample 9" in run("inspect", shard, "--index", 9, code=2).err


def test_inspect_counts_zero_rows_and_values_that_are_not_finite(run, tmp_path) -> None:
    states = torch.rand(9, 2, 4) + 1
    states[3, 0] = 0
    states[5, 1, 2] = torch.nan
    states[6, 1, 0] = torch.inf
    save_file({"hidden_states": states, "token_ids": torch.arange(9)}, tmp_path / "x.safetensors")
    png = tmp_path / "x.png"
    facts = json.loads(run("inspect", tmp_path / "x.safetensors", "--png", png, "--json").out)
    assert [layer["zero_rows"] for layer in facts["layers"]] == [1, 0]
    assert [layer["rows_not_finite"] for layer in facts["layers"]] == [0, 2]


def test_the_heat_map_shows_the_row_that_stands_out(run, tmp_path) -> None:
    from PIL import Image

    states = torch.ones(20, 3, 4)
    states[7, 1] = 100
    save_file({"hidden_states": states, "token_ids": torch.arange(20)}, tmp_path / "x.safetensors")
    png = tmp_path / "x.png"
    run("inspect", tmp_path / "x.safetensors", "--png", png)
    with Image.open(png) as image:
        assert image.format == "PNG"
        bright = image.getpixel((70 + 7 * 40 + 20, 44 + 26 + 13))
        dark = image.getpixel((70 + 8 * 40 + 20, 44 + 26 + 13))
    assert sum(bright) > 2 * sum(dark)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere/x.safetensors", "there is no file"),
        ("{tmp}/..", "is a folder: name a file in it"),
        ("no-such-ring-x", "there is no ring 'no-such-ring-x'"),
        ("{tmp}/junk", "is not a file of hidden states"),
    ],
)
def test_inspect_of_what_is_not_there_or_no_sample_ends_with_2(run, tmp_path, source, says) -> None:
    (tmp_path / "junk").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ?")
    assert says in run("inspect", source.format(tmp=tmp_path), code=2).err


def test_metrics_tell_of_the_drain_its_rings_and_groups(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--metrics-port", 0, "--follow")
    drain.says("metrics at")
    url = next(word for word in drain.err.split() if word.startswith("http://"))
    assert url.startswith("http://127.0.0.1:")
    source.put(1, 4)
    source.bury(5, "short")

    def scrape() -> dict[str, float]:
        lines = ask(url, 30).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    labels = f'{{generation="{source.generation}",ring="{ring}"}}'
    drain.until(lambda: scrape().get(f'shmconn_drain_samples_total{{output="{tmp_path}"}}') == 4)
    found = scrape()
    assert found[f"shmconn_ring_published_samples_total{labels}"] == 4
    assert found[f"shmconn_ring_live{labels}"] == 1
    lost = f'{{generation="{source.generation}",reason="short",ring="{ring}"}}'
    assert found[f"shmconn_ring_lost_requests_total{lost}"] == 1
    group = default_group(str(tmp_path))
    assert found[f'shmconn_group_live_members{{group="{group}",ring="{ring}"}}'] == 1
    drain.signal(signal.SIGTERM)
    assert drain.wait() == 143
    source.close()
    run("groups", "rm", ring, group)


def test_a_metrics_port_that_is_taken_is_told_before_joining(ring, producer, run, tmp_path) -> None:
    source = producer()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = run("drain", ring, "--to", tmp_path, "--metrics-port", port, code=2).err
    assert f"127.0.0.1:{port}" in error
    assert [group["name"] for group in json.loads(run("groups", ring, "--json").out)] == [""]
    source.close()


def test_systemd_is_told_of_readiness_and_of_the_stop(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(60)
        environment = os.environ | {"NOTIFY_SOCKET": address}
        drain = shmconn("drain", ring, "--to", tmp_path / "out", env=environment)
        assert manager.recv(100) == b"READY=1"
        drain.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
    assert drain.wait() == 143
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "out")))


def test_hang_up_opens_the_log_file_anew(ring, producer, shmconn, run, tmp_path) -> None:
    source = producer()
    log = tmp_path / "drain.log"
    drain = shmconn("drain", ring, "--to", tmp_path / "out", "--log-file", log, "--follow")
    drain.until(lambda: log.exists() and "writes to" in log.read_text())
    log.rename(tmp_path / "drain.log.1")
    drain.signal(signal.SIGHUP)
    drain.until(log.exists)
    drain.signal(signal.SIGTERM)
    assert drain.wait() == 143
    assert "SIGTERM" in log.read_text()
    assert "SIGTERM" not in (tmp_path / "drain.log.1").read_text()
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "out")))
