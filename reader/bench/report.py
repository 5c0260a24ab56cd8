# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m reader.bench.vllm`, out of its figures: medians, ratios, goals."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# Of repeats, before a ratio of their medians is held against a goal.
FEWEST = 3
TOO_FEW = f"fewer than {FEWEST} repeats: not judged"


def read(files: Iterable[Path]) -> list[Record]:
    """All figures of these files, in order."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]


def median(values: Iterable[float]) -> float:
    """The median, or NaN of nothing."""
    kept = list(values)
    return statistics.median(kept) if kept else float("nan")


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that ``share`` of the values do not exceed."""
    kept = sorted(values)
    return kept[min(len(kept) - 1, int(share * len(kept)))] if kept else float("nan")


def latencies(records: list[Record], name: str) -> list[float]:
    """Seconds from vLLM's answer to the sample on the reader's device."""
    return [
        one["arrived_after_answer_s"]
        for one in records
        if one["what"] == "handoff" and one["name"] == name and "arrived_after_answer_s" in one
    ]


def delivered(one: Record) -> float:
    """Tokens a second of a batch until its reader has all of it on its device.

    vLLM's example answers before its files are written, so the engine's own rate tells less.
    """
    late = max(0.0, one.get("arrived_after_answer_s", 0.0))
    return float(one["tokens"] / (one["seconds"] + late))


def print_table(file: Path) -> None:
    """Prints what a file of figures says."""
    for line in lines(read([file])):
        print(line)


def lines(records: list[Record]) -> list[str]:
    """The table, line by line."""
    table: list[str] = []
    for one in records:
        if one["what"] in ("failed", "reader failed", "cut"):
            table.append(f"!! {one['part']}: {json.dumps(one)[:400]}")
    return [*table, *_bus(records), *_speeds(records), *_handoff(records), *_others(records)]


def _row(
    what: str, value: float, unit: str, goal: float | None = None, *, most: bool = False
) -> str:
    text = f"{what:<62}{value:>12,.4g} {unit:<8}"
    if goal is None:
        return text
    met = value <= goal if most else value >= goal
    return f"{text} goal {'<=' if most else '>='} {goal:g} {'met' if met else 'MISSED'}"


def _spread(values: Iterable[float]) -> str:
    """How much a median is worth: some machines change their own speed by half."""
    kept = list(values)
    if not kept:
        return "no repeat"
    return f"{len(kept)} x, {min(kept):,.0f} to {max(kept):,.0f}"


def _bus(records: list[Record]) -> list[str]:
    table: list[str] = []
    by_size: dict[int, dict[str, Record]] = defaultdict(dict)
    for one in records:
        if one["part"] == "copy" and "tokens" in one:
            by_size[one["tokens"]][one["what"]] = one
    for ways in by_size.values():
        size = ways["pin"]["bytes"] / 1e6
        text = "  ".join(f"{way} {one['gb_s']:.1f}" for way, one in ways.items())
        table.append(f"copy of {size:.1f} MB, GB/s: {text}")
        if size > 200 and size < 300:
            share = ways["pin"]["seconds"] / ways["capture"]["seconds"]
            whole = ways["pin"]["seconds"] / ways["ring"]["seconds"]
            table.append(_row("copy out of the cache / one pinned copy", share, "x", 0.92))
            table.append(_row("allocate, copy, publish / one pinned copy", whole, "x"))
    return table


def _speeds(records: list[Record]) -> list[str]:
    table: list[str] = []
    groups: dict[tuple[str, str, int], dict[str, list[Record]]] = defaultdict(
        lambda: defaultdict(list)
    )
    bare: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for one in records:
        if one["what"] != "batch":
            continue
        if one["name"] == "none":
            bare[one["part"], one["shape"]].append(one)
        else:
            groups[one["part"], one["shape"], one["layers"]][one["name"]].append(one)
    for (part, shape, count), names in groups.items():
        title = f"{part}: {shape}, {count} layers"
        speed = {name: median(one["tokens_s"] for one in all_) for name, all_ in names.items()}
        speed["none"] = median(one["tokens_s"] for one in bare[part, shape])
        for name, value in speed.items():
            kept = names[name] if name in names else bare[part, shape]
            row = _row(f"{title}: {name}", value, "tokens/s")
            table.append(f"{row} {_spread(one['tokens_s'] for one in kept)}")
        ours = speed.get("ours", float("nan"))
        share = ours / speed.get("throw", float("nan"))
        table.append(_judged(names, "throw", f"{title}: ours / thrown away", share, 0.99))
        if "stock" in speed:
            goal = 1.35 if count == 8 else 1.0
            table.append(_row(f"{title}: ours / stock", ours / speed["stock"], "x"))
            arrived = {name: median(map(delivered, all_)) for name, all_ in names.items()}
            for name in ("ours", "stock"):
                table.append(
                    _row(f"{title}: {name}, until all has arrived", arrived[name], "tokens/s")
                )
            share = arrived["ours"] / arrived["stock"]
            row = f"{title}: ours / stock, all arrived"
            table.append(_judged(names, "stock", row, share, goal))
        table.append(_row(f"{title}: ours / no extraction", ours / speed["none"], "x"))
        table += _cpu(title, names)
    return table


def _judged(
    names: dict[str, list[Record]], other: str, what: str, value: float, goal: float
) -> str:
    if min(len(names.get(one, ())) for one in ("ours", other)) < FEWEST:
        return f"{_row(what, value, 'x')} {TOO_FEW}"
    return _row(what, value, "x", goal)


def _cpu(title: str, names: dict[str, list[Record]]) -> list[str]:
    table = []
    base = median(one["engine_cpu_s"] for one in names.get("throw", []))
    for name in ("ours", "stock"):
        kept = names.get(name, [])
        if not kept:
            continue
        gb = median(one["bytes"] for one in kept) / 1e9
        engine = (median(one["engine_cpu_s"] for one in kept) - base) / gb
        reader = median(one.get("reader_cpu_s", float("nan")) for one in kept) / gb
        table.append(_row(f"{title}: {name}: engine CPU above thrown away", engine, "s/GB"))
        table.append(_row(f"{title}: {name}: reader CPU", reader, "s/GB"))
    return table


def _handoff(records: list[Record]) -> list[str]:
    table: list[str] = []
    ours, stock = latencies(records, "ours"), latencies(records, "stock")
    limit = median(one["seconds"] for one in records if one["what"] == "two copies")
    if not ours:
        return table
    for name, values in (("ours", ours), ("stock", stock)):
        for share in (0.5, 0.99):
            value = 1e3 * percentile(values, share)
            table.append(
                _row(f"hand-off, {name}, p{share * 100:.0f} of {len(values)}", value, "ms")
            )
    table.append(_row("two copies of the same bytes", 1e3 * limit, "ms"))
    p50 = percentile(ours, 0.5)
    table.append(_row("hand-off p50: stock / ours", percentile(stock, 0.5) / p50, "x", 15))
    table.append(_row("hand-off p50: ours / two copies", p50 / limit, "x", 1.25, most=True))
    return table


def _others(records: list[Record]) -> list[str]:
    table: list[str] = []
    for one in records:
        if one["what"] == "memory":
            sizes = {
                key: value / 1e6
                for key, value in one.items()
                if key.startswith(("device", "pinned")) and isinstance(value, int)
            }
            text = "  ".join(f"{key} {value:,.0f}" for key, value in sizes.items())
            table.append(f"memory, MB: {one['name']:<6} {one['tokens']:>6} tokens: {text}")
        if one["what"] == "correct":
            same = one["compared"] - one["differing"]
            settled = one["compared"] + sum(one["lost"].values())
            good = not one["differing"] and settled == one["requests"] and one["preemptions"] > 0
            table.append(
                f"correct: {same} of {one['compared']} samples equal bit for bit, "
                f"{one['preemptions']} preemptions, lost of {one['requests']} requests: "
                f"{one['lost'] or 'none'}: {'met' if good else 'MISSED'}"
            )
    return table
