# SPDX-License-Identifier: Apache-2.0
"""What `verify` found, as one table for people or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reader.verify.rules import BOUNDS, Bounds, Noise

_SHOWN_FAULTS = 20
_COLUMNS = {"median": "median", "q99": "99 %", "row": "row", "run": "8 rows", "first": "first"}


@dataclass
class Check:
    """One thing that was looked at: in how many places, and in how many it did not hold.

    Attributes:
        worst: The largest figure seen, in `unit`, for a check that measures something.
    """

    name: str
    unit: str = ""
    checked: int = 0
    off: int = 0
    worst: float = 0.0

    @property
    def result(self) -> str:
        """For the table."""
        return f"[bold red]{self.off:,} off[/]" if self.off else f"[green]{self.checked:,}[/]"


@dataclass(frozen=True)
class Fault:
    """One sentence about one sample."""

    sample: str
    check: str
    text: str


@dataclass
class Report:
    """Collects the findings. `ok` is whether nothing was off.

    Attributes:
        complete: Whether a sender's log said which samples there must be.
    """

    complete: bool
    checks: dict[str, Check] = field(default_factory=dict)
    noise: dict[tuple[str, str], Noise] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every check held everywhere."""
        return not self.faults

    def check(
        self,
        name: str,
        sample: str,
        faults: Iterable[str] = (),
        *,
        worst: float = 0.0,
        unit: str = "",
    ) -> None:
        """Count one look of check `name` at `sample`, with a sentence for each fault."""
        check = self.checks.setdefault(name, Check(name, unit))
        check.checked += 1
        check.worst = max(check.worst, worst)
        texts = list(faults)
        check.off += bool(texts)
        self.faults += [Fault(sample, name, text) for text in texts]

    def measure(self, dtype: str, name: str, noise: Noise) -> None:
        """Keep the worst figures of each layer, or of whatever `name` says."""
        key = (dtype, name)
        self.noise[key] = self.noise.get(key, Noise()).worst(noise)

    def as_json(self) -> str:
        """Everything, machine-readable."""
        noise = [
            {"dtype": dtype, "of": name, "worst": asdict(noise)}
            for (dtype, name), noise in self.noise.items()
        ]
        bounds = {dtype: asdict(BOUNDS[dtype]) for dtype in self._dtypes()}
        content = {
            "ok": self.ok,
            "completeness_checked": self.complete,
            "checks": [asdict(check) for check in self.checks.values()],
            "noise": noise,
            "bounds": bounds,
            "faults": [asdict(fault) for fault in self.faults],
        }
        return json.dumps(content, indent=2)

    def _dtypes(self) -> list[str]:
        return sorted({dtype for dtype, _ in self.noise})

    def show(self, console: Console) -> None:
        """One table, then the faults, then one line that says how it ended."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("hold", justify="right", no_wrap=True)
        for label in _COLUMNS.values():
            table.add_column(label, justify="right", no_wrap=True)
        for check in self.checks.values():
            worst = [f"{_short(check.worst)} {check.unit}" if check.unit else ""]
            table.add_row(check.name, check.result, *([""] * 2), *worst)
        for dtype in self._dtypes():
            table.add_section()
            table.add_row(f"worst errors, {dtype}", style="bold")
            for (of, name), noise in self.noise.items():
                if of == dtype:
                    table.add_row(f"  {name}", "", *_figures(noise))
            table.add_row("  bound of a layer", "", *_figures(BOUNDS[dtype]), style="dim")
        console.print(table)
        for fault in self.faults[:_SHOWN_FAULTS]:
            console.print(f"[red]off[/] [bold]{escape(fault.sample)}[/]: {escape(fault.text)}")
        if len(self.faults) > _SHOWN_FAULTS:
            console.print(f"… and {len(self.faults) - _SHOWN_FAULTS} more; --json lists all")
        if not self.complete:
            console.print(
                "[yellow]completeness is unchecked[/]: give the sender's log with --sends to check "
                "that no sample is missing or mixed up"
            )
        wrong = len({fault.sample for fault in self.faults})
        samples = "sample" if wrong == 1 else "samples"
        console.print(
            "[bold green]verified: everything holds[/]"
            if self.ok
            else f"[bold red]not verified: {wrong} {samples} off or missing[/]"
        )


def _figures(values: Bounds | Noise) -> list[str]:
    return [_short(getattr(values, name)) for name in _COLUMNS]


def _short(value: float) -> str:
    """Two figures, without a leading zero before the point."""
    if value == 0:
        return "0"
    return f"{value:.0e}" if value < 1e-3 else f"{value:.2g}".removeprefix("0")
