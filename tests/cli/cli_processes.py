# SPDX-License-Identifier: Apache-2.0
"""Child processes of the tests: real producers and real `shmconn` commands."""

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WATCHDOG_S = 60


class Process:
    """A child with its output in files; killed at the end of the test."""

    def __init__(self, command: list[str], folder: Path, **options: Any) -> None:
        stem = folder / secrets.token_hex(4)
        self.out_path, self.err_path = stem.with_suffix(".out"), stem.with_suffix(".err")
        with open(self.out_path, "w") as out, open(self.err_path, "w") as err:
            self.child = subprocess.Popen(command, stdout=out, stderr=err, text=True, **options)

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait(self, timeout: float = WATCHDOG_S) -> int:
        try:
            return self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.out}\n{self.err}") from None

    def until(self, true: Callable[[], object]) -> None:
        """Wait for something that this process must bring about."""
        until(lambda: true() or self.child.poll() is not None, lambda: self.out + self.err)
        assert true(), f"exit {self.child.returncode}: {self.out}{self.err}"

    def says(self, text: str) -> None:
        """Wait until it said something on stderr."""
        self.until(lambda: text in self.err)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait()
        if self.child.stdin is not None and not self.child.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.child.stdin.close()


class ProducerProcess(Process):
    """A producer; each call returns when it is done."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        options = {"name": name, "size": "8MiB"} | options
        super().__init__(
            [sys.executable, str(HERE / "cli_producer.py"), json.dumps(options)],
            folder,
            stdin=subprocess.PIPE,
        )
        self._answers = 0
        self.generation: str = self._answer()["generation"]

    def _answer(self) -> dict[str, Any]:
        self._answers += 1
        until(
            lambda: self.out.count("\n") >= self._answers or self.child.poll() is not None,
            lambda: self.err,
        )
        lines = self.out.splitlines()
        assert len(lines) >= self._answers, self.err
        return json.loads(lines[self._answers - 1])

    def tell(self, do: str, **facts: Any) -> None:
        """Say what to do without waiting for it."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do, **facts}) + "\n")
        self.child.stdin.flush()

    def put(self, first: int, count: int, **facts: Any) -> None:
        self.tell("put", first=first, count=count, **facts)
        self._answer()

    def bury(self, number: int, reason: str) -> None:
        self.tell("bury", number=number, reason=reason)
        self._answer()

    def finish(self) -> None:
        """Close after all that it was told before; the answers to that are left unread."""
        self.tell("close")
        assert self.child.stdin is not None
        self.child.stdin.close()
        assert self.wait() == 0, self.err

    def close(self) -> None:
        self.tell("close")
        self._answer()


def until(true: Callable[[], object], explain: Callable[[], str] = str) -> None:
    """Wait for something that must come; the watchdog says what there was instead."""
    deadline = time.monotonic() + WATCHDOG_S
    while not true():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)
