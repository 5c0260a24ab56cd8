# SPDX-License-Identifier: Apache-2.0
"""A dataset in one process: everything once, in order, to the end, and where it left off."""

import ast
import itertools
import logging
import pickle
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_tools import check, give_up, group_names, ids, numbers, put, states, until

import shmconn
from shmconn import OptionError, Producer, ProducerDied, SampleLost, subscribe
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset


def line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, f"the process ended with {process.wait()}"
    return text.strip()


def test_all_samples_come_in_order_and_the_group_ends_with_them(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(5):
        put(producer, number)
    producer.close()
    dataset = SampleDataset(producer.name)
    for number, sample in enumerate(dataset):
        check(sample, number)
    assert number == 4
    assert dataset.handed_out == 5
    del sample
    until(lambda: not group_names(producer.name), "the group to end")


def test_a_dropped_sample_is_released_before_the_next_is_asked_for(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with SampleDataset(producer.name) as dataset:
        samples = iter(dataset)
        for number in range(3):
            put(producer, number)
            sample = next(samples)
            assert producer.reclaim() == 0
            del sample
            assert producer.reclaim() == 1


def test_batches_hold_all_samples_and_the_last_may_be_short(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    handles = [put(producer, number, 10) for number in range(5)]
    producer.close()
    batches = list(SampleDataset(producer.name, collator=Collator(25)))
    assert [batch["lengths"].tolist() for batch in batches] == [[10, 10], [10, 10], [10]]
    assert sum((batch["handles"] for batch in batches), []) == list(map(str, handles))
    want = states(4, 10)[:, -1]
    assert torch.equal(batches[2]["verifier_last_hidden_states"][0, :10], want)


@pytest.mark.parametrize("max_len", [None, 40])
def test_iterating_again_goes_on_where_the_last_one_broke_off(
    make: Callable[..., Producer], max_len: int | None
) -> None:
    producer = make(groups=["trainer"])
    for number in range(9):
        put(producer, number, 16)
    collator = Collator(max_len) if max_len else None
    seen: list[str] = []
    with SampleDataset(producer.name, collator=collator) as dataset:
        for _ in range(3):
            for item in dataset:
                seen += item["handles"] if max_len else [str(item.handle)]
                del item
                break
        producer.close()
        for item in dataset:
            seen += item["handles"] if max_len else [str(item.handle)]
            del item
    assert [int(handle.split(":")[3]) for handle in seen] == list(range(1, 10))


def test_a_batch_larger_than_the_ring_does_not_hang(make: Callable[..., Producer]) -> None:
    producer = make(size="1MiB", slots=4, groups=["trainer"])

    def send() -> None:
        for number in range(12):
            put(producer, number, 16)
        producer.close()

    sender = threading.Thread(target=send)
    sender.start()
    batches = list(SampleDataset(producer.name, collator=Collator(160)))
    sender.join()
    assert [len(batch["handles"]) for batch in batches] == [10, 2]


def test_samples_of_a_half_filled_batch_come_again_after_a_kill(
    make: Callable[..., Producer], role: Callable[..., "subprocess.Popen[str]"]
) -> None:
    producer = make(groups=["trainer"])
    for number in range(3):
        put(producer, number)
    victim = role("half_a_batch", producer.name)
    assert line(victim) == "half"
    victim.kill()
    victim.wait()
    producer.close()
    assert numbers(SampleDataset(producer.name)) == [0, 1, 2]


def test_after_a_restart_what_was_handed_out_is_skipped(
    make: Callable[..., Producer], role: Callable[..., "subprocess.Popen[str]"]
) -> None:
    producer = make(groups=["trainer"])
    for number in range(6):
        put(producer, number)
    victim = role("hold", producer.name, 3)
    count, state = line(victim).split(" ", 1)
    assert count == "3"
    victim.kill()
    victim.wait()
    producer.close()
    dataset = SampleDataset(producer.name)
    dataset.load_state_dict(ast.literal_eval(state))
    assert numbers(dataset) == [3, 4, 5]
    assert dataset.skipped == 3
    assert dataset.handed_out == 6


def test_a_state_of_another_rank_counts_too(make: Callable[..., Producer]) -> None:
    producer = make(groups=["one", "two"])
    for number in range(4):
        put(producer, number)
    producer.close()
    one = SampleDataset(producer.name, "one")
    seen = []
    for sample in itertools.islice(one, 2):
        seen.append(sample.request_id)
    other = SampleDataset(producer.name, "one")
    with one:
        state = one.state_dict()
        two = SampleDataset(producer.name, "two")
        two.load_state_dict(other.state_dict(), state)
        assert numbers(two) == [2, 3]
        assert numbers(one) == [2, 3]


def test_an_exception_keeps_the_place_and_a_normal_end_does_not(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    for number in range(3):
        put(producer, number)
    with pytest.raises(ZeroDivisionError), SampleDataset(producer.name) as dataset:
        next(iter(dataset))
        raise ZeroDivisionError
    assert group_names(producer.name) == {"trainer"}
    with SampleDataset(producer.name) as dataset:
        assert next(iter(dataset)).request_id == "r1"
    assert group_names(producer.name) == set()


def test_a_batch_that_was_never_handed_out_goes_back_to_the_group(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(3):
        put(producer, number)
    with (
        pytest.raises(ZeroDivisionError),
        SampleDataset(producer.name, collator=Collator(32)) as dataset,
    ):
        assert len(next(iter(dataset))["handles"]) == 2
        raise ZeroDivisionError
    producer.close()
    assert numbers(SampleDataset(producer.name)) == [2]


@pytest.mark.parametrize("on_death", ["raise", "end"])
def test_the_producers_death_comes_after_all_it_had_published(
    ring_name: str,
    role: Callable[..., "subprocess.Popen[str]"],
    on_death: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = SampleDataset(ring_name, collator=Collator(64), wait_s=60, on_death=on_death)
    role("produce_and_die", ring_name, 7, 2)
    with caplog.at_level(logging.WARNING, "shmconn"):
        batches = []
        if on_death == "raise":
            with pytest.raises(ProducerDied, match="2 of them were never published") as died:
                for batch in dataset:
                    batches.append(batch)
            assert died.value.unpublished == 2
        else:
            batches = list(dataset)
            assert "2 of them were never published" in caplog.text
    assert sum(len(batch["handles"]) for batch in batches) == 7
    assert dataset.died is not None


def test_losses_are_told_or_raised_as_asked(
    make: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(groups=["raise", "warn", "ignore"])
    data = {name: SampleDataset(producer.name, name, on_loss=name) for name in ("raise", "warn")}
    data["ignore"] = SampleDataset(producer.name, "ignore", on_loss="ignore")
    iterators = {name: iter(dataset) for name, dataset in data.items()}
    put(producer, 1)
    for samples in iterators.values():
        assert next(samples).request_id == "r1"
    for reason in ("aborted", "short"):
        number = producer.accepted + 1
        producer.accept(number)
        producer.bury(number, "gone", reason)
    put(producer, 2)
    with pytest.raises(
        SampleLost, match=rf"ring '{producer.name}' .*no sample: 1 \(short\)"
    ) as lost:
        next(iterators["raise"])
    assert lost.value.reason == "short"
    assert lost.value.retry
    assert next(iterators["ignore"]).request_id == "r2"
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, "shmconn"):
        assert next(iterators["warn"]).request_id == "r2"
    assert "1 (short)" in caplog.text
    for dataset in data.values():
        dataset.close()


def test_a_dataset_is_pickled_without_its_subscription(make: Callable[..., Producer]) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)
    put(producer, 2)
    with SampleDataset(producer.name) as dataset:
        sample = next(iter(dataset))
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.state_dict() == dataset.state_dict()
        assert numbers([sample, next(iter(copy))]) == [1, 2]
        copy.close()


def test_a_stop_ends_a_wait_and_a_later_iteration_goes_on(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with SampleDataset(producer.name) as dataset:
        seen: list[str] = []
        stop = threading.Event()

        def read() -> None:
            for sample in dataset.unrecorded(stop):
                seen.append(sample.request_id)

        reader = threading.Thread(target=read)
        reader.start()
        put(producer, 1)
        until(lambda: seen, "the sample to be read")
        stop.set()
        reader.join()
        assert seen == ["r1"]
        put(producer, 2)
        assert next(iter(dataset)).request_id == "r2"


def test_mistakes_are_named(make: Callable[..., Producer]) -> None:
    with pytest.raises(OptionError, match="on_death 'ignore' must be one of raise, end"):
        SampleDataset("x", on_death="ignore")
    with pytest.raises(OptionError, match="on_loss 'no'"):
        SampleDataset("x", on_loss="no")
    with pytest.raises(OptionError, match="no option 'by_handle': follow, durable or pin"):
        SampleDataset("x", by_handle=True)
    with pytest.raises(OptionError, match="group name 'a b'"):
        SampleDataset("x", "a b")
    with pytest.raises(shmconn.RingMissing, match="no ring 'no-such-ring'"):
        next(iter(SampleDataset("no-such-ring")))
    with pytest.raises(OptionError, match="a int names no samples"):
        SampleDataset("x").record(7)
    producer = make()
    dataset = SampleDataset(producer.name)
    with dataset:
        pass
    with pytest.raises(shmconn.Closed, match="dataset of group 'trainer' was closed"):
        next(iter(dataset))


def test_record_takes_samples_batches_handles_and_lists(make: Callable[..., Producer]) -> None:
    producer = make(groups=["other"])
    handles = [put(producer, number) for number in range(4)]
    with subscribe(producer.name, "other") as subscription:
        samples = [next(subscription) for _ in range(4)]
        dataset = SampleDataset(producer.name)
        dataset.record(samples[0])
        dataset.record([samples[1], str(handles[2])])
        dataset.record({"handles": [str(handles[3])]})
        assert dataset.handed_out == 4
        assert ids(3) == samples[3].token_ids.tolist()
        del samples


def test_a_subscription_gives_a_sample_back_to_its_group(make: Callable[..., Producer]) -> None:
    producer = make(groups=["g"])
    put(producer, 1)
    put(producer, 2)
    with subscribe(producer.name, "g") as one, subscribe(producer.name, "g") as two:
        sample: Any = next(one)
        assert one.give_back(sample)
        assert not one.give_back(sample)
        assert one.leases == 0
        check(next(two), 1)
        check(next(two), 2)
        assert two.next(timeout=0) is None
    give_up(producer.name) if group_names(producer.name) else None


def test_a_sample_that_cannot_be_added_costs_nothing_of_what_came_before(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    for number in range(6):
        put(producer, number)
    producer.close()
    bad = {"r2"}

    def mask(sample: shmconn.Sample) -> list[bool]:
        if sample.request_id in bad:
            raise ValueError(f"no mask for {sample.request_id}")
        return [True] * sample.tokens

    seen: list[int] = []
    with SampleDataset(producer.name, collator=Collator(32, loss_mask=mask)) as dataset:
        # The batch of 0 and 1 is full when 2 fails; the next try has it still.
        with pytest.raises(ValueError, match="no mask for r2"):
            list(dataset)
        bad.clear()
        for batch in dataset:
            seen += [int(first) for first in batch["input_ids"][0, ::16]]
            assert batch["document_ids"].tolist() == [[0] * 16 + [1] * 16]
    assert sorted(seen) == list(range(6))


def test_a_loss_between_two_iterations_is_told_in_the_next(make: Callable[..., Producer]) -> None:
    producer = make()
    with SampleDataset(producer.name, on_loss="raise") as dataset:
        number = producer.accepted + 1
        producer.accept(number)
        producer.bury(number, "lost", "no_reader")
        put(producer, 1)
        with pytest.raises(SampleLost, match=r"yielded no sample: 1 \(no_reader\)"):
            next(iter(dataset))
        # Told once; the sample beside it is still there.
        assert next(iter(dataset)).request_id == "r1"


def test_a_half_filled_batch_keeps_its_leases_while_there_is_room(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    put(producer, 1)
    with SampleDataset(producer.name, collator=Collator(32)) as dataset:
        stop = threading.Event()
        reader = threading.Thread(target=lambda: list(dataset.unrecorded(stop)))
        reader.start()
        until(lambda: dataset._packing is not None, "the first sample")
        assert dataset._packing is not None
        reader.join(1.6)
        assert len(dataset._packing.samples) == 1
        # Asked to hold, the producer is short of room, whatever its pages say.
        producer.set_held_since(1)
        until(lambda: dataset._packing is not None and not dataset._packing.samples, "the release")
        stop.set()
        reader.join()


def test_mistakes_of_later_are_named_too(make: Callable[..., Producer]) -> None:
    with pytest.raises(OptionError, match="wait_s '5' must be 0 or more seconds"):
        SampleDataset("x", wait_s="5")  # type: ignore[arg-type]
    dataset = SampleDataset("x")
    with pytest.raises(OptionError, match="batch_size=None"):
        dataset.record({"handles": [("shmconn:x",)]})
    state = {"version": 1, "handed_out": {"0" * 32: 7}}
    with pytest.raises(OptionError, match="names ranges 7"):
        dataset.load_state_dict(state)
    with pytest.raises(OptionError, match=r"dtype <class 'float'> must be one of"):
        Collator(8, dtype=float)  # type: ignore[arg-type]
