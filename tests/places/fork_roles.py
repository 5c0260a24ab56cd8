# SPDX-License-Identifier: Apache-2.0
"""A program that forks with a ring open, in one of five states; run by test_fork.py.

It says on stdout what it has done, and goes on when it is told to by a line on stdin.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from shmconn.errors import ForkedError
from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.subscription import subscribe

STATES = ("subscribed", "holding", "view alone", "iterating", "producing")
ENDS = ("os._exit", "exit", "killed")


def tell(text: str) -> None:
    """Says something and waits for the word to go on."""
    print(text, flush=True)
    sys.stdin.readline()


def set_up(name: str, state: str) -> tuple[dict[str, Any], list[Callable[[], object]]]:
    """What is alive in a state, and uses of it that a child must be refused."""
    if state == "producing":
        producer = Producer.create(
            name,
            size=RingShape(65536, 6, 4).size,
            layer_ids=[0],
            hidden_size=4,
            dtype="float32",
            groups=["group"],
        )
        return {"producer": producer}, [
            lambda: producer.allocate(number=1, request_id="r", token_ids=[1]),
            lambda: producer.bury(1, "r", "fault"),
        ]
    subscription = subscribe(name, "group", wait_s=60)
    uses: list[Callable[[], object]] = [
        lambda: subscription.next(0),
        lambda: next(iter(subscription)),
        lambda: subscription.get(f"shmconn:{name}:{'0' * 32}:1:{'0' * 32}"),
    ]
    if state == "subscribed":
        return {"subscription": subscription}, uses
    if state == "iterating":
        # It waits for samples until the end of the ring, over all forks.
        thread = threading.Thread(target=lambda: [sample.seq for sample in subscription])
        thread.daemon = True
        thread.start()
        time.sleep(0.05)
        return {"subscription": subscription, "thread": thread}, uses
    sample = subscription.next(60)
    if state == "holding":
        return {"subscription": subscription, "sample": sample}, uses
    view = sample.states_bytes[4:] if sample is not None else None
    subscription.close()
    return {"view": view}, []


def in_child(alive: dict[str, Any], uses: list[Callable[[], object]], end: str) -> None:
    """Uses and drops in the child what is the parent's, then ends."""
    for use in uses:
        try:
            use()
        except ForkedError:
            continue
        os._exit(9)
    for thing in alive.values():
        if hasattr(thing, "close"):
            thing.close()
    alive.clear()
    gc.collect()
    if end == "os._exit":
        os._exit(0)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


def main(name: str, state: str) -> None:
    alive, uses = set_up(name, state)
    # Threads of ours do not run in what the children do.
    warnings.simplefilter("ignore", DeprecationWarning)
    tell("ready")
    for end in ENDS:
        pid = os.fork()
        if pid == 0:
            in_child(alive, uses, end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tell(f"{end} {status}")
    uses.clear()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    with subprocess.Popen(["sleep", "600"]) as other:
        tell(f"{pid} {other.pid}")


if __name__ == "__main__":
    main(*sys.argv[1:])
