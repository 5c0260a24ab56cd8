# SPDX-License-Identifier: Apache-2.0
"""Clients at their worst: afterwards nothing is held, and every request is counted."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from server import WATCHDOG_S, Server, make_tiny_model, params, prompt
from test_trouble import PAGES, wait_idle

import shmconn
from shmconn import directory
from shmconn.handle import Handle

pytestmark = [pytest.mark.vllm, pytest.mark.long]
TTL_S = 3.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("unkind")
    ring = {"ring_size": "15MiB", "page_size": "1MiB", "unclaimed_ttl_s": TTL_S}
    server = Server(
        folder,
        ring,
        flags=["--load-format", "dummy", "--max-num-seqs", "32"],
        model=make_tiny_model(folder / "tiny"),
        layers=[1, 2, 4],
    )
    try:
        server.wait_healthy()
        yield server
        assert server.stop() == 0
        assert [path.name for path in Path("/dev/shm").glob(f"*shmconn.{server.ring}*")] == []
    finally:
        server.clear()


class Drain:
    """A group that reads all, in a thread of its own, from when it is told to."""

    def __init__(self, server: Server, *, reads: bool = True) -> None:
        self.ids: list[str] = []
        self.reads = threading.Event()
        if reads:
            self.reads.set()
        self._stop = threading.Event()
        self._subscription = shmconn.subscribe(server.ring, "drain")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() or self._subscription.unread():
            self.reads.wait()
            sample = self._subscription.next(timeout=0.05)
            if sample is not None:
                self.ids.append(sample.request_id)
                sample.release()

    def close(self) -> None:
        """Reads what is there, and leaves."""
        self.reads.set()
        self._stop.set()
        self._thread.join()
        self._subscription.close()


def all_is_well(server: Server, before: directory.RingInfo) -> directory.RingInfo:
    """After one more request nothing is held, the ring is empty and the counts add up."""
    last = Handle.parse(params(server.complete(prompt(6, 1))))
    after = server.wait_settled(last.number)
    wait_idle(server)
    deadline = time.monotonic() + WATCHDOG_S
    while (after := server.info()).free_slots < after.slots or after.free_pages < after.pages:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not empty: {after}")
        time.sleep(0.1)
    gone = lost(before, after)
    # What expired was published first.
    buried = sum(gone.values()) - gone.get("expired", 0)
    assert after.accepted - before.accepted == after.published - before.published + buried
    assert after.settled == after.accepted and after.held_since_ns == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.healthy()
    return after


def hang_up(server: Server, seed: int, seconds: float) -> None:
    """Asks for a stream and hangs up after this time, whatever came."""
    body = {"model": "smollm2", "prompt": prompt(20 + 3 * (seed % 200), seed), "stream": True}
    data = json.dumps(body | {"max_tokens": 1 + seed * 7 % 40, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + data)
        connection.settimeout(max(0.001, seconds))
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until and connection.recv(4096):
                pass
        except TimeoutError:
            pass


def lost(before: directory.RingInfo, after: directory.RingInfo) -> dict[str, int]:
    """Requests lost meanwhile, by reason."""
    counts = {
        reason: count - before.lost_by_reason.get(reason, 0)
        for reason, count in after.lost_by_reason.items()
    }
    return {reason: count for reason, count in counts.items() if count}


def test_two_hundred_streams_cut_at_random_moments(tiny: Server) -> None:
    before = tiny.wait_settled()
    rng = random.Random(1)
    moments = [rng.uniform(0.0, 1.5) for _ in range(200)]
    drain = Drain(tiny)
    try:
        with ThreadPoolExecutor(40) as pool:
            list(pool.map(lambda one: hang_up(tiny, *one), enumerate(moments)))
        after = all_is_well(tiny, before)
    finally:
        drain.close()
    assert set(lost(before, after)) == {"aborted"} and lost(before, after)["aborted"] >= 30
    assert after.published > before.published + 1
    # A request whose client was gone before it was read never reached the engine.
    assert after.accepted - before.accepted <= 201
    assert len(drain.ids) == after.published - before.published


def test_storms_of_aborts_while_the_ring_is_full(tiny: Server) -> None:
    before = tiny.wait_settled()
    drain = Drain(tiny, reads=False)
    try:
        with ThreadPoolExecutor(8) as pool:
            prompts = [prompt(6, 100 + index) for index in range(PAGES + 10)]
            list(pool.map(tiny.complete, prompts))
        assert tiny.info().held_since_ns > 0
        for wave in range(5):
            with ThreadPoolExecutor(30) as pool:
                list(pool.map(lambda index: hang_up(tiny, 300 + index, 0.2), range(30)))
            assert tiny.healthy() and tiny.info().held_since_ns > 0, wave
        # A tombstone does not wait for the ring.
        assert lost(before, tiny.info())["aborted"] >= 30
        drain.reads.set()
        after = all_is_well(tiny, before)
    finally:
        drain.close()
    assert set(lost(before, after)) == {"aborted"}
    assert len(drain.ids) == after.published - before.published >= PAGES + 11


def test_five_hundred_and_twelve_at_once(tiny: Server) -> None:
    before = tiny.wait_settled()
    drain = Drain(tiny)

    async def ask_all() -> list[str]:
        url = f"http://127.0.0.1:{tiny.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", timeout=300) as client:
            replies = await asyncio.gather(
                *(
                    client.completions.create(
                        model="smollm2", prompt=prompt(5 + index % 90, index), max_tokens=2
                    )
                    for index in range(512)
                )
            )
        return [str(params(reply)["request_id"]) for reply in replies]

    try:
        asked = asyncio.run(ask_all())
        after = all_is_well(tiny, before)
    finally:
        drain.close()
    assert lost(before, after) == {}
    assert len(drain.ids) == 513 and set(asked) <= set(drain.ids)


def test_a_client_that_never_reads_its_samples_stalls_nobody_for_longer_than_their_time(
    tiny: Server,
) -> None:
    before = tiny.wait_settled()
    with shmconn.subscribe(tiny.ring, "silent", by_handle=True) as silent:
        with ThreadPoolExecutor(8) as pool:
            prompts = [prompt(6, 900 + index) for index in range(3 * PAGES)]
            replies = list(pool.map(tiny.complete, prompts))
        tiny.wait_settled(before.accepted + len(prompts))
        with pytest.raises(shmconn.SampleLost) as caught:
            silent.get(params(replies[0]), timeout=10)
        assert caught.value.reason == "expired"
        # Figures move with a step: the second request shows what became of all before it.
        all_is_well(tiny, before)
        after = all_is_well(tiny, before)
    assert after.published - before.published == len(prompts) + 2
    assert lost(before, after) == {"expired": len(prompts) + 2}
    assert tiny.metric("vllm:shmconn_samples_lost_total", reason="expired") >= len(prompts)
