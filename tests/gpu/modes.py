# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.modes --out DIR`: ways of running real vLLM on a GPU, one engine each.

    base         async scheduling, chunks, prefix cache, an abort
    fp8          KV cache in fp8: samples keep the model's dtype
    preemption   a cache so small that requests lose their blocks
    graphs       with torch.compile and CUDA graphs
    runner_v2    the second model runner, or vLLM's words that refuse it
    tp2          two tensor-parallel ranks, if there are two devices

Each mode gives N requests and must get N samples, bit for bit those of a second copy that the
worker takes of the same blocks, all KV blocks free afterwards, and counts that add up. A Qwen3 of
0.6B shapes with random weights. One line a mode goes to DIR/modes.jsonl, its log to DIR/MODE.log.
`--device cpu` rehearses with a small model what a CPU can do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VLLM_TESTS = Path(__file__).parents[1] / "vllm"
sys.path.append(str(VLLM_TESTS))

import torch  # noqa: E402
from offline import Offline, agree, prompt, random_model, set_up  # noqa: E402
from rings import remove_ring  # noqa: E402

LAYERS = [2, 6, 7, 8]
SEED = 5


def engine(folder: Path, device: str, **options: Any) -> Offline:
    """An engine of this run."""
    hidden, heads = (1024, 16) if device == "cuda" else (64, 2)
    model = random_model(
        folder / "model",
        "qwen3",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128 if device == "cuda" else 32,
        max_position_embeddings=4096,
        initializer_range=0.02,
        tie_word_embeddings=True,
    )
    common: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64, "layers": LAYERS}
    if device == "cuda":
        common |= {"max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.3}
        common |= {"max_model_len": 2048}
    made = Offline(model, **common | options)
    config = made.engine.vllm_config
    print(
        "ENGINE",
        f"async {bool(config.scheduler_config.async_scheduling)},",
        f"cache {config.cache_config.cache_dtype},",
        f"blocks {config.cache_config.num_gpu_blocks}",
    )
    return made


def prompts(device: str, count: int) -> list[list[int]]:
    """Prompts of any length, every fourth with the beginning of its neighbour."""
    longest = 1500 if device == "cuda" else 300
    made: list[list[int]] = []
    for index in range(count):
        ids = prompt(1 + (index * 7919) % longest, SEED + index)
        made.append(made[-1][: len(made[-1]) // 2] + ids[:100] if index % 4 == 3 else ids)
    return made


def show(made: Offline, device: str, count: int, max_tokens: int = 20) -> None:
    """N requests, N samples, twice: the second time from the prefix cache."""
    asked = prompts(device, count)
    first = made.round(asked, max_tokens=max_tokens)
    assert made.llm.reset_prefix_cache()
    again = made.round(asked, max_tokens=max_tokens)
    agree(first, again)
    cached = made.round(asked[:40], max_tokens=1)
    agree(cached, first[:40])
    dtypes = sorted({sample.dtype for sample in first})
    print("SAMPLES", made.seen, "of", 2 * count + min(count, 40), "requests,", *dtypes)


def preempted(made: Offline) -> int:
    """How often requests lost their blocks."""
    metrics = {metric.name: metric for metric in made.llm.get_metrics()}
    return int(getattr(metrics["vllm:num_preemptions"], "value", 0))


def base(folder: Path, device: str, count: int, **options: Any) -> None:
    made = engine(folder, device, **options)
    show(made, device, count)
    made.close()


def fp8(folder: Path, device: str, count: int) -> None:
    made = engine(folder, device, kv_cache_dtype="fp8")
    show(made, device, count)
    sample = made.round(prompts(device, 1))[0]
    assert sample.dtype == "bfloat16"
    made.close()


def preemption(folder: Path, device: str, count: int) -> None:
    blocks = 260 if device == "cuda" else 9
    made = engine(folder, device, num_gpu_blocks_override=blocks, max_num_seqs=64)
    show(made, device, count, max_tokens=200)
    print("PREEMPTIONS", preempted(made))
    assert preempted(made) > 0
    made.close()


def graphs(folder: Path, device: str, count: int) -> None:
    base(folder, device, count, enforce_eager=False)


def runner_v2(folder: Path, device: str, count: int) -> None:
    base(folder, device, count)


def tp2(folder: Path, device: str, count: int) -> None:
    base(folder, device, count, tensor_parallel_size=2)


MODES: dict[str, Callable[[Path, str, int], None]] = {
    one.__name__: one for one in (base, fp8, preemption, graphs, runner_v2, tp2)
}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode in a process of its own; what became of it."""
    out = Path(options.out)
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment["PYTHONPATH"] = f"{VLLM_TESTS}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    if name == "runner_v2":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    arguments = ["--one", name, "--device", options.device, "--count", str(options.count)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(out / f"{name}.log", "w") as log:
        command = [sys.executable, "-m", "tests.gpu.modes", *arguments, "--out", folder]
        try:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=options.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith("RING "):
            remove_ring(line.split()[1])
    said = [one for one in lines if one.split(" ")[0] in ("ENGINE", "SAMPLES", "PREEMPTIONS")]
    if code:
        said += [one for one in lines if "Error" in one][-2:]
    return {
        "mode": name,
        "passed": code == 0,
        "seconds": round(time.monotonic() - began),
        "said": said,
    }


def main() -> int:
    """Runs the modes; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for modes.jsonl and logs")
    parser.add_argument("--only", default="", help="modes, with commas between; all if left out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--count", type=int, default=200, help="requests of one round")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for one mode")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        set_up(Path(options.out))
        MODES[options.one](Path(options.out), options.device, options.count)
        print("DONE", options.one)
        return 0
    Path(options.out).mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",") if options.only else list(MODES)
    if options.only == "":
        if options.device == "cpu":
            chosen = ["base", "preemption"]
        elif torch.cuda.device_count() < 2:
            chosen.remove("tp2")
    if unknown := set(chosen) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    failed = 0
    with open(Path(options.out) / "modes.jsonl", "a") as file:
        for name in chosen:
            record = run(name, options)
            failed |= not record["passed"]
            file.write(json.dumps(record) + "\n")
            file.flush()
            state = "passed" if record["passed"] else "FAILED"
            print(f"{name:12} {state} {record['seconds']} s", *record["said"], sep="\n    ")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
