# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m reader.bench.vllm` that take two GPUs.

tp       tensor parallel 2 beside 1, the same prompts: one sample a request, equal within
         noise; aborts; a ring that stays full for a minute; all KV blocks free at the end
dp       two engines with a ring each under one name, one reader of both; one engine is killed
beside   vLLM on GPU 0, its readers on GPU 1: hand-off of an 8k-token request, ours and stock
path     without an engine: GPU 0's cache -> ring -> GPU 1, from ring pages of each NUMA node,
         beside a copy from device to device
"""

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reader.bench.bus import BLOCK, Bus
from reader.bench.crew import LAYERS, Crew, Run, crew, measure_handoff
from reader.bench.engine import Child, kill_group

SMALL_LAYERS = (2, 14, 25, 28)


def tensor_parallel(run: Run) -> None:
    """Two engines of one model, of one and of two ranks."""
    cuda = run.device != "cpu"
    count, tokens = (64, 2048) if not run.tiny else (8, 200)
    with crew(run) as team:
        # A ring that holds a few samples, so that it is full as soon as its reader pauses.
        fields = {
            "ring_size": "16MiB" if run.tiny else "96MiB",
            "kv_bytes": 24 << 30,
            "eager": True,
            "reads": False,
            "weights": True,
        }
        one = team.spec("ours", "qwen3-0.6b", SMALL_LAYERS, gpus="0" if cuda else "", **fields)
        two = team.spec(
            "ours", "qwen3-0.6b", SMALL_LAYERS, gpus="0,1" if cuda else "", tp=2, **fields
        )
        team.start({"tp1": one, "tp2": two})
        if len(team.engines) < 2:
            return
        reader = Child("reader.bench.drains", ["twins", "cpu", one.ring, two.ring], one.log, {})
        reader.answer(120)
        team.readers["twins"] = reader
        for seed in range(1 if run.tiny else 3):
            for engine in team.engines.values():
                engine.tell(
                    "batch", count=count, tokens=tokens, seed=seed, spread=tokens // 2, max_tokens=4
                )
            for engine in team.engines.values():
                engine.answer(300)
        asked = 2 * count * (1 if run.tiny else 3)
        state = reader.ask("wait", 200, requests=asked, at_most_s=150.0)
        errors = state["errors"]
        run.note(
            "tp equal",
            requests_each=asked // 2,
            samples=state["samples"],
            by_ring=state["rings"],
            lost=state["lost_by_reason"],
            pairs=len(errors.get("typical", ())),
            typical_error=statistics.median(errors["typical"]),
            largest_error=errors["largest"][-1],
            least_error_of_next_row=errors["next row"][0],
            problem=state["problem"],
        )
        _free(run, team, "tp free after batches")
        aborted = {
            key: engine.ask("aborted", 200, count=count, tokens=tokens, seed=77)
            for key, engine in team.engines.items()
        }
        asked += 2 * count
        state = reader.ask("wait", 100, requests=asked, at_most_s=60.0)
        lost = state["lost_by_reason"]
        run.note("tp aborts", sent_each=count, aborted=aborted, samples=state["samples"], lost=lost)
        _free(run, team, "tp free after aborts")
        _full_for_a_while(run, team, reader, asked, count, tokens)


def _full_for_a_while(
    run: Run, team: Crew, reader: Child, asked: int, count: int, tokens: int
) -> None:
    """The reader stops for a minute; the engine answers meanwhile, and nothing is lost."""
    pause_s = 3.0 if run.tiny else 60.0
    reader.ask("pause")
    engine = team.engines["tp2"]
    began = time.monotonic()
    engine.ask("batch", 200, count=count, tokens=tokens, seed=555)
    answered_s = time.monotonic() - began
    time.sleep(max(0.0, pause_s - answered_s))
    held = reader.ask("state")["samples"]
    reader.ask("go")
    state = reader.ask("wait", 150, requests=asked + count, at_most_s=120.0)
    run.note(
        "tp full",
        paused_s=time.monotonic() - began,
        answered_s=answered_s,
        read_before=held,
        read_after=state["samples"],
        lost=state["lost_by_reason"],
        problem=state["problem"],
    )
    _free(run, team, "tp free after a full ring")


def _free(run: Run, team: Crew, what: str) -> None:
    run.note(what, free={key: one.ask("all_free", 60) for key, one in team.engines.items()})


def two_engines(run: Run) -> None:
    """Data parallel as two servers: one ring each, one name, one subscription."""
    cuda = run.device != "cpu"
    count, tokens = (64, 2048) if not run.tiny else (8, 200)
    with crew(run) as team:
        first = team.spec("ours", "qwen3-0.6b", SMALL_LAYERS, gpus="0" if cuda else "", eager=True)
        second = replace(first, gpus="1" if cuda else "", reads=False)
        team.start({"a": first, "b": second})
        if len(team.engines) < 2:
            return
        reader = team.readers["a"]
        for seed, engine in enumerate(team.engines.values()):
            engine.tell("batch", count=4 * count, tokens=tokens, seed=seed)
        for engine in team.engines.values():
            engine.answer(300)
        state = reader.ask("wait", 150, requests=8 * count, at_most_s=120.0)
        run.note(
            "dp both",
            requests=8 * count,
            samples=state["samples"],
            by_ring=state["rings"],
            lost=state["lost_by_reason"],
            problem=state["problem"],
        )
        team.engines["b"].tell("batch", count=16 * count, tokens=tokens, seed=5)
        while reader.ask("state")["samples"] <= state["samples"]:
            time.sleep(0.02)
        kill_group(team.engines.pop("b").process)
        killed = reader.ask("state")
        began = time.monotonic()
        team.engines["a"].ask("batch", 200, count=4 * count, tokens=tokens, seed=6)
        time.sleep(2)
        after = reader.ask("state")
        run.note(
            "dp killed",
            read_of_killed_batch=killed["samples"] - state["samples"],
            asked_of_the_other=4 * count,
            by_ring_before=killed["rings"],
            by_ring_after=after["rings"],
            seconds=time.monotonic() - began,
            lost=after["lost_by_reason"],
            problem=after["problem"],
            free=team.engines["a"].ask("all_free", 60),
        )


def beside(run: Run) -> None:
    """Hand-off to another GPU than the engine's."""
    gpus = {"gpus": "0", "reader_gpu": "1"} if run.device != "cpu" else {}
    with crew(run) as team:
        team.start(
            {name: team.spec(name, "qwen3-8b", LAYERS, **gpus) for name in ("ours", "stock")}
        )
        measure_handoff(run, team)


def path(run: Run) -> None:
    """GPU 0's cache through the ring to GPU 1, and what bounds it."""
    tokens, layers, hidden = (256, 2, 64) if run.tiny else (8192, 4, 4096)
    samples = 4 if run.tiny else 60
    nodes = numa_nodes()
    run.note("numa", nodes={name: len(cpus) for name, cpus in nodes.items()}, gpus=gpu_nodes())
    if torch.cuda.device_count() > 1:
        _between_devices(run, tokens * layers * hidden * 2)
    everywhere = os.sched_getaffinity(0)
    for node, cpus in nodes.items():
        # The kernel takes the ring's pages from the node of the CPU that reserves them.
        os.sched_setaffinity(0, cpus & everywhere)
        try:
            bus = Bus(run.device, tokens, layers, hidden)
        finally:
            os.sched_setaffinity(0, everywhere)
        try:
            _through(run, bus, node, tokens, samples)
        finally:
            bus.close()


def _through(run: Run, bus: Bus, node: str, tokens: int, samples: int) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "1"} if torch.cuda.device_count() > 1 else {}
    bus.subscription.close()
    reader = Child(
        "reader.bench.drains",
        ["ours", run.device, bus.producer.name],
        str(run.out / "log.txt"),
        gpus,
    )
    try:
        reader.answer(120)
        nbytes = tokens * bus.layers * bus.hidden * 2
        ids, blocks = list(range(tokens)), bus.order[: -(-tokens // BLOCK)]
        single = []
        for turn in range(5 + (2 if run.tiny else 15)):
            began = time.monotonic()
            bus.put(ids, blocks)
            state = reader.ask("wait", 60, requests=turn + 1, at_most_s=50.0)
            if turn >= 5:
                single.append(state["last"] - began)
        before, began = state["samples"], time.monotonic()
        for _ in range(samples):
            bus.put(ids, blocks)
        state = reader.ask("wait", 100, requests=before + samples, at_most_s=90.0)
        took = state["last"] - began
        run.note(
            "path",
            node=node,
            bytes=nbytes,
            one_s=statistics.median(single),
            sustained_gb_s=samples * nbytes / took / 1e9,
            samples=state["samples"],
            problem=state["problem"],
        )
    finally:
        reader.ask_to_end()
        reader.close(15)


def _between_devices(run: Run, nbytes: int) -> None:
    """A copy of the same bytes from one device to the other: the limit."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    times = []
    for _ in range(12):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.monotonic() - began)
    seconds = statistics.median(times[2:])
    run.note(
        "device to device",
        bytes=nbytes,
        one_s=seconds,
        gb_s=nbytes / seconds / 1e9,
        peer_access=torch.cuda.can_device_access_peer(0, 1),
    )


def numa_nodes() -> dict[str, set[int]]:
    """CPUs by NUMA node; one node of all of them where the host shows none."""
    nodes: dict[str, set[int]] = {}
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        cpus = set()
        for piece in (folder / "cpulist").read_text().strip().split(","):
            first, _, last = piece.partition("-")
            if first:
                cpus |= set(range(int(first), int(last or first) + 1))
        if cpus:
            nodes[folder.name] = cpus
    return nodes or {"all": os.sched_getaffinity(0)}


def gpu_nodes() -> dict[str, Any]:
    """The NUMA node of each NVIDIA device on the bus, as the kernel knows it (-1: it does not)."""
    found: dict[str, Any] = {}
    for device in Path("/sys/bus/pci/devices").glob("*"):
        if (device / "vendor").read_text().strip() == "0x10de":
            found[device.name] = (device / "numa_node").read_text().strip()
    return found
