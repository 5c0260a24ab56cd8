# SPDX-License-Identifier: Apache-2.0
"""Real producers and real `shmconn` processes, each test with a ring name of its own."""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_processes import Process, ProducerProcess
from harness.isolation import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


@pytest.fixture
def ring() -> Iterator[str]:
    """A ring name of this test's own; nothing of it may be left in /dev/shm."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    left = [entry for entry in os.listdir("/dev/shm") if name in entry]
    for entry in left:
        os.unlink(f"/dev/shm/{entry}")
    assert left == []


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture
def producer(ring: str, processes: list[Process], logs: Path) -> Callable[..., ProducerProcess]:
    """Starts a producer of this test's ring."""

    def start(**options: Any) -> ProducerProcess:
        process = ProducerProcess(logs, options.pop("name", ring), **options)
        processes.append(process)
        return process

    return start


@pytest.fixture
def shmconn(processes: list[Process], logs: Path) -> Callable[..., Process]:
    """Starts a `shmconn` command."""

    def start(*words: object, wrap: list[str] | None = None, **options: Any) -> Process:
        main = "from reader.cli import main; main()"
        command = [*(wrap or []), sys.executable, "-c", main, *map(str, words)]
        process = Process(command, logs, **options)
        processes.append(process)
        return process

    return start


@pytest.fixture
def run(shmconn: Callable[..., Process]) -> Callable[..., Process]:
    """Runs a `shmconn` command to its end."""

    def finish(*words: object, code: int = 0, **options: Any) -> Process:
        process = shmconn(*words, **options)
        assert process.wait() == code, process.out + process.err
        assert "Traceback" not in process.err
        return process

    return finish
