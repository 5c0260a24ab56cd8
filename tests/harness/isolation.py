# SPDX-License-Identifier: Apache-2.0
"""A ring name of each test's own, and nothing of it left in /dev/shm. Fixtures for a conftest."""

import os
import secrets
from collections.abc import Iterator

import pytest

from harness import figures, processes
from shmconn import cleanup, words


def left_of(name: str) -> list[str]:
    """Entries of /dev/shm that carry a name."""
    return sorted(entry for entry in os.listdir("/dev/shm") if name in entry)


def remove_left(name: str) -> list[str]:
    """Removes what is left of a name by hand; returns what it was."""
    left = left_of(name)
    for entry in left:
        os.unlink(f"/dev/shm/{entry}")
    return left


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A ring name of this test's own; starts sweep under names that begin with it only."""
    name = f"t{secrets.token_hex(5)}"
    registry_names = cleanup.registry_names
    monkeypatch.setattr(
        cleanup,
        "registry_names",
        lambda: [found for found in registry_names() if found.startswith(name)],
    )
    yield name
    words.watch(None)
    processes.end_all()
    assert remove_left(name) == []


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures of this run."""
    lines = figures.flush()
    if lines:
        terminalreporter.section(f"figures, also in {figures.OUT}")
        for line in lines:
            terminalreporter.line(line)
