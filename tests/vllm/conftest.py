# SPDX-License-Identifier: Apache-2.0
"""One server for all tests of this folder that can share it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.isolation import pytest_terminal_summary
from server import Server

import shmconn

__all__ = ["pytest_terminal_summary"]

HERE = Path(__file__).parent
# A sample takes one page or more: the ring holds 14 short ones, and 500 tokens are a third.
RING = {"ring_size": "15MiB", "page_size": "1MiB", "no_reader_timeout_s": 2}


@pytest.fixture(autouse=True)
def vllm_s_log_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps its log from the root, where pytest listens."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server leaves second copies."""
    return tmp_path_factory.mktemp("twins")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, twins: Path) -> Iterator[Server]:
    """The shared server, with the connector that plants faults on request."""
    made = Server(
        tmp_path_factory.mktemp("server"),
        RING,
        connector={"kv_connector": "PlantedConnector", "kv_connector_module_path": "planted"},
        environment={"PYTHONPATH": str(HERE), "SHMCONN_TWINS": str(twins)},
    )
    try:
        made.wait_healthy()
        yield made
    finally:
        made.clear()


@pytest.fixture
def reader(server: Server) -> Iterator[shmconn.Subscription]:
    """A reader that sees what one test sends, and must have read all of it at the end."""
    with shmconn.subscribe(server.ring, "tests") as subscription:
        while (left := subscription.next(timeout=0)) is not None:
            left.release()
        yield subscription
        server.wait_settled()
        assert subscription.next(timeout=0) is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The end of the server's log stands beside a failure."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if server is not None and report.failed:  # type: ignore[attr-defined]
        report.sections.append(("vLLM's log", server.log()[-5000:]))  # type: ignore[attr-defined]
    return report
