# SPDX-License-Identifier: Apache-2.0
"""The names of a ring in use are removed: by `rm`, or by logind when its user has logged out."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import payload
from harness.processes import Child, Shared

from places.namespaces import until
from shmconn import Producer, RingMissing, Subscription, subscribe
from shmconn.layout import SHM_DIR
from shmconn.unlinked import unlinked_rings

READY, SAID = range(2)


@pytest.fixture
def ring(ring_name: str) -> str:
    """A name that other programs see too."""
    return ring_name


def create(name: str) -> Producer:
    return Producer.create(
        name,
        size="2MiB",
        layer_ids=[0],
        hidden_size=payload.HIDDEN,
        dtype="float32",
        groups=["g"],
    )


def remove(*kinds: str, name: str) -> None:
    """What `rm` of a ring, its registry or its doorbells does."""
    for file in os.listdir(SHM_DIR):
        bell = file.startswith(f"sem.shmconn.{name}")
        ring = file.startswith(f"shmconn.{name}.")
        kind = "bells" if bell else "ring" if ring else "registry"
        if (bell or ring or file == f"shmconn.{name}") and kind in kinds:
            os.unlink(f"{SHM_DIR}/{file}")


class Live:
    """A producer in a process of its own, which publishes until it is killed."""

    def __init__(self, name: str) -> None:
        self.shared = Shared()
        self.child = Child(lambda: self._run(name), self.shared)
        until(lambda: self.shared.words[READY], "the first sample", self.child)

    def _run(self, name: str) -> None:
        producer = create(name)
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shmconn").addHandler(handler)
        while True:
            if payload.put(producer, 1) is not None:
                self.shared.words[READY] += 1
            producer.wait(0.01)
            producer.tick()
            if len(said) != self.shared.words[SAID]:
                self.shared.note = f"{' '.join(said)} {producer.stall_text()}"
                self.shared.words[SAID] = len(said)


@pytest.fixture
def live(ring: str) -> Iterator[Live]:
    live = Live(ring)
    yield live
    live.child.kill()
    remove("ring", "registry", "bells", name=ring)


def read(subscription: Subscription, count: int) -> None:
    """Reads so many samples, each whole and the next one."""
    for _ in range(count):
        sample = subscription.next(10)
        assert sample is not None
        assert payload.problems(sample, payload.slot_of(subscription, sample)) == []
        sample.release()


@pytest.mark.parametrize("kinds", [("ring", "registry", "bells"), ("ring",), ("registry",)])
def test_both_ends_go_on_and_say_once_that_names_were_removed(
    ring: str, live: Live, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...]
) -> None:
    with subscribe(ring, "g") as subscription:
        read(subscription, 3)
        remove(*kinds, name=ring)
        until(lambda: live.shared.words[SAID], "the producer's word", live.child)
        read(subscription, 200)
        time.sleep(2.2)  # two more looks of both
        read(subscription, 200)
        said = live.shared.note
        assert (
            live.shared.words[SAID] == 1
            and f"ring {ring!r} goes on with the readers that it has" in said
        )
        assert "RemoveIPC" in said and f"{SHM_DIR}/shmconn.{ring}" in said, said
        assert "its name is gone from /dev/shm" in said
        ours = [record.getMessage() for record in caplog.records]
        assert len(ours) == 1 and "no other reader can join it" in ours[0], ours
        # A newcomer is told what happened, not that vLLM was not started.
        for wait_s in (0.0, 0.3):
            with pytest.raises(RingMissing) as caught, subscribe(ring, "new", wait_s=wait_s) as new:
                new.next(10)
            text = str(caught.value)
            assert "RemoveIPC" in text and "restart vLLM" in text, text
            assert "ring" not in kinds or f"of pid {live.child.pid}" in text, text
        live.child.kill()
        with pytest.raises(Exception, match="died; all"):
            while True:
                read(subscription, 1)


def test_the_next_start_works_and_a_follower_does_not_wait_for_it_in_vain(
    ring: str, live: Live
) -> None:
    subscription = subscribe(ring, "g", follow=True)
    read(subscription, 3)
    remove("ring", "registry", "bells", name=ring)
    live.child.kill()
    with create(ring) as producer:
        assert payload.put(producer, 1) is not None
        with pytest.raises(RingMissing, match="removed by hand") as caught:
            while subscription.next(10) is not None:
                pass
        assert "Subscribe again" in str(caught.value)
        subscription.close()
        with subscribe(ring, "g") as again:
            read(again, 1)
            producer.close()


def test_a_reader_that_waits_for_a_ring_is_told_that_its_registry_was_removed(ring: str) -> None:
    with subscribe(ring, "g", wait_s=60) as subscription:
        assert subscription.next(0) is None
        remove("registry", "bells", name=ring)
        with pytest.raises(RingMissing, match="no further ring"):
            subscription.next(10)


def test_without_its_doorbells_a_ring_is_read_by_who_comes(ring: str, live: Live) -> None:
    remove("bells", name=ring)
    with subscribe(ring, "g") as subscription:
        read(subscription, 100)
        assert not live.shared.words[SAID]


def test_stat_drain_and_doctor_name_the_ring_that_lost_its_name(
    ring: str, live: Live, tmp_path: Path
) -> None:
    remove("ring", "registry", "bells", name=ring)
    for command in (["stat", ring], ["drain", ring, "--to", str(tmp_path)], ["doctor"]):
        ran = subprocess.run(
            [sys.executable, "-c", "from reader.cli import main; main()", *command],
            capture_output=True,
            text=True,
            timeout=60,
        )
        text = ran.stdout + ran.stderr
        assert "Traceback" not in text, text
        assert ran.returncode in (1, 2), (ran.returncode, text)
        assert f"ring {ring!r} of pid {live.child.pid} is in use" in text, text


def test_a_ring_that_ended_is_not_taken_for_one_whose_name_was_removed(ring: str) -> None:
    with create(ring) as producer, subscribe(ring, "g") as subscription:
        assert payload.put(producer, 1) is not None
        sample = subscription.next(10)
        assert sample is not None
        producer.close()
        assert subscription.next(10) is None and subscription.ended
        assert unlinked_rings(ring) == []
        sample.release()


def test_a_stopped_producer_without_names_is_found(ring: str, live: Live) -> None:
    remove("ring", "registry", "bells", name=ring)
    os.kill(live.child.pid, signal.SIGSTOP)
    (found,) = unlinked_rings(ring)
    os.kill(live.child.pid, signal.SIGCONT)
    assert (found.name, found.pid) == (ring, live.child.pid)
