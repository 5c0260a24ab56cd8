# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench files`: what a drain writes to tmpfs, beside ``save_file`` from private memory.

The ring is full when the clock starts, and nobody fills it meanwhile: so this is the speed of the
drain alone. Each figure is the median of the repeats; the ways take turns within one run.
"""

import secrets
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import shmconn
from reader.bench.ring import Figure, show
from reader.lane import Lane
from reader.sinks import SinkOptions, open_sink
from shmconn.errors import ShmConnError

MIB = 1 << 20
_LAYERS, _HIDDEN = 4, 4096


def run(
    *, sample_mib: int = 64, samples: int = 12, repeats: int = 5, json_out: bool = False
) -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    figures = measure(sample_mib=sample_mib, samples=samples, repeats=repeats)
    return show(figures, "drain to files on tmpfs", json_out=json_out)


def measure(*, sample_mib: int, samples: int, repeats: int) -> list[Figure]:
    """The figures of one run."""
    tokens = max(1, sample_mib * MIB // (_LAYERS * _HIDDEN * 2))
    states = torch.rand(tokens, _LAYERS, _HIDDEN).bfloat16()
    ids = torch.arange(tokens)
    size = (states.nbytes + ids.nbytes) * samples
    ways = {
        "save_file": (None, 1),
        "1 writer": ("safetensors", 1),
        "2 writers": ("safetensors", 2),
        "4 writers": ("safetensors", 4),
        "shards, 1 writer": ("shards", 1),
        "shards, 2 writers": ("shards", 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (form, writers) in ways.items():
            if form is None:
                seconds[name].append(_save(states, ids, samples))
            else:
                seconds[name].append(_drain(states, ids, samples, form, writers))
    speed = {name: size / statistics.median(found) / 1e9 for name, found in seconds.items()}
    figures = [Figure(name, value, "GB/s") for name, value in speed.items()]
    share = speed["1 writer"] / speed["save_file"]
    return [*figures, Figure("1 writer against save_file", share, "x", goal=1.0)]


def _save(states: torch.Tensor, ids: torch.Tensor, samples: int) -> float:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shmconn-bench-"))
    try:
        begun = time.perf_counter()
        for index in range(samples):
            path = folder / f"{index}.safetensors"
            save_file({"hidden_states": states, "token_ids": ids}, path)
        return time.perf_counter() - begun
    finally:
        shutil.rmtree(folder)


def _drain(states: torch.Tensor, ids: torch.Tensor, samples: int, form: str, writers: int) -> float:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shmconn-bench-"))
    name = f"bench-{secrets.token_hex(4)}"
    size = int(1.1 * samples * (states.nbytes + MIB)) + 64 * MIB
    try:
        with shmconn.Producer.create(
            name,
            size=size,
            layer_ids=range(1, _LAYERS + 1),
            hidden_size=_HIDDEN,
            dtype="bfloat16",
            groups=["bench"],
        ) as producer:
            for index in range(samples):
                producer.put(states, ids, request_id=f"r{index}", timeout=60)
            with shmconn.subscribe(name, group="bench") as subscription:
                producer.close()
                sink = open_sink(form, SinkOptions(str(folder), shard_size=256 * MIB))
                lane = Lane(subscription, sink, writers=writers)
                begun = time.perf_counter()
                lane.start()
                done = lane.join(600)
                took = time.perf_counter() - begun
                sink.close()
        if not done or lane.counts.samples != samples:
            raise ShmConnError(f"the drain stored {lane.counts.samples} of {samples}: {lane.error}")
        return took
    finally:
        shutil.rmtree(folder)
