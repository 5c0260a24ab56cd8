# SPDX-License-Identifier: Apache-2.0
"""Rings of a test's own."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from trainer_tools import any_alive, make_producer, until

from shmconn import Producer


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
