# SPDX-License-Identifier: Apache-2.0
"""A dataset in several processes: DataLoader workers and DDP ranks are members of one group."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainer_tools import (
    any_alive,
    check,
    give_up,
    group_names,
    live_members,
    numbers,
    put,
    states,
    until,
)

from shmconn import Producer, ProducerDied, SampleLost
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.directory import groups

ROLES = Path(__file__).with_name("roles.py")
METHODS = ["fork", "spawn"]


def load(dataset: SampleDataset, method: str = "fork", workers: int = 2, **options: Any) -> Any:
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
        **options,
    )


@pytest.mark.parametrize("method", METHODS)
def test_workers_share_the_samples_and_hand_over_copies(
    make: Callable[..., Producer], method: str
) -> None:
    producer = make(groups=["trainer"])
    for number in range(20):
        put(producer, number)
    producer.close()
    with SampleDataset(producer.name) as dataset:
        samples = list(load(dataset, method))
        for sample in samples:
            check(sample, int(sample.request_id[1:]))
            dataset.record(sample)
        assert sorted(numbers(samples)) == list(range(20))
        assert dataset.handed_out == 20
    assert group_names(producer.name) == set()


@pytest.mark.parametrize("method", METHODS)
def test_workers_make_batches_and_what_was_handed_out_is_skipped(
    make: Callable[..., Producer], method: str
) -> None:
    producer = make(groups=["trainer"])
    handles = [put(producer, number, 10) for number in range(12)]
    producer.close()
    with SampleDataset(producer.name, collator=Collator(25)) as dataset:
        dataset.record(handles[3])
        batches = list(load(dataset, method))
        assert dataset.skipped == 1
    seen = []
    for batch in batches:
        for index, handle in enumerate(batch["handles"]):
            number = int(handle.split(":")[3]) - 1
            seen.append(number)
            rows = slice(10 * index, 10 * index + 10)
            last = batch["verifier_last_hidden_states"][0, rows]
            assert torch.equal(last, states(number, 10)[:, -1])
    assert sorted(seen) == [number for number in range(12) if number != 3]


def test_a_collate_fn_gets_the_ring_itself_and_makes_the_one_copy(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(8):
        put(producer, number, 8)
    producer.close()
    dataset = SampleDataset(producer.name)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=Collator(20))
    batches = list(loader)
    # The workers share the eight in any way: of an odd number the last batch has one.
    sizes = [len(batch["handles"]) for batch in batches]
    assert sum(sizes) == 8 and max(sizes) == 2 and sizes.count(1) in (0, 2)
    assert all(batch["hidden_states"].is_shared() for batch in batches)


def test_workers_after_an_iteration_of_the_trainers_own(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    for number in range(6):
        put(producer, number)
    with SampleDataset(producer.name) as dataset:
        first = next(iter(dataset))
        check(first, 0)
        producer.close()
        assert sorted(numbers(load(dataset))) == [1, 2, 3, 4, 5]
        del first


def test_a_death_is_raised_after_the_work_of_all_workers(
    ring_name: str, role: Callable[..., "subprocess.Popen[str]"]
) -> None:
    role("produce_and_die", ring_name, 12, 3)
    seen: list[int] = []
    with (
        pytest.raises(ProducerDied, match="3 of them were never published"),
        SampleDataset(ring_name, wait_s=60) as dataset,
    ):
        seen += numbers(load(dataset))
    assert sorted(seen) == list(range(12))
    assert group_names(ring_name) == set()


def late(worker: int) -> None:
    """Holds the second worker up until the others have read all."""
    if worker == 1:
        time.sleep(3)


def test_a_worker_that_comes_after_all_is_read_ends_as_the_others_do(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(6):
        put(producer, number)
    producer.close()
    dataset = SampleDataset(producer.name)
    seen = []
    for sample in load(dataset, in_order=False, worker_init_fn=late):
        seen += numbers([sample])
        del sample
    assert sorted(seen) == list(range(6))
    dataset.close()


def test_a_loss_in_a_worker_is_raised_in_the_trainer(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)
    with SampleDataset(producer.name, on_loss="raise") as dataset:
        samples = iter(load(dataset, workers=1))
        check(next(samples), 1)
        producer.accept(2)
        producer.bury(2, "gone", "oversized")
        put(producer, 3)
        with pytest.raises(SampleLost, match=r"1 \(oversized\)"):
            next(samples)
        dataset.close()
        del samples


def test_breaking_off_after_close_lets_waiting_workers_leave(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with SampleDataset(producer.name) as dataset:
        for number in range(4):
            put(producer, number)
        samples = iter(load(dataset))
        next(samples)
        until(lambda: live_members(producer.name, "trainer") == 3, "the workers to join")
        dataset.close()
        assert group_names(producer.name) == {"trainer"}
        del samples
        assert group_names(producer.name) == set()


def test_workers_that_torch_kills_at_the_end_do_not_keep_the_place(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with SampleDataset(producer.name) as dataset:
        put(producer, 1)
        samples = iter(load(dataset, workers=1))
        check(next(samples), 1)
        (pid,) = (worker.pid for worker in samples._workers)
        # The worker waits for a sample: torch waits 5 s for it, then kills it.
        del samples
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        (group,) = (group for group in groups(producer.name) if group.name == "trainer")
        assert [member.alive for member in group.members if member.pid == pid] == [False]
    assert group_names(producer.name) == set()


def test_an_exception_in_training_keeps_the_place_though_workers_end_well(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    for number in range(4):
        put(producer, number)
    with pytest.raises(ZeroDivisionError), SampleDataset(producer.name) as dataset:
        for _ in load(dataset):
            raise ZeroDivisionError
    assert group_names(producer.name) == {"trainer"}
    until(lambda: not any_alive(producer.name), "the workers to leave")
    producer.close()
    give_up(producer.name)


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_a_killed_trainer_go_too_and_keep_its_place(
    make: Callable[..., Producer], role: Callable[..., "subprocess.Popen[str]"], method: str
) -> None:
    producer = make(groups=["trainer"])
    for number in range(4):
        put(producer, number)
    trainer = role("train_with_workers", producer.name, method)
    assert trainer.stdout is not None
    seen = {trainer.stdout.readline().strip() for _ in range(4)}
    assert seen == {"r0", "r1", "r2", "r3"}
    until(lambda: live_members(producer.name, "trainer") == 2, "the workers to wait")
    trainer.kill()
    trainer.wait()
    until(lambda: not any_alive(producer.name), "the workers to go")
    assert group_names(producer.name) == {"trainer"}
    put(producer, 4)
    producer.close()
    assert numbers(SampleDataset(producer.name)) == [4]
    # Two workers have not left, and one reader came for them: one place is still kept.
    give_up(producer.name)


# Gloo aborts a rank now and then when the other one leaves first: no test for every push.
@pytest.mark.long
def test_ddp_ranks_share_the_samples_and_train_one_model(
    make: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make(groups=["trainer"])
    for number in range(30):
        put(producer, number)
    producer.close()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROLES), "ddp", producer.name, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    (seen_0, weight_0), (seen_1, weight_1) = out
    both = [int(number) for number in f"{seen_0},{seen_1}".split(",") if number]
    assert sorted(both) == list(range(30))
    assert weight_0 == weight_1 != "0.0"
    assert group_names(producer.name) == set()
