# SPDX-License-Identifier: Apache-2.0
"""Row 20: a fork with a ring open. The child owns nothing, and keeps nobody alive."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.survivors import SLOTS, Reader, create
from harness import figures, payload

from places.fork_roles import ENDS, STATES
from places.namespaces import until
from shmconn import layout
from shmconn.directory import groups, rings
from shmconn.ring import Producer
from shmconn.subscription import subscribe

ROLES = Path(__file__).with_name("fork_roles.py")


@pytest.fixture
def start(ring: str) -> Iterator["list[subprocess.Popen[str]]"]:
    """Processes that a test started; they are killed at its end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def begin(ring: str, state: str, started: "list[subprocess.Popen[str]]") -> "Role":
    prefix = layout.PREFIX
    code = (
        "import re, runpy, sys\n"
        "from shmconn import layout, segment\n"
        f"layout.PREFIX = {prefix!r}\n"
        "for name in ('_RING', '_REGISTRY'):\n"
        "    text = getattr(segment, name).pattern\n"
        f"    new = re.escape({prefix!r}) + text[text.index('('):]\n"
        "    setattr(segment, name, re.compile(new))\n"
        f"sys.argv = [{str(ROLES)!r}, {ring!r}, {state!r}]\n"
        f"runpy.run_path({str(ROLES)!r}, run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return Role(process)


class Role:
    """The other side of fork_roles.py."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def says(self) -> str:
        """The next line; what went wrong if there is none."""
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.strip()

    def go_on(self) -> None:
        """Lets it take its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("state", STATES)
def test_a_forked_child_owns_nothing_however_it_ends(
    ring: str, state: str, start: "list[subprocess.Popen[str]]"
) -> None:
    problems: list[str] = []
    producer: Producer | None = None
    if state != "producing":
        producer = create(ring, ("group",))
        for _ in range({"holding": SLOTS, "view alone": 1}.get(state, 0)):
            payload.put(producer)
    role = begin(ring, state, start)
    assert role.says() == "ready"
    role.go_on()
    for end in ENDS:
        assert role.says() == f"{end} {-signal.SIGKILL if end == 'killed' else 0}"
        # The parent is as before: alive, and with what it held.
        if producer is None:
            (info,) = rings(ring)
            assert info.live
        else:
            (group,) = groups(ring)
            holds = int(state in ("holding", "view alone"))
            assert [(m.alive, m.leases) for m in group.members] == [(True, holds)]
            assert producer.reclaim() == 0
        role.go_on()
    # Its death is seen although a child, and a program that it started, live on.
    others = [int(pid) for pid in role.says().split()]
    reader = Reader(subscribe(ring, "group"), problems)
    role.process.send_signal(signal.SIGKILL)
    role.process.wait()
    died_at = time.monotonic()
    if producer is None:
        reader.read_until("the end", lambda: reader.died is not None)
    else:
        count = producer.published
        reader.read_until("all", lambda: len(reader.got[producer.generation]) == count)
        until(lambda: not any(m.alive for m in groups(ring)[0].members[:1]), "the death")
    recovery_s = time.monotonic() - died_at
    assert [_is_there(pid) for pid in others] == [True, True], "both were to live on"
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    if producer is not None:
        # Takes the dead one's row and leaves it.
        subscribe(ring, "group").close()
        producer.close()
        reader.read_until("the end", lambda: reader.over)
    reader.subscription.close()
    assert role.process.stderr is not None and role.process.stderr.read() == ""
    figures.record(
        "20",
        "fork with a ring open: 5 states, child ends by os._exit, exit, kill, or outlives",
        trials=4,
        exercised=4,
        failures=len(problems),
        recovery_s=[recovery_s],
    )
    assert problems == []
