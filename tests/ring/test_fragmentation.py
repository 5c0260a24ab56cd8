# SPDX-License-Identifier: Apache-2.0
"""A sample is one run of pages: free pages that lie apart do not hold it."""

import threading
import time
from collections.abc import Callable

import pytest
from ring_tools import HIDDEN, LAYERS, check, put, states, until

from shmconn import Producer, Sample, subscribe

ROW = len(LAYERS) * HIDDEN * 4
PAGE = 65536
Make = Callable[..., Producer]


def tokens_of(pages: int) -> int:
    """Tokens of a sample that takes just so many pages."""
    return (pages * PAGE - 4096) // (ROW + 8)


def fragmented(producer: Producer, held: dict[int, Sample], take: Callable[[], Sample]) -> None:
    """Fills the ring with samples of one page, and keeps those at each third page."""
    pages = producer.shape.pages
    for number in range(pages):
        assert put(producer, number) is not None
    for number in range(pages):
        sample = take()
        if number % (pages // 3) == pages // 3 - 1:
            held[number] = sample
        else:
            sample.release()
    producer.tick()
    assert producer.free_pages == pages - len(held)


def test_a_stall_by_fragmentation_is_named_and_ends_when_a_reader_releases(
    make: Make, ring_name: str
) -> None:
    producer = make(groups=["g"])
    largest = tokens_of(producer.shape.pages // 3)
    held: dict[int, Sample] = {}
    with subscribe(ring_name, "g") as subscription:
        fragmented(producer, held, lambda: subscription.next(5))
        assert put(producer, 100, tokens=largest) is None
        said = producer.stall_text()
        free = (producer.shape.pages - len(held)) * PAGE / (1 << 20)
        assert "(fragmentation)" in said and f"{free:.1f} MiB are free" in said, said
        assert "but the longest run is 1.1 MiB" in said, said
        waiting = threading.Thread(
            target=lambda: producer.put(
                states(100, largest), list(range(100, 100 + largest)), request_id="r100"
            )
        )
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        held.popitem()[1].release()
        waiting.join(10)
        assert not waiting.is_alive()
        assert "fragmentation" not in producer.stall_text()
        sample = subscription.next(5)
        assert sample is not None
        check(sample, 100)
        sample.release()
        for one in held.values():
            one.release()
        producer.close()


def test_a_long_put_gets_its_turn_beside_threads_that_put_short_ones(
    make: Make, ring_name: str
) -> None:
    """Without turns a short sample takes each page as it comes free, for ever."""
    producer = make(groups=["g"], size="2MiB")
    pages = producer.shape.pages
    largest = tokens_of(pages // 3)
    over = threading.Event()
    shorts = [0, 0]

    def put_short(who: int) -> None:
        while not over.is_set():
            try:
                producer.put(states(1), list(range(1, 17)), request_id="r1", timeout=0.2)
            except TimeoutError:
                continue
            shorts[who] += 1

    with subscribe(ring_name, "g") as subscription:
        for _ in range(pages):
            assert put(producer, 1) is not None
        threads = [threading.Thread(target=put_short, args=(who,)) for who in (0, 1)]
        long = threading.Thread(
            target=lambda: producer.put(
                states(2, largest), list(range(2, 2 + largest)), request_id="r2"
            )
        )
        for thread in (*threads, long):
            thread.start()
        # One sample at a time: a page comes free only while somebody waits for one.
        for _ in range(20 * pages):
            sample = subscription.next(5)
            assert sample is not None
            found = sample.request_id == "r2"
            sample.release()
            if found:
                break
            time.sleep(0.001)
        over.set()
        long.join(10)
        for thread in threads:
            thread.join(10)
        assert found, f"{sum(shorts)} short samples went before the long one, which still waits"
        producer.close()
        for sample in subscription:
            sample.release()


def test_a_put_that_waits_for_another_thread_s_put_times_out_and_says_why(
    make: Make, ring_name: str
) -> None:
    producer = make(groups=["g"], slots=1)
    assert put(producer, 0) is not None
    first = threading.Thread(
        target=lambda: producer.put(states(1), list(range(1, 17)), request_id="r1")
    )
    first.start()
    until(lambda: producer._slots.refused, "the first put to wait")
    with pytest.raises(TimeoutError, match=r"no room within 0.1 s: ring .* 0 of 1 slots"):
        producer.put(states(2), list(range(2, 18)), request_id="r2", timeout=0.1)
    with subscribe(ring_name, "g") as subscription:
        for number in (0, 1):
            sample = subscription.next(5)
            assert sample is not None
            check(sample, number)
            sample.release()
        first.join(10)
        assert not first.is_alive()
        producer.close()
