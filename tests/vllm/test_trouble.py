# SPDX-License-Identifier: Apache-2.0
"""A full ring, unkind clients and faults of our own: the server goes on, and all adds up."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import figures
from server import BLOCK, WATCHDOG_S, Server, params, prompt, take

import shmconn
from shmconn import directory
from shmconn.handle import Handle

pytestmark = pytest.mark.vllm
# Pages of the shared server's ring, and so the short samples that fit.
PAGES = 14


def adds_up(before: directory.RingInfo, after: directory.RingInfo) -> None:
    """accepted = published + lost, and the ring is empty again."""
    accepted = after.accepted - before.accepted
    assert accepted == after.published - before.published + after.lost - before.lost


def wait_idle(server: Server) -> None:
    """Until vLLM says that no request runs, none waits and no KV block is held."""
    deadline = time.monotonic() + WATCHDOG_S
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(server.metric(f"vllm:{name}") for name in names):
        if time.monotonic() > deadline:
            raise TimeoutError({name: server.metric(f"vllm:{name}") for name in names})
        # The figures move only with a step.
        time.sleep(0.1)


def test_a_slow_reader_holds_requests_and_loses_none_while_the_server_answers(
    server: Server, reader: shmconn.Subscription
) -> None:
    before = server.wait_settled()
    prompts = [prompt(6, 1000 + index) for index in range(40)]
    replies = []
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(server.complete, prompts))
    # All were answered, though only so many samples fit.
    info = server.info()
    assert info.published - before.published == PAGES
    assert info.held_since_ns > 0
    assert server.metric("vllm:shmconn_requests_held") > 0
    assert server.metric("vllm:kv_cache_usage_perc") > 0
    assert server.healthy()
    samples = {}
    for _ in prompts:
        samples.update(take(reader, 1))
        time.sleep(0.02)
    after = server.wait_settled()
    assert after.held_since_ns == 0 and after.lost == before.lost
    adds_up(before, after)
    for reply, ids in zip(replies, prompts, strict=True):
        assert samples[params(reply)["request_id"]].token_ids.tolist() == ids
    server.complete(prompt(6, 1))
    take(reader, 1)
    wait_idle(server)
    assert server.metric("vllm:shmconn_requests_held") == 0
    assert server.metric("vllm:shmconn_hold_time_seconds_count") >= 40 - PAGES


def test_without_a_live_reader_requests_are_lost_with_a_reason_after_the_timeout(
    server: Server,
) -> None:
    with shmconn.subscribe(server.ring, "asleep", durable=True):
        pass
    before = server.wait_settled()
    replies = [server.complete(prompt(6, 1100 + index)) for index in range(PAGES + 3)]
    after = server.wait_settled(before.accepted + PAGES + 3)
    assert after.published - before.published == PAGES
    assert after.lost_by_reason["no_reader"] - before.lost_by_reason.get("no_reader", 0) == 3
    adds_up(before, after)
    with shmconn.subscribe(server.ring, "asleep") as late:
        with pytest.raises(shmconn.SampleLost, match="asleep") as caught:
            late.get(params(replies[-1]), timeout=10)
        assert caught.value.reason == "no_reader" and caught.value.retry
        take(late, PAGES)
    directory.remove_group(server.ring, "asleep")
    assert "has no live member" in server.log()
    lost = server.metric("vllm:shmconn_samples_lost_total", reason="no_reader")
    assert server.healthy() and lost >= 3


def test_a_request_longer_than_a_third_of_the_ring_is_refused_by_its_handle(
    server: Server, reader: shmconn.Subscription
) -> None:
    reply = server.complete(prompt(600, 1200))
    with pytest.raises(shmconn.SampleLost) as caught:
        reader.get(params(reply), timeout=10)
    assert caught.value.reason == "oversized"
    assert "make the ring larger" in server.log()


def test_streams_cut_at_any_moment_leave_no_block_and_no_number_behind(
    server: Server, reader: shmconn.Subscription
) -> None:
    before = server.wait_settled()

    def cut(index: int) -> None:
        # Longer than a step, and more of them than run at once: some are cut in the middle of
        # their prefill, some before they were ever scheduled, some while they answer.
        stream = server.complete(
            prompt(BLOCK + 60 * (index % 4), 1300 + index), max_tokens=30, stream=True
        )
        if index % 3 == 0:
            next(iter(stream))
        stream.close()

    def slam(index: int) -> None:
        request = threading.Thread(target=cut_raw, args=(server, prompt(400, 1400 + index), index))
        request.start()
        request.join()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(slam, range(16)))
        list(pool.map(cut, range(12)))
    last = Handle.parse(params(server.complete(prompt(6, 2))))
    after = server.wait_settled(last.number)
    left = after.published - before.published
    take(reader, left)
    aborted = after.lost_by_reason["aborted"] - before.lost_by_reason.get("aborted", 0)
    figures.record(
        "23",
        "requests to a real server whose clients hang up",
        trials=28,
        exercised=aborted,
        failures=abs(after.accepted - before.accepted - left - (after.lost - before.lost)),
    )
    adds_up(before, after)
    assert aborted == after.lost - before.lost and aborted >= 16
    server.complete(prompt(6, 3))
    take(reader, 1)
    wait_idle(server)


def cut_raw(server: Server, ids: list[int], index: int) -> None:
    """Sends a request and hangs up."""
    import json
    import socket

    body = json.dumps({"model": "smollm2", "prompt": ids, "max_tokens": 5}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.1 + 0.02 * (index % 8))


def test_aborts_while_the_ring_is_full_leave_a_reason_at_once(
    server: Server, reader: shmconn.Subscription
) -> None:
    before = server.wait_settled()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(server.complete, [prompt(6, 1500 + i) for i in range(PAGES + 6)]))
    assert server.info().held_since_ns > 0
    for index in range(8):
        cut_raw(server, prompt(400, 1600 + index), index)
    deadline = time.monotonic() + WATCHDOG_S
    lost = 0
    while lost < 8 and time.monotonic() < deadline:
        lost = server.info().lost - before.lost
        time.sleep(0.05)
    assert lost == 8 and server.info().held_since_ns > 0
    take(reader, len(replies))
    adds_up(before, server.wait_settled())


@pytest.mark.parametrize(
    "place", ["decide", "build_connector_meta", "allocate", "copy", "publish", "published"]
)
def test_a_fault_of_ours_costs_at_most_its_own_sample(
    server: Server, reader: shmconn.Subscription, place: str
) -> None:
    before = server.wait_settled()
    reply = server.complete(prompt(7, 1700), params={"tag": f"plant:{place}"})
    assert reply.choices[0].finish_reason
    good = server.complete(prompt(7, 1701))
    after = server.wait_settled(before.accepted + 2)
    assert after.accepted == before.accepted + 2
    adds_up(before, after)
    # A fault in handing over, or in counting, costs not even that one.
    kept = 2 if place in ("build_connector_meta", "published") else 1
    samples = take(reader, kept)
    assert params(good)["request_id"] in samples
    faults = after.lost_by_reason.get("fault", 0) - before.lost_by_reason.get("fault", 0)
    assert faults == 2 - kept
    assert f"Planted: plant:{place}" in server.log() or f"Planted: {place}" in server.log()
    assert server.healthy()
    wait_idle(server)


def test_the_figures_stand_on_metrics_and_in_the_log(
    server: Server, reader: shmconn.Subscription
) -> None:
    names = ("samples_published_total", "bytes_published_total", "copy_time_seconds_count")
    before = [server.metric(f"vllm:shmconn_{name}") for name in names]
    server.complete(prompt(11, 1800))
    (sample,) = take(reader, 1).values()
    deadline = time.monotonic() + WATCHDOG_S
    after = before
    while after[0] == before[0] and time.monotonic() < deadline:
        after = [server.metric(f"vllm:shmconn_{name}") for name in names]
        time.sleep(0.05)
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, sample.nbytes, 1]
    assert 0 <= server.metric("vllm:shmconn_ring_usage_perc") <= 1
    log = server.log()
    assert "Samples published=" in log and "Ring full (%)=" in log
    assert f"read it with `shmconn drain {server.ring} --to DIR`" in log
    assert log.count("shmconn: ring ") == 1
