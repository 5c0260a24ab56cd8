# SPDX-License-Identifier: Apache-2.0
"""The page allocator against a plain set of free pages."""

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
