# SPDX-License-Identifier: Apache-2.0
"""Rings of a test's own, and other processes that use them."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ring_tools import HIDDEN, LAYERS

from shmconn import Producer


@pytest.fixture
def make(ring_name: str) -> Iterator[Callable[..., Producer]]:
    """Makes producers of this test's ring."""
    made: list[Producer] = []

    def create(**options: Any) -> Producer:
        options = {"size": "4MiB", "dtype": "float32", **options}
        name = options.pop("name", ring_name)
        producer = Producer.create(name, layer_ids=LAYERS, hidden_size=HIDDEN, **options)
        made.append(producer)
        return producer

    yield create
    for producer in made:
        producer.close()


@pytest.fixture
def fork() -> Iterator[Callable[..., int]]:
    """Runs a function in a forked process; `wait` gives its exit code, negative for a signal."""
    children: list[int] = []

    def start(function: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            try:
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
        return child

    yield start
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
