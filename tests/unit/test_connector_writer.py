# SPDX-License-Identifier: Apache-2.0
"""The writing rank, as a scheduler in its process finds it."""

import logging
from collections.abc import Callable, Iterator

import pytest
from test_connector_copier import Rig, make, name

from shmconn.worker import Writer, writer_here

__all__ = ["make", "name"]


@pytest.fixture
def build(make: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Writer]]]:
    writers: list[Writer] = []

    def build(**options: bool) -> tuple[Rig, Writer]:
        rig = make(**options)
        writers.append(Writer(rig.producer, rig.capture, rig.copier, rig.tally, 0.0))
        return rig, writers[-1]

    yield build
    for writer in writers:
        writer.close()


def test_a_writer_is_found_from_its_first_step_until_its_end(
    build: Callable[..., tuple[Rig, Writer]],
) -> None:
    rig, writer = build()
    generation = rig.producer.generation
    assert writer_here(generation) is None
    assert writer.step(()) == set()
    assert writer_here(generation) is writer
    assert writer_here("") is None and writer_here("0" * 32) is None
    writer.close()
    assert writer_here(generation) is None
    writer.step(())
    assert writer_here(generation) is None


def test_a_writer_that_copies_within_its_step_is_not_found(
    build: Callable[..., tuple[Rig, Writer]],
) -> None:
    rig, writer = build(background=False)
    writer.step(())
    assert writer_here(rig.producer.generation) is None


def test_work_that_was_handed_over_is_taken_once_and_a_step_reports_it(
    build: Callable[..., tuple[Rig, Writer]],
) -> None:
    rig, writer = build()
    works = [rig.work(tokens=16) for _ in range(3)]
    writer.step(())
    writer.submit(works[:2])
    done = writer.step(works)
    while len(done) < 3:
        done |= writer.step(())
    assert done == {"r1", "r2", "r3"} and rig.producer.published == 3


def test_a_writer_that_does_not_know_its_step_s_stream_is_not_found_for_that_step(
    build: Callable[..., tuple[Rig, Writer]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, writer = build()
    writer.step(())

    def fail() -> None:
        raise RuntimeError("planted")

    real = rig.capture.at_step
    monkeypatch.setattr(rig.capture, "at_step", fail)
    work = rig.work(tokens=16)
    with caplog.at_level(logging.ERROR, "vllm.shmconn"):
        done = writer.step([work])
        assert writer_here(rig.producer.generation) is None
        while not done:
            done = writer.step(())
    assert done == {work.request_id} and rig.producer.published == 1
    assert caplog.text.count("what finishes now waits for the next step") == 1
    monkeypatch.setattr(rig.capture, "at_step", real)
    writer.step(())
    assert writer_here(rig.producer.generation) is writer
