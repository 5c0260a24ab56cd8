# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench input`: from a producer's memory to a trainer's batch, by one process each.

  ring   Producer.put; SampleDataset with a Collator
  files  save_file to /dev/shm; speculators' file backend, its dataset's split and its CollateFn

Both end in the same batch of 4 samples in page-locked memory, or plain memory where there is no
CUDA device. Where there is one, both are measured to the device too:

  ring-gpu   a Collator that makes its batches on the device, and a CudaPrefetcher
  files-gpu  the page-locked batch, moved as speculators' trainer moves it

Readers have one thread, as DataLoader workers have. The first batches, in which ring
and batches are touched for the first time, are not counted: a training has thousands.
speculators itself is used where it is installed; else the steps of its version 0.9, restated here.
"""

import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import shmconn
from reader.bench.ring import MIB, Figure, show
from shmconn.collate import Collator
from shmconn.dataset import SampleDataset
from shmconn.prefetch import CudaPrefetcher
from shmconn.sample import Sample

LAYERS, HIDDEN = 4, 4096
PER_BATCH = 4
_WARM = 4  # batches
_BYTES_PER_TOKEN = LAYERS * HIDDEN * 2
# Samples that a writer may be ahead of its reader: a batch that is being made, and the next.
_AHEAD = 2 * PER_BATCH

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """One way, once."""

    samples_s: float
    reader_cpu_s: float  # per GB of states
    writer_cpu_s: float


def run(
    *, sample_mib: int = 64, samples: int = 24, repeats: int = 5, json_out: bool = False
) -> int:
    """Measures and prints; returns 1 if a goal is missed."""
    figures = measure(sample_mib=sample_mib, samples=samples, repeats=repeats)
    return show(figures, "the trainer's input: one writer, one reader", json_out=json_out)


def measure(*, sample_mib: int, samples: int, repeats: int) -> list[Figure]:
    """The figures of one run; the ways take turns."""
    tokens = max(1, sample_mib * MIB // _BYTES_PER_TOKEN)
    samples += _WARM * PER_BATCH
    ways = ("ring", "files", "ring-gpu", "files-gpu") if _cuda() else ("ring", "files")
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, several in found.items():
            several.append(_once(way, tokens, samples))

    medians = {
        way: Measured(*map(statistics.median, zip(*map(astuple, several), strict=True)))
        for way, several in found.items()
    }
    ring, files = medians["ring"], medians["files"]
    saved = files.reader_cpu_s / ring.reader_cpu_s
    size = tokens * _BYTES_PER_TOKEN / MIB
    peer = "speculators" if _speculators() else "speculators' steps"
    figures = [
        Figure(f"ring to batch, samples of {size:.0f} MiB", ring.samples_s, "1/s"),
        Figure(f"files to batch by {peer}", files.samples_s, "1/s"),
        Figure("ring / files", ring.samples_s / files.samples_s, "x", goal=3),
        Figure("ring: CPU of the reader", ring.reader_cpu_s, "s/GB"),
        Figure("files: CPU of the reader", files.reader_cpu_s, "s/GB"),
        Figure("CPU of readers, files / ring", saved, "x", goal=3),
        Figure("ring: CPU of the writer", ring.writer_cpu_s, "s/GB"),
        Figure("files: CPU of the writer", files.writer_cpu_s, "s/GB"),
    ]
    if _cuda():
        ring, files = medians["ring-gpu"], medians["files-gpu"]
        figures += [
            Figure("ring to batch on the GPU", ring.samples_s, "1/s"),
            Figure("files to batch on the GPU", files.samples_s, "1/s"),
            Figure("on the GPU, ring / files", ring.samples_s / files.samples_s, "x"),
            Figure("on the GPU, ring: CPU of the reader", ring.reader_cpu_s, "s/GB"),
            Figure("on the GPU, files: CPU of the reader", files.reader_cpu_s, "s/GB"),
        ]
    return figures


def _once(way: str, tokens: int, samples: int) -> Measured:
    name = f"bench-{secrets.token_hex(4)}"
    command = [sys.executable, "-m", "reader.bench.input"]
    options = [name, str(tokens), str(samples)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, f"{way.split('-')[0]}-write", *options], **pipes) as write,
        subprocess.Popen([*command, f"{way}-read", *options], **pipes) as read,
    ):
        answers = []
        for process in (read, write):
            out, _ = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"bench input: {way} failed, see above")
            answers.append(json.loads(out))
    (count, seconds, reader_cpu), writer_cpu = answers
    gigabytes = tokens * _BYTES_PER_TOKEN / 1e9
    return Measured(
        count / seconds, reader_cpu / (count * gigabytes), writer_cpu / (samples * gigabytes)
    )


# --- the writers: each prints its CPU seconds ---------------------------------------------------


def _source(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, LAYERS, HIDDEN).bfloat16(), torch.arange(tokens)


def ring_write(name: str, tokens: int, samples: int) -> None:
    """Puts samples into a ring."""
    states, ids = _source(tokens)
    page = 1 << 16
    pages = (tokens * (_BYTES_PER_TOKEN + 8) + page) // page + 1
    producer = shmconn.Producer.create(
        name,
        size=_AHEAD * pages * page + (1 << 22),
        layer_ids=range(1, LAYERS + 1),
        hidden_size=HIDDEN,
        groups=["bench"],
    )
    begin = time.process_time()
    for index in range(samples):
        producer.put(states, ids, request_id=str(index), timeout=60)
    print(time.process_time() - begin)
    producer.close()


def files_write(name: str, tokens: int, samples: int) -> None:
    """save_file, renamed when whole, as far ahead as the ring would allow."""
    states, ids = _source(tokens)
    folder = _folder(name)
    begin = time.process_time()
    for index in range(samples):
        _until_not(folder / f"{index - _AHEAD}", there=True)
        save_file({"hidden_states": states, "token_ids": ids}, folder / "part")
        os.rename(folder / "part", folder / str(index))
    print(time.process_time() - begin)


# --- the readers: each prints samples, seconds and CPU seconds after the warm batches -----------


def ring_read(name: str, tokens: int, samples: int) -> None:
    """Batches out of the ring."""
    collator = Collator(PER_BATCH * tokens, pin=_cuda(), loss_mask=_ones(tokens))
    with SampleDataset(name, "bench", collator=collator, wait_s=60) as dataset:
        _time(dataset, tokens, samples)


def ring_gpu_read(name: str, tokens: int, samples: int) -> None:
    """Batches on the device, by DMA out of the ring."""
    collator = Collator(PER_BATCH * tokens, device="cuda", loss_mask=_ones(tokens, "cuda"))
    with (
        SampleDataset(name, "bench", collator=collator, pin=True, wait_s=60) as dataset,
        CudaPrefetcher(dataset, "cuda") as batches,
    ):
        _time(batches, tokens, samples)


def _ones(tokens: int, device: str = "cpu") -> Callable[[Sample], torch.Tensor]:
    ones = torch.ones(tokens, dtype=torch.bool, device=device)

    def mask(sample: Sample) -> torch.Tensor:
        return ones

    return mask


def files_read(name: str, tokens: int, samples: int, *, on_gpu: bool = False) -> None:
    """Batches out of files."""
    folder = _folder(name)
    ones = torch.ones(tokens, dtype=torch.bool)
    load, collate = _peer(folder, PER_BATCH * tokens)

    def batches() -> Iterator[Tensors]:
        for first in range(0, samples, PER_BATCH):
            items = []
            for index in range(first, min(samples, first + PER_BATCH)):
                _until_not(folder / str(index), there=False)
                items.append(_item(load(folder / str(index)), ones))
            batch = collate(items)
            del items
            if _cuda():
                batch = _pinned(batch)
            if on_gpu:
                batch = {key: value.to("cuda", non_blocking=True) for key, value in batch.items()}
            yield batch

    try:
        _time(batches(), tokens, samples)
    finally:
        shutil.rmtree(folder)


def files_gpu_read(name: str, tokens: int, samples: int) -> None:
    """Batches out of files, on the device."""
    files_read(name, tokens, samples, on_gpu=True)


def _cuda() -> bool:
    return torch.cuda.is_available()


def _time(batches: Any, tokens: int, samples: int) -> None:
    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []
    counted = seen = 0
    for index, batch in enumerate(batches):
        # On a device this waits for the batch, too.
        count = int((batch["document_ids"] >= 0).sum()) // tokens
        seen += count
        counted += count if index >= _WARM else 0
        times.append((time.perf_counter(), time.process_time()))
    taken = [last - first for first, last in zip(times[_WARM - 1], times[-1], strict=True)]
    wrong = int((batch["input_ids"][0, :tokens].cpu() != torch.arange(tokens)).sum())
    if seen != samples or wrong or not counted:
        raise SystemExit(f"{seen} of {samples} samples came, {wrong} token ids are wrong")
    print(json.dumps([counted, *taken]))


# --- speculators 0.9 ----------------------------------------------------------------------------


def _speculators() -> bool:
    try:
        import speculators.train.data  # noqa: F401
    except ImportError:
        return False
    return True


def _peer(
    folder: Path, max_len: int
) -> "tuple[Callable[[Path], Tensors], Callable[[list[Tensors]], Tensors]]":
    """How its file backend loads a sample and deletes it, and its collation."""
    if not _speculators():
        return _load, lambda items: collate(items, max_len)
    from hs_connectors import FileTransfer
    from speculators.train.data import CollateFn

    transfer = FileTransfer(folder)

    def load(path: Path) -> Tensors:
        loaded: Tensors = transfer.get_generated({"hidden_states_path": str(path)})
        transfer.delete(str(path))
        return loaded

    return load, CollateFn(max_len, HIDDEN, LAYERS - 1)


def _load(path: Path) -> Tensors:
    loaded: Tensors = load_file(path)
    path.unlink()
    return loaded


def _item(loaded: Tensors, loss_mask: torch.Tensor) -> Tensors:
    """ArrowDataset._get_raw_data and BaseDataset.__getitem__ of speculators/train/data.py."""
    states = loaded["hidden_states"]
    return {
        "hidden_states": states[:, :-1].flatten(1),
        "input_ids": loaded["token_ids"],
        "verifier_last_hidden_states": states[:, -1],
        "loss_mask": loss_mask,
        "lengths": torch.tensor([len(states)]),
        "position_ids": torch.arange(len(states)),
    }


def collate(items: list[Tensors], max_len: int) -> Tensors:
    """CollateFn.__call__ of speculators/train/data.py, for samples that are all there."""
    batch: Tensors = {}
    for key, first in items[0].items():
        if key == "lengths":
            continue
        dtype = torch.bfloat16 if "hidden_states" in key else first.dtype
        out = torch.zeros((max_len, *first.shape[1:]), dtype=dtype)
        offset = 0
        for item in items:
            rows = min(len(item[key]), max_len - offset)
            out[offset : offset + rows] = item[key][:rows]
            offset += rows
            if offset == max_len:
                break
        batch[key] = out.unsqueeze(0)
    lengths, total = [], 0
    for item in items:
        length = int(item["lengths"])
        lengths.append(min(length, max_len - total))
        total += length
        if total >= max_len:
            break
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    padding = -1 * torch.ones(max_len - len(documents), dtype=torch.long)
    batch["document_ids"] = torch.cat([documents, padding]).unsqueeze(0)
    return batch


def _pinned(batch: Tensors) -> Tensors:
    """As its DataLoader's pin_memory=True does."""
    return {key: value.pin_memory() for key, value in batch.items() if torch.is_tensor(value)}


def _folder(name: str) -> Path:
    folder = Path("/dev/shm") / name
    folder.mkdir(exist_ok=True)
    return folder


def _until_not(path: Path, *, there: bool) -> None:
    while path.exists() == there:
        time.sleep(0.0005)


def main() -> None:
    """`python -m reader.bench.input ROLE NAME TOKENS SAMPLES`."""
    role, name, tokens, samples = sys.argv[1:]
    roles: dict[str, Callable[[str, int, int], None]] = {
        "ring-write": ring_write,
        "ring-read": ring_read,
        "files-write": files_write,
        "files-read": files_read,
        "ring-gpu-read": ring_gpu_read,
        "files-gpu-read": files_gpu_read,
    }
    roles[role](name, int(tokens), int(samples))


if __name__ == "__main__":
    main()
