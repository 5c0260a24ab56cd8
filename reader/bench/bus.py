# SPDX-License-Identifier: Apache-2.0
"""The ring beside the bus: copies of one sample out of a paged cache, without an engine.

    pin         one copy of contiguous device memory to pinned memory: the limit
    capture     blocks of the cache into the slot: the copy alone
    ring        allocate, capture, publish: what a worker does for one sample
    stock       gather, new pinned memory, save_file to /dev/shm: what vLLM's example does
    back        host to device from pinned memory: the limit of a trainer
    ring back   claim, sample.to(device, non_blocking=True)
    stock back  load_file, .to(device)

All ways take turns in the same run. Seconds are wall time with the device idle before and after.
"""

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import shmconn
from shmconn.capture import CacheView, make_capture

BLOCK = 16


class Bus:
    """One paged cache, one ring, one reader of it.

    Args:
        tokens: of the largest sample.
    """

    def __init__(self, device: str, tokens: int, layers: int, hidden: int) -> None:
        self.device = torch.device(device)
        self.layers, self.hidden = layers, hidden
        blocks = 2 * -(-tokens // BLOCK)
        shape = (blocks, BLOCK, layers, hidden)
        self.cache = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        # Blocks of a request lie anywhere in the cache.
        self.order = torch.randperm(blocks).tolist()
        row = layers * hidden * 2
        name = f"bench-{secrets.token_hex(4)}"
        began = time.monotonic()
        self.producer = shmconn.Producer.create(
            name,
            size=4 * (tokens * (row + 8) + (1 << 20)),
            layer_ids=list(range(layers)),
            hidden_size=hidden,
            dtype="bfloat16",
        )
        self.made_s = time.monotonic() - began
        began = time.monotonic()
        self.capture = make_capture(CacheView(self.cache), self.producer.data_area)
        self.registered_s = time.monotonic() - began
        self.capture.bind()
        self.subscription = shmconn.subscribe(name, "bench", pin=self.device.type != "cpu")
        self.number = 0
        self.capture_s = 0.0
        self.path = f"/dev/shm/{name}.safetensors"

    def close(self) -> None:
        """Ends the ring and removes the file."""
        self.subscription.close()
        self.capture.close()
        self.producer.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall time of one call, the device idle before and after it."""
        self.synchronize()
        began = time.monotonic()
        kept = work()
        self.synchronize()
        took = time.monotonic() - began
        del kept
        return took

    def ways(self, tokens: int) -> Iterator[tuple[str, float]]:
        """Each way once: its name and its seconds."""
        row = self.layers * self.hidden
        blocks = self.order[: -(-tokens // BLOCK)]
        flat = self.cache.view(-1)[: tokens * row]
        pinned = torch.empty(
            tokens * row, dtype=torch.bfloat16, pin_memory=self.device.type != "cpu"
        )
        yield "pin", self.seconds(lambda: pinned.copy_(flat, non_blocking=True))
        yield "back", self.seconds(lambda: flat.copy_(pinned, non_blocking=True))
        ids = list(range(tokens))
        yield "ring", self.seconds(lambda: self.put(ids, blocks))
        yield "capture", self.capture_s
        yield "ring back", self.seconds(self._take)
        index = torch.tensor(blocks)
        yield "stock", self.seconds(lambda: self._save(index, tokens))
        yield "stock back", self.seconds(self._load)

    def put(self, ids: list[int], blocks: list[int], timeout_s: float = 10.0) -> None:
        """One sample out of the cache into the ring; waits for room."""
        self.number += 1
        self.producer.accept(self.number)
        deadline = time.monotonic() + timeout_s
        while (
            fill := self.producer.allocate(
                number=self.number, request_id=f"r{self.number}", token_ids=ids
            )
        ) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ring has no room: {self.producer.stall_text()}")
            self.producer.wait(0.1)
            self.producer.tick()
        began = time.monotonic()
        self.capture.copy(fill, blocks, self.capture.mark())
        self.capture_s = time.monotonic() - began
        self.producer.publish(fill)

    def _take(self) -> Any:
        sample = self.subscription.next(timeout=10)
        if sample is None:
            raise RuntimeError("the ring yielded no sample")
        states = sample.to(self.device, non_blocking=True)
        sample.release()
        return states

    def _save(self, index: torch.Tensor, tokens: int) -> None:
        rows = self.cache[index.to(self.device)].flatten(0, 1)[:tokens]
        host = torch.empty_like(rows, device="cpu", pin_memory=self.device.type != "cpu")
        host.copy_(rows, non_blocking=True)
        self.synchronize()
        save_file({"hidden_states": host, "token_ids": torch.arange(tokens)}, self.path)

    def _load(self) -> Any:
        tensors = load_file(self.path)
        return [one.to(self.device) for one in tensors.values()]


def measure(
    device: str, sizes: list[int], layers: int, hidden: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One record for each way and size: the median of the repeats, after one that warms up."""
    bus = Bus(device, max(sizes), layers, hidden)
    try:
        yield {
            "what": "start",
            "ring_bytes": bus.producer.shape.size,
            "made_s": bus.made_s,
            "registered_s": bus.registered_s,
        }
        for tokens in sizes:
            seconds: dict[str, list[float]] = {}
            for turn in range(repeats + 2):
                for way, took in bus.ways(tokens):
                    # The first touch of memory is not what is measured.
                    if turn >= 2:
                        seconds.setdefault(way, []).append(took)
            nbytes = tokens * layers * hidden * 2
            for way, times in seconds.items():
                median = statistics.median(times)
                yield {
                    "what": way,
                    "tokens": tokens,
                    "bytes": nbytes,
                    "seconds": median,
                    "least_s": min(times),
                    "most_s": max(times),
                    "gb_s": nbytes / median / 1e9,
                }
    finally:
        bus.close()
        Path(bus.path).unlink(missing_ok=True)
