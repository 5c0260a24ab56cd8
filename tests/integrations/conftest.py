# SPDX-License-Identifier: Apache-2.0
"""Rings of a test's own, with the samples of tests/trainer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trainer_tools import any_alive, make_producer, until

from shmconn import Producer
from shmconn.integrations import vllm


@pytest.fixture
def make(ring_name: str) -> Iterator[Callable[..., Producer]]:
    """Makes producers of this test's ring; they are closed at its end."""
    made: list[Producer] = []

    def create(**options: Any) -> Producer:
        made.append(make_producer(ring_name, **options))
        return made[-1]

    yield create
    # What the loader keeps for the life of a process.
    for subscription in vllm._subscriptions.values():
        subscription.close()
    vllm._subscriptions.clear()
    vllm.active.clear()
    for producer in made:
        producer.close()
    until(lambda: not any_alive(ring_name), "the members to leave")
    for thread in threading.enumerate():
        if thread.name == "shmconn-leave":
            thread.join(30)
