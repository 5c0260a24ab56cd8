# SPDX-License-Identifier: Apache-2.0
"""What people see fits their terminal: columns go, the least wanted first, and names stay."""

import io

import pytest
from rich.console import Console

from reader.progress import Progress, Snapshot
from reader.tables import Column, fitted

COLUMNS = (Column("RING"), Column("FULL", right=True, rank=1), Column("HOLDS", rank=2))
ROWS = [("a-rather-long-ring-name", "37%", "[2,18,33,36] x 4096 bfloat16")]


def lines(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(fitted(COLUMNS, ROWS, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("width", "headings"),
    [(200, ["RING", "FULL", "HOLDS"]), (40, ["RING", "FULL"]), (26, ["RING"]), (10, ["RING"])],
)
def test_a_table_leaves_out_what_does_not_fit(width, headings) -> None:
    shown = lines(width)
    assert next(line.split() for line in shown if "RING" in line) == headings
    assert all(len(line) <= width for line in shown)
    assert ROWS[0][0] in "".join(line.strip() for line in shown)  # folded, never cut


@pytest.mark.parametrize("width", [40, 200])
def test_the_line_of_a_drain_breaks_between_its_parts(width) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    snapshot = Snapshot("/data/out", 1234, 5 << 20, 87, 2, 1, fill=0.6, total=5000)
    with Progress(console) as progress:
        progress.update([snapshot])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("/data/out", "1,234 of 5,000 samples", "ring 60% full", "2 waiting for the disk"):
        assert part in text
