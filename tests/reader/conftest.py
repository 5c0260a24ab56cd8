# SPDX-License-Identifier: Apache-2.0
"""Samples that need no ring."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness.isolation import pytest_terminal_summary

from shmconn.handle import Handle

__all__ = ["pytest_terminal_summary"]


@dataclass
class PlainSample:
    """What a sink may ask of a sample."""

    number: int
    tokens: int
    tag: str | None = None
    request_id: str = ""
    layers: int = 2
    hidden: int = 8
    dtype: str = "bfloat16"
    generation: str = "0" * 32
    metadata: dict[str, Any] = field(default_factory=dict)
    released: int = 0

    def __post_init__(self) -> None:
        self.request_id = self.request_id or f"cmpl-{self.number}"
        generator = torch.Generator().manual_seed(self.number)
        shape = (self.tokens, self.layers, self.hidden)
        dtype = getattr(torch, self.dtype)
        self.hidden_states = torch.rand(shape, generator=generator).to(dtype)
        self.token_ids = torch.arange(self.tokens) + self.number
        self.layer_ids = tuple(range(1, self.layers + 1))

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.tokens, self.layers, self.hidden)

    @property
    def handle(self) -> Handle:
        return Handle.make("q", self.generation, self.number, self.request_id)

    @property
    def nbytes(self) -> int:
        return self.states_bytes.nbytes + self.token_ids_bytes.nbytes

    @property
    def states_bytes(self) -> memoryview:
        return memoryview(self.hidden_states.reshape(-1).view(torch.uint8).numpy()).cast("B")

    @property
    def token_ids_bytes(self) -> memoryview:
        return memoryview(self.token_ids.numpy()).cast("B")

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def make_sample() -> Callable[..., PlainSample]:
    """Makes a sample with states that follow from its number."""
    numbers = iter(range(1, 1 << 30))

    def make(tag: str | None = None, **values: Any) -> PlainSample:
        number = values.pop("number", None) or next(numbers)
        tokens = values.pop("tokens", random.Random(number).randint(1, 9))
        return PlainSample(number=number, tokens=tokens, tag=tag, **values)

    return make
