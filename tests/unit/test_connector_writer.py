# SPDX-License-Identifier: Apache-2.0
"""The writing rank, as a scheduler in its process finds it."""

from collections.abc import Callable, Iterator

import pytest
from test_connector_copier import Rig, make, name

from shmconn.worker import Writer, writer_here

__all__ = ["make", "name"]


@pytest.fixture
def build(make: Callable[..., Rig]) -> Iterator[Callable[[], tuple[Rig, Writer]]]:
    writers: list[Writer] = []

    def build() -> tuple[Rig, Writer]:
        rig = make()
        writers.append(Writer(rig.producer, rig.capture, rig.copier, rig.tally, 0.0))
        return rig, writers[-1]

    yield build
    for writer in writers:
        writer.close()


def test_a_writer_is_found_from_its_first_step_until_its_end(
    build: Callable[[], tuple[Rig, Writer]],
) -> None:
    rig, writer = build()
    generation = rig.producer.generation
    assert writer_here(generation) is None
    writer.step(())
    assert writer_here(generation) is writer
    assert writer_here("") is None and writer_here("0" * 32) is None
    writer.close()
    assert writer_here(generation) is None
    writer.step(())
    assert writer_here(generation) is None


def test_work_that_was_handed_over_is_taken_once_and_a_step_reports_it(
    build: Callable[[], tuple[Rig, Writer]],
) -> None:
    rig, writer = build()
    works = [rig.work(tokens=16) for _ in range(3)]
    writer.step(())
    writer.submit(works[1:2])
    writer.step(works)
    rig.wait_done(*works)
    assert rig.producer.published == 3 and set(rig.done.values()) == {1}
