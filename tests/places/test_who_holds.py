# SPDX-License-Identifier: Apache-2.0
"""Stall message, `stat` and `doctor` say in one look who holds what, and the command that helps."""

import json
import os
import re
import signal
import time

import pytest
from crash.survivors import SLOTS, create
from harness import payload
from harness.processes import Child, Shared

from places.namespaces import ended, reached
from reader import doctor, show
from shmconn.directory import groups, remove_group
from shmconn.subscription import subscribe


def hold(name: str, group: str, holds: int, shared: Shared) -> None:
    """Claims so many samples and waits to be killed."""
    subscription = subscribe(name, group)
    held = [subscription.next(60) for _ in range(holds)]
    shared.words[0] = len(held)
    time.sleep(600)


def holder(name: str, group: str, holds: int) -> Child:
    shared = Shared()
    child = Child(lambda: hold(name, group, holds, shared), shared)
    reached(child, holds, "leases")
    return child


def test_one_look_tells_who_holds_what_and_what_helps(
    ring: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Else the test would wait until a live reader is late enough to be told of.
    monkeypatch.setattr(show, "_LATE_S", 0.0)
    producer = create(ring, ("slow", "gone", "probe"))
    while payload.put(producer):
        pass
    slow, gone = holder(ring, "slow", 2), holder(ring, "gone", 1)
    host, oldest = os.uname().nodename, payload.request_id(producer.generation, 1)
    with ended(slow, gone):
        gone.kill()
        slow.signal(signal.SIGSTOP)

        stall = producer.stall_text()
        for said in (
            f"holds {SLOTS} samples, 256.0 KiB of 384.0 KiB, 0 of {SLOTS} slots are free",
            f"oldest sample {oldest!r} is",
            f"'slow' needs {SLOTS} samples, the oldest is held by pid {slow.pid} on {host} (alive)",
            "if that process is stuck, continue or end it",
            f"'gone' needs {SLOTS} samples, the oldest is held by pid {gone.pid} on {host} (dead)",
            f"`shmconn groups rm {ring} gone`",
            f"'probe' needs {SLOTS} samples and has no live member",
            f"`shmconn groups rm {ring} probe`",
        ):
            assert said in stall, (said, stall)

        show.stat(ring, as_json=False)
        text = capsys.readouterr().out
        for said in (
            f"pid {os.getpid()} on {host}",
            "4 pages (67%), 4 slots",
            f"{SLOTS} samples wait for group slow, the oldest, {oldest!r}, for 0 s; "
            f"pid {slow.pid} on {host} (alive) holds 2",
            "if a reader is stuck, continue or end it",
            f"{SLOTS} samples wait for group gone, the oldest, {oldest!r}, for 0 s; "
            f"pid {gone.pid} on {host} (dead) holds 1",
            f"give them up with shmconn groups rm {ring} gone",
            f"give them up with shmconn groups rm {ring} probe",
        ):
            assert said in text, (said, text)
        row = next(line for line in text.splitlines() if line.split()[:1] == ["gone"])
        assert re.search(rf"dead\s+3\s+1\s+0 s\s+pid {gone.pid} on {host} \(dead\)", row), row

        show.stat(ring, as_json=True)
        facts = json.loads(capsys.readouterr().out)
        found = {group["name"]: group for group in facts["groups"]}
        assert facts["rings"][0]["full"] == round(4 / 6, 4)
        for name, alive, leases, pid in (("slow", 1, 2, slow.pid), ("gone", 0, 1, gone.pid)):
            (member,) = found[name]["members"]
            assert (member["pid"], member["alive"], member["leases"]) == (pid, alive, leases)
            assert found[name]["oldest_request_id"] == oldest
            assert found[name]["unread"] == {producer.generation: SLOTS - leases}

        monkeypatch.setattr(doctor, "_FULL", 0.5)
        monkeypatch.setattr(doctor, "CHECKS", [doctor.check_rings])
        assert doctor.run(as_json=True) == 0
        said_of = {item["subject"]: item for item in json.loads(capsys.readouterr().out)}
        for name, pid, state, helps in (
            ("slow", slow.pid, "alive", "continue or end it"),
            ("gone", gone.pid, "dead", f"shmconn groups rm {ring} gone"),
        ):
            finding = said_of[f"group {name} of {ring}"]
            assert finding["state"] == "warn"
            assert f"pid {pid} on {host} ({state}) holds" in finding["text"]
            assert oldest in finding["text"] and "is 67% full" in finding["text"]
            assert helps in finding["remedy"]
    producer.close()
    for group in groups(ring):
        remove_group(ring, group.name)


def test_what_waits_for_a_first_reader_is_told_with_the_command_that_starts_one(
    ring: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with create(ring) as producer:
        payload.put(producer)
        show.stat(ring, as_json=False)
        text = capsys.readouterr().out
        assert "1 samples wait for a first reader" in text
        assert f"shmconn drain {ring} --to DIR" in text and "shmconn drain" in producer.stall_text()
        with subscribe(ring, "reader") as subscription:
            sample = subscription.next(5)
            # A reader at work is nothing to be told of.
            show.stat(ring, as_json=False)
            assert "wait for" not in capsys.readouterr().out
            del sample
