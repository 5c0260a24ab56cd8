# SPDX-License-Identifier: Apache-2.0
"""From a paged cache on the device into a ring and out of it: the bytes, the races, the memory."""

import hashlib
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import figures
from ring_on_gpu import BLOCK, HIDDEN, LAYERS, RingOnGpu, bits, random_cache, rows

import shmconn
from shmconn import capture_cuda, pinning
from shmconn.capture import CacheView
from shmconn.capture_cuda import CHUNK_BYTES, DeviceCapture
from shmconn.pinning import Pinned

ROW = LAYERS * HIDDEN * 2


@pytest.fixture
def ring(ring_name: str) -> Iterator[RingOnGpu]:
    made = RingOnGpu(ring_name, random_cache(512), "192MiB", chunk_bytes=3 * BLOCK * ROW)
    yield made
    made.close()


def shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(512), count)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 47, 48, 49, 96, 97, 1000, 8192])
def test_a_sample_of_shuffled_blocks_is_what_the_cache_held_at_and_around_chunk_edges(
    ring: RingOnGpu, ring_name: str, tokens: int
) -> None:
    blocks = shuffled(-(-tokens // BLOCK), tokens)
    with shmconn.subscribe(ring_name, "g") as subscription:
        assert ring.put(blocks, tokens)
        sample = subscription.next(5)
        assert sample is not None
        assert bits(sample.hidden_states).equal(rows(ring.cache, blocks, tokens))
        assert sample.token_ids.tolist() == list(range(tokens))
        del sample


@pytest.mark.parametrize("strange", ["wider pages", "layers first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_strides_and_dtypes_yield_the_same_rows(
    ring_name: str, strange: str, dtype: torch.dtype
) -> None:
    page = BLOCK * LAYERS * HIDDEN
    flat = torch.randn(64, page + 64, device="cuda").to(dtype)[:, :page]
    if strange == "wider pages":
        cache = flat.unflatten(1, (BLOCK, LAYERS, HIDDEN))
    else:
        cache = flat.unflatten(1, (LAYERS, BLOCK, HIDDEN)).transpose(1, 2)
    name = str(dtype).removeprefix("torch.")
    with shmconn.Producer.create(
        ring_name, size="64MiB", layer_ids=[1, 2, 3, 4], hidden_size=HIDDEN, dtype=name
    ) as producer:
        capture = DeviceCapture(CacheView(cache), producer.data_area, chunk_bytes=5 << 20)
        capture.bind()
        fill = producer.allocate(number=1, request_id="r", token_ids=range(500))
        assert fill is not None
        blocks = list(range(40, 8, -1))
        capture.copy(fill, blocks, capture.mark())
        got = fill.tensor().clone()
        producer.discard(fill)
        del fill
        capture.close()
    assert got.equal(cache[blocks].flatten(0, 1)[:500].cpu())


def test_blocks_may_be_overwritten_as_soon_as_a_copy_has_returned(
    ring: RingOnGpu, ring_name: str
) -> None:
    compute = torch.cuda.Stream()
    weights = torch.randn(4096, 4096, device="cuda")
    stale_turns = []
    with shmconn.subscribe(ring_name, "g") as subscription, torch.cuda.stream(compute):
        for turn in range(60):
            tokens = 300 + 11 * turn
            blocks = shuffled(-(-tokens // BLOCK), turn)
            fresh = random_cache(len(blocks), seed=2 * turn + 1)
            stale = random_cache(len(blocks), seed=2 * turn + 2)
            where = torch.tensor(blocks, device="cuda")
            # A step: the model computes for long, then its cache is written, then our mark.
            for _ in range(40):
                weights = torch.nn.functional.normalize(weights @ weights)
            ring.cache.index_copy_(0, where, fresh)
            assert ring.put(blocks, tokens)
            # The next step is queued at once and writes into the blocks that are free now.
            ring.cache.index_copy_(0, where, stale)
            weights = torch.nn.functional.normalize(weights @ weights)
            sample = subscription.next(5)
            assert sample is not None
            expected = bits(fresh.flatten(0, 1)[:tokens])
            if not bits(sample.hidden_states).equal(expected):
                stale_turns.append(turn)
            del sample
    figures.record(
        "24",
        "blocks on a device overwritten as soon as their copy returned",
        trials=60,
        exercised=60,
        failures=len(stale_turns),
    )
    assert stale_turns == []


def test_a_planted_copy_without_its_wait_is_seen_by_the_race_test(
    ring: RingOnGpu, ring_name: str
) -> None:
    blocks = list(range(64))
    with shmconn.subscribe(ring_name, "g") as subscription:
        never = torch.cuda.Event()
        ring.capture.mark = lambda: never  # type: ignore[method-assign]
        fresh = random_cache(64, seed=3)
        where = torch.tensor(blocks, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        ring.cache.index_copy_(0, where, fresh)
        assert ring.put(blocks, 1024)
        sample = subscription.next(5)
        assert sample is not None
        seen = not bits(sample.hidden_states).equal(bits(fresh.flatten(0, 1)))
        figures.detected("24", "the race on a device", 1, [] if seen else ["no wait"])
        assert seen
        del sample


def test_memory_that_is_registered_already_is_refused_and_samples_go_through_bounce_memory(
    ring_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    producers: list[Pinned] = []
    create = shmconn.Producer.create

    def create_registered(*args: object, **options: object) -> object:
        producer = create(*args, **options)  # type: ignore[arg-type]
        producers.append(Pinned(producer.data_area))
        return producer

    monkeypatch.setattr(shmconn.Producer, "create", create_registered)
    with caplog.at_level(logging.WARNING):
        ring = RingOnGpu(ring_name, random_cache(512), "96MiB", chunk_bytes=3 * BLOCK * ROW)
    assert len(caplog.records) == 1 and "cudaHostRegister" in caplog.text
    with shmconn.subscribe(ring_name, "g") as subscription:
        for tokens in (5, 48, 1000, 4000):
            blocks = shuffled(-(-tokens // BLOCK), tokens)
            assert ring.put(blocks, tokens)
            sample = subscription.next(5)
            assert sample is not None
            assert bits(sample.hidden_states).equal(rows(ring.cache, blocks, tokens))
            del sample
    ring.close()
    producers[0].close()
    # Nothing of the refused call is left for the next launch to report.
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_copies_that_cross_the_edges_of_registrations_are_whole(
    ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_cuda, "REGISTER_BYTES", 1 << 20)
    monkeypatch.setattr(pinning.Pinned.try_register.__func__, "__defaults__", (1 << 20,))
    ring = RingOnGpu(ring_name, random_cache(512), "96MiB", chunk_bytes=3 * BLOCK * ROW)
    with shmconn.subscribe(ring_name, "g", pin=True) as subscription:
        for tokens in (700, 3000, 5000):
            blocks = shuffled(-(-tokens // BLOCK), tokens)
            assert ring.put(blocks, tokens)
            sample = subscription.next(5)
            assert sample is not None
            states, ids = sample.to("cuda", non_blocking=True)
            sample.release()
            assert bits(states).equal(rows(ring.cache, blocks, tokens))
            assert ids.tolist() == list(range(tokens))
            del sample
    ring.close()


def test_200_requests_of_any_length_allocate_nothing_on_the_device_and_nothing_pinned(
    ring_name: str,
) -> None:
    cache = random_cache(4096, hidden=64)
    ring = RingOnGpu(ring_name, cache, "256MiB", chunk_bytes=8 << 20)
    with shmconn.subscribe(ring_name, "g") as subscription:

        def send(tokens: int) -> None:
            assert ring.put(range(-(-tokens // BLOCK)), tokens)
            sample = subscription.next(5)
            assert sample is not None
            sample.release()

        send(2048)
        torch.cuda.synchronize()
        keys = ("allocation.all.allocated", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
        before = [torch.cuda.memory_stats()[key] for key in keys]
        host = _host_allocations()
        assert host, "torch counts no pinned memory"
        for turn in range(200):
            send((2048, 4096, 16_384, 65_536)[turn % 4])
        assert [torch.cuda.memory_stats()[key] for key in keys] == before
        assert _host_allocations() == host
    ring.close()


def _host_allocations() -> dict[str, int]:
    stats = torch.cuda.host_memory_stats()
    return {
        key: value
        for key, value in stats.items()
        if key.startswith(("allocat", "num_host_alloc", "segment")) and not key.endswith("peak")
    }


def test_a_default_capture_takes_two_chunks_of_64_mib_and_no_more(ring_name: str) -> None:
    cache = random_cache(64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    ring = RingOnGpu(ring_name, cache, "16MiB")
    taken = torch.cuda.memory_allocated() - before
    ring.close()
    assert 2 * CHUNK_BYTES * 0.99 <= taken <= 2 * CHUNK_BYTES + (1 << 20)


def test_another_process_reads_the_same_bytes(ring: RingOnGpu, ring_name: str) -> None:
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, str(here / "read_to_gpu.py"), ring_name, "3"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for tokens in (100, 2000, 4111):
            blocks = shuffled(-(-tokens // BLOCK), tokens)
            while not ring.put(blocks, tokens):
                ring.producer.wait(0.1)
                ring.producer.tick()
        out, _ = child.communicate(timeout=110)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    digests = out.split()
    for digest, tokens in zip(digests, (100, 2000, 4111), strict=True):
        wanted = rows(ring.cache, shuffled(-(-tokens // BLOCK), tokens), tokens)
        assert digest == hashlib.sha256(wanted.numpy().tobytes()).hexdigest()
