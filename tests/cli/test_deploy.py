# SPDX-License-Identifier: Apache-2.0
"""The files in examples/deploy: they say what the programs understand."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from reader.service import default_group

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


def unit() -> dict[str, str]:
    lines = (DEPLOY / "shmconn-drain@.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_is_one_that_systemd_takes(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    program = tmp_path / "shmconn"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "shmconn-drain@.service").read_text()
    text = text.replace("/opt/shmconn/bin/shmconn", str(program)).replace("User=vllm", "User=root")
    (tmp_path / "shmconn-drain@q.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "shmconn-drain@q.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in done.stderr.splitlines() if "shmconn-drain" in line]
    assert complaints == [], done.stderr


def test_the_units_command_drains_and_its_stop_fits_its_time_limit(
    ring, producer, shmconn, run, tmp_path
) -> None:
    facts = unit()
    words = shlex.split(facts["ExecStart"])[1:]
    words = [word.replace("/var/lib/shmconn/%i", str(tmp_path / "out")) for word in words]
    words = [ring if word == "%i" else "0" if word == "9123" else word for word in words]
    drain = shmconn(*words)
    drain.says("writes to")
    source = producer()
    source.put(1, 5)
    drain.until(lambda: len(list((tmp_path / "out").glob("*.safetensors"))) == 5)
    drain.signal(signal.SIGTERM)
    assert drain.wait() == int(facts["SuccessExitStatus"])
    stop = float(words[words.index("--stop-timeout") + 1])
    assert stop < float(facts["TimeoutStopSec"])
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path / "out")))


def test_compose_shares_one_large_dev_shm_between_one_user() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    vllm, drain = services["vllm"], services["drain"]
    assert vllm["ipc"] == "shareable"
    assert drain["ipc"] == "service:vllm"
    assert vllm["user"] == drain["user"]
    assert vllm["shm_size"] == "16gb"
    for service in services.values():
        assert (DEPLOY / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("service", ["vllm", "drain"])
def test_composes_commands_use_options_that_there_are(service, run) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    words = services[service]["command"]
    words = words[words.index("shmconn") + 1 :] if "shmconn" in words else words
    ours = words[: words.index("--")] if "--" in words else words
    text = run(words[0], "--help").out
    options = [word for word in ours if word.startswith("--")]
    assert options
    for option in options:
        assert option in text


def test_every_metric_of_the_dashboard_is_one_that_a_drain_serves(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--metrics-port", 0)
    drain.says("writes to")
    source.bury(1, "short")
    url = next(word for word in drain.err.split() if word.startswith("http://"))

    def served() -> set[str]:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return set(re.findall(r"^(shmconn_\w+)", reply.read().decode(), re.MULTILINE))

    wanted = set(re.findall(r"shmconn_\w+", (DEPLOY / "dashboard.json").read_text()))
    json.loads((DEPLOY / "dashboard.json").read_text())
    assert len(wanted) > 10
    drain.until(lambda: wanted <= served())
    source.close()
    assert drain.wait() == 3


def test_prometheus_scrapes_the_units_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    port = target.rsplit(":", 1)[1]
    assert f"--metrics-port {port}" in unit()["ExecStart"]
