# SPDX-License-Identifier: Apache-2.0
"""Rings of a test's own, and other processes."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_tools import any_alive, make_producer, until

from shmconn import Producer

ROLES = Path(__file__).with_name("roles.py")


@pytest.fixture
def make(ring_name: str) -> Iterator[Callable[..., Producer]]:
    """Makes producers of this test's ring; they are closed at its end."""
    made: list[Producer] = []

    def create(**options: Any) -> Producer:
        made.append(make_producer(ring_name, **options))
        return made[-1]

    yield create
    for producer in made:
        producer.close()
    until(lambda: not any_alive(ring_name), "the members to leave")
    # Who was given the last sample leaves when it is dropped, in a thread of its own.
    for thread in threading.enumerate():
        if thread.name == "shmconn-leave":
            thread.join(30)


@pytest.fixture
def role() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts another process of these tests: `role(ROLE, RING, ...)`."""
    started = []

    def start(*words: object) -> "subprocess.Popen[str]":
        command = [sys.executable, str(ROLES), *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
