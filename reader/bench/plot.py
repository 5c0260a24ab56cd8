# SPDX-License-Identifier: Apache-2.0
"""`python -m reader.bench.plot FIGURES.jsonl... --out docs`: the pictures of docs/bench.md.

Needs matplotlib, which shmconn itself does not.
"""

import argparse
from pathlib import Path
from typing import Any

from reader.bench.report import Record, latencies, median, read

_WAYS = {
    "pin": ("one pinned copy, device to host (the limit)", "black", "--"),
    "capture": ("shmconn: cache to ring", "tab:blue", "-"),
    "stock": ("stock: gather, pin, save_file", "tab:red", "-"),
    "ring back": ("shmconn: ring to the reader's device", "tab:cyan", "-"),
    "stock back": ("stock: load_file, .to(device)", "tab:orange", "-"),
}


def bandwidth(records: list[Record], pyplot: Any, path: Path, device: str) -> None:
    """GB/s over the size of a sample."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for way, (label, colour, line) in _WAYS.items():
        kept = [one for one in records if one["part"] == "copy" and one["what"] == way]
        kept.sort(key=lambda one: int(one["bytes"]))
        sizes = [one["bytes"] / 1e6 for one in kept]
        speeds = [one["gb_s"] for one in kept]
        axes.plot(sizes, speeds, line, color=colour, marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("size of a sample, MB")
    axes.set_ylabel("GB/s")
    axes.set_title(f"Hidden states between device and host, {device}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def handoff(records: list[Record], pyplot: Any, path: Path, device: str) -> None:
    """Shares of hand-offs that took at most so long."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label, colour in (
        ("ours", "shmconn", "tab:blue"),
        ("stock", "ExampleHiddenStatesConnector on /dev/shm", "tab:red"),
    ):
        values = sorted(1e3 * one for one in latencies(records, name))
        shares = [(index + 1) / len(values) for index in range(len(values))]
        axes.step(values, shares, where="post", color=colour, label=label)
    limit = 1e3 * median(one["seconds"] for one in records if one["what"] == "two copies")
    axes.axvline(limit, color="black", linestyle="--", label="two copies of the bytes (the limit)")
    axes.set_xscale("log")
    axes.set_xlabel("ms from vLLM's answer to the sample on another process's device")
    axes.set_ylabel("share of requests")
    axes.set_title(f"Hand-off of 8,192 tokens, 4 layers of 4,096 (268 MB), {device}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Draws both pictures."""
    from importlib import import_module

    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    records = read(options.figures)
    device = next((one["device"] for one in records if one["what"] == "about"), "")
    bandwidth(records, pyplot, options.out / "bandwidth.png", device)
    handoff(records, pyplot, options.out / "handoff.png", device)


if __name__ == "__main__":
    main()
