# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench ring`: one producer process to one reader process that touches every byte.

Beside the ring run, in turn and in the same run:
  plain   copies into a warm shared mapping, with two semaphores: what a ring can do at best
  files   safetensors save_file and load_file through /dev/shm: what people do without a ring,
          both in one process one after the other, and by two processes at once
Each figure is the median of the repeats; the ratios are of medians.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One line of the table. ``goal`` is a least value, or a largest one if ``at_most``."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the goal is met; true where there is none."""
        if self.goal is None:
            return True
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def run(
    *, sample_mib: int = 64, samples: int = 24, repeats: int = 11, json_out: bool = False
) -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    figures = measure(sample_mib=sample_mib, samples=samples, repeats=repeats)
    return show(figures, "ring: one producer process, one reader process", json_out=json_out)


def show(figures: list[Figure], title: str, *, json_out: bool) -> int:
    """Prints what a bench measured; returns 1 if a goal is missed."""
    if json_out:
        print(json.dumps([asdict(figure) | {"met": figure.met} for figure in figures], indent=1))
    else:
        Console().print(table(figures, title))
    return 0 if all(figure.met for figure in figures) else 1


def measure(*, sample_mib: int, samples: int, repeats: int) -> list[Figure]:
    """The figures of one run."""
    size = sample_mib * MIB
    counts = {"ring": samples, "plain": samples, "files": samples // 4, "alone": samples // 4}
    seconds: dict[str, list[float]] = {way: [] for way in counts}
    for turn in range(repeats):
        # To and fro: none always follows the same other, whose pages it may get.
        for way, count in sorted(counts.items(), reverse=turn % 2 == 1):
            took = _files_alone(size, count) if way == "alone" else _transfer(way, size, count)
            seconds[way].append(took)
    speed = {
        way: size * counts[way] / statistics.median(times) / 1e9 for way, times in seconds.items()
    }
    small = [_transfer("ring", 4096, 20_000) for _ in range(repeats)]
    return [
        Figure(f"ring, {sample_mib} MiB samples", speed["ring"], "GB/s"),
        Figure("plain copies into a warm mapping", speed["plain"], "GB/s"),
        Figure("save_file + load_file through /dev/shm", speed["alone"], "GB/s"),
        Figure("the same, two processes at once", speed["files"], "GB/s"),
        Figure("ring / plain copies", speed["ring"] / speed["plain"], "x", goal=0.9),
        Figure("ring / save_file + load_file", speed["ring"] / speed["alone"], "x", goal=8),
        Figure("ring / two processes at once", speed["ring"] / speed["files"], "x"),
        Figure("samples of 4 KiB", 20_000 / statistics.median(small), "1/s", goal=3000),
        Figure("idle reader, share of a core", 100 * _idle_share(), "%", goal=1, at_most=True),
    ]


def _transfer(way: str, size: int, samples: int) -> float:
    """Seconds from the first put until the reader has touched the last byte."""
    name = f"bench-{secrets.token_hex(4)}"
    return _between(f"{way}-write", f"{way}-read", name, size, samples)


def _between(writer: str, reader: str, name: str, size: int, samples: int) -> float:
    command = [sys.executable, "-m", "reader.bench.roles"]
    options = [name, str(size), str(samples)]
    with (
        _started([*command, writer, *options]) as write,
        _started([*command, reader, *options]) as read,
    ):
        begin = float(_answer(write))
        end = float(_answer(read))
    return end - begin


def _files_alone(size: int, samples: int) -> float:
    """Seconds of save_file, load_file and a touch, one after the other."""
    name = f"bench-{secrets.token_hex(4)}"
    command = [sys.executable, "-m", "reader.bench.roles", "files-alone", name]
    with _started([*command, str(size), str(samples)]) as process:
        return float(_answer(process))


def _idle_share() -> float:
    """CPU seconds per second of a reader with nothing to read."""
    name = f"bench-{secrets.token_hex(4)}"
    command = [sys.executable, "-m", "reader.bench.roles", "idle", name, "0", "0"]
    with _started(command) as process:
        return float(_answer(process))


def _started(command: list[str]) -> "subprocess.Popen[str]":
    # Threads of torch that spin while they wait would keep the reader from its core, in each way.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _answer(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args))} failed")  # type: ignore[arg-type]
    return out.strip().splitlines()[-1]


def table(figures: list[Figure], title: str) -> Table:
    """The figures for people."""
    table = Table(title=title)
    for column in ("what", "value", "goal", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    for figure in figures:
        sign = "≤" if figure.at_most else "≥"
        goal = "" if figure.goal is None else f"{sign} {figure.goal:g} {figure.unit}"
        mark = "" if figure.goal is None else "met" if figure.met else "MISSED"
        table.add_row(figure.what, f"{figure.value:,.2f} {figure.unit}", goal, mark)
    return table
