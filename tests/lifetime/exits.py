# SPDX-License-Identifier: Apache-2.0
"""A program that ends in one of many states, with a ring in use; run by test_exits.py.

``python exits.py RING STATE``: it comes into that state, says so, and falls off its end.
"""

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.subscription import Subscription, subscribe

kept: list[Any] = []  # alive until the interpreter takes its modules apart


def _sample(name: str) -> tuple[Subscription, Any]:
    subscription = subscribe(name, "group", wait_s=60)
    sample = subscription.next(60)
    kept.extend((subscription, sample))
    return subscription, sample


def subscribed(name: str) -> None:
    kept.append(subscribe(name, "group"))


def holding(name: str) -> None:
    _sample(name)


def bytes_alive(name: str) -> None:
    _, sample = _sample(name)
    kept[:] = [sample.states_bytes[8:], sample.token_ids_bytes]


def closed_with_bytes_alive(name: str) -> None:
    subscription, sample = _sample(name)
    kept[:] = [sample.states_bytes]
    del sample
    subscription.close()


def abandoned_with_bytes_alive(name: str) -> None:
    subscription, sample = _sample(name)
    kept[:] = [sample.states_bytes]
    subscription.abandon()


def in_a_cycle(name: str) -> None:
    gc.disable()
    _, sample = _sample(name)
    cycle: list[Any] = [sample, sample.states_bytes]
    cycle.append(cycle)
    kept.clear()


def iterating_in_a_thread(name: str) -> None:
    subscription = subscribe(name, "group")
    # It waits for the next sample for ever.
    threading.Thread(target=lambda: list(subscription), daemon=True).start()
    time.sleep(0.1)


def held_by_a_thread(name: str) -> None:
    def hold() -> None:
        subscription = subscribe(name, "group")
        sample = subscription.next(60)
        kept.append(True)
        time.sleep(600)
        del sample

    threading.Thread(target=hold, daemon=True).start()
    while not kept:
        time.sleep(0.01)


def inside_the_block(name: str) -> None:
    with subscribe(name, "group") as subscription:
        kept.append(subscription.next(60))
        sys.exit(0)


def in_a_forked_child(name: str) -> None:
    _sample(name)
    # A second thread may run here; it is none of ours.
    warnings.simplefilter("ignore", DeprecationWarning)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"the child ended with {status}")


def after_a_fork(name: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    if os.fork() == 0:
        time.sleep(0.1)
        os._exit(0)
    _sample(name)


def _producer(name: str) -> Producer:
    shape = RingShape(65536, 6, 4)
    producer = Producer.create(
        f"{name}-made", size=shape.size, layer_ids=[0], hidden_size=4, dtype="float32"
    )
    fill = producer.allocate(number=1, request_id="r", token_ids=[1, 2])
    if fill is None:
        raise SystemExit("a new ring has no room")
    producer.accept(1)
    producer.publish(fill)
    kept.append(producer)
    return producer


def producing(name: str) -> None:
    _producer(name)


def filling(name: str) -> None:
    kept.append(_producer(name).allocate(number=2, request_id="r", token_ids=[1]))


def producer_closed(name: str) -> None:
    _producer(name).close()


def both_ends(name: str) -> None:
    _producer(name)
    subscription = subscribe(f"{name}-made", "group")
    kept.extend((subscription, subscription.next(60)))


def both_ends_closed(name: str) -> None:
    both_ends(name)
    for thing in kept[:2]:
        thing.close()


def tensor_alive(name: str) -> None:
    _, sample = _sample(name)
    kept[:] = [sample.hidden_states[1:], sample.token_ids.numpy()]


def closed_with_tensor_alive(name: str) -> None:
    subscription, sample = _sample(name)
    kept[:] = [sample.hidden_states.view(-1)[::2].numpy()]
    del sample
    subscription.close()


def _load(name: str, workers: int, method: str | None) -> None:
    from torch.utils.data import DataLoader

    from shmconn.dataset import SampleDataset

    loader = DataLoader(
        SampleDataset(name, "group"),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method,
        in_order=False,
    )
    samples = iter(loader)
    kept.extend((loader, samples, next(samples)))
    # At exit multiprocessing terminates workers, and torch's handler may complain of it, with any
    # dataset: what is looked for here are words of ours.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def in_a_loader(name: str) -> None:
    _load(name, 0, None)


def with_forked_workers(name: str) -> None:
    _load(name, 2, "fork")


def with_spawned_workers(name: str) -> None:
    _load(name, 2, "spawn")


LIGHT: list[Callable[[str], None]] = [
    subscribed,
    holding,
    bytes_alive,
    closed_with_bytes_alive,
    abandoned_with_bytes_alive,
    in_a_cycle,
    iterating_in_a_thread,
    held_by_a_thread,
    inside_the_block,
    in_a_forked_child,
    after_a_fork,
    producing,
    filling,
    producer_closed,
    both_ends,
    both_ends_closed,
]
WITH_TORCH: list[Callable[[str], None]] = [
    tensor_alive,
    closed_with_tensor_alive,
    in_a_loader,
    with_forked_workers,
]
SPAWNING: list[Callable[[str], None]] = [with_spawned_workers]
STATES = {state.__name__: state for state in LIGHT + WITH_TORCH + SPAWNING}


if __name__ == "__main__":
    STATES[sys.argv[2]](sys.argv[1])
