# SPDX-License-Identifier: Apache-2.0
"""What all tests share: a ring name of one's own, and a look at what it leaves."""

import os
import secrets
import time
from collections.abc import Iterator

import pytest


def segments(name: str) -> list[str]:
    """What a ring name has in /dev/shm."""
    ours = (f"shmconn.{name}", f"sem.shmconn.{name}")
    return sorted(file for file in os.listdir("/dev/shm") if file.startswith(ours))


@pytest.fixture
def ring_name() -> Iterator[str]:
    """A name that no other test uses. The test fails if it leaves anything in /dev/shm."""
    name = f"t-{secrets.token_hex(6)}"
    yield name
    # A subscription that was closed with tensors alive leaves in a thread of its own.
    deadline = time.monotonic() + 10
    while (left := segments(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for file in left:
        os.unlink(f"/dev/shm/{file}")
    assert not left, f"left in /dev/shm: {left}"
