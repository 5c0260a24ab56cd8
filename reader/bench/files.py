# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench files`: what a drain writes to tmpfs, beside ``save_file`` from private memory.

The ring is full when the clock starts, and nobody fills it meanwhile: so this is the speed of the
drain alone. Ring and private memory are there from the beginning, and each way writes all of its
files, removes them, and then writes them again by the clock: so every way reads what it has read
before, and writes into what its own first files have freed. Each figure is the median of the
repeats; the ways take turns within one run.
"""

import contextlib
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import shmconn
from reader.bench.ring import Figure, show
from reader.lane import Lane, Limits
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
    first = torch.rand(tokens, _LAYERS, _HIDDEN).bfloat16()
    private = [first, *(first.clone() for _ in range(samples - 1))]
    ids = torch.arange(tokens)
    size = (first.nbytes + ids.nbytes) * samples
    ways = {
        "1 writer": ("safetensors", 1),
        "2 writers": ("safetensors", 2),
        "4 writers": ("safetensors", 4),
        "shards, 1 writer": ("shards", 1),
        "shards, 2 writers": ("shards", 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("save_file", *ways)}
    with _ring(private) as (producer, subscription):
        for _ in range(repeats):
            for name, found in seconds.items():
                for _ in range(2):
                    if name == "save_file":
                        took = _save(private, ids)
                    else:
                        took = _drain(producer, subscription, private, ids, *ways[name])
                found.append(took)
    speed = {name: size / statistics.median(found) / 1e9 for name, found in seconds.items()}
    figures = [Figure(name, value, "GB/s") for name, value in speed.items()]
    share = speed["1 writer"] / speed["save_file"]
    return [*figures, Figure("1 writer against save_file", share, "x", goal=1.0)]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="shmconn-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _ring(
    private: Sequence[torch.Tensor],
) -> Iterator[tuple[shmconn.Producer, shmconn.Subscription]]:
    """A ring with room for as many samples and not one more: they lie in the same pages again."""
    name = f"bench-{secrets.token_hex(4)}"
    with (
        shmconn.Producer.create(
            name,
            size=len(private) * (private[0].nbytes + MIB) + private[0].nbytes // 2,
            layer_ids=range(1, _LAYERS + 1),
            hidden_size=_HIDDEN,
            dtype="bfloat16",
            groups=["bench"],
        ) as producer,
        shmconn.subscribe(name, group="bench") as subscription,
    ):
        yield producer, subscription


def _save(private: Sequence[torch.Tensor], ids: torch.Tensor) -> float:
    with _folder() as folder:
        begun = time.perf_counter()
        for index, states in enumerate(private):
            path = folder / f"{index}.safetensors"
            save_file({"hidden_states": states, "token_ids": ids}, path)
        return time.perf_counter() - begun


def _drain(
    producer: shmconn.Producer,
    subscription: shmconn.Subscription,
    private: Sequence[torch.Tensor],
    ids: torch.Tensor,
    form: str,
    writers: int,
) -> float:
    for states in private:
        producer.put(states, ids, request_id=f"r{producer.published}", timeout=60)
    with _folder() as folder:
        sink = open_sink(form, SinkOptions(str(folder), shard_size=256 * MIB))
        lane = Lane(subscription, sink, writers=writers, limits=Limits(samples=len(private)))
        begun = time.perf_counter()
        lane.start()
        done = lane.join(600)
        took = time.perf_counter() - begun
        sink.close()
    if not done or lane.counts.samples != len(private):
        stored = lane.counts.samples
        raise ShmConnError(f"the drain stored {stored} of {len(private)}: {lane.error}")
    return took
