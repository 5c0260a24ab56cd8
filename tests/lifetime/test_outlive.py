# SPDX-License-Identifier: Apache-2.0
"""Row 21: whatever still shows a sample keeps its pages, however it was made, until it is gone."""

import gc
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from crash import planted
from crash.survivors import Reader
from harness import figures, payload

from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.subscription import subscribe

SLOTS, PAGES = 8, 12
WRAPS = 10

ALIASES: dict[str, Callable[[Sample], Any]] = {
    "tensor": lambda sample: sample.hidden_states,
    "slice": lambda sample: sample.hidden_states[3:, :, 8:],
    "slice of a slice of a slice": lambda sample: sample.hidden_states[1:][2:, 0][::2, ::3],
    "one element": lambda sample: sample.hidden_states[-1, 0, -1],
    "transposed": lambda sample: sample.hidden_states.permute(2, 1, 0),
    "flat view": lambda sample: sample.hidden_states.view(-1)[5:],
    "other dtype": lambda sample: sample.hidden_states.view(torch.int16),
    "expanded": lambda sample: sample.hidden_states[:1].expand(4, -1, -1),
    "strided": lambda sample: sample.hidden_states.as_strided((4, 2), (7, 3), 11),
    "detached": lambda sample: sample.hidden_states.detach(),
    "unbound": lambda sample: sample.hidden_states.unbind(0)[3],
    "split": lambda sample: sample.hidden_states.split(5)[1],
    "numpy": lambda sample: sample.hidden_states.numpy(),
    "numpy slice": lambda sample: sample.hidden_states.numpy()[2:, :, ::5].T,
    "numpy of a slice": lambda sample: sample.hidden_states[4:].numpy().reshape(-1)[9:],
    "numpy and back": lambda sample: torch.from_numpy(sample.hidden_states.numpy()[1:]),
    "dlpack": lambda sample: torch.from_dlpack(sample.hidden_states),
    "numpy by dlpack": lambda sample: np.from_dlpack(sample.hidden_states),
    "memoryview of numpy": lambda sample: memoryview(sample.hidden_states.numpy())[3:],
    "bytes": lambda sample: sample.states_bytes[100:],
    "numpy of bytes": lambda sample: np.frombuffer(sample.states_bytes, dtype=np.uint16)[3:],
    "token ids": lambda sample: sample.token_ids[2:],
    "bytes of token ids": lambda sample: sample.token_ids_bytes[8:],
    "in containers": lambda sample: {"a": [(sample.hidden_states[2:],)]},
    "in a closure": lambda sample: lambda states=sample.hidden_states[1:]: states,
}


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Collections look at what came since only: torch alone has a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def bytes_of(alias: Any) -> int:
    """A checksum of what an alias shows."""
    if isinstance(alias, dict):
        alias = alias["a"][0][0]
    if callable(alias) and not isinstance(alias, torch.Tensor):
        alias = alias()
    if isinstance(alias, torch.Tensor):
        alias = alias.contiguous().numpy()
    return zlib.crc32(np.ascontiguousarray(alias).tobytes())


def create(name: str, *groups: str) -> Producer:
    return Producer.create(
        name,
        size=RingShape(65536, PAGES, SLOTS).size,
        layer_ids=[0],
        hidden_size=payload.HIDDEN,
        dtype="float32",
        slots=SLOTS,
        groups=groups,
    )


def wrap(producer: Producer, readers: list[Reader], times: int) -> int:
    """Sends samples round the ring beside what is held; how many were read."""
    before = producer.published
    while producer.published - before < times * SLOTS:
        if payload.put(producer, 16) is None:
            assert sum(reader.read() for reader in readers), producer.stall_text()
    for reader in readers:
        reader.read()
    return producer.published - before


def outlive(ring: str, how: str) -> list[str]:
    """Holds an alias through ten rounds of the ring; what was wrong."""
    problems: list[str] = []
    producer = create(ring, "owner", "other")
    other = Reader(subscribe(ring, "other"), problems)
    for _ in range(2):
        payload.put(producer, 16)
    subscription = subscribe(ring, "owner")
    sample = subscription.next(5)
    assert sample is not None
    alias = ALIASES[how](sample)
    was = bytes_of(alias)
    before = bytes(sample.states_bytes)
    sample.release()
    del sample
    gc.collect()
    # A mate reads on, so that only what the alias shows stays.
    mate = Reader(subscribe(ring, "owner"), problems)
    subscription.close()
    del subscription
    gc.collect()
    wrap(producer, [mate, other], WRAPS)
    producer.reclaim()
    held = SLOTS - producer.free_slots
    changed = bytes_of(alias) != was
    if held != 1 or changed:
        problems.append(f"{how}: {held} slots held, {'changed' if changed else 'unchanged'}")
    assert len(before) == 16 * payload.TOKEN_BYTES
    del alias
    gc.collect()
    producer.reclaim()
    if producer.free_slots != SLOTS:
        problems.append(f"{how}: {SLOTS - producer.free_slots} slots held by nothing")
    producer.close()
    for reader in (mate, other):
        reader.read_until("the end", lambda reader=reader: reader.over)
        reader.subscription.close()
    # A subscription that was closed with an alias alive leaves in a thread of its own.
    for thread in threading.enumerate():
        if thread.name == "shmconn-leave":
            thread.join(60)
    return problems


@pytest.mark.parametrize("how", ALIASES)
def test_an_alias_of_any_kind_outlives_sample_subscription_and_ten_rounds(
    ring: str, how: str
) -> None:
    problems = outlive(ring, how)
    figures.record(
        "21",
        "alias of a sample through 10 rounds of the ring",
        trials=1,
        exercised=1,
        failures=len(problems),
    )
    assert problems == []


def test_an_alias_that_does_not_keep_its_pages_is_seen(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.released_at_the_claim(monkeypatch)
    problems = outlive(ring, "slice")
    figures.detected("21", "aliases", 1, [] if problems else ["released at the claim"])
    assert any("changed" in problem and "unchanged" not in problem for problem in problems)


def test_aliases_that_pile_up_and_go_in_any_order_hold_exactly_their_slots(ring: str) -> None:
    problems: list[str] = []
    dice = random.Random(7)
    producer = create(ring, "owner", "other")
    subscription = subscribe(ring, "owner")
    other = Reader(subscribe(ring, "other"), problems)
    held: list[tuple[Any, int]] = []
    taken = 0
    for _ in range(300):
        while payload.put(producer, 16) is not None:
            pass
        other.read()
        sample = subscription.next(0)
        if sample is not None:
            taken += 1
            # The aliases that torch cannot keep apart from the sample are among them.
            alias = ALIASES[dice.choice(list(ALIASES))](sample)
            held.append((alias, bytes_of(alias)))
            del alias
        del sample
        assert subscription.leases == len(held)
        while len(held) == SLOTS or (held and dice.random() < 0.4):
            alias, was = held.pop(dice.randrange(len(held)))
            if bytes_of(alias) != was:
                problems.append("an alias changed while it was held")
            del alias
    assert all(bytes_of(alias) == was for alias, was in held)
    held.clear()
    assert subscription.leases == 0
    producer.close()
    rest = sum(1 for _ in subscription)
    other.read_until("the end", lambda: other.over)
    if taken + rest != producer.published:
        problems.append(f"{taken} + {rest} of {producer.published} samples came")
    subscription.close()
    other.subscription.close()
    figures.record(
        "21",
        "aliases that pile up and are dropped in any order",
        trials=taken,
        exercised=taken,
        failures=len(problems),
    )
    assert problems == []


def test_aliases_dropped_by_other_threads_end_their_leases_once(ring: str) -> None:
    problems: list[str] = []
    producer = create(ring, "owner")
    subscription = subscribe(ring, "owner")
    boxes: list[list[Any]] = [[] for _ in range(4)]
    over = threading.Event()

    def drop(box: list[Any]) -> None:
        while not over.is_set() or box:
            if box:
                alias, was = box.pop()
                if bytes_of(alias) != was:
                    problems.append("an alias changed while it was held")
                del alias
            else:
                time.sleep(0.0005)

    threads = [threading.Thread(target=drop, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    count = 0
    while count < 400:
        payload.put(producer, 16)
        sample = subscription.next(0)
        if sample is None:
            continue
        alias = sample.hidden_states[2:].numpy()
        boxes[count % 4].append((alias, bytes_of(alias)))
        count += 1
        del alias, sample
    over.set()
    for thread in threads:
        thread.join(60)
    producer.close()
    rest = sum(1 for _ in subscription)
    assert subscription.leases == 0
    if count + rest != producer.published:
        problems.append(f"{count} + {rest} of {producer.published} samples came")
    subscription.close()
    figures.record(
        "21",
        "aliases dropped by four other threads",
        trials=count,
        exercised=count,
        failures=len(problems),
    )
    assert problems == []
