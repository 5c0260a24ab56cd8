# SPDX-License-Identifier: Apache-2.0
"""Samples that prove themselves: each word of one names its slot, sequence and generation.

The states of a sample begin with eight words, the rest follows from them, so a word that belongs
to another sample, generation or slot, or was never written, is seen wherever it stands.

    magic | generation (2) | slot | seq | number | words | CRC of the rest
"""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from shmconn import words
from shmconn.fill import Fill
from shmconn.handle import Handle
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.subscription import Subscription

HIDDEN = 64
TOKEN_BYTES = HIDDEN * 4  # one layer of float32
_HEAD = 8
_MAGIC = 0x53454C4650524F46
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


def expected(generation: str, slot: int, seq: int, number: int, count: int) -> Words:
    """The ``count`` words that the states of a sample hold."""
    high, low = int(generation[:16], 16), int(generation[16:], 16)
    seed = (high ^ (low * 3) ^ (slot * 5 << 40) ^ (seq * 7 << 20) ^ number * 11) & _MASK
    body = np.arange(1, count - _HEAD + 1, dtype=np.uint64) * np.uint64(_ODD) ^ np.uint64(seed)
    head = [_MAGIC, high, low, slot, seq, number, count, zlib.crc32(body)]
    return np.concatenate([np.array(head, dtype=np.uint64), body])


def request_id(generation: str, number: int) -> str:
    """The request id that goes with a number."""
    return f"request-{number}-of-{generation}"


def token_ids(number: int, tokens: int) -> list[int]:
    """The token ids that go with a number."""
    return [number * 1000 + token for token in range(tokens)]


def fill_in(fill: Fill, generation: str, seq: int, chunks: int = 2, passes: int = 1) -> None:
    """Writes the states, in parts, with a step of the protocol before each.

    Passes before the last write what is wrong, so that more kills fall into a fill.
    """
    target = np.frombuffer(fill.states, dtype=np.uint64)
    source = expected(generation, fill.slot, seq, fill.number, len(target))
    edges = [len(target) * part // chunks for part in range(chunks + 1)]
    for left in range(passes - 1, -1, -1):
        for start, stop in zip(edges, edges[1:], strict=False):
            words.step("fill")
            target[start:stop] = ~source[start:stop] if left else source[start:stop]


def put(
    producer: Producer,
    tokens: int = 2,
    *,
    chunks: int = 2,
    passes: int = 1,
) -> Handle | None:
    """Publishes the next sample, or returns None if there is no room."""
    number = producer.accepted + 1
    fill = producer.allocate(
        number=number,
        request_id=request_id(producer.generation, number),
        token_ids=token_ids(number, tokens),
        metadata={"number": number},
    )
    if fill is None:
        return None
    producer.accept(number)
    fill_in(fill, producer.generation, producer.published + 1, chunks, passes)
    return producer.publish(fill)


def slot_of(subscription: Subscription, sample: Sample) -> int:
    """The slot that a sample of ours lies in, by its lease."""
    member = subscription._member
    for lease in list(member.leases):
        if lease.seq == sample.seq and lease.view.generation == sample.handle.generation:
            shape = lease.view.ring.shape
            return (lease.at - shape.hold) // 8 - member.group * shape.slots
    raise AssertionError(f"sample {sample.seq} has no lease")


def problems(sample: Sample, slot: int) -> list[str]:
    """What is wrong with a sample, by its own word."""
    found = []
    generation, number = sample.handle.generation, sample.number
    states: Any = np.frombuffer(sample.states_bytes, dtype=np.uint64)
    want = expected(generation, slot, sample.seq, number, len(states))
    if not np.array_equal(states, want):
        wrong = np.flatnonzero(states != want)
        found.append(
            f"torn: sample {sample.seq} in slot {slot}, {len(wrong)} of {len(want)} words differ, "
            f"first {wrong[0]}: head is {[hex(int(word)) for word in states[:_HEAD]]}"
        )
    ids = np.frombuffer(sample.token_ids_bytes, dtype=np.int64).tolist()
    if ids != token_ids(number, sample.tokens):
        found.append(f"token ids of sample {sample.seq} are {ids}")
    if sample.request_id != request_id(generation, number):
        found.append(f"request id of sample {sample.seq} is {sample.request_id!r}")
    if sample.metadata != {"number": number}:
        found.append(f"metadata of sample {sample.seq} is {sample.metadata}")
    return found
