# SPDX-License-Identifier: Apache-2.0
"""The engines and readers of `python -m reader.bench.vllm`, and where their figures go."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reader.bench.engine import Child, Spec, start

# Of Qwen3-8B, as EAGLE-3's trainers take them, and the last.
LAYERS = (2, 18, 33, 36)
START_S = 420.0


class Run:
    """What all parts share: where figures go, sizes, and how much time there is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device: str = options.device
        self.tiny: bool = options.tiny
        self.repeats: int = options.repeats
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="bench-"))
        self.deadline: float = time.monotonic() + options.limit_s
        self.part = ""
        self.began = time.time()

    @property
    def figures(self) -> Path:
        """The file of all figures, one JSON object a line."""
        return self.out / "figures.jsonl"

    def note(self, what: str, **fields: Any) -> None:
        """Writes one figure down, whatever happens next."""
        record = {"part": self.part, "what": what, "at": round(time.time(), 3), **fields}
        with open(self.figures, "a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(json.dumps(record)[:300], flush=True)

    def left(self) -> float:
        """Seconds until no further repeat is begun."""
        return self.deadline - time.monotonic()


class Crew:
    """Engines that are up at once, each with its reader."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engines: dict[str, Child] = {}
        self.readers: dict[str, Child] = {}
        self.specs: dict[str, Spec] = {}
        self._folders: list[Path] = []

    def spec(self, name: str, shape: str, layers: Sequence[int], **fields: Any) -> Spec:
        """An engine of this run."""
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
        self._folders.append(folder)
        spec = Spec(
            name,
            "tiny" if self.run.tiny else shape,
            (1, 2, 3, 4) if self.run.tiny else tuple(layers),
            self.run.device,
            ring=f"bench-{secrets.token_hex(4)}",
            folder=str(folder),
            log=str(self.run.out / "log.txt"),
        )
        spec = replace(spec, **fields)
        if self.run.tiny:
            # Compiling takes longer than all else on the CPU.
            spec = replace(
                spec,
                ring_size="16MiB",
                max_model_len=1024,
                batched_tokens=256,
                sequences=8,
                eager=True,
            )
        return spec

    def start(self, specs: dict[str, Spec]) -> None:
        """Starts all of them together; those that fail are noted and left out."""
        self.specs |= specs
        started = {key: start(spec, self.run.work) for key, spec in specs.items()}
        for key, child in started.items():
            try:
                about = child.answer(START_S)
            except RuntimeError as error:
                self.run.note("failed", engine=key, error=str(error)[-2000:])
                child.close(0)
                continue
            self.engines[key] = child
            self.run.note("up", engine=key, **about)
        for key, spec in specs.items():
            if key in self.engines and spec.reads:
                self.start_reader(key, spec)

    def start_reader(self, key: str, spec: Spec) -> None:
        """Starts what reads this engine's samples."""
        places = {"ours": [spec.ring], "stock": [spec.folder], "both": [spec.ring, spec.folder]}
        if spec.name not in places:
            return
        kind = "check" if spec.name == "both" else spec.name
        device = "cpu" if kind == "check" else self.run.device
        gpus = {"CUDA_VISIBLE_DEVICES": spec.reader_gpu} if spec.reader_gpu else {}
        reader = Child(
            "reader.bench.drains",
            [kind, device, *places[spec.name]],
            spec.log,
            spec.environment | gpus,
        )
        reader.answer(120)
        self.readers[key] = reader

    def batch(self, key: str, note: str, **arguments: Any) -> dict[str, Any] | None:
        """One batch on one engine, until its reader has all of it; written down."""
        engine, reader = self.engines.get(key), self.readers.get(key)
        if engine is None:
            return None
        before = reader.ask("state") if reader else {}
        began = time.monotonic()
        result: dict[str, Any] = engine.ask("batch", 200, **arguments)
        after = {}
        if reader is not None:
            # A request that vLLM could not keep whole is recorded as lost, and nothing comes.
            wanted = before["samples"] + before["lost"] + arguments["count"]
            after = reader.ask("wait", 130, requests=wanted, at_most_s=100.0)
            if after["samples"] + after["lost"] < wanted or after["problem"]:
                self.run.note("reader failed", engine=key, wanted=wanted, state=after)
        spec = self.specs[key]
        record = {
            "engine": key,
            "name": spec.name,
            "shape": spec.shape,
            "layers": len(spec.layers),
            "tokens": result["tokens"],
            "seconds": result["seconds"],
            "tokens_s": result["tokens"] / result["seconds"],
            "bytes": result["tokens"] * spec.bytes_per_token,
            "engine_cpu_s": result["cpu_s"],
            "wall_s": time.monotonic() - began,
            "ended": result["ended"],
        }
        if after:
            record["reader_cpu_s"] = after["cpu_s"] - before["cpu_s"]
            record["arrived_after_answer_s"] = after["last"] - result["ended"]
        self.run.note(note, **record)
        return record

    def close(self) -> None:
        """Ends all processes and removes their files."""
        everybody = (*self.readers.values(), *self.engines.values())
        for child in everybody:
            child.ask_to_end()
        deadline = time.monotonic() + 15
        for child in everybody:
            child.close(max(0.0, deadline - time.monotonic()))
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        for spec in self.specs.values():
            for file in Path("/dev/shm").glob(f"*shmconn.{spec.ring}*"):
                file.unlink(missing_ok=True)


@contextlib.contextmanager
def crew(run: Run) -> Iterator[Crew]:
    """A crew that is ended whatever happens."""
    one = Crew(run)
    try:
        yield one
    finally:
        one.close()


def in_turn(run: Run, crew: Crew, keys: list[str], count: int, tokens: int) -> None:
    """Batches on each engine in turn, after one that warms up."""
    for repeat in range(run.repeats + 1):
        if run.left() < 20 and repeat > 2:
            run.note("cut", repeats=repeat - 1)
            return
        # Each engine is first, second, ... equally often.
        order = keys[repeat % len(keys) :] + keys[: repeat % len(keys)]
        for key in order:
            note = "batch" if repeat else "warm"
            crew.batch(key, note, count=count, tokens=tokens, seed=1000 * repeat + len(key))


def measure_handoff(run: Run, team: Crew) -> None:
    """One request at a time, until its sample is on the reader's device."""
    tokens = 300 if run.tiny else 8192
    rounds, each = (1, 2) if run.tiny else (5, 20)
    for name in ("ours", "stock"):
        team.batch(name, "warm", count=1, tokens=tokens, seed=99_999)
    for turn in range(rounds):
        if run.left() < 30 and turn > 1:
            run.note("cut", rounds=turn)
            break
        if "ours" in team.readers:
            nbytes = tokens * team.specs["ours"].bytes_per_token
            times = team.readers["ours"].ask("two_copies", nbytes=nbytes, repeats=7)
            run.note("two copies", bytes=nbytes, seconds=times[0])
        for name in ("ours", "stock"):
            for one in range(each):
                seed = 100 * turn + one
                team.batch(name, "handoff", count=1, tokens=tokens, seed=seed)
