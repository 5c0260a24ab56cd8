# SPDX-License-Identifier: Apache-2.0
"""The metrics of a drain beside clients that come in hundreds, say nothing, or break off."""

import os
import signal
import socket
import struct
import urllib.error
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_processes import Process
from harness import figures
from test_drain import samples

from reader.loopback import ask
from reader.metrics_server import MAX_CONNECTIONS, MetricsServer
from reader.service import default_group

CROWD = 250
FILES = 80  # that the drain may have open


def scrape(url: str) -> str:
    return ask(url, 30)


def count(drain: Process, what: str) -> int:
    return len(os.listdir(f"/proc/{drain.child.pid}/{what}"))


@pytest.mark.parametrize("said", [b"", b"GET /metr", b"GET / HTTP/1.1\r\nA: b\r\n"])
def test_a_crowd_of_silent_clients_stops_neither_the_drain_nor_a_scraper(
    ring, producer, shmconn, run, tmp_path: Path, said: bytes
) -> None:
    source = producer()
    wrap = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]
    words = ["drain", ring, "--to", tmp_path, "--metrics-port", 0, "--follow"]
    drain = shmconn(*words, wrap=wrap)
    drain.says("writes to")
    url = next(word for word in drain.err.split() if word.startswith("http://"))
    port = int(url.split(":")[2].split("/")[0])
    threads, files = count(drain, "task"), count(drain, "fd")
    with ExitStack() as crowd:
        for _ in range(CROWD):
            client = crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            client.sendall(said)
        source.put(1, 20)
        drain.until(lambda: len(samples(tmp_path)) == 20)
        drain.until(lambda: "shmconn_drain_samples_total" in scrape(url))
        drain.until(lambda: count(drain, "task") <= threads + MAX_CONNECTIONS + 1)
        grown = count(drain, "fd") - files
        figures.record(
            "27",
            f"silent connections to a drain's metrics, each having said {len(said)} bytes",
            trials=CROWD,
            exercised=CROWD,
            failures=20 - len(samples(tmp_path)),
            descriptors=grown,
        )
        assert grown <= MAX_CONNECTIONS + 2
    drain.signal(signal.SIGTERM)
    assert drain.wait() == 143
    assert "Traceback" not in drain.err
    source.close()
    run("groups", "rm", ring, default_group(str(tmp_path)))


def test_a_client_that_breaks_off_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    def answer(environ, start_response):
        start_response("200 OK", [])
        return [b"x" * (1 << 22)]

    server = MetricsServer("127.0.0.1", 0, answer)
    for _ in range(5):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.recv(10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # by a reset
    assert scrape(f"http://127.0.0.1:{server.port}/").startswith("xxx")
    server.stop()
    assert caplog.text == ""


def test_what_cannot_be_looked_at_is_an_answer_and_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(environ, start_response):
        raise OSError("the ring is out of reach")

    server = MetricsServer("127.0.0.1", 0, fail)
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(f"http://127.0.0.1:{server.port}/metrics")
        assert refused.value.code == 500
        assert refused.value.read() == b"the ring is out of reach\n"
        refused.value.close()
    server.stop()
    assert caplog.text.count("the ring is out of reach") == 1
