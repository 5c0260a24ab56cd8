# SPDX-License-Identifier: Apache-2.0
"""The processes of `shmconn bench ring`: a writer or a reader, of one of three ways.

A writer prints the time of its first put, a reader that of its last touched byte (Unix seconds);
the writer starts when the reader is there.
"""

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import posix_ipc
import torch

import shmconn
from shmconn.directory import groups

HIDDEN = 1024
SLOTS = 6


def _touch(data: memoryview) -> int:
    """Reads every byte; 8 at a time, as a checksum would."""
    return int(np.frombuffer(data, np.uint64).sum())


def _source(size: int) -> torch.Tensor:
    return torch.randint(0, 1000, (size // HIDDEN // 4, 1, HIDDEN), dtype=torch.int32).view(
        torch.float32
    )


def ring_write(name: str, size: int, samples: int) -> None:
    """Puts samples into a ring once its reader has joined."""
    # A sample carries its token ids and its names too: a page more each.
    producer = shmconn.Producer.create(
        name,
        size=max(SLOTS * (size + (1 << 18)), 1 << 24) + (1 << 22),
        layer_ids=[0],
        hidden_size=HIDDEN,
        dtype="float32",
    )
    states = _source(size)
    ids = np.arange(len(states))
    with contextlib.suppress(shmconn.RingMissing):
        while not any(group.alive for group in groups(name)):
            time.sleep(0.01)
    _warm(producer, states, ids, min(samples, SLOTS))
    # The reader keeps its last sample while it asks for the next.
    while producer.free_slots < producer.shape.slots - 1:
        producer.wait(0.1)
        producer.tick()
    begin = time.time()
    for _ in range(samples):
        producer.put(states, ids, request_id="bench", timeout=60)
    producer.close()
    print(begin)


def _warm(producer: shmconn.Producer, states: torch.Tensor, ids: object, count: int) -> None:
    """Touches the pages once in both processes; not timed."""
    for _ in range(count):
        producer.put(states, ids, request_id="warm", timeout=60)


def ring_read(name: str, _size: int, _samples: int) -> None:
    """Touches every byte of every sample."""
    with shmconn.subscribe(name, "bench", wait_s=60) as subscription:
        for sample in subscription:
            _touch(sample.states_bytes)
        del sample
        print(time.time())


class _Plain:
    """A mapping of equal slots and two semaphores: the least that can hand samples over."""

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        flags = posix_ipc.O_CREAT
        self.memory = posix_ipc.SharedMemory(f"/{name}", flags, size=SLOTS * size)
        self.map = mmap.mmap(self.memory.fd, SLOTS * size)
        self.free = posix_ipc.Semaphore(f"/{name}.free", flags, initial_value=SLOTS)
        self.full = posix_ipc.Semaphore(f"/{name}.full", flags, initial_value=0)

    def slot(self, index: int) -> memoryview:
        start = index % SLOTS * self.size
        return memoryview(self.map)[start : start + self.size]

    def unlink(self) -> None:
        for thing in (self.memory, self.free, self.full):
            with contextlib.suppress(posix_ipc.ExistentialError):
                thing.unlink()


def plain_write(name: str, size: int, samples: int) -> None:
    """Copies into the slots of a plain mapping."""
    plain = _Plain(name, size)
    states = _source(size)
    slots = [
        torch.frombuffer(plain.slot(index), dtype=torch.float32).view_as(states)
        for index in range(SLOTS)
    ]
    begin = 0.0
    for index in range(SLOTS + samples):
        plain.free.acquire()
        if index == SLOTS:
            begin = time.time()
        slots[index % SLOTS].copy_(states)
        plain.full.release()
    print(begin)


def plain_read(name: str, size: int, samples: int) -> None:
    """Touches every byte of the slots of a plain mapping."""
    plain = _Plain(name, size)
    for index in range(SLOTS + samples):
        plain.full.acquire()
        _touch(plain.slot(index))
        plain.free.release()
    print(time.time())
    plain.unlink()


def _folder(name: str) -> Path:
    folder = Path("/dev/shm") / name
    folder.mkdir(exist_ok=True)
    return folder


def files_write(name: str, size: int, samples: int) -> None:
    """save_file, at most SLOTS ahead of the reader."""
    from safetensors.torch import save_file

    folder = _folder(name)
    states = _source(size)
    ids = torch.arange(len(states))
    save_file({"hidden_states": states, "token_ids": ids}, folder / "warm")
    _until_gone(folder / "warm")
    begin = time.time()
    for index in range(samples):
        _until_gone(folder / f"{index - SLOTS}")
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"{index}.part")
        os.rename(folder / f"{index}.part", folder / f"{index}")
    print(begin)


def files_read(name: str, _size: int, samples: int) -> None:
    """load_file, touch, remove."""
    from safetensors.torch import load_file

    folder = _folder(name)
    for file in ["warm", *map(str, range(samples))]:
        path = folder / file
        _until(path.exists)
        if file == "warm":
            time.sleep(0.1)
        tensors = load_file(path)
        _touch(memoryview(tensors["hidden_states"].numpy()).cast("B"))
        del tensors
        path.unlink()
    print(time.time())
    folder.rmdir()


def files_alone(name: str, size: int, samples: int) -> None:
    """Seconds of save_file, load_file and a touch of every byte, one after the other."""
    from safetensors.torch import load_file, save_file

    path = _folder(name) / "sample"
    states = _source(size)
    ids = torch.arange(len(states))
    begin = 0.0
    for index in range(1 + samples):
        if index == 1:
            begin = time.perf_counter()
        save_file({"hidden_states": states, "token_ids": ids}, path)
        tensors = load_file(path)
        _touch(memoryview(tensors["hidden_states"].numpy()).cast("B"))
        del tensors
        path.unlink()
    print(time.perf_counter() - begin)
    path.parent.rmdir()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


def _until_gone(path: Path) -> None:
    _until(lambda: not path.exists())


def idle(name: str, _size: int, _samples: int) -> None:
    """CPU seconds per second of a subscription without samples."""
    producer = shmconn.Producer.create(name, size="4MiB", layer_ids=[0], hidden_size=8)
    with shmconn.subscribe(name, "bench") as subscription:
        subscription.next(0.5)
        cpu, wall = time.process_time(), time.monotonic()
        subscription.next(5)
        print((time.process_time() - cpu) / (time.monotonic() - wall))
    producer.close()


def main() -> None:
    """`python -m reader.bench.roles ROLE NAME SIZE SAMPLES`."""
    role, name, size, samples = sys.argv[1:]
    roles: dict[str, Callable[[str, int, int], None]] = {
        "ring-write": ring_write,
        "ring-read": ring_read,
        "plain-write": plain_write,
        "plain-read": plain_read,
        "files-write": files_write,
        "files-read": files_read,
        "files-alone": files_alone,
        "idle": idle,
    }
    roles[role](name, int(size), int(samples))


if __name__ == "__main__":
    main()
