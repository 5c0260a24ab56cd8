# SPDX-License-Identifier: Apache-2.0
"""Samples that tell which they are, and waits that end."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from shmconn import Producer, RingMissing
from shmconn.directory import groups, remove_group, remove_rings

LAYERS = [2, 18]
HIDDEN = 64


def states(number: int, tokens: int = 16) -> torch.Tensor:
    """States that tell which sample they are: row t holds number + t / 256."""
    rows = torch.arange(tokens, dtype=torch.float32) / 256 + number
    return rows.view(tokens, 1, 1).expand(tokens, len(LAYERS), HIDDEN).contiguous()


def check(sample: Any, number: int) -> None:
    """That a sample is the one that `put` wrote as `number`."""
    assert sample.request_id == f"r{number}"
    assert torch.equal(sample.hidden_states, states(number, sample.tokens))
    assert sample.token_ids.tolist() == list(range(number, number + sample.tokens))


def put(producer: Producer, number: int, tokens: int = 16, **options: Any) -> Any:
    """Puts sample `number`; returns its handle, or None when the ring is full."""
    ids = list(range(number, number + tokens))
    return producer.try_put(states(number, tokens), ids, request_id=f"r{number}", **options)


def wait(child: int) -> int:
    """Exit code of a forked process; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Waits for a condition; a hang is a failure that says what did not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.005)


def give_up(producer: Producer) -> None:
    """Closes a ring and gives up what this test left unread in it, as a person would."""
    producer.close()
    with contextlib.suppress(RingMissing):
        alive = lambda: any(group.alive for group in groups(producer.name))  # noqa: E731
        until(lambda: not alive(), "the members to leave")
        for group in groups(producer.name):
            if group.name:
                remove_group(producer.name, group.name)
        remove_rings(producer.name)
