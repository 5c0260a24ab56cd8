# SPDX-License-Identifier: Apache-2.0
"""Copies blocks out of a cache in device memory at the speed of the bus.

    cache ──gather──► staging (2 x 32 MiB on the device) ──one DMA a chunk──► slot

Two lanes, each a stream with a staging buffer, take turns: while one lane's chunk crosses the
bus, the other gathers. The ring's pages are registered with the device at start, so the DMA goes
straight into the slot; where that fails, it goes into a pinned buffer and on from there. All
buffers are allocated once: a request of any length needs no more. The compute stream is never
waited for by the host: an event recorded on it holds the lanes back.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shmconn.capture import CacheView, Meanwhile
from shmconn.fill import Fill
from shmconn.pinning import Pinned

logger = logging.getLogger("vllm.shmconn")

# Two of these are on the device. Larger ones leave more of the first gather and the last wait
# uncovered, smaller ones cost more launches: 32 MiB was best on an H200.
CHUNK_BYTES = 32 << 20
# Registering is slow and cannot be interrupted: about 0.3 s a GiB.
REGISTER_BYTES = 1 << 30


class Device:
    """What is asked of an accelerator; a test puts another in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._pinned: Pinned | None = None
        self._steps: Any = None

    def bind(self) -> None:
        """Makes the device the current one of this thread."""
        torch.accelerator.set_device_index(self._device)

    def at_step(self) -> None:
        """Takes the stream that is current now for the steps'."""
        self._steps = self._module.current_stream(self._device)

    def mark(self) -> Any:
        """An event after all work that is queued on the steps' stream."""
        event = self._module.Event()
        event.record(self._steps or self._module.current_stream(self._device))
        return event

    def stream(self) -> Any:
        """A stream of our own; its short gathers go before the model's next kernels."""
        return self._module.Stream(self._device, priority=-1)

    def on(self, stream: Any) -> Any:
        """A context in which work goes to this stream."""
        return self._module.stream(stream)

    def event(self, *, sleep: bool) -> Any:
        """An event whose waiter sleeps, where the device has such, or spins."""
        kind = self._module.Event
        return kind(blocking=True) if sleep and self._device.type == "cuda" else kind()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes by itself."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def register(self, area: memoryview) -> str | None:
        """Lets the device write into host memory that is there already.

        Returns:
            ``None``, or why it cannot be done; then nothing is registered.
        """
        if self._device.type != "cuda":
            return f"{self._device.type} has no call for it"
        try:
            self._pinned = Pinned(area, REGISTER_BYTES)
        except RuntimeError as error:
            return str(error)
        return None

    def pieces(self, target: torch.Tensor) -> Sequence[slice]:
        """Parts of a flat tensor that one DMA each can fill."""
        if self._pinned is None:
            return [slice(None)]
        size = target.element_size()
        pieces = self._pinned.pieces(target.data_ptr(), target.nbytes)
        return [slice(at // size, (at + length) // size) for at, length in pieces]

    def unregister(self) -> None:
        """Takes it back; comes before the memory is unmapped."""
        if self._pinned is not None:
            self._pinned.close()


class Blocks:
    """Which blocks a request has, on the device: one upload for all of its chunks.

    Args:
        most: blocks that one request can have.
        chunk: blocks in one chunk.
    """

    def __init__(self, device: Device, most: int, chunk: int) -> None:
        self._ids = device.empty((most,), torch.int64)
        self._pinned = device.pinned((most,), torch.int64)
        self._numbers = self._pinned.numpy()
        self._there = device.event(sleep=False)
        self._chunk = chunk
        self._chunks = torch.split(self._ids, chunk)

    def upload(self, ids: Sequence[int], ready: Any, lanes: "Sequence[Lane]") -> list[torch.Tensor]:
        """Holds all lanes back until ``ready``, and until the ids are on the device.

        The last request's copy is over by now, so nothing reads its ids any more.

        Returns:
            The ids of each chunk.
        """
        count = len(ids)
        self._numbers[:count] = ids
        first, *others = lanes
        with first.current():
            first.stream.wait_event(ready)
            self._ids[:count].copy_(self._pinned[:count], non_blocking=True)
            self._there.record(first.stream)
        for lane in others:
            lane.stream.wait_event(self._there)
        whole, rest = divmod(count, self._chunk)
        last = [self._chunks[whole][:rest]] if rest else []
        return [*self._chunks[:whole], *last]


class Lane:
    """A stream and its buffers; one chunk is under way in it at most.

    Args:
        words: the cache as integers, ``[blocks, block, layers, words]``.
        blocks: blocks in one chunk.
        bounce: whether the slot's memory is not registered.
    """

    def __init__(self, device: Device, words: torch.Tensor, blocks: int, *, bounce: bool) -> None:
        self._words = words
        self._device = device
        self.stream = device.stream()
        self._blocks = blocks
        self._staging = device.empty((blocks, *words.shape[1:]), words.dtype)
        self._flat = self._staging.view(-1)
        self._bounce = device.pinned(self._flat.shape, words.dtype) if bounce else None
        # A sleeper wakes 0.2 ms late, which the other lane's chunk covers; after the last chunk
        # nothing does, so that one is waited for spinning.
        self._sleep = device.event(sleep=True)
        self._spin = device.event(sleep=False)
        self._sent = self._sleep
        self._target: torch.Tensor | None = None

    def current(self) -> Any:
        """A context in which work goes to this lane."""
        return self._device.on(self.stream)

    def send(self, ids: torch.Tensor, target: torch.Tensor, *, last: bool) -> None:
        """Queues one chunk: the first rows of these blocks go to ``target``, which is flat.

        As few calls as can be: torch lets go of the interpreter lock in each, and the engine's
        main thread may keep it for a while.
        """
        if self._bounce is not None:
            self.finish()
        whole = len(ids) == self._blocks
        size = len(target)
        with self.current():
            staging = self._staging if whole else self._staging[: len(ids)]
            torch.index_select(self._words, 0, ids, out=staging)
            source = self._flat if size == len(self._flat) else self._flat[:size]
            landing = target if self._bounce is None else self._bounce[:size]
            pieces = self._device.pieces(landing)
            if len(pieces) == 1:
                landing.copy_(source, non_blocking=True)
            else:
                for piece in pieces:
                    landing[piece].copy_(source[piece], non_blocking=True)
            self._sent = self._spin if last else self._sleep
            self._sent.record(self.stream)
        self._target = target

    def finish(self) -> None:
        """Waits until this lane's chunk is in its slot."""
        if self._target is None:
            return
        self._sent.synchronize()
        if self._bounce is not None:
            np.copyto(self._target.numpy(), self._bounce[: len(self._target)].numpy())
        self._target = None

    def abandon(self) -> None:
        """Waits until nothing of this lane writes anywhere any more."""
        self.stream.synchronize()
        self._target = None


class DeviceCapture:
    """Copies out of a cache in device memory.

    Args:
        data_area: the ring's pages; registered here, given back by ``close``.
        chunk_bytes: size of each of the two staging buffers.
    """

    def __init__(
        self,
        cache: CacheView,
        data_area: memoryview,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        device: Device | None = None,
    ) -> None:
        self._cache = cache
        self._device = device or Device(cache.states.device)
        problem = self._device.register(data_area)
        if problem is not None:
            logger.warning(
                "shmconn: the ring's memory cannot be registered with the device (%s); samples go "
                "through a pinned buffer, which is slower",
                problem,
            )
        words = cache.words()
        self._words = words
        self._chunk = max(1, chunk_bytes // (cache.block * cache.row_bytes))
        self._chunk_words = self._chunk * cache.block * words.shape[2] * words.shape[3]
        try:
            self._blocks = Blocks(self._device, words.shape[0], self._chunk)
            self._lanes = [
                Lane(self._device, words, self._chunk, bounce=problem is not None) for _ in range(2)
            ]
        except BaseException:
            self._device.unregister()
            raise

    def at_step(self) -> None:
        """Marks are made on the stream that is current now."""
        self._device.at_step()

    def mark(self) -> Any:
        """A point on the compute stream that no copy passes before it is reached."""
        return self._device.mark()

    def bind(self) -> None:
        """The copier's thread works on the cache's device."""
        self._device.bind()

    def copy(
        self, fill: Fill, blocks: Sequence[int], ready: Any, meanwhile: Meanwhile = None
    ) -> None:
        """Fills the slot; the last byte has landed when this returns, or raises."""
        ids = self._cache.cache_blocks(blocks, fill.tokens)
        # vLLM's worker may make tensors in inference mode, which every thread enters by itself.
        with torch.inference_mode():
            self._fill(fill, ids, ready, meanwhile)

    def _fill(self, fill: Fill, ids: Sequence[int], ready: Any, meanwhile: Meanwhile) -> None:
        flat = torch.frombuffer(fill.states, dtype=self._words.dtype)
        try:
            chunks = self._blocks.upload(ids, ready, self._lanes)
            targets = torch.split(flat, self._chunk_words)
            other, lane = self._lanes
            for turn, (chunk, target) in enumerate(zip(chunks, targets, strict=True)):
                lane, other = other, lane
                lane.send(chunk, target, last=turn == len(chunks) - 1)
                # Both lanes are busy, and the next turn may have to wait for the first of them.
                if meanwhile is not None and turn == len(self._lanes) - 1:
                    meanwhile()
                    meanwhile = None
            if meanwhile is not None:
                meanwhile()
            other.finish()
            lane.finish()
        except BaseException:
            # The slot's pages are somebody else's once this is left.
            for lane in self._lanes:
                lane.abandon()
            raise

    def close(self) -> None:
        """Waits for what is under way and lets go of the ring's memory."""
        try:
            for lane in self._lanes:
                lane.abandon()
        finally:
            self._device.unregister()
