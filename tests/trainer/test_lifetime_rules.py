# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/trainer.md on how long a tensor lives, those that no other test shows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import check, give_up, put, states

from shmconn import Producer, ProducerDied, subscribe
from shmconn.sample import Sample

Tensor = torch.Tensor

DOCUMENT = Path(__file__).parents[2] / "docs" / "trainer.md"

VIEWS: dict[str, Callable[[Tensor], object]] = {
    "a slice": lambda t: t[3:5, 1],
    "one layer, unbound": lambda t: t.unbind(1)[2],
    "a chunk": lambda t: t.chunk(2)[1],
    "another shape": lambda t: t.view(-1),
    "flattened": lambda t: t.flatten(1),
    "transposed": lambda t: t.transpose(0, 1),
    "expanded": lambda t: t[None].expand(4, -1, -1, -1),
    "detached": lambda t: t.detach(),
    "the same bytes as another dtype": lambda t: t.view(torch.int32),
    "a cast to the dtype that it has": lambda t: t.float(),
    "on the device where it is": lambda t: t.cpu(),
    "contiguous, as it is": lambda t: t.contiguous(),
    "a tensor of its numpy alias": lambda t: torch.from_numpy(t.numpy()),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "an autograd graph that needs it": lambda t: (torch.ones(8, requires_grad=True) * t).sum(),
}
COPIES: dict[str, Callable[[Tensor], object]] = {
    "chosen rows": lambda t: t[[1, 3]],
    "a mask": lambda t: t[t[:, 0, 0] > 1],
    "a cast": lambda t: t.bfloat16(),
    "a sum": lambda t: t + 0,
    "concatenated": lambda t: torch.cat([t, t]),
    "stacked": lambda t: torch.stack([t]),
    "made contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "cloned": lambda t: t.clone(),
    "a list": lambda t: t.tolist(),
}


def one(producer: Producer, group: str = "g") -> tuple[Sample, Callable[[], int]]:
    """A sample, and what counts the leases of its reader."""
    subscription = subscribe(producer.name, group)
    sample = subscription.next(10)
    assert sample is not None
    subscription.close()
    return sample, lambda: subscription.leases


def test_every_rule_of_the_document_names_tests_that_are_there() -> None:
    text = DOCUMENT.read_text()
    rules = re.findall(r"^(\d+)\. ", text, re.M)
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M))
    assert list(rows) == rules == [str(number) for number in range(1, 11)]
    everything = "".join(file.read_text() for file in DOCUMENT.parents[1].glob("tests/*/test_*.py"))
    for row in rows.values():
        tests = re.findall(r"`(test_\w+)`", row)
        assert tests
        assert [test for test in tests if f"def {test}(" not in everything] == []


@pytest.mark.parametrize("how", VIEWS)
def test_what_shows_the_same_bytes_keeps_the_lease(make: Callable[..., Producer], how: str) -> None:
    producer = make()
    put(producer, 1)
    sample, leases = one(producer)
    kept = VIEWS[how](sample.hidden_states)
    del sample
    assert leases() == 1
    del kept
    assert leases() == 0


@pytest.mark.parametrize("how", COPIES)
def test_what_torch_computes_does_not(make: Callable[..., Producer], how: str) -> None:
    producer = make()
    put(producer, 1)
    sample, leases = one(producer)
    kept = COPIES[how](sample.hidden_states)
    del sample
    assert leases() == 0
    del kept


def test_backward_lets_go_of_what_the_graph_kept(make: Callable[..., Producer]) -> None:
    producer = make()
    put(producer, 1)
    sample, leases = one(producer)
    weight = torch.ones(8, requires_grad=True)
    loss = (weight * sample.hidden_states).sum()
    del sample
    assert leases() == 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert leases() == 0
    assert torch.equal(weight.grad, states(1).sum((0, 1)))  # type: ignore[arg-type]


def test_release_leaves_the_tensors_that_were_taken_out(make: Callable[..., Producer]) -> None:
    producer = make()
    put(producer, 1)
    sample, leases = one(producer)
    taken = sample.token_ids
    sample.release()
    assert leases() == 1
    assert taken[0] == 1
    del taken
    assert leases() == 0


def test_copies_of_a_sample_have_no_lease(make: Callable[..., Producer]) -> None:
    producer = make()
    put(producer, 1)
    sample, leases = one(producer)
    clone, moved = sample.clone(), sample.to("cpu")
    del sample
    assert leases() == 0
    clone.hidden_states.add_(1)
    moved[0].add_(1)
    assert torch.equal(clone.hidden_states, states(1) + 1)
    assert torch.equal(moved[0], states(1) + 1)


def test_what_is_changed_in_place_is_changed_for_every_group(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["one", "two"])
    put(producer, 1)
    mine, _ = one(producer, "one")
    mine.hidden_states.zero_()
    other, _ = one(producer, "two")
    assert other.hidden_states.count_nonzero() == 0
    del mine, other


def test_a_loop_s_variable_holds_its_sample_while_the_next_one_is_waited_for(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    for number in range(3):
        put(producer, number)
    held = []
    with subscribe(producer.name, "g") as subscription:
        for sample in subscription:
            held.append((sample.number, subscription.leases))
            if len(held) == 3:
                break
        assert held == [(1, 1), (2, 1), (3, 1)]
        assert subscription.leases == 1
        assert subscription.next(0) is None
        assert subscription.leases == 1
        del sample
        assert subscription.leases == 0


def test_a_traceback_holds_what_its_frames_held(make: Callable[..., Producer]) -> None:
    producer = make()
    put(producer, 1)

    def fail(sample: Sample) -> None:
        view = sample.hidden_states
        raise ValueError(view.shape)

    sample, leases = one(producer)
    kept: BaseException
    try:
        fail(sample)
    except ValueError as error:
        kept = error
    del sample
    assert leases() == 1
    kept.__traceback__ = None
    assert leases() == 0


def test_neither_the_producer_s_death_nor_its_ring_s_removal_takes_a_tensor_away(
    make: Callable[..., Producer], role: Callable[..., Any], ring_name: str
) -> None:
    role("produce_and_die", ring_name, 3, 0)
    samples = []
    with pytest.raises(ProducerDied), subscribe(ring_name, "g", wait_s=60) as subscription:
        for sample in subscription:
            samples.append(sample)
            del sample
    del subscription
    # The next life of the ring, under the same name, is other memory.
    producer = make(groups=["g"])
    for number in range(10, 40):
        put(producer, number)
    for number, sample in enumerate(samples):
        check(sample, number)
    del sample
    samples.clear()
    producer.close()
    give_up(ring_name)
