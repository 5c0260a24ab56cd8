# SPDX-License-Identifier: Apache-2.0
"""The state of a dataset: a set of handles that stays small and is checked when it is read."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmconn import Handle, OptionError
from shmconn.handed_out import HandedOut

GENERATIONS = ["a" * 32, "b" * 32]


def handle(generation: str, number: int) -> Handle:
    return Handle("ring", generation, number, "c" * 32)


members = st.lists(st.tuples(st.sampled_from(GENERATIONS), st.integers(1, 60)), max_size=80)


@given(given_out=members, others=members)
def test_it_is_the_set_of_what_was_added_also_after_a_checkpoint(
    given_out: list[tuple[str, int]], others: list[tuple[str, int]]
) -> None:
    ours, theirs = HandedOut(), HandedOut()
    for one in given_out:
        ours.add(handle(*one))
    for one in others:
        theirs.add(handle(*one))
    again = HandedOut()
    for state in (ours.state_dict(), theirs.state_dict()):
        again.merge(json.loads(json.dumps(state)))
    want = set(given_out) | set(others)
    assert len(ours) == len(set(given_out))
    assert len(again) == len(want)
    for generation in GENERATIONS:
        for number in range(1, 62):
            assert (handle(generation, number) in again) == ((generation, number) in want)


def test_numbers_in_a_row_take_one_range_whatever_their_order() -> None:
    handed_out = HandedOut()
    for number in [*range(1, 1000, 2), *range(2, 1000, 2)]:
        handed_out.add(handle(GENERATIONS[0], number))
    assert handed_out.state_dict()["handed_out"] == {GENERATIONS[0]: [[1, 999]]}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"version": 1},
        {"version": 2, "handed_out": {}},
        {"version": 1, "handed_out": {"short": []}},
        {"version": 1, "handed_out": {"a" * 32: [[2, 1]]}},
        {"version": 1, "handed_out": {"a" * 32: [[0, 1]]}},
        {"version": 1, "handed_out": {"a" * 32: [7]}},
        {"version": 1, "handed_out": {"a" * 32: [["x", 1]]}},
    ],
)
def test_a_state_of_another_kind_is_refused_and_nothing_is_added(state: Any) -> None:
    handed_out = HandedOut()
    with pytest.raises(OptionError, match="state"):
        handed_out.merge(state)
    assert len(handed_out) == 0
