# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own, that generates when it is told to.

The parent starts it with a `Spec` and talks to it by a pipe; several can be up at once, so that
repeats alternate between them. Weights are dummies: the shapes make the speed.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

_SHAPES: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 1000,
    },
}
LARGEST_CONTEXT = 80_000


@dataclass(frozen=True)
class Spec:
    """One engine.

    Attributes:
        name: ours, stock, throw (extraction, all thrown away), none (no extraction) or both.
        kv_bytes: of the KV cache on the device.
        blocks: scheduler's blocks, instead of what ``kv_bytes`` gives.
        weights: random ones from a file: dummies are not the same for every ``tp``.
        tp: tensor-parallel size.
        gpus: the device numbers that it sees, and ``reader_gpu`` its reader's; all if empty.
        reads: whether it has a reader of its own.
    """

    name: str
    shape: str
    layers: tuple[int, ...]
    device: str
    ring: str = ""
    ring_size: str = "4GiB"
    folder: str = ""
    max_model_len: int = 8300
    batched_tokens: int = 8192
    sequences: int = 128
    kv_bytes: int = 8 << 30
    blocks: int | None = None
    eager: bool = False
    stats: bool = False
    weights: bool = False
    tp: int = 1
    gpus: str = ""
    reader_gpu: str = ""
    reads: bool = True
    log: str = "/dev/null"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        """Size of one layer's state."""
        return _SHAPES[self.shape]["hidden_size"]

    @property
    def bytes_per_token(self) -> int:
        """Of the hidden states, in bf16."""
        return self.hidden * len(self.layers) * 2

    def transfer(self) -> dict[str, Any] | None:
        """The KV transfer configuration."""
        ours: dict[str, Any] = {
            "kv_connector": "ShmHiddenStatesConnector",
            "kv_connector_module_path": "shmconn.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"ring": self.ring, "ring_size": self.ring_size},
        }
        stock: dict[str, Any] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": self.folder},
        }
        if self.device == "cpu":
            stock |= {
                "kv_connector": "StockOnHost",
                "kv_connector_module_path": "reader.bench.stock",
            }
        throw: dict[str, Any] = {
            "kv_connector": "ThrowAway",
            "kv_connector_module_path": "reader.bench.stock",
            "kv_role": "kv_producer",
        }
        both: dict[str, Any] = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [ours, stock]},
        }
        return {"ours": ours, "stock": stock, "throw": throw, "both": both}.get(self.name)

    def options(self, model: Path) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``."""
        options: dict[str, Any] = {
            "model": str(model),
            "load_format": "auto" if self.weights else "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.sequences,
            "enforce_eager": self.eager,
            "tensor_parallel_size": self.tp,
            "disable_log_stats": not self.stats,
            "worker_extension_cls": "reader.bench.stock.Probe",
        }
        if self.blocks is not None:
            options["num_gpu_blocks_override"] = self.blocks
        if self.device != "cpu":
            # Several engines share the card: each is given its bytes, and none takes a share.
            options |= {
                "attention_backend": "FLASH_ATTN",
                "kv_cache_memory_bytes": self.kv_bytes,
                "gpu_memory_utilization": 0.1,
            }
            if not self.eager:
                options["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 32, 128]}
        if self.name != "none":
            layers = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
            options["speculative_config"] = {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            }
            options["kv_transfer_config"] = self.transfer()
        return options


def write_model(folder: Path, shape: str, *, weights: bool = False) -> Path:
    """A folder with the configuration of a Qwen3 of this shape, and random weights if asked."""
    model = folder / shape
    model.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": LARGEST_CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_SHAPES[shape],
    }
    if weights:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        kind = AutoConfig.for_model(**config)
        AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16).save_pretrained(model)
    else:
        (model / "config.json").write_text(json.dumps(config))
    return model


class Child:
    """A process of the benchmark, told what to do by a pipe."""

    def __init__(
        self, module: str, arguments: list[str], log: str, environment: dict[str, str]
    ) -> None:
        mine, theirs = Pipe()
        self._pipe = mine
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        self.process = start_group(command, self._log, environment, [theirs.fileno()])
        theirs.close()

    def tell(self, what: str, **arguments: Any) -> None:
        """Sends a command."""
        self._pipe.send((what, arguments))

    def answer(self, timeout_s: float) -> Any:
        """The reply to the oldest command without one.

        Raises:
            RuntimeError: it failed, died, or did not answer in time.
        """
        try:
            if not self._pipe.poll(timeout_s):
                raise RuntimeError(f"{self.process.args!r}: no answer within {timeout_s:.0f} s")
            reply = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{self.process.args!r}: it died") from error
        if isinstance(reply, Exception):
            raise RuntimeError(f"{self.process.args!r}: {reply}") from reply
        return reply

    def ask(self, what: str, timeout_s: float = 120, **arguments: Any) -> Any:
        """`tell` and `answer`."""
        self.tell(what, **arguments)
        return self.answer(timeout_s)

    def ask_to_end(self) -> None:
        """Asks it to end; it goes on for a moment."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", {}))

    def close(self, grace_s: float) -> None:
        """Waits for its end, and kills its process group if it does not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        kill_group(self.process)
        self._pipe.close()
        os.close(self._log)


def start_group(
    command: Sequence[str],
    log: IO[str] | int,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """A process in a group of its own that says all it says in a log.

    Args:
        environment: added to that of this process.
    """
    return subprocess.Popen(
        command,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **environment},
        process_group=0,
    )


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(pipe: Connection, commands: Any) -> None:
    """Answers commands by the methods of an object until `close`."""
    while True:
        what, arguments = pipe.recv()
        if what == "close":
            return
        try:
            reply = getattr(commands, what)(**arguments)
        except Exception as error:
            reply = RuntimeError(f"{what}: {type(error).__name__}: {error}")
        pipe.send(reply)


def cpu_seconds() -> float:
    """User and system time of this process and of all processes under it."""
    ticks, parents = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            parents[int(entry)] = int(fields[1])
            ticks[int(entry)] = int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    for _ in range(8):
        family |= {one for one, parent in parents.items() if parent in family}
    return sum(ticks.get(one, 0) for one in family) / os.sysconf("SC_CLK_TCK")


class _Commands:
    """What the parent may ask of an engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def batch(
        self,
        count: int,
        tokens: int,
        seed: int,
        spread: int = 0,
        max_tokens: int = 1,
        outputs: bool = False,
    ) -> dict[str, Any]:
        """Generates for ``count`` prompts of ``tokens`` tokens, at once.

        Args:
            spread: prompts have up to so many tokens less, and answers from 1 to ``max_tokens``.
            outputs: every second request captures its output tokens, too.
        """
        from vllm import SamplingParams

        rng = random.Random(seed)
        vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        sizes = [tokens - rng.randint(0, spread) for _ in range(count)]
        prompts = [
            {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(size)]}
            for size in sizes
        ]
        sampling = [
            SamplingParams(
                max_tokens=rng.randint(1, max_tokens) if spread else max_tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"include_output_tokens": True}}
                if outputs and index % 2
                else None,
            )
            for index in range(count)
        ]
        cpu, began = cpu_seconds(), time.monotonic()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        ended = time.monotonic()
        return {
            "seconds": ended - began,
            "ended": ended,
            "tokens": sum(sizes),
            "cpu_s": cpu_seconds() - cpu,
            "last": answers[-1].kv_transfer_params,
        }

    def cpu(self) -> float:
        """CPU seconds so far."""
        return cpu_seconds()

    def memory(self, reset: bool) -> Any:
        """The worker's memory; the peaks start anew if ``reset``."""
        if reset:
            self._llm.collective_rpc("bench_reset")
        return self._llm.collective_rpc("bench_memory")[0]

    def aborted(self, count: int, tokens: int, seed: int) -> int:
        """Every second request is aborted, one a step; says how many were before their end."""
        from vllm import SamplingParams

        rng, engine = random.Random(seed), self._llm.llm_engine
        vocabulary = engine.model_config.get_vocab_size()
        ids = [f"abort-{seed}-{index}" for index in range(count)]
        for one in ids:
            prompt = {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(tokens)]}
            sampling = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False)
            engine.add_request(one, prompt, sampling)
        ended: set[str] = set()
        doomed = ids[::2]
        # A step waits for an answer, so the others keep the engine busy.
        while engine.has_unfinished_requests():
            if doomed:
                engine.abort_request([doomed.pop()])
            ended |= {answer.request_id for answer in engine.step() if answer.finished}
        return count - len(ended & set(ids))

    def all_free(self, at_most_s: float = 20.0) -> bool:
        """Whether all KV blocks are free, or become so: only then can the cache be reset."""
        deadline = time.monotonic() + at_most_s
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def preemptions(self) -> int:
        """Preemptions so far."""
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        return int(metrics["vllm:num_preemptions"].value)

    def about(self) -> dict[str, Any]:
        """What is running."""
        import torch
        import vllm

        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "blocks": config.cache_config.num_gpu_blocks,
        }


def start(spec: Spec, folder: Path) -> Child:
    """Starts an engine; its first answer comes when it is up."""
    model = folder / spec.shape
    if not (model / "config.json").exists():
        write_model(folder, spec.shape, weights=spec.weights)
    # Engines that compile at the same time must not share what they compile.
    kind = f"{spec.shape}-{spec.name}-{len(spec.layers)}-{spec.tp}-{spec.gpus.replace(',', '')}"
    gpus = {"CUDA_VISIBLE_DEVICES": spec.gpus} if spec.gpus else {}
    environment = {
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "shmconn-bench-cache" / kind),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **spec.environment,
        **gpus,
    }
    return Child(
        "reader.bench.engine", [json.dumps(asdict(spec)), str(folder)], spec.log, environment
    )


def main() -> None:
    """`python -m reader.bench.engine FD SPEC FOLDER`."""
    pipe = Connection(int(sys.argv[1]))
    fields = json.loads(sys.argv[2])
    spec = Spec(**{**fields, "layers": tuple(fields["layers"])})
    began = time.monotonic()
    try:
        from vllm import LLM

        from shmconn.plugin import register

        # vLLM looks metrics up by the connector's name, also where shmconn is not installed.
        register()

        commands = _Commands(LLM(**spec.options(Path(sys.argv[3]) / spec.shape)))
    except Exception as error:
        pipe.send(RuntimeError(f"engine {spec.name}: {type(error).__name__}: {error}"))
        raise
    pipe.send({"start_s": time.monotonic() - began, **commands.about()})
    serve(pipe, commands)


if __name__ == "__main__":
    main()
