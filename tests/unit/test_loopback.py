# SPDX-License-Identifier: Apache-2.0
"""Servers of this host are reached whatever proxies the environment names."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from reader.loopback import NO_PROXY, ask

ROOT = Path(__file__).resolve().parents[2]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server, in an environment whose proxies nobody answers."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_of_this_host_is_asked_without_the_proxy(url: str) -> None:
    assert '"m"' in ask(f"{url}/health", 10)


async def _models(openai, **options: object) -> str:
    async with openai.AsyncOpenAI(api_key="-", max_retries=0, **options) as client:
        return (await client.models.list()).data[0].id


def test_the_examples_client_goes_past_every_proxy(url: str) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(ImportError, match="SOCKS"):
        asyncio.run(_models(openai, base_url=url))
    direct = openai.DefaultAsyncHttpxClient(trust_env=False)
    assert asyncio.run(_models(openai, base_url=url, http_client=direct)) == "m"


def test_a_child_that_asks_this_host_alone_looks_at_no_proxy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    for name, value in NO_PROXY.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(_models(openai, base_url=url)) == "m"


def test_no_program_of_ours_asks_this_host_in_another_way() -> None:
    paths = [*ROOT.glob("reader/**/*.py"), *ROOT.glob("examples/**/*.py")]
    assert len(paths) > 40
    clients = 0
    for path in paths:
        text = path.read_text()
        assert "urlopen(" not in text, path
        made = text.count("AsyncOpenAI(")
        clients += made
        assert made == text.count("http_client=") == text.count("trust_env=False"), path
    assert clients == 3
