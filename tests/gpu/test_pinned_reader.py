# SPDX-License-Identifier: Apache-2.0
"""subscribe(pin=True): one DMA out of the ring, and a lease that lasts until it is done."""

import gc
import logging
import time

import pytest
import torch
from ring_on_gpu import BLOCK, RingOnGpu, bits, random_cache, rows

import shmconn
from shmconn.pinning import Pinned


def until(condition: object) -> None:
    """Waits for what other threads do; the test's watchdog ends it if they never do."""
    while not condition():  # type: ignore[operator]
        time.sleep(0.001)


def is_registered(area: memoryview) -> bool:
    """Whether the driver refuses to register this memory once more."""
    try:
        once_more = Pinned(area[: 1 << 16])
    except RuntimeError:
        return True
    once_more.close()
    return False


def test_a_copy_that_is_under_way_keeps_its_lease_and_the_lease_ends_with_it(
    ring_name: str,
) -> None:
    ring = RingOnGpu(ring_name, random_cache(512), "96MiB")
    with shmconn.subscribe(ring_name, "g", pin=True) as subscription:
        blocks = list(range(256))
        assert ring.put(blocks, 256 * BLOCK)
        sample = subscription.next(5)
        assert sample is not None
        torch.cuda.synchronize()
        # The copy waits behind this on the same stream: some seconds of nothing.
        torch.cuda._sleep(4_000_000_000)
        done = torch.cuda.Event()
        states, _ = sample.to("cuda", non_blocking=True)
        done.record()
        sample.release()
        del sample
        gc.collect()
        assert not done.query(), "the copy was done before the look at its lease"
        assert subscription.leases == 1
        assert ring.producer.reclaim() == 0
        done.synchronize()
        until(lambda: subscription.leases == 0)
        assert ring.producer.reclaim() == 1
        assert bits(states).equal(rows(ring.cache, blocks, 256 * BLOCK))
    ring.close()


def test_samples_that_are_sent_on_at_once_never_mix_while_the_ring_wraps(ring_name: str) -> None:
    ring = RingOnGpu(ring_name, random_cache(512), "40MiB")
    with shmconn.subscribe(ring_name, "g", pin=True) as subscription:
        sent: list[tuple[int, torch.Tensor]] = []
        for turn in range(120):
            tokens = 400 + 13 * turn
            first = turn % 200
            while not ring.put(range(first, first + -(-tokens // BLOCK)), tokens):
                ring.producer.wait(0.1)
                ring.producer.tick()
            sample = subscription.next(5)
            assert sample is not None
            states, _ = sample.to("cuda", non_blocking=True)
            sample.release()
            del sample
            sent.append((turn, states))
        for turn, states in sent:
            tokens, first = 400 + 13 * turn, turn % 200
            blocks = range(first, first + -(-tokens // BLOCK))
            assert bits(states).equal(rows(ring.cache, blocks, tokens)), turn
    ring.close()


def test_the_pages_are_registered_while_the_view_lives_and_not_after_it(ring_name: str) -> None:
    with shmconn.Producer.create(ring_name, size="8MiB", layer_ids=[0], hidden_size=64) as producer:
        states = torch.randn(10, 1, 64).bfloat16()
        producer.put(states, range(10), request_id="r")
        subscription = shmconn.subscribe(ring_name, "g", pin=True)
        (view,) = subscription._views.live.values()
        area = memoryview(view.ring.map)[view.ring.shape.data :]
        assert is_registered(area)
        sample = subscription.next(5)
        assert sample is not None
        kept = sample.hidden_states
        del sample, view
        subscription.close()
        gc.collect()
        assert is_registered(area), "a lease lives"
        assert kept.equal(states)
        del kept
        gc.collect()
        until(lambda: not is_registered(area))


def test_where_it_cannot_be_registered_one_warning_says_so_and_samples_still_come(
    ring_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("planted")

    ring = RingOnGpu(ring_name, random_cache(512), "40MiB")
    monkeypatch.setattr(Pinned, "__init__", refuse)
    with (
        caplog.at_level(logging.WARNING),
        shmconn.subscribe(ring_name, "g", pin=True) as subscription,
    ):
        assert ring.put(range(10), 150)
        sample = subscription.next(5)
        assert sample is not None
        states, _ = sample.to("cuda", non_blocking=True)
        sample.release()
        del sample
        assert bits(states).equal(rows(ring.cache, range(10), 150))
    assert [record for record in caplog.records if "planted" in record.message]
    assert len([one for one in caplog.records if "pin=True" in one.message]) == 1
    ring.close()
