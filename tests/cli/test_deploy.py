# SPDX-License-Identifier: Apache-2.0
"""The files in examples/deploy: they say what the programs understand."""

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from reader.loopback import ask
from reader.service import default_group

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"


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


def metrics_of_vllm() -> set[str]:
    """The connector's series in vLLM's metrics, as a Prometheus client writes their names."""
    source = (ROOT / "shmconn" / "stats.py").read_text()
    found = re.findall(r'(counter|gauge|histogram)\(\s*name="(vllm:\w+)"', source)
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {name + ending for kind, name in found for ending in endings[kind]}


def expressions() -> list[str]:
    """All PromQL of the dashboard and of the alerts."""
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [item["query"] for item in dashboard["templating"]["list"]]
    return found + [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]


def test_every_metric_of_the_dashboard_and_the_alerts_is_one_that_is_served(
    ring, producer, shmconn, run, tmp_path
) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--metrics-port", 0)
    drain.says("writes to")
    source.bury(1, "short")
    url = next(word for word in drain.err.split() if word.startswith("http://"))

    def served() -> dict[str, set[str]]:
        """Names with their labels."""
        lines = re.findall(r"^(shmconn_\w+)(\{.*\})? ", ask(url, 30), re.MULTILINE)
        return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in lines}

    wanted = {name for text in expressions() for name in re.findall(r"(?:vllm:)?shmconn_\w+", text)}
    assert len(wanted) > 15
    ours = {name for name in wanted if not name.startswith("vllm:")}
    assert wanted - ours <= metrics_of_vllm()
    drain.until(lambda: ours <= set(served()))
    labels = served()
    for text in expressions():
        for name, filters in re.findall(r"\b(shmconn_\w+)\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)(?:=~|!=|=)", filters)) <= labels[name], text
    source.close()
    assert drain.wait() == 3


def test_prometheus_scrapes_the_units_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    ours, vllm = (job["static_configs"][0]["targets"] for job in config["scrape_configs"])
    assert vllm == ["127.0.0.1:8000"]  # as compose publishes it
    (target,) = ours
    port = target.rsplit(":", 1)[1]
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
    assert f"--metrics-port {port}" in unit()["ExecStart"]
