# SPDX-License-Identifier: Apache-2.0
"""The reading processes of the benchmark: a trainer that takes every sample to its device.

    ours    subscribe(pin=True), sample.to(device, non_blocking=True); may read several rings
    stock   vLLM's load_hidden_states, .to(device), and the file is removed
    check   both of one engine, compared bit for bit
    twins   two rings whose engines got the same prompts: each sample beside its twin

Each runs in a thread; the main thread answers the benchmark. Times are of the monotonic clock,
which all processes of a host share.
"""

import contextlib
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import shmconn
from reader.bench.engine import cpu_seconds, serve


class Drain:
    """What was read so far, and the commands to ask for it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stop = threading.Event()
        self.problem = ""
        self._arrived: list[float] = []
        self._bytes = 0
        self.differing: list[str] = []
        self.lost: Counter[str] = Counter()
        self.handles: set[str] = set()
        self.rings: Counter[str] = Counter()
        self.errors: dict[str, list[float]] = {}
        self.joined = threading.Event()
        self.going = threading.Event()
        self.going.set()

    def take(self, states: torch.Tensor) -> None:
        """A sample is on its way to the device: waits for it, then counts it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._arrived.append(time.monotonic())
        self._bytes += states.nbytes

    def differs(self, request_id: str) -> None:
        """A sample was not what the other side wrote."""
        self.differing.append(request_id)

    def count(self, handle: shmconn.Handle) -> None:
        """Which ring a sample came from, and that it came once."""
        if str(handle) in self.handles:
            self.problem = f"{handle} came twice"
        self.handles.add(str(handle))
        self.rings[handle.generation[:8]] += 1

    def run(self, loop: "Callable[[Drain], None]") -> None:
        """The loop, and why it ended early."""
        try:
            loop(self)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    # --- commands -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Counts so far."""
        return {
            "samples": len(self._arrived),
            "bytes": self._bytes,
            "last": self._arrived[-1] if self._arrived else 0.0,
            "cpu_s": cpu_seconds(),
            "problem": self.problem,
            "differing": self.differing,
            "lost": sum(self.lost.values()),
            "lost_by_reason": dict(self.lost),
            "rings": dict(self.rings),
            "errors": {key: sorted(values) for key, values in self.errors.items()},
        }

    def wait(self, requests: int, at_most_s: float) -> dict[str, Any]:
        """`state` once so many samples were read or recorded as lost, or the time is over."""
        deadline = time.monotonic() + at_most_s
        while time.monotonic() < deadline and not self.problem:
            if len(self._arrived) + sum(self.lost.values()) >= requests:
                break
            time.sleep(0.001)
        return self.state()

    def pause(self) -> None:
        """Reads nothing until `go`."""
        self.going.clear()

    def go(self) -> None:
        """Reads on."""
        self.going.set()

    def two_copies(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds of a device-to-host and a host-to-device copy of pinned memory, one by one."""
        on_device = torch.empty(nbytes, dtype=torch.uint8, device=self.device).random_()
        on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        times = []
        for _ in range(repeats):
            self._synchronize()
            began = time.monotonic()
            on_host.copy_(on_device, non_blocking=True)
            self._synchronize()
            on_device.copy_(on_host, non_blocking=True)
            self._synchronize()
            times.append(time.monotonic() - began)
        return sorted(times) if repeats < 3 else [statistics.median(times), *sorted(times)]

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


def ours(ring: str) -> "Callable[[Drain], None]":
    """Reads a ring."""

    def loop(drain: Drain) -> None:
        pin = drain.device.type != "cpu"
        with shmconn.subscribe(ring, "trainer", wait_s=600, pin=pin) as subscription:
            drain.joined.set()
            while not drain.stop.is_set() and not subscription.ended:
                drain.going.wait()
                sample = subscription.next(timeout=0.5)
                drain.lost = Counter(subscription.lost_by_reason)
                if sample is not None:
                    states, _ = sample.to(drain.device, non_blocking=True)
                    drain.count(sample.handle)
                    sample.release()
                    drain.take(states)
                    del sample, states

    return loop


def stock(folder: str) -> "Callable[[Drain], None]":
    """Reads the files of vLLM's example, each as soon as its writer lets go of its lock."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    def loop(drain: Drain) -> None:
        drain.joined.set()
        while not drain.stop.is_set():
            locks = [one for one in os.scandir(folder) if one.name.endswith(".lock")]
            # Oldest first, as the requests came.
            for lock in sorted(locks, key=lambda one: one.stat().st_mtime_ns):
                path = lock.path.removesuffix(".lock")
                # The lock file is there a moment before its lock is held.
                with contextlib.suppress(FileNotFoundError):
                    data = load_hidden_states(path)
                    states = data["hidden_states"].to(drain.device)
                    data["token_ids"].to(drain.device)
                    drain.take(states)
                    cleanup_hidden_states(path)
                    del data, states
            if not locks:
                time.sleep(0.002)

    return loop


def check(ring: str, folder: str) -> "Callable[[Drain], None]":
    """Compares each sample with the file that vLLM's example wrote of the same request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    def load(path: str) -> Any:
        deadline = time.monotonic() + 60
        while True:
            try:
                return load_hidden_states(path)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)

    def loop(drain: Drain) -> None:
        with shmconn.subscribe(ring, "check", wait_s=600) as subscription:
            drain.joined.set()
            while not drain.stop.is_set() and not subscription.ended:
                sample = subscription.next(timeout=0.5)
                drain.lost = Counter(subscription.lost_by_reason)
                if sample is None:
                    continue
                path = os.path.join(folder, f"{sample.request_id}.safetensors")
                data = load(path)
                if not (
                    data["hidden_states"].shape == sample.hidden_states.shape
                    and data["hidden_states"]
                    .view(torch.int16)
                    .equal(sample.hidden_states.view(torch.int16))
                    and data["token_ids"].equal(sample.token_ids)
                    and bool(data["hidden_states"].view(torch.int16).any())
                ):
                    drain.differs(sample.request_id)
                drain.take(data["hidden_states"])
                cleanup_hidden_states(path)
                sample.release()
                del sample, data

    return loop


def twins(one: str, other: str) -> "Callable[[Drain], None]":
    """Compares the samples of two rings by their token ids.

    Writes down, for each pair, the median and the largest distance of a row from its twin, and
    the least distance from the twin's next row: as shares of the row's own length, in float32.
    """

    def errors(mine: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        mine, twin = mine.float(), twin.float()
        apart: torch.Tensor = (mine - twin).norm(dim=-1) / mine.norm(dim=-1)
        return apart

    def loop(drain: Drain) -> None:
        first: dict[bytes, torch.Tensor] = {}
        with (
            shmconn.subscribe(one, "twins", wait_s=600) as mine,
            shmconn.subscribe(other, "twins", wait_s=600) as theirs,
        ):
            drain.joined.set()
            while not drain.stop.is_set():
                drain.going.wait()
                for subscription in (mine, theirs):
                    sample = subscription.next(timeout=0.05)
                    if sample is None:
                        continue
                    key = bytes(sample.token_ids_bytes)
                    drain.count(sample.handle)
                    states = sample.hidden_states.clone()
                    sample.release()
                    twin = first.pop(key, None)
                    if twin is None:
                        first[key] = states
                    else:
                        noise = errors(states, twin)
                        for name, value in (
                            ("typical", noise.median()),
                            ("largest", noise.max()),
                            ("next row", errors(states[:-1], twin[1:]).min()),
                        ):
                            drain.errors.setdefault(name, []).append(float(value))
                    drain.take(states)
                    del sample
                drain.lost = Counter(mine.lost_by_reason) + Counter(theirs.lost_by_reason)

    return loop


def main() -> None:
    """`python -m reader.bench.drains FD KIND DEVICE PLACE...`."""
    pipe, (kind, device, *places) = Connection(int(sys.argv[1])), sys.argv[2:]
    kinds: dict[str, Callable[..., Callable[[Drain], None]]] = {
        "ours": ours,
        "stock": stock,
        "check": check,
        "twins": twins,
    }
    drain = Drain(device)
    if drain.device.type != "cpu":
        torch.empty(1, device=drain.device)
    thread = threading.Thread(target=drain.run, args=(kinds[kind](*places),))
    thread.start()
    drain.joined.wait(100)
    pipe.send({"pid": os.getpid()})
    try:
        serve(pipe, drain)
    finally:
        drain.stop.set()
        thread.join()


if __name__ == "__main__":
    main()
