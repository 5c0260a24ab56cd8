# SPDX-License-Identifier: Apache-2.0
"""The row rules find each planted fault, and nothing in honest rows with a server's noise."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from reader.verify.rules import BOUNDS, Bounds, compare, judge

LAYERS = [8, 15, 22, 30]
# What is computed but not captured: the neighbours of the captured layers.
ALL_LAYERS = [7, 8, 9, 14, 15, 16, 21, 22, 23, 29, 30]
TOKENS, HIDDEN, BLOCK = 300, 96, 128
SEEDS = 10


@functools.cache
def all_states(seed: int) -> torch.Tensor:
    """Rows like a model's, [TOKENS, all layers, HIDDEN]: neighbours alike, a sink in front."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(TOKENS, HIDDEN)
    rows = rows + 0.5 * rows.roll(1, dims=0)
    states = [rows]
    for _ in ALL_LAYERS[1:]:
        # One layer changes a row by about a fifth of its length.
        states.append(states[-1] + 0.2 * draw(TOKENS, HIDDEN))
    stacked = torch.stack(states, dim=1)
    stacked[0, :, 7] = 1000.0
    return stacked


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def captured(states: torch.Tensor) -> torch.Tensor:
    return states[:, [ALL_LAYERS.index(layer) for layer in LAYERS]].clone()


@dataclass
class Noisy:
    """An honest sample, its reference, and what faults are made of."""

    got: torch.Tensor
    ref: torch.Tensor
    all_layers: torch.Tensor
    other: torch.Tensor
    place: int

    def faults(self) -> tuple[str, ...]:
        return judge(self.got, self.ref, LAYERS, self.bounds).faults

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[str(self.got.dtype).removeprefix("torch.")]


def honest(dtype: str, seed: int) -> Noisy:
    """As noisy as the samples that were measured on vLLM (median, and a few rows far out)."""
    every, other = all_states(seed), captured(all_states(seed + 1000))
    ref = captured(every)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(ref.shape, generator=generator)
    direction /= direction.norm(dim=2, keepdim=True)
    size = torch.full((TOKENS, 1, 1), 0.02 if dtype == "bfloat16" else 4e-6)
    size[torch.randperm(TOKENS - 1, generator=generator)[:2] + 1] *= 7 if dtype == "bfloat16" else 4
    # The sink's length is in one dimension; the noise of the others goes with their own length.
    length = ref.norm(dim=2, keepdim=True).clamp_max(ref[1:].norm(dim=2).median())
    got = (ref + direction * size * length).to(getattr(torch, dtype))
    place = int(torch.randint(1, TOKENS - BLOCK - 2, (1,), generator=generator))
    return Noisy(got, ref, every.to(got.dtype), other.to(got.dtype), place)


def swap_rows(s: Noisy) -> None:
    s.got[[s.place, s.place + 1]] = s.got[[s.place + 1, s.place]]


def swap_rows_of_one_layer(s: Noisy) -> None:
    s.got[[s.place, s.place + 1], 2] = s.got[[s.place + 1, s.place], 2]


def swap_layers(s: Noisy) -> None:
    s.got[:, [1, 2]] = s.got[:, [2, 1]]


def shift_layer_down(s: Noisy) -> None:
    s.got[:, 1] = s.all_layers[:, ALL_LAYERS.index(14)]


def shift_layer_up(s: Noisy) -> None:
    s.got[:, 0] = s.all_layers[:, ALL_LAYERS.index(9)]


def norm_last_layer(s: Noisy) -> None:
    last = s.got[:, 3].float()
    scale = torch.linspace(0.5, 2.0, HIDDEN)
    normed = last / last.square().mean(dim=1, keepdim=True).sqrt() * scale
    s.got[:, 3] = normed.to(s.got.dtype)


def zero_row(s: Noisy) -> None:
    s.got[s.place] = 0


def zero_row_of_one_layer(s: Noisy) -> None:
    s.got[s.place, 3] = 0


def zero_first_row(s: Noisy) -> None:
    s.got[0] = 0


def zero_all_but_the_sink(s: Noisy) -> None:
    s.got[0, 1, 8:] = 0


def block_of_another_request(s: Noisy) -> None:
    s.got[s.place : s.place + BLOCK] = s.other[s.place : s.place + BLOCK]


def stale_tail_of_another_request(s: Noisy) -> None:
    s.got[-3:] = s.other[-3:]


def stale_tail_of_the_rows_before(s: Noisy) -> None:
    s.got[-3:] = s.got[-6:-3].clone()


def stale_tail_of_one_block_earlier(s: Noisy) -> None:
    s.got[-3:] = s.got[-3 - BLOCK : -BLOCK].clone()


def one_stale_row(s: Noisy) -> None:
    s.got[-1] = s.other[-1]


def not_a_number(s: Noisy) -> None:
    s.got[s.place, 0, 5] = float("nan")


def infinite(s: Noisy) -> None:
    s.got[s.place, 0, 5] = float("inf")


FAULTS: list[Callable[[Noisy], None]] = [
    swap_rows,
    swap_rows_of_one_layer,
    swap_layers,
    shift_layer_down,
    shift_layer_up,
    norm_last_layer,
    zero_row,
    zero_row_of_one_layer,
    zero_first_row,
    zero_all_but_the_sink,
    block_of_another_request,
    stale_tail_of_another_request,
    stale_tail_of_the_rows_before,
    stale_tail_of_one_block_earlier,
    one_stale_row,
    not_a_number,
    infinite,
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_noise_breaks_no_rule(dtype: str) -> None:
    for seed in range(SEEDS):
        assert honest(dtype, seed).faults() == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_planted_fault_is_found_wherever_it_is(
    fault: Callable[[Noisy], None], dtype: str
) -> None:
    for seed in range(SEEDS):
        sample = honest(dtype, seed)
        fault(sample)
        assert sample.faults() != (), f"seed {seed}"


def test_the_sentences_name_layer_rows_and_bound() -> None:
    sample = honest("float32", 3)
    sample.got[50:52, 1] = 0
    sample.got[:, 3] = sample.got[:, 2]
    text = "\n".join(sample.faults())
    assert "layer 15: a row off by 1, bound 0.0001 (2 of 299 rows: 50, 51)" in text
    assert "layer 30: its rows are those of layer 22" in text


def test_rows_that_changed_places_are_named() -> None:
    sample = honest("bfloat16", 3)
    sample.place = 70
    swap_rows(sample)
    assert any("2 rows are nearer to a neighbour's" in text for text in sample.faults())


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 99])
def test_short_samples_are_judged_as_far_as_they_go(tokens: int) -> None:
    sample = honest("float32", 5)
    got, ref = sample.got[:tokens], sample.ref[:tokens]
    assert judge(got, ref, LAYERS, BOUNDS["float32"]).faults == ()
    got[-1, 1] = got[-1, 2]
    assert judge(got, ref, LAYERS, BOUNDS["float32"]).faults != ()


def test_one_layer_alone_is_judged() -> None:
    sample = honest("float32", 5)
    assert judge(sample.got[:, :1], sample.ref[:, :1], [8], BOUNDS["float32"]).faults == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_sends_agree_within_half_the_bounds_and_a_changed_row_does_not(dtype: str) -> None:
    bounds = BOUNDS[dtype].halved()
    first = honest(dtype, 1)
    again = first.got.clone()
    again[5] *= 1 + (1e-5 if dtype == "float32" else 0.02)
    assert compare(again, first.got, LAYERS, bounds).faults == ()
    again[9] = first.other[9]
    assert compare(again, first.got, LAYERS, bounds).faults != ()
