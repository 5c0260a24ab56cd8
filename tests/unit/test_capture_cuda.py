# SPDX-License-Identifier: Apache-2.0
"""The device's copy: its arithmetic on a device that is none, and the real thing on a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_capture import DTYPES, LAYOUTS, bits, expected, find, make_cache, make_fill

from shmconn import capture_cuda
from shmconn.capture import HostCapture, make_capture
from shmconn.capture_cuda import DeviceCapture

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


class Clockwork:
    """A stream or an event that does at once what it is told, and notes it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record(self, stream: Any) -> None:
        self.log.append(f"{self.name} after {stream.name}")

    def __str__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class NoDevice:
    """Host memory behind the calls of a device."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.log: list[str] = []
        self.allocations = 0
        self.streams = 0
        self.events = 0
        self.registered = 0

    def bind(self) -> None:
        self.log.append("bind")

    def at_step(self) -> None:
        self.log.append("at step")

    def mark(self) -> str:
        return "mark"

    def stream(self) -> Clockwork:
        self.streams += 1
        return Clockwork(self.log, f"stream {self.streams}")

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def event(self, *, sleep: bool) -> Clockwork:
        self.events += 1
        return Clockwork(self.log, f"event {self.events}")

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        self.allocations += 1
        return torch.empty(tuple(shape), dtype=dtype)

    pinned = empty

    def register(self, area: memoryview) -> str | None:
        self.registered += self.problem is None
        return self.problem

    def pieces(self, target: torch.Tensor) -> list[slice]:
        half = len(target) // 2
        return [slice(0, half), slice(half, None)]

    def unregister(self) -> None:
        self.registered = 0


def make(cache: torch.Tensor, token_major: bool, blocks: int, device: Any) -> DeviceCapture:
    view = find(cache, token_major)
    chunk = blocks * view.block * view.row_bytes
    return DeviceCapture(view, memoryview(bytearray(64)), chunk_bytes=chunk, device=device)


@pytest.mark.parametrize("problem", [None, "planted"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 97, 112])
def test_chunks_make_up_the_very_rows_of_the_request(
    layout: str, dtype: str, chunk: int, tokens: int, problem: str | None
) -> None:
    cache, token_major = make_cache(layout, 9, 16, 3, 8, dtype)
    capture = make(cache, token_major, chunk, NoDevice(problem))
    blocks = [8, 1, 5, 0, 2, 7, 3]
    fill = make_fill(tokens, 3, 8, dtype)
    capture.copy(fill, blocks, "mark")
    assert bytes(fill.states) == bits(expected(cache, token_major, blocks, tokens))


@pytest.mark.parametrize("problem", [None, "planted"])
def test_a_long_request_allocates_no_more_than_a_short_one(problem: str | None) -> None:
    cache, token_major = make_cache("layer-major", 40, 16, 3, 8, "bfloat16")
    device = NoDevice(problem)
    capture = make(cache, token_major, 2, device)
    before = device.allocations
    for tokens in (1, 600, 17):
        capture.copy(make_fill(tokens, 3, 8, "bfloat16"), list(range(40)), "mark")
    assert device.allocations == before


def test_both_lanes_wait_for_the_mark_and_the_ids_and_the_host_for_both_lanes() -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    device = NoDevice()
    capture = make(cache, token_major, 1, device)
    for _ in range(2):
        capture.copy(make_fill(48, 3, 8, "bfloat16"), [1, 2, 3], "mark")
    # Event 1: the ids are there. 2 and 3, 4 and 5: a lane's chunk has landed, waited for asleep or
    # spinning; only the last of all is waited for spinning. The second request's ids overwrite
    # the first one's only when the host has waited for all of its chunks.
    one_request = [
        "stream 1 waits for mark",
        "event 1 after stream 1",
        "stream 2 waits for event 1",
        "event 2 after stream 1",
        "event 4 after stream 2",
        "event 3 after stream 1",
        "host waits for event 4",
        "host waits for event 3",
    ]
    assert device.log == 2 * one_request


def test_after_a_fault_nothing_writes_into_the_slot_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    device = NoDevice()
    capture = make(cache, token_major, 1, device)
    real = torch.index_select
    calls = iter([False, True])

    def select(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            raise RuntimeError("planted")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "index_select", select)
    with pytest.raises(RuntimeError, match="planted"):
        capture.copy(make_fill(48, 3, 8, "bfloat16"), [1, 2, 3], "mark")
    assert device.log[-2:] == ["host waits for stream 1", "host waits for stream 2"]


def test_the_ring_is_registered_at_start_and_given_back_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    device = NoDevice()
    capture = make(cache, token_major, 1, device)
    assert device.registered == 1 and caplog.text == ""
    capture.close()
    assert device.registered == 0


def test_memory_that_cannot_be_registered_is_told_once_and_used_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    capture = make(cache, token_major, 1, NoDevice("no such call"))
    for _ in range(3):
        capture.copy(make_fill(48, 3, 8, "bfloat16"), [1, 2, 3], "mark")
    assert len(caplog.records) == 1 and "no such call" in caplog.text


def test_a_cache_in_host_memory_is_copied_by_the_host() -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    view = find(cache, token_major)
    assert isinstance(make_capture(view, memoryview(bytearray(1))), HostCapture)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def area() -> Iterator[memoryview]:
    """Page-aligned shared memory, as the ring's."""
    import mmap

    mapping = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    yield memoryview(mapping)


def fill_in(
    area: memoryview, offset: int, tokens: int, layers: int, hidden: int, dtype: str
) -> Any:
    size = tokens * layers * hidden * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    fill = make_fill(tokens, layers, hidden, dtype)
    object.__setattr__(fill, "states", area[offset : offset + size])
    return fill


@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.gpu
@needs_gpu
def test_a_gpu_copies_bit_for_bit_what_the_cache_held(
    area: memoryview, layout: str, dtype: str, bounce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small registrations, so that copies cross from one to the next.
    monkeypatch.setattr(capture_cuda, "REGISTER_BYTES", 1 << 20)
    if bounce:
        monkeypatch.setattr(capture_cuda.Device, "register", lambda self, area: "planted")
    cache, token_major = make_cache(layout, 64, 16, 4, 512, dtype)
    gpu = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device="cuda")
    gpu.copy_(cache)
    view = find(gpu, token_major)
    capture = DeviceCapture(view, area, chunk_bytes=5 * view.block * view.row_bytes)
    capture.bind()
    try:
        blocks = [(index * 7 + 3) % 64 for index in range(60)]
        for turn, tokens in enumerate((1, 16, 17, 500, 960)):
            fill = fill_in(area, turn << 16, tokens, 4, 512, dtype)
            capture.copy(fill, blocks, capture.mark())
            assert bytes(fill.states) == bits(expected(cache, token_major, blocks, tokens))
    finally:
        capture.close()


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_copy_waits_for_the_work_that_was_queued_before_its_mark(area: memoryview) -> None:
    cache = torch.zeros(64, 4, 16, 512, dtype=torch.bfloat16, device="cuda")
    view = find(cache, False)
    capture = DeviceCapture(view, area)
    capture.bind()
    try:
        for value in range(1, 20):
            torch.cuda._sleep(20_000_000)
            cache.fill_(value)
            fill = fill_in(area, 0, 1024, 4, 512, "bfloat16")
            capture.copy(fill, list(range(64)), capture.mark())
            assert (torch.frombuffer(fill.states, dtype=torch.bfloat16) == value).all()
    finally:
        capture.close()


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_copy_needs_no_more_memory_for_a_longer_request(area: memoryview) -> None:
    cache = torch.zeros(2048, 4, 16, 64, dtype=torch.bfloat16, device="cuda")
    capture = DeviceCapture(find(cache, False), area, chunk_bytes=1 << 20)
    capture.bind()
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for tokens in (16, 32_768, 100):
            fill = fill_in(area, 0, tokens, 4, 64, "bfloat16")
            capture.copy(fill, list(range(2048)), capture.mark())
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        capture.close()
