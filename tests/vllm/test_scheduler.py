# SPDX-License-Identifier: Apache-2.0
"""The connector under vLLM's real scheduler: any order of ends, and engines of another kind."""

import random
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from engine import BLOCK, LAYERS, MERGES, Engine, transfer_config, vllm_config
from harness import figures
from rings import remove_ring
from server import make_model
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import prometheus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import shmconn
from shmconn import connector as connector_module
from shmconn import directory

Make = Callable[..., Engine]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and worker do not meet, as in processes of their own."""
    monkeypatch.setattr(connector_module, "writer_here", lambda generation: None)


@pytest.fixture(params=["in one process", "apart"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways in which a finished request may get to its worker."""
    if request.param == "apart":
        request.getfixturevalue("apart")
    return str(request.param)


@pytest.fixture
def make() -> Iterator[Make]:
    ring = f"t-{secrets.token_hex(6)}"
    engines: list[Engine] = []

    def build(
        blocks: int = 40,
        ranks: int = 1,
        other: int | None = None,
        deferred: bool = False,
        **extra: Any,
    ) -> Engine:
        ours = transfer_config({"ring": ring, "ring_size": "4MiB", **extra})
        if other is not None:
            children = [
                {
                    "kv_connector": one.kv_connector,
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": one.kv_connector_extra_config,
                    "kv_connector_module_path": one.kv_connector_module_path,
                }
                for one in (
                    ours,
                    transfer_config(
                        {}, kv_connector="OtherConnector", kv_connector_module_path="engine"
                    ),
                )
            ]
            children.insert(other, children.pop())
            ours = transfer_config({"connectors": children}, kv_connector="MultiConnector")
        config = vllm_config(str(make_model()), ours)
        engines.append(Engine(config, blocks, ranks, deferred=deferred))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()
    remove_ring(ring)


def ids(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(tokens)]


def ring_of(engine: Engine) -> str:
    return str(engine.worker.get_handshake_metadata().identity.ring)


class Reader:
    """A group that reads all the time, in a thread of its own."""

    def __init__(self, engine: Engine, delay_s: float = 0.0) -> None:
        self.engine = engine
        self.samples: dict[str, shmconn.Sample] = {}
        self._delay_s = delay_s
        self._stop = threading.Event()
        ring = ring_of(engine)
        self._subscription = shmconn.subscribe(ring, "tests", background=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() or self._subscription.unread():
            sample = self._subscription.next(timeout=0.02)
            if sample is not None:
                time.sleep(self._delay_s)
                assert sample.request_id not in self.samples
                self.samples[sample.request_id] = sample.clone()
                sample.release()

    def finish(self) -> dict[str, shmconn.Sample]:
        self._stop.set()
        self._thread.join()
        self._subscription.close()
        return self.samples


def settled(engine: Engine) -> directory.RingInfo:
    ring = ring_of(engine)
    deadline = time.monotonic() + 60
    while True:
        (info,) = directory.rings(ring)
        if info.settled == info.accepted == len(engine.requests):
            return info
        if time.monotonic() > deadline:
            raise TimeoutError(str(info))
        time.sleep(0.002)


def torn(engine: Engine, samples: dict[str, shmconn.Sample]) -> list[str]:
    return [
        name
        for name, sample in samples.items()
        if not torch.equal(sample.hidden_states, engine.expected(sample))
    ]


def check_whole(engine: Engine, samples: dict[str, shmconn.Sample]) -> None:
    assert torn(engine, samples) == []


def test_prompts_of_every_length_yield_their_rows(make: Make) -> None:
    engine = make()
    reader = Reader(engine)
    for index, tokens in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 64, 65, 200)):
        engine.add(f"r{index}", ids(tokens, index), max_tokens=1 + index % 3, tag=str(tokens))
    engine.run()
    settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert {sample.tag: sample.tokens for sample in samples.values()} == {
        str(tokens): tokens for tokens in (1, 15, 16, 17, 64, 65, 200)
    }
    assert engine.usage == 0 and sorted(engine.reported) == sorted(samples)
    for request_id, sample in samples.items():
        assert engine.replies[request_id]["handle"] == str(sample.handle)
        assert engine.replies[request_id]["shape"] == [sample.tokens, len(LAYERS), engine.hidden]


def test_output_tokens_are_all_but_the_last(make: Make) -> None:
    engine = make()
    reader = Reader(engine)
    for count in (1, 2, 40):
        engine.add(f"r{count}", ids(30, count), count, include_output_tokens=True)
    engine.run()
    settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    for count in (1, 2, 40):
        expected = list(engine.requests[f"r{count}"].all_token_ids)[:-1]
        assert samples[f"r{count}"].token_ids.tolist() == expected
        assert len(expected) == 30 + count - 1


def test_preempted_requests_yield_their_rows_all_the_same(make: Make) -> None:
    engine = make(blocks=14)
    reader = Reader(engine)
    for index in range(32):
        # Of several lengths, or all would soon take turns without a preemption.
        engine.add(f"r{index}", ids(60, index), 50 + index % 5 * 7, include_output_tokens=True)
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    figures.record(
        "24",
        "requests preempted and resumed",
        trials=32,
        exercised=engine.preemptions,
        failures=len(torn(engine, samples)) + 32 - len(samples),
    )
    check_whole(engine, samples)
    assert engine.preemptions > 0
    assert len(samples) + info.lost == 32 and info.lost == 0
    assert {name: sample.tokens for name, sample in samples.items()} == {
        f"r{index}": 60 + 49 + index % 5 * 7 for index in range(32)
    }
    assert engine.usage == 0


def test_requests_that_hold_the_whole_cache_let_it_go_when_the_reader_moves(make: Make) -> None:
    # The ring takes 4 samples, the cache 13 requests of one block: the rest must wait for both.
    engine = make(blocks=14, ring_size="1MiB")
    reader = Reader(engine, delay_s=0.01)
    for index in range(40):
        engine.add(f"r{index}", ids(BLOCK - 1, index))
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert len(samples) == 40 and info.lost == 0 and engine.usage == 0
    assert list(samples) == [f"r{index}" for index in range(40)]


def test_an_engine_without_readers_gets_its_blocks_back(make: Make) -> None:
    engine = make(ring_size="1MiB", no_reader_timeout_s=0.1)
    for index in range(30):
        engine.add(f"r{index}", ids(BLOCK, index))
    engine.run()
    info = settled(engine)
    assert info.published + info.lost_by_reason["no_reader"] == 30
    assert engine.usage == 0 and len(engine.reported) == 30


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("seed", [5, *(pytest.param(n, marks=pytest.mark.long) for n in range(30))])
def test_ends_of_any_kind_in_any_order_report_each_held_request_once(
    make: Make, way: str, deferred: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make(blocks=30, ring_size="1MiB", deferred=deferred)
    reader = Reader(engine, delay_s=0.002)
    alive: list[str] = []
    for turn in range(400):
        if turn < 250 and rng.random() < 0.5:
            name = f"r{turn}"
            engine.add(
                name,
                ids(rng.choice([1, 20, 70, 150, 400]), turn),
                rng.choice([1, 1, 5]),
                stop=rng.choice([None, ["never met"]]),
                include_output_tokens=rng.random() < 0.5,
            )
            alive.append(name)
        if alive and rng.random() < 0.2:
            engine.abort(alive.pop(rng.randrange(len(alive))))
        engine.step()
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    twice = [name for name, times in Counter(engine.reported).items() if times > 1]
    unaccounted = len(engine.requests) - len(samples) - info.lost
    figures.record(
        "23",
        "requests that end in any way and order",
        trials=len(engine.requests),
        exercised=info.lost_by_reason["aborted"],
        failures=len(twice) + len(torn(engine, samples)) + abs(unaccounted),
        held=len(engine.reported),
        reported_twice=len(twice),
    )
    check_whole(engine, samples)
    assert len(samples) == info.published
    assert info.published + info.lost == len(engine.requests)
    assert info.lost_by_reason["aborted"] > 10 and info.lost_by_reason["oversized"] > 0
    assert max(Counter(engine.reported).values()) == 1
    assert engine.usage == 0 and not engine.scheduler.requests


def test_an_engine_that_stops_stepping_while_blocks_are_held_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(self: Any) -> bool:
        """Word for word as vLLM 0.18 to 0.21 have it."""
        return len(self.finished_req_ids) > 0

    monkeypatch.setattr(scheduler_module.Scheduler, "has_finished_requests", old)
    with pytest.raises(shmconn.OptionError, match="use 0.22 or later"):
        make()


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_beside_another_connector_each_request_is_freed_when_both_are_done(
    make: Make, ranks: int, other: int
) -> None:
    engine = make(ranks=ranks, other=other)
    reader = Reader(engine)
    for index in range(6):
        engine.add(f"r{index}", ids(40, index))
    for index in range(3):
        engine.add(f"abort{index}", ids(200, index))
    for _ in range(3):
        engine.step()
    for index in range(3):
        engine.abort(f"abort{index}")
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert sorted(engine.reported) == sorted(samples) == [f"r{index}" for index in range(6)]
    assert info.lost_by_reason == {"aborted": 3} and engine.usage == 0
    for request_id, sample in samples.items():
        reply = engine.replies[request_id]
        assert reply["handle"] == str(sample.handle)
        assert reply.get("other") == (1 if MERGES else None)


@pytest.mark.parametrize("between", ["one process", "two processes"])
@pytest.mark.parametrize("other", [None, 0, 1])
def test_vllm_shows_our_figures_alone_and_beside_another_connector(
    make: Make, other: int | None, between: str
) -> None:
    engine = make(other=other)
    for index in range(6):
        engine.add(f"r{index}", ids(40, index))
    engine.add("abort0", ids(200, 9))
    engine.step()
    engine.abort("abort0")
    engine.run()
    settled(engine)
    # What the idle copier has to tell goes out with the next step.
    engine.step()
    config = engine.scheduler.vllm_config
    prometheus.unregister_vllm_metrics()
    shown = KVConnectorProm(config, ["engine"], {0: ["0"]})
    lines = KVConnectorLogging(config.kv_transfer_config)
    for outputs in engine.outputs:
        if between == "two processes":
            frames = MsgpackEncoder().encode(outputs)
            outputs = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        figures = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
        if figures:
            shown.observe(figures)
            lines.observe(figures)
    value = prometheus_client.REGISTRY.get_sample_value
    assert value("vllm:shmconn_samples_published_total", {"engine": "0"}) == 6
    lost = {"engine": "0", "reason": "aborted"}
    assert value("vllm:shmconn_samples_lost_total", lost) == 1
    said: list[str] = []
    lines.log(lambda text, *values: said.append(text % values))
    assert len(said) == 1 and re.search(r"Samples published'?[=:] ?6\b", said[0]), said


def test_of_two_ranks_one_writes_and_its_word_alone_frees_a_request(make: Make) -> None:
    engine = make(ranks=2)
    reader = Reader(engine)
    for index in range(10):
        engine.add(f"r{index}", ids(40, index))
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert len(samples) == info.published == 10 and engine.usage == 0
    assert engine.workers[1].get_handshake_metadata() is None
    assert engine.workers[1].get_kv_connector_stats() is None


HOOKS = {
    "get_num_new_matched_tokens": (0, False),
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "bind_connector_metadata": None,
    "get_finished": (None, None),
    "get_handshake_metadata": None,
    "set_xfer_handshake_metadata": None,
    "get_kv_connector_stats": None,
    "shutdown": None,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_inside_a_hook_is_logged_and_answered_harmlessly(
    make: Make, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    worker = make().worker
    # Every part that a hook may use is gone.
    with pytest.MonkeyPatch.context() as patch:
        for part in ("_intake", "_worker", "_place", "_ring"):
            patch.setattr(worker, part, None)
        arguments = {
            "get_num_new_matched_tokens": (None, 0),
            "request_finished": (None, []),
            "request_finished_all_groups": (None, ([],)),
            "bind_connector_metadata": (connector_module.ShmMetadata([None]),),  # type: ignore
            "get_finished": (set(),),
            "set_xfer_handshake_metadata": ({},),
        }.get(hook, ())
        connector_module._throttle._last.clear()
        assert getattr(worker, hook)(*arguments) == HOOKS[hook]
    if hook != "get_num_new_matched_tokens":
        assert f"a fault in {hook}" in caplog.text


@pytest.mark.usefixtures("way")
def test_an_end_that_comes_amid_a_step_overtakes_nobody(make: Make) -> None:
    engine = make(deferred=True)
    reader = Reader(engine)
    engine.add("short", ids(20, 0), max_tokens=2)
    engine.add("stopped", ids(20, 1), max_tokens=9, stop=["never met"])
    while engine.requests["stopped"].num_output_tokens < 1:
        engine.step()
    # Between the step's metadata and its results: one is aborted, and then the other finishes.
    engine.abort("stopped")
    engine.run()
    info = settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert set(samples) == {"short", "stopped"} and info.lost == 0
    assert sorted(engine.reported) == ["short", "stopped"] and engine.usage == 0


def reported(engine: Engine) -> set[str]:
    """What the worker reports; a moment after the sample was published."""
    deadline = time.monotonic() + 10
    while not (sent := engine.worker.get_finished(set())[0]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return set(sent)


def test_in_one_process_a_finished_request_waits_for_no_step(make: Make) -> None:
    engine = make()
    reader = Reader(engine)
    for index in range(3):
        engine.add(f"r{index}", ids(20, index))
        while engine.scheduler.get_num_unfinished_requests():
            engine.step()
        # As after LLM.generate, which takes no further step.
        settled(engine)
    engine.run()
    samples = reader.finish()
    check_whole(engine, samples)
    assert list(samples) == ["r0", "r1", "r2"] and engine.reported == list(samples)


@pytest.mark.usefixtures("apart")
def test_work_is_taken_in_before_the_rows_of_its_step_are_written(make: Make) -> None:
    engine = make()
    reader = Reader(engine)
    engine.add("r0", ids(20, 0))
    while engine.scheduler.get_num_unfinished_requests():
        engine.step()
    (info,) = directory.rings(ring_of(engine))
    assert info.accepted == 0
    output = engine.scheduler.schedule()
    engine.worker.bind_connector_metadata(output.kv_connector_metadata)
    # Nothing but the binding was called, and the copy is under way.
    assert settled(engine).published == 1 and list(reader.finish()) == ["r0"]
    assert reported(engine) == {"r0"}
    assert engine.worker.get_finished(set())[0] is None


@pytest.mark.usefixtures("way")
def test_metadata_that_is_bound_twice_is_taken_once(make: Make) -> None:
    engine = make()
    reader = Reader(engine)
    engine.add("r0", ids(20, 0))
    while engine.scheduler.get_num_unfinished_requests():
        engine.step()
    output = engine.scheduler.schedule()
    for _ in range(2):
        engine.worker.bind_connector_metadata(output.kv_connector_metadata)
    settled(engine)
    assert list(reader.finish()) == ["r0"]
    assert reported(engine) == {"r0"}
    assert engine.worker.get_finished(set())[0] is None


@pytest.mark.parametrize("end", ["while it waits", "with its last input"])
def test_a_session_of_streamed_inputs_that_ends_in_order_is_a_sample(make: Make, end: str) -> None:
    engine = make()
    reader = Reader(engine)
    wish = {"include_output_tokens": True, "tag": "session"}
    first, second = ids(20, 0), ids(30, 1)
    # vLLM makes a session's later inputs part of the very list that it was given.
    request = engine.add("s", list(first), max_tokens=3, resumable=True, **wish)
    if end == "with its last input":
        engine.add("s", second, max_tokens=3, resumable=True, **wish)
        engine.add("s", [1], max_tokens=3, **wish)
        engine.run()
    else:
        for chunk in (None, second):
            if chunk:
                engine.add("s", chunk, max_tokens=3, resumable=True, **wish)
            while request.status.name != "WAITING_FOR_STREAMING_REQ":
                engine.step()
        engine.add("s", [1], max_tokens=3, **wish)
        engine.run()
    info = settled(engine)
    samples = reader.finish()
    check_whole(engine, samples)
    assert info.lost == 0 and samples["s"].tag == "session"
    found = samples["s"].token_ids.tolist()
    assert found[:20] == first and found[-32:-2] == second
    assert engine.usage == 0
    # vLLM aborts a session that waits when it ends, so nobody is told the handle.
    assert samples["s"].metadata.get("aborted", False) is (end == "while it waits")


def test_a_session_whose_client_hangs_up_amid_an_input_is_aborted(make: Make) -> None:
    engine = make()
    engine.add("s", ids(200, 0), max_tokens=3, resumable=True)
    engine.step()
    engine.abort("s")
    engine.run()
    assert settled(engine).lost_by_reason == {"aborted": 1}


def test_a_sample_without_a_reply_is_not_kept_for_groups_by_handle(make: Make) -> None:
    engine = make(groups=[{"name": "probe", "by_handle": True}, "tests"])
    engine.add("stopped", ids(20, 1), max_tokens=9, stop=["never met"])
    while engine.requests["stopped"].num_output_tokens < 2:
        engine.step()
    engine.abort("stopped")
    engine.add("plain", ids(20, 2))
    engine.run()
    info = settled(engine)
    assert info.published == 2 and "stopped" not in engine.replies
    with shmconn.subscribe(ring_of(engine), "tests", background=True) as reader:
        samples = {}
        while (sample := reader.next(timeout=0)) is not None:
            samples[sample.request_id] = sample.clone()
            sample.release()
    check_whole(engine, samples)
    assert samples["stopped"].metadata["aborted"] is True
    assert "aborted" not in samples["plain"].metadata
    deadline = time.monotonic() + 10
    # Only the one that a reply names is still there for the group by handle.
    while directory.rings(ring_of(engine))[0].free_slots < info.slots - 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with shmconn.subscribe(ring_of(engine), "probe", by_handle=True) as probe:
        assert probe.get(engine.replies["plain"], timeout=10).request_id == "plain"


@pytest.mark.usefixtures("apart")
def test_a_fault_in_building_metadata_loses_no_work(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    reader = Reader(engine)
    engine.add("r0", ids(20, 0))
    intake = engine.scheduler.connector._intake
    real = intake.take
    calls = 0

    def take() -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("planted")
        return real()

    monkeypatch.setattr(intake, "take", take)
    engine.run()
    settled(engine)
    assert list(reader.finish()) == ["r0"] and calls > 2


def test_the_scheduler_looks_its_ring_up_when_only_another_connector_s_word_reaches_it(
    make: Make,
) -> None:
    engine = make()
    connector = engine.scheduler.connector
    known = connector._intake.identity
    connector._intake.identity = None
    connector.set_xfer_handshake_metadata({0: object()})
    assert connector._intake.identity == known and known is not None
    connector._engine_id = "another engine"
    connector.set_xfer_handshake_metadata({})
    assert connector._intake.identity is None


def test_a_step_that_finishes_nothing_costs_next_to_nothing(make: Make) -> None:
    engine = make()
    engine.add("r0", ids(20, 0))
    engine.run()
    output = engine.scheduler.schedule()
    ours = str(Path(shmconn.__file__).parent)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(ours)

    connector, worker = engine.scheduler.connector, engine.worker
    sys.setprofile(count)
    worker.bind_connector_metadata(connector.build_connector_meta(output))
    worker.start_load_kv(None)
    worker.wait_for_save()
    worker.get_finished(set())
    worker.get_kv_connector_stats()
    worker.clear_connector_metadata()
    sys.setprofile(None)
    assert calls <= 15
