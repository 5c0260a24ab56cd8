# SPDX-License-Identifier: Apache-2.0
"""A stop is bounded: a write that hangs is left behind, with its sample's lease."""

import os
import secrets
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from rich.console import Console

import shmconn
from reader import service
from reader.progress import Progress
from reader.sinks import SinkOptions, Stored
from shmconn.directory import groups, remove_group


class Hanging:
    """A disk that answers only when the test lets it."""

    path = "hanging"

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()

    def write(self, sample: shmconn.Sample) -> Stored:
        self.asked.set()
        self.go.wait(120)
        return Stored("f", sample.nbytes, fresh=True)

    def close(self) -> None:
        pass


def test_a_write_that_hangs_does_not_hold_up_the_stop_and_its_sample_is_kept(monkeypatch) -> None:
    sink = Hanging()
    monkeypatch.setattr(service, "open_sink", lambda form, options: sink)
    name = f"test-{secrets.token_hex(4)}"
    options = service.DrainOptions(
        ring=name,
        outputs=[service.Output(SinkOptions("hanging"), group="files")],
        writers=1,
        stop_s=0.1,
    )

    def stop() -> None:
        sink.asked.wait(120)
        os.kill(os.getpid(), signal.SIGTERM)

    with shmconn.Producer.create(
        name, size="1MiB", layer_ids=[1], hidden_size=4, dtype="float32", groups=["files"]
    ) as producer:
        for number in (1, 2):
            fill = producer.allocate(number=number, request_id="r", token_ids=np.arange(2))
            assert fill is not None
            producer.accept(number)
            producer.publish(fill)
        threading.Thread(target=stop).start()
        outcome = service.run(options, Progress(Console(quiet=True), quiet=True))
        assert outcome.code == 128 + signal.SIGTERM
        assert [sample.number for sample in outcome.unreleased] == [1]
        assert any("2 samples unread" in line for line in outcome.lines)
        (group,) = groups(name)
        assert sum(group.needed.values()) == 2
        assert group.alive  # its lock goes with the process, which then ends without clean-up
        sink.go.set()
        del outcome
        while groups(name)[0].alive:
            threading.Event().wait(0.01)
        remove_group(name, "files")


# Sleeps as the service does while signals come, until it has heard of so many of them; each asks
# for the next one. A thread looks whether it still gets them.
STORM = """
import os, signal, sys, threading, time
from reader.service import _Signals
most, count = int(sys.argv[2]), 0
def heard():
    global count
    count += 1
    if count < most:
        signal.setitimer(signal.ITIMER_REAL, 0.0001)
signals, event = _Signals(heard), threading.Event()
sleep, handler = signals.sleep, signals._hang_up
if sys.argv[1] == "event":
    handler = lambda number, frame: event.set()
    def sleep(seconds):
        if event.wait(seconds):
            event.clear()
            heard()
def look():
    before = -1
    while count < most:
        if count == before:
            os.write(1, b"hangs")
            os._exit(0)
        before = count
        time.sleep(2)
signal.signal(signal.SIGALRM, handler)
threading.Thread(target=look, daemon=True).start()
signal.setitimer(signal.ITIMER_REAL, 0.0001)
while count < most:
    sleep(0.00005)
print("had", count)
"""


def storm(kind: str, most: int) -> str:
    """What the sleeper said."""
    command = [sys.executable, "-c", STORM, kind, str(most)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


def test_a_signal_at_any_moment_of_the_sleep_is_heard_and_hangs_nothing() -> None:
    assert storm("ours", 30_000) == "had 30000\n"


@pytest.mark.long
def test_a_threading_event_in_a_handler_is_seen_to_hang() -> None:
    assert storm("event", 300_000) == "hangs"


def test_a_drain_runs_in_a_thread_that_is_not_the_main_one(tmp_path) -> None:
    name = f"test-{secrets.token_hex(4)}"
    options = service.DrainOptions(name, [service.Output(SinkOptions(str(tmp_path)))])
    found: list[service.Outcome] = []
    progress = Progress(Console(), live=False, quiet=True)
    with shmconn.Producer.create(
        name, size="1MiB", layer_ids=[1], hidden_size=4, dtype="float32"
    ) as producer:
        fill = producer.allocate(number=1, request_id="r", token_ids=np.arange(2))
        assert fill is not None
        producer.accept(1)
        producer.publish(fill)
        thread = threading.Thread(target=lambda: found.append(service.run(options, progress)))
        handler = signal.getsignal(signal.SIGTERM)
        thread.start()
        producer.close()
        thread.join(60)
    assert found[0].code == 0
    assert (tmp_path / "r.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) is handler
