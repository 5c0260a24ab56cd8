# SPDX-License-Identifier: Apache-2.0
"""Batches hold what the ring held, and their leases and memory end when they should."""

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_tools import HIDDEN, LAYERS, ids, put, states

from shmconn import OptionError, Producer, subscribe
from shmconn.collate import Collator
from shmconn.fill import encode_json
from shmconn.handle import Handle
from shmconn.sample import Facts, Sample


def in_memory(number: int, tokens: int) -> Sample:
    """A sample of no ring, as ``clone()`` makes."""
    handle = Handle.make("mem", "0" * 32, number, f"r{number}")
    shape = (tokens, len(LAYERS), HIDDEN)
    facts = Facts(handle, number, f"r{number}", None, tuple(LAYERS), {}, "float32", shape, 0)
    raw = states(number, tokens).numpy().tobytes()
    pad = -len(raw) % 64
    text = encode_json(f"r{number}", None, LAYERS, None)
    data = raw + bytes(pad) + torch.tensor(ids(number, tokens)).numpy().tobytes() + text
    return Sample(facts, bytearray(data), len(raw) + pad)


def expected(lengths: list[tuple[int, int, int]], max_len: int) -> dict[str, torch.Tensor]:
    """A batch by plain torch: of (number, tokens, tokens kept) each."""
    hidden = [states(n, t)[:kept] for n, t, kept in lengths]
    rest = max_len - sum(kept for _, _, kept in lengths)
    pad = torch.zeros(rest, dtype=torch.int64)
    every = torch.cat([*hidden, torch.zeros(rest, len(LAYERS), HIDDEN)])
    return {
        "hidden_states": every[:, :-1].flatten(1)[None],
        "verifier_last_hidden_states": every[:, -1][None],
        "input_ids": torch.cat(
            [*(torch.tensor(ids(n, t)[:k], dtype=torch.int64) for n, t, k in lengths), pad]
        )[None],
        "position_ids": torch.cat([*(torch.arange(k) for _, _, k in lengths), pad])[None],
        "document_ids": torch.cat(
            [*(torch.full((k,), i) for i, (_, _, k) in enumerate(lengths)), pad - 1]
        )[None],
        "lengths": torch.tensor([kept for _, _, kept in lengths]),
    }


def check_batch(batch: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    for name, tensor in want.items():
        assert batch[name].dtype == tensor.dtype, name
        assert batch[name].shape == tensor.shape, name
        assert torch.equal(batch[name], tensor), name


def test_a_batch_holds_the_samples_of_the_ring_and_their_leases_have_ended(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with subscribe(producer.name, "t") as subscription:
        handles = [put(producer, number, tokens) for number, tokens in ((1, 5), (2, 9))]
        samples = [subscription.next(5), subscription.next(5)]
        batch = Collator(32)(sample for sample in samples if sample)
        assert subscription.leases == 0
        assert producer.reclaim() == 2
        check_batch(batch, expected([(1, 5, 5), (2, 9, 9)], 32))
        assert batch["handles"] == list(map(str, handles))
        assert batch["cut_tokens"] == 0
        producer.close()


def test_leases_last_until_the_batch_is_finished_and_no_longer(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with subscribe(producer.name, "t") as subscription:
        collator = Collator(32)
        put(producer, 1)
        put(producer, 2)
        first, second = next(subscription), next(subscription)
        packing = collator.start(first)
        packing.add(first)
        del first
        assert subscription.leases == 2
        packing.release()
        assert subscription.leases == 1
        packing.add(second)
        del second
        check_batch(packing.finish(), expected([(1, 16, 16), (2, 16, 16)], 32))
        assert subscription.leases == 0
        producer.close()


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    max_len=st.integers(1, 64),
)
def test_packing_loses_nothing_but_what_is_longer_than_a_batch(
    tokens: list[int], max_len: int
) -> None:
    collator = Collator(max_len)
    sent = [(number, count, min(count, max_len)) for number, count in enumerate(tokens)]
    rest = list(sent)
    for batch in collator.pack(in_memory(number, count) for number, count in enumerate(tokens)):
        taken = [rest.pop(0) for _ in batch["handles"]]
        check_batch(batch, expected(taken, max_len))
        assert batch["cut_tokens"] == sum(count - kept for _, count, kept in taken)
        # As full as the order allows.
        assert not rest or sum(kept for _, _, kept in taken) + rest[0][1] > max_len
    assert rest == []


@settings(deadline=None, max_examples=60)
@given(tokens=st.lists(st.integers(1, 40), min_size=1, max_size=6), max_len=st.integers(1, 64))
def test_as_a_collate_fn_it_cuts_what_does_not_fit_and_counts_it(
    tokens: list[int], max_len: int
) -> None:
    batch = Collator(max_len)(in_memory(number, count) for number, count in enumerate(tokens))
    room, kept = max_len, []
    for number, count in enumerate(tokens):
        if room:
            kept.append((number, count, min(count, room)))
            room -= kept[-1][2]
    check_batch(batch, expected(kept, max_len))
    assert batch["cut_tokens"] == sum(tokens) - int(batch["lengths"].sum())


def test_cut_tokens_are_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    collator = Collator(8)
    with caplog.at_level(logging.WARNING, "shmconn"):
        collator([in_memory(1, 20)])
        collator([in_memory(1, 20)])
    assert len(caplog.records) == 1
    assert "did not fit into a batch of 8 were cut: 12 now" in caplog.text


def test_a_batch_that_is_kept_is_never_written_over() -> None:
    collator = Collator(16)
    kept = []
    for number in range(8):
        batch = collator([in_memory(number, 10)])
        kept.append((number, batch["hidden_states"]))
    for number, hidden in kept:
        want = expected([(number, 10, 10)], 16)["hidden_states"]
        assert torch.equal(hidden, want)


def test_the_memory_of_a_dropped_batch_is_used_again_and_its_rests_do_not_show() -> None:
    collator = Collator(64)
    places = set()
    for number, count in ((1, 64), (2, 3), (3, 40), (4, 1)):
        batch = collator([in_memory(number, count)])
        check_batch(batch, expected([(number, count, count)], 64))
        places.add(batch["hidden_states"].data_ptr())
        del batch
    assert len(places) == 1


def test_one_slice_of_a_batch_keeps_its_memory() -> None:
    collator = Collator(16)
    batch = collator([in_memory(1, 16)])
    view = batch["input_ids"][0, 3:5]
    del batch
    again = collator([in_memory(9, 16)])
    assert view.tolist() == ids(1, 16)[3:5]
    assert again["input_ids"][0].tolist() == ids(9, 16)


def test_states_are_cast_while_they_are_copied_and_may_stay_together() -> None:
    batch = Collator(8, split=False, dtype="bfloat16")([in_memory(1, 8)])
    assert torch.equal(batch["hidden_states"][0], states(1, 8).flatten(1).to(torch.bfloat16))
    assert "verifier_last_hidden_states" not in batch


def test_a_loss_mask_travels_with_its_sample() -> None:
    collator = Collator(8, loss_mask=lambda sample: [index % 2 for index in range(sample.tokens)])
    batch = collator([in_memory(1, 3), in_memory(2, 2)])
    assert batch["loss_mask"].tolist() == [[False, True, False, False, True] + [False] * 3]
    with pytest.raises(OptionError, match=r"loss_mask gave shape \[1\] for sample .* of 3 tokens"):
        Collator(8, loss_mask=lambda sample: [1])([in_memory(1, 3)])


def test_a_collator_is_pickled_without_its_memory() -> None:
    collator = Collator(16)
    collator([in_memory(1, 16)])
    assert len(pickle.dumps(collator)) < 2000
    check_batch(pickle.loads(pickle.dumps(collator))([in_memory(2, 4)]), expected([(2, 4, 4)], 16))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(OptionError, match="max_len 0 must be"):
        Collator(0)
    with pytest.raises(OptionError, match="dtype 'int4' must be one of bfloat16"):
        Collator(8, dtype="int4")
    with pytest.raises(OptionError, match="device 'meta'"):
        Collator(8, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="pin=True has no use here: there is no CUDA device"):
            Collator(8, pin=True)
    with pytest.raises(OptionError, match="no samples"):
        Collator(8)([])


def test_samples_of_different_rings_do_not_mix() -> None:
    other = in_memory(2, 4)
    facts = Facts(other.handle, 2, "r2", None, (1, 2), {}, "float32", (4, len(LAYERS), HIDDEN), 0)
    with pytest.raises(OptionError, match=r"layers \[1, 2\].*the batch has \[2, 18, 30\]"):
        Collator(16)([in_memory(1, 4), Sample(facts, other._buffer, other._ids_offset)])


def test_one_layer_cannot_be_split(ring_name: str) -> None:
    producer = Producer.create(ring_name, size="1MiB", layer_ids=[7], hidden_size=4)
    with producer, subscribe(ring_name, "t") as subscription:
        producer.put(torch.zeros(2, 1, 4, dtype=torch.bfloat16), [1, 2], request_id="r")
        sample = next(subscription)
        with pytest.raises(OptionError, match="one layer, 7: there is nothing to split"):
            Collator(8)([sample])
        assert Collator(8, split=False)([sample])["hidden_states"].shape == (1, 8, 4)
        del sample
