# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a group take as many steps, however fast each is."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_tools import make_producer, put

from shmconn import OptionError, Producer, ProducerDied
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.even import EvenBatches

Make = Callable[..., Producer]
Role = Callable[..., "subprocess.Popen[str]"]
# One sample a batch, and an odd number: two ranks cannot have as many.
SAMPLES = 27
ENDS = ("uneven", "drop", "pad", "nothing")


@pytest.fixture
def rings(ring_name: str) -> Iterator[str]:
    """A ring for each end; the one that `drop` reads leaves what it says it leaves."""
    for end in ENDS:
        producer = make_producer(f"{ring_name}-{end}", groups=["trainer"])
        for number in range(SAMPLES):
            put(producer, number)
        producer.close()
    yield ring_name


def test_two_ranks_one_three_times_slower_take_as_many_steps(
    rings: str, role: Role, tmp_path: Path
) -> None:
    ranks = [role("even", rings, rank, tmp_path / "store") for rank in range(2)]
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    said = [{line[0]: line[1:] for line in map(json.loads, text.splitlines())} for text in texts]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for end in ENDS:
        (steps, seen, dropped, handed, shapes), (steps1, seen1, dropped1, handed1, shapes1) = (
            one[end] for one in said
        )
        print(f"{end}: {steps} and {steps1} steps, {dropped} and {dropped1} dropped")
        got = seen + seen1
        assert len(set(got)) == len(got)
        # A batch is counted as handed out if it was, and only then.
        assert (handed, handed1) == (len(seen), len(seen1))
        if end == "uneven":
            # Without votes the race is really there.
            assert steps != steps1 and len(got) == SAMPLES
            continue
        assert steps == steps1
        assert (shapes, shapes1) == (1, 1)
        if end == "drop":
            assert len(got) == 2 * steps < SAMPLES
            # One rank had a batch, and said so; both counts are the same.
            assert sorted([dropped, dropped1]) == [[0, 0], [1, 1]]
        else:
            assert len(got) == SAMPLES
            assert sum(dropped) + sum(dropped1) == 0


def test_one_rank_alone_votes_nothing(make: Make) -> None:
    producer = make(groups=["trainer"])
    for number in range(3):
        put(producer, number)
    producer.close()
    with SampleDataset(producer.name, collator=Collator(32)) as dataset:
        batches = EvenBatches(dataset)
        assert [len(batch["handles"]) for batch in batches] == [2, 1]
        assert (dataset.handed_out, batches.dropped, batches.padded) == (3, 0, 0)


def test_a_producer_s_death_is_told_after_the_last_batch(ring_name: str, role: Role) -> None:
    died = role("produce_and_die", ring_name, 3, 2)
    died.wait(60)
    seen = 0
    with (
        pytest.raises(ProducerDied, match="2 of them were never published"),
        SampleDataset(ring_name, collator=Collator(32)) as dataset,
    ):
        for batch in EvenBatches(dataset, "pad"):
            seen += len(batch["handles"])
    assert seen == 3


def test_wrong_ends_and_batches_that_cannot_be_padded_are_refused() -> None:
    with pytest.raises(OptionError, match="'stop' must be one of drop, pad"):
        EvenBatches([], "stop")
    with pytest.raises(OptionError, match="this is a list"):
        list(EvenBatches([[1]], "pad"))
