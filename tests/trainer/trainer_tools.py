# SPDX-License-Identifier: Apache-2.0
"""Samples that tell which they are, for tests of the trainer's side."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from shmconn import Producer, RingMissing
from shmconn.directory import groups, remove_group, remove_rings

LAYERS = [2, 18, 30]
HIDDEN = 8


def states(number: int, tokens: int = 16) -> torch.Tensor:
    """States ``[tokens, layers, hidden]``: number + token / 256 + 1000 x layer, exactly."""
    token = torch.arange(tokens, dtype=torch.float32).view(tokens, 1, 1) / 256
    layer = torch.arange(len(LAYERS), dtype=torch.float32).view(1, -1, 1) * 1000
    return (number + token + layer).expand(tokens, len(LAYERS), HIDDEN).contiguous()


def ids(number: int, tokens: int = 16) -> list[int]:
    """The token ids of sample `number`."""
    return list(range(number, number + tokens))


def put(producer: Producer, number: int, tokens: int = 16, **options: Any) -> Any:
    """Puts sample `number`, waiting for room; returns its handle."""
    options = {"request_id": f"r{number}", "timeout": 30, **options}
    return producer.put(states(number, tokens), ids(number, tokens), **options)


def make_producer(name: str, **options: Any) -> Producer:
    """A small ring for samples of this module."""
    options = {"size": "4MiB", "dtype": "float32", **options}
    return Producer.create(name, layer_ids=LAYERS, hidden_size=HIDDEN, **options)


def check(sample: Any, number: int) -> None:
    """That a sample is the one that `put` wrote as `number`."""
    assert sample.request_id == f"r{number}"
    assert torch.equal(sample.hidden_states, states(number, sample.tokens))
    assert sample.token_ids.tolist() == ids(number, sample.tokens)


def numbers(samples: Any) -> list[int]:
    """The numbers of samples, in their order."""
    return [int(sample.request_id[1:]) for sample in samples]


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Waits for a condition; a hang is a failure that says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.005)


def live_members(name: str, group: str) -> int:
    """Live members of a group, ourselves included."""
    return sum(
        member.alive for found in groups(name) if found.name == group for member in found.members
    )


def group_names(name: str) -> set[str]:
    """Named groups of a ring; none when all of it is gone."""
    try:
        return {group.name for group in groups(name) if group.name}
    except RingMissing:
        return set()


def give_up(name: str) -> None:
    """Gives up all groups of a ring and removes it, as a person would."""
    until(lambda: not any_alive(name), "the members to leave")
    for group in group_names(name):
        remove_group(name, group)
    if any(entry.startswith(f"shmconn.{name}") for entry in os.listdir("/dev/shm")):
        remove_rings(name, force=True)


def any_alive(name: str) -> bool:
    """Whether a ring has any live member."""
    try:
        return any(group.alive for group in groups(name))
    except RingMissing:
        return False
