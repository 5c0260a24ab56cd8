# SPDX-License-Identifier: Apache-2.0
"""The table of the GPU benchmark: what it says of figures whose ratios are known."""

from typing import Any

from reader.bench.report import lines


def batch(name: str, seconds: float) -> dict[str, Any]:
    """One batch of 1,000 tokens."""
    return {
        "part": "small",
        "what": "batch",
        "name": name,
        "shape": "s",
        "layers": 8,
        "tokens": 1000,
        "seconds": seconds,
        "tokens_s": 1000 / seconds,
        "bytes": 10**9,
        "engine_cpu_s": seconds,
        "arrived_after_answer_s": 0.0,
        "reader_cpu_s": 0.1,
    }


def row(table: list[str], what: str) -> str:
    """The one row that begins so."""
    (found,) = [line for line in table if line.startswith(f"small: s, 8 layers: {what}  ")]
    return " ".join(found.split())


def test_a_ratio_is_held_against_its_goal_and_the_spread_stands_beside_its_medians() -> None:
    figures = [batch("none", 1.0), *(batch("throw", one) for one in (1.0, 1.25, 2.0))]
    figures += [batch("ours", one) for one in (1.0, 1.25, 2.0)]
    table = lines(figures)
    assert row(table, "ours / thrown away").endswith("1 x goal >= 0.99 met")
    assert row(table, "ours").endswith("800 tokens/s 3 x, 500 to 1,000")
    slower = [
        one | {"tokens_s": one["tokens_s"] * 0.98} for one in figures if one["name"] == "ours"
    ]
    table = lines([one for one in figures if one["name"] != "ours"] + slower)
    assert row(table, "ours / thrown away").endswith("0.98 x goal >= 0.99 MISSED")


def test_a_ratio_of_too_few_repeats_is_not_judged() -> None:
    figures = [batch("none", 1.0)] * 3 + [batch("throw", 1.0)] * 3 + [batch("ours", 1.0)] * 2
    said = row(lines(figures), "ours / thrown away")
    assert said.endswith("1 x fewer than 3 repeats: not judged")


def test_samples_that_differ_or_are_missing_fail_the_comparison() -> None:
    good = {
        "part": "correct",
        "what": "correct",
        "requests": 10,
        "compared": 9,
        "differing": 0,
        "lost": {"short": 1},
        "preemptions": 3,
    }
    assert lines([good])[-1].endswith("met")
    for fault in ({"differing": 1}, {"compared": 8}, {"lost": {}}, {"preemptions": 0}):
        assert lines([good | fault])[-1].endswith("MISSED")
