# SPDX-License-Identifier: Apache-2.0
"""How a server ends. The last tests of this folder: they take the servers down."""

import time
from pathlib import Path

import pytest
from server import LAYERS, WATCHDOG_S, Server, params, prompt, take

import shmconn
from shmconn import directory

pytestmark = pytest.mark.vllm


def segments(ring: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"*shmconn.{ring}*")]


def test_a_clean_shutdown_gives_readers_everything_and_a_normal_end(server: Server) -> None:
    with shmconn.subscribe(server.ring, "tests") as subscription:
        server.wait_settled()
        while (left := subscription.next(timeout=0)) is not None:
            left.release()
        replies = server.complete_all([prompt(9, 2000 + index) for index in range(5)])
        assert server.stop() == 0
        samples = {sample.request_id: sample.tokens for sample in subscription}
        assert samples == {params(reply)["request_id"]: 9 for reply in replies}
        assert [end.died for end in subscription.ends] == [False]
    assert segments(server.ring) == []
    # Python's own resource tracker ends a moment after the process that it served.
    deadline = time.monotonic() + WATCHDOG_S
    while running := server.processes():
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def test_a_killed_server_leaves_what_it_published_and_an_end_that_says_so(
    tmp_path: Path,
) -> None:
    # Found by its name, through the plugin, with the group named in the options.
    server = Server(tmp_path, {"ring_size": "8MiB", "groups": ["trainer"]})
    try:
        server.wait_healthy()
        ids = [prompt(10 + index, 2100 + index) for index in range(4)]
        replies = [server.complete(one) for one in ids]
        server.wait_settled(4)
        server.kill()
        while server.info().live:
            time.sleep(0.02)
        with shmconn.subscribe(server.ring, "trainer") as subscription:
            samples = take(subscription, 4)
            for reply, one in zip(replies, ids, strict=True):
                assert samples[params(reply)["request_id"]].token_ids.tolist() == one
                assert samples[params(reply)["request_id"]].shape == (len(one), len(LAYERS), 576)
            with pytest.raises(shmconn.ProducerDied) as caught:
                next(subscription)
            assert (caught.value.accepted, caught.value.unpublished) == (4, 0)
        assert segments(server.ring) == []
        with pytest.raises(shmconn.RingMissing):
            directory.groups(server.ring)
    finally:
        server.clear()
