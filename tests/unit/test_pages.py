# SPDX-License-Identifier: Apache-2.0
"""The page allocator against a plain set of free pages."""

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shmconn.pages import PageRuns

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 7), st.integers(0, 30)), max_size=80)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 24), STEPS)
def test_runs_never_overlap_and_are_refused_only_when_no_run_is_long_enough(
    pages: int, steps: list[tuple[bool, int, int]]
) -> None:
    runs = PageRuns(pages)
    free = set(range(pages))
    held: list[tuple[int, int]] = []
    for take, count, choice in steps:
        if take:
            start = runs.allocate(count)
            fits = any(
                set(range(at, at + count)) <= free for at in range(max(0, pages - count + 1))
            )
            assert (start is not None) == fits
            if start is not None:
                run = set(range(start, start + count))
                assert run <= free
                free -= run
                held.append((start, count))
        elif held:
            start, count = held.pop(choice % len(held))
            runs.release(start, count)
            free |= set(range(start, start + count))
        assert runs.free == len(free)
    for start, count in held:
        runs.release(start, count)
    assert runs.free == pages
    assert runs.longest() == pages


def test_more_pages_than_there_are_is_none() -> None:
    assert PageRuns(3).allocate(4) is None


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), STEPS)
def test_the_longest_run_is_at_least_the_free_pages_over_what_is_held_and_one(
    pages: int, steps: list[tuple[bool, int, int]]
) -> None:
    """What any placement promises, and what the documents do: no less, and no more."""
    runs = PageRuns(pages)
    held: list[tuple[int, int]] = []
    for take, count, choice in steps:
        if take:
            start = runs.allocate(count)
            if start is not None:
                held.append((start, count))
        elif held:
            runs.release(*held.pop(choice % len(held)))
        assert runs.longest() * (len(held) + 1) >= runs.free


def test_a_ring_little_used_has_a_third_in_one_run_though_some_samples_are_held_long() -> None:
    """Short lives beside long ones, at 6 to 29 % of the ring used."""
    for seed, long_share in itertools.product(range(3), (0.02, 0.05)):
        dice = random.Random(seed)
        pages = 1500
        runs = PageRuns(pages)
        held: list[tuple[float, int, int]] = []  # (when it is released, start, count)
        used = missed = 0
        for now in range(4000):
            while held and held[0][0] <= now:
                _, start, count = heapq.heappop(held)
                runs.release(start, count)
            count = dice.randint(2, 16)
            first = runs.allocate(count)
            assert first is not None
            life = dice.expovariate(1 / 300 if dice.random() < long_share else 1 / 3)
            heapq.heappush(held, (now + 1 + life, first, count))
            used = max(used, pages - runs.free)
            missed += runs.longest() < pages // 3
        assert used < 0.3 * pages
        assert missed == 0, f"{missed} of 4000 times no third in one run"
