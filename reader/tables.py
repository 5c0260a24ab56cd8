# SPDX-License-Identifier: Apache-2.0
"""Tables that fit: on a narrow terminal columns are left out, the least wanted first."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

# Columns of a pipe: as wide as any table, so that a script sees all of it.
_PIPE = 500


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        right: for numbers.
        rank: 0 always stays; of the others the largest goes first.
        width: columns that it takes at least, so that a live table does not jump.
    """

    title: str
    right: bool = False
    rank: int = 0
    width: int | None = None


Row = Sequence[RenderableType]


def console_of_width() -> Console:
    """stdout, as wide as the terminal; in a pipe as wide as a table needs to be."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE)


def fitted(columns: Sequence[Column], rows: Sequence[Row], console: Console) -> Table:
    """A table that is no wider than the console, if leaving columns out can bring that about."""
    kept = list(range(len(columns)))
    while True:
        table = _table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows])
        width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
        worst = max(kept, key=lambda at: columns[at].rank)
        if width <= console.width or columns[worst].rank == 0:
            return table
        kept.remove(worst)


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            overflow="fold",
            min_width=column.width,
        )
    for row in rows:
        table.add_row(*row)
    return table
