# SPDX-License-Identifier: Apache-2.0
"""Figures of the fault table: one JSON line per row, in the report and in ``out/figures.jsonl``."""

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("SHMCONN_FIGURES", "out/figures.jsonl"))

_rows: dict[tuple[str, str], dict[str, Any]] = {}
_recoveries: dict[tuple[str, str], list[float]] = {}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def record(
    row: str,
    what: str,
    *,
    trials: int,
    exercised: int,
    failures: int,
    recovery_s: Sequence[float] = (),
    **more: Any,
) -> None:
    """Notes what a test of a row found; figures of the same row and trial are added up.

    Args:
        row: row of the fault table, or a name for what is outside of it.
        what: what a trial is.
        trials: how many there were.
        exercised: in how many the race, or the fault, really took place.
        failures: in how many a promise was broken.
        recovery_s: seconds until the others had recovered, one per trial.
        more: further figures; numbers and lists are added up, but of what is called longest or
            most the largest counts, and of the rest the last.
    """
    key = (row, what)
    line = _rows.setdefault(key, {"row": row, "what": what})
    counts = {"trials": trials, "exercised": exercised, "failures": failures, **more}
    for name, value in counts.items():
        if name not in line:
            line[name] = value
        elif name.startswith(("longest", "most")):
            line[name] = max(line[name], value)
        else:
            line[name] = line[name] + value if isinstance(value, int | list) else value
    _recoveries.setdefault(key, []).extend(recovery_s)


def detected(row: str, how: str, planted: int, missed: Sequence[str] = ()) -> None:
    """Notes how many of the faults that were planted a test of a row found.

    Args:
        row: row of the fault table.
        how: what looked for them.
        planted: how many there were.
        missed: names of those it did not find.
    """
    key = (row, f"planted faults found by {how}")
    line = _rows.setdefault(key, {"row": row, "what": key[1], "planted": 0, "detected": 0})
    line["planted"] += planted
    line["detected"] += planted - len(missed)
    if missed:
        line["missed"] = [*line.get("missed", []), *missed]


def flush() -> list[str]:
    """Writes all figures to the file; returns the lines."""
    lines = []
    for key, line in _rows.items():
        # What is searched to its end is no sample of anything.
        sampled = "not_to_the_end" not in line or line["what"].endswith("random priorities")
        if line.get("exercised") and not line["failures"] and sampled:
            line["bound95"] = float(f"{3 / line['exercised']:.2g}")
        if _recoveries.get(key):
            for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0)):
                line[name] = round(1000 * percentile(_recoveries[key], share), 2)
        line |= {"date": datetime.date.today().isoformat(), "machine": machine()}
        lines.append(json.dumps(line))
    _rows.clear()
    _recoveries.clear()
    if lines:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        with OUT.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    return lines


def machine() -> str:
    """Cores, kernel and Python of this machine."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}"
    )
