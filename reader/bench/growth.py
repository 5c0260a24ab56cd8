# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench growth`: what each operation costs as slots and groups grow.

One process; a ring that is full of samples of one page that every group still needs, which is when
a look at all of them costs most. Medians, in microseconds:
  put       try_put of one token, with room
  refused   try_put without room: a look at what can be taken back
  take      a group's next sample
  release   of that sample
  get       one request's sample, by handle
  loss      a tombstone, and whom the connector blames for it
  tick      what the producer does every 0.1 s while it holds
  expiry    the same where groups by handle have not asked for what is old
  held      whether to hold on: asked with every look while it holds
  stat      rings and groups, as `shmconn stat` shows them
"""

import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import shmconn
from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.layout import GROUPS, MAX_SLOTS

SLOTS = (100, 1000, MAX_SLOTS)
_PAGE = 65536
_ROOM = 16  # slots that stay free for what is put by the clock
_WHATS = (
    *("put", "refused", "take", "release", "get"),
    *("loss", "tick", "expiry", "held", "stat"),
)


def run(*, repeats: int = 15, json_out: bool = False) -> int:
    """Measures and prints; there is no goal, so it returns 0."""
    cases = [(slots, count) for count in (1, GROUPS) for slots in SLOTS]
    costs = {case: measure(*case, repeats=min(repeats, _ROOM - 1)) for case in cases}
    if json_out:
        lines = [{"slots": s, "groups": g} | costs[s, g] for s, g in cases]
        print(json.dumps(lines, indent=1))
        return 0
    table = Table(title="growth: microseconds each, in a full ring", box=None)
    table.add_column("groups\nslots")
    for slots, count in cases:
        table.add_column(f"{count}\n{slots:,}", justify="right", no_wrap=True)
    for what in _WHATS:
        table.add_row(what, *(f"{costs[case][what]:,.0f}" for case in cases))
    Console().print(table)
    return 0


def measure(slots: int, count: int, *, repeats: int) -> dict[str, float]:
    """Microseconds of each operation.

    Args:
        slots: of the ring.
        count: groups that need every sample.
        repeats: the median of so many counts, 15 at most.
    """
    costs: dict[str, float] = {}
    with _full(slots, [f"g{n}" for n in range(count)], ttl_s=600.0) as producer:
        costs["put"] = _median(lambda: _put(producer), repeats)
        while _put(producer) is not None:
            pass
        costs["refused"] = _median(lambda: _put(producer), repeats)
        costs["loss"] = _median(lambda: _lose(producer), repeats)
        costs["tick"] = _median(producer.tick, repeats)
        costs["held"] = _median(producer.can_progress, repeats)
        name = producer.name
        costs["stat"] = _median(lambda: (rings(name), groups(name)), repeats)
        with shmconn.subscribe(name, "g0", durable=True) as subscription:
            held: list[shmconn.Sample] = []
            costs["take"] = _median(lambda: held.append(_next(subscription)), repeats)
            costs["release"] = _median(lambda: held.pop().release(), repeats)
    # The first of the groups by handle asks for some; the others for none.
    by_handle = [{"name": f"h{n}", "by_handle": True} for n in range(max(1, count - 1))]
    kept = [] if count == 1 else ["all"]
    with _full(slots, [*by_handle, *kept], ttl_s=600.0) as producer:
        handles = [_put(producer) for _ in range(repeats)]
        with shmconn.subscribe(producer.name, "h0", by_handle=True, durable=True) as subscription:
            asked = iter(handles)
            costs["get"] = _median(lambda: subscription.get(next(asked), 10).release(), repeats)
        producer._ttl_s = 0.0
        producer.expire()
        costs["expiry"] = _median(producer.expire, repeats)
    return costs


@contextmanager
def _full(slots: int, names: list[object], ttl_s: float) -> Iterator[shmconn.Producer]:
    """A ring that is full but for a few slots."""
    name = f"bench-{secrets.token_hex(4)}"
    producer = shmconn.Producer.create(
        name,
        size=slots * (_PAGE + 512) + (2 << 20),
        layer_ids=[0],
        hidden_size=16,
        dtype="float32",
        slots=slots,
        groups=names,
        unclaimed_ttl_s=ttl_s,
    )
    with ExitStack() as stack:
        stack.callback(_remove, name)
        stack.enter_context(producer)
        for _ in range(slots - _ROOM):
            _put(producer)
        yield producer


def _remove(name: str) -> None:
    for group in groups(name):
        if group.name:
            remove_group(name, group.name)
    if any(ring.name == name for ring in rings()):
        remove_rings(name, force=True)


_STATES = torch.zeros(1, 1, 16)
_IDS = np.zeros(1, dtype=np.int64)


def _put(producer: shmconn.Producer) -> object:
    return producer.try_put(_STATES, _IDS, request_id="bench")


def _lose(producer: shmconn.Producer) -> None:
    """What the connector does for a request that finds no room."""
    number = producer.accepted + 1
    producer.accept(number)
    mask = sum(1 << blocker.row for blocker in producer.blockers())
    producer.bury(number, "bench", "no_reader", mask)


def _next(subscription: shmconn.Subscription) -> shmconn.Sample:
    sample = subscription.next(10)
    assert sample is not None
    return sample


def _median(do: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        do()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(run())
