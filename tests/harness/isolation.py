# SPDX-License-Identifier: Apache-2.0
"""A ring name of each test's own, and nothing of it left in /dev/shm. Fixtures for a conftest."""

import os
import re
import secrets
from collections.abc import Iterator

import pytest

from harness import figures, processes
from shmconn import layout, segment, words


def left_of(name: str) -> list[str]:
    """Entries of /dev/shm that carry a name."""
    return sorted(entry for entry in os.listdir("/dev/shm") if name in entry)


def remove_left(name: str) -> list[str]:
    """Removes what is left of a name by hand; returns what it was."""
    left = left_of(name)
    for entry in left:
        os.unlink(f"/dev/shm/{entry}")
    return left


def use_prefix(patch: pytest.MonkeyPatch, prefix: str) -> None:
    """Gives all segments of this process, and of its forked children, another prefix.

    So a start elsewhere on this host does not sweep here, nor a start here elsewhere.
    """
    patch.setattr(layout, "PREFIX", prefix)
    for pattern in ("_RING", "_REGISTRY"):
        text = getattr(segment, pattern).pattern
        # What follows the prefix begins with the group of the ring's name.
        rest = text[text.index("(") :]
        patch.setattr(segment, pattern, re.compile(re.escape(prefix) + rest))


@pytest.fixture
def ring(damaged_ring: str) -> Iterator[str]:
    """A ring name of this test's own, apart from all other rings of this host."""
    yield damaged_ring
    words.watch(None)
    processes.end_all()
    assert remove_left(damaged_ring) == []


@pytest.fixture
def damaged_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same for segments that the test damages: what is left is for a person to remove."""
    name = f"t{secrets.token_hex(5)}"
    use_prefix(monkeypatch, f"shmconn-{name}.")
    yield name
    words.watch(None)
    processes.end_all()
    remove_left(name)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures of this run."""
    lines = figures.flush()
    if lines:
        terminalreporter.section(f"figures, also in {figures.OUT}")
        for line in lines:
            terminalreporter.line(line)
