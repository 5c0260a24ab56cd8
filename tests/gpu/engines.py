# SPDX-License-Identifier: Apache-2.0
"""The modes of `tests.gpu.modes`, each one engine of real vLLM in this process.

Those of `tests/vllm/modes.py` run here as they are, with this device's options.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

import modes
import offline
import torch
from offline import Offline, agree, planted, prompt, random_model

LAYERS = [2, 6, 7, 8]
SEED = 5
CUDA = torch.cuda.is_available()
# A share of the memory that others on the device cannot change: vLLM's own estimate of what is
# free goes wrong beside another engine that is starting.
_MEMORY = {"gpu_memory_utilization": 0.05}
_SMALL: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 28, **_MEMORY}
_LARGE: dict[str, Any] = {
    "kv_cache_memory_bytes": 4 << 30,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    **_MEMORY,
}


def engine(folder: Path, **options: Any) -> Offline:
    """An engine with the shapes of Qwen3-0.6B, eight layers of them, or a tiny one on a CPU."""
    hidden, heads = (1024, 16) if CUDA else (64, 2)
    model = random_model(
        folder / "model",
        "qwen3",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128 if CUDA else 32,
        max_position_embeddings=4096,
        initializer_range=0.02,
        tie_word_embeddings=True,
    )
    common: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64, "layers": LAYERS}
    common |= _LARGE if CUDA else {}
    # A round's samples must all find room: they are read when all answers are there.
    size = "2GiB" if CUDA else "64MiB"
    made = Offline(model, transfer=lambda ring: planted(ring, size), **common | options)
    config = made.engine.vllm_config
    print(
        "ENGINE",
        f"async {bool(config.scheduler_config.async_scheduling)},",
        f"graphs {config.compilation_config.cudagraph_mode.name},",
        f"cache {config.cache_config.cache_dtype},",
        f"blocks {config.cache_config.num_gpu_blocks}",
        flush=True,
    )
    return made


def prompts(count: int) -> list[list[int]]:
    """Prompts of any length, every fourth with the beginning of its neighbour."""
    longest = 1500 if CUDA else 300
    made: list[list[int]] = []
    for index in range(count):
        ids = prompt(1 + (index * 7919) % longest, SEED + index)
        made.append(made[-1][: len(made[-1]) // 2] + ids[:100] if index % 4 == 3 else ids)
    return made


def show(made: Offline, count: int, max_tokens: int = 20, may_lose: int = 0) -> None:
    """N requests, N samples, twice, and some again from the prefix cache."""
    asked = prompts(count)
    first = made.round(asked, max_tokens=max_tokens, may_lose=may_lose)
    assert made.llm.reset_prefix_cache()
    again = made.round(asked, max_tokens=max_tokens, may_lose=may_lose)
    noise = 0.0
    if not made.lost:
        noise = agree(first, again)
    cached = made.round(asked[: count // 2], max_tokens=1, may_lose=may_lose)
    if not made.lost:
        noise = max(noise, agree(cached, first[: count // 2]))
    dtypes = ", ".join(sorted({sample.dtype for sample in first}))
    print(
        *("SAMPLES", made.seen, "of", made.seen + made.lost, "requests,", dtypes),
        f"within {noise:.4f} of each other",
        flush=True,
    )


def base(folder: Path, count: int) -> None:
    """What vLLM does if nothing is asked for, and several answers, and an abort."""
    made = engine(folder, enforce_eager=not CUDA)
    show(made, count)
    assert len(made.round(prompts(4), n=3)) == 12
    modes.abort_one(made, 1900 if CUDA else 400, max_tokens=30)
    made.close(lost=1)


def eager(folder: Path, count: int) -> None:
    """No graphs."""
    made = engine(folder)
    show(made, count)
    made.close()


def fp8(folder: Path, count: int) -> None:
    """A KV cache of 8 bits: samples keep the model's type."""
    made = engine(folder, kv_cache_dtype="fp8")
    show(made, count)
    (sample,) = made.round(prompts(1))
    assert sample.dtype == "bfloat16"
    made.close()


def preemption(folder: Path, count: int) -> None:
    """A request that loses its blocks in its very last step has no rows left to copy."""
    made = engine(folder, num_gpu_blocks_override=260 if CUDA else 9)
    show(made, count, max_tokens=100 if CUDA else 200, may_lose=3)
    metrics = made.llm.get_metrics()
    (preempted,) = (one.value for one in metrics if one.name == "vllm:num_preemptions")
    lost = {
        one.labels["reason"]: int(one.value)
        for one in metrics
        if one.name == "vllm:shmconn_samples_lost" and one.value
    }
    print("PREEMPTIONS", int(preempted), f"lost {lost or 0}", flush=True)
    assert preempted > 0 and set(lost) <= {"short"} and sum(lost.values()) == made.lost
    made.close()


def tp2(folder: Path, count: int) -> None:
    """Two tensor-parallel ranks."""
    made = engine(folder, tensor_parallel_size=2)
    show(made, count)
    made.close()


def _small(mode: Callable[[Path], None]) -> Callable[[Path, int], None]:
    def run(folder: Path, count: int) -> None:
        if CUDA:
            offline.OPTIONS |= _SMALL
        mode(folder)

    return run


# The most wanted first, in case time runs out.
MODES: dict[str, Callable[[Path, int], None]] = {
    **{one.__name__: one for one in (base, fp8, preemption)},
    **{
        one.__name__: _small(one)
        for one in (
            *(modes.mamba, modes.mla, modes.lora, modes.offloading, modes.prompt_embeds),
            *(modes.sleep, modes.plain, modes.apart, modes.pooling, modes.runner_v2),
        )
    },
    **{one.__name__: one for one in (eager, tp2)},
}
# Words with which vLLM itself refuses a mode, where it does.
REFUSALS = {
    "runner_v2": ("does not yet support: speculative method", "requires Triton"),
    "prompt_embeds": ("was provided via prompt_embeds",),
    "offloading": ("only supported on CUDA-alike and XPU GPUs",),
}
