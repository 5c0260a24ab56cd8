# SPDX-License-Identifier: Apache-2.0
"""One offline engine of real vLLM in this very process, so that all of it can be looked at.

A script of its own, as vLLM is set up by environment variables: `python modes.py NAME FOLDER`.
"""

import os
import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shmconn
from shmconn import directory

HERE = Path(__file__).parent
LAYERS = [1, 2, 4]
WATCHDOG_S = 120
# Relative error of a row between two float32 runs; bfloat16 rounds to a 256th.
NOISE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
# Options of ``LLM`` that every engine of this process takes, a machine's own.
OPTIONS: dict[str, Any] = {}


def set_up(folder: Path) -> None:
    """What vLLM takes from the environment; before its first import."""
    twins = folder / "twins"
    twins.mkdir(exist_ok=True)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "SHMCONN_TWINS": str(twins),
    }


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that look like nothing else."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


def random_model(folder: Path, model_type: str, **fields: Any) -> Path:
    """A model with random weights, such that its layers differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    common = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.05}
    config = AutoConfig.for_model(model_type, **common | fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def reference(model: Path, ids: list[int], layers: Sequence[int]) -> torch.Tensor:
    """What transformers computes in float32: layer k is the output of the k-th block."""
    from transformers import AutoModelForCausalLM

    body = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).model
    rows: list[torch.Tensor] = []
    for layer in layers:
        body.layers[layer - 1].register_forward_hook(
            lambda module, args, output: rows.append(
                (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1)
            )
        )
    with torch.inference_mode():
        body(torch.tensor([ids]), use_cache=False)
    return torch.stack(rows, 1)


def planted(ring: str, ring_size: str = "16MiB") -> dict[str, Any]:
    """The connector with a second copy; see `planted`."""
    return {
        "kv_connector": "PlantedConnector",
        "kv_connector_module_path": "planted",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"ring": ring, "ring_size": ring_size},
    }


class Offline:
    """An engine and a reader of its ring.

    Args:
        transfer: the KV transfer configuration, made of the ring's name.
        layers: that are captured.
        options: of ``LLM`` that differ.
    """

    def __init__(
        self,
        model: Path,
        *,
        transfer: Any = planted,
        layers: Sequence[int] = LAYERS,
        **options: Any,
    ) -> None:
        from vllm import LLM

        self.ring = f"t-{secrets.token_hex(6)}"
        # Whoever runs this takes away what a failure leaves of it.
        print("RING", self.ring, flush=True)
        self.layers = list(layers)
        self.llm = LLM(
            **{
                "model": str(model),
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "max_model_len": 512,
                "max_num_batched_tokens": 128,
                "max_num_seqs": 8,
                "enforce_eager": True,
                "disable_log_stats": False,
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {
                        "hf_config": {"eagle_aux_hidden_state_layer_ids": self.layers}
                    },
                },
                "kv_transfer_config": transfer(self.ring),
                **OPTIONS,
                **options,
            }
        )
        self.engine: Any = self.llm.llm_engine
        self.reader = shmconn.subscribe(self.ring, "tests")
        self.seen = 0
        # Requests of which vLLM had taken the blocks away before they finished.
        self.lost = 0

    @property
    def core(self) -> Any:
        """vLLM's engine itself."""
        return self.engine.engine_core.engine_core

    @property
    def usage(self) -> float:
        """Share of KV blocks that somebody owns."""
        return float(self.core.scheduler.kv_cache_manager.usage)

    @property
    def idle(self) -> bool:
        """Whether it has no request and no block any more."""
        return self.usage == 0 and not self.core.scheduler.requests

    def settle(self) -> None:
        """Steps as the engine's own loop would, until no request is left, held ones included."""
        deadline = time.monotonic() + WATCHDOG_S
        while self.core.scheduler.has_requests():
            self.engine.step()
            time.sleep(0.001)
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there: {list(self.core.scheduler.requests)}")

    def round(
        self,
        prompts: Sequence[Any],
        max_tokens: int = 3,
        n: int = 1,
        may_lose: int = 0,
        **options: Any,
    ) -> list[shmconn.Sample]:
        """Generates, and checks that each answer has its sample and that the engine is empty.

        Args:
            may_lose: how many samples there may be less, each recorded as lost.

        Returns:
            The samples, copied out, in the order of the prompts.
        """
        from vllm import SamplingParams

        wish = {"include_output_tokens": True, "tag": "twin"}
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            temperature=0.0 if n == 1 else 1.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": wish},
        )
        given = [{"prompt_token_ids": one} if isinstance(one, list) else one for one in prompts]
        outputs = self.llm.generate(given, sampling, use_tqdm=False, **options)
        samples = self.take(len(prompts) * n, may_lose)
        missing = len(prompts) * n - len(samples)
        wanted = []
        for output in outputs:
            known = output.prompt_token_ids if output.prompt_token_ids else None
            for choice in output.outputs:
                assert len(choice.token_ids) == max_tokens
                wanted.append((known, list(choice.token_ids)[:-1]))
        found = []
        for prompt_ids, answer in wanted:
            # One answer is one sample: each is found once.
            fits = [
                sample
                for sample in samples
                if sample.token_ids.tolist()[sample.metadata["prompt_tokens"] :] == answer
                and (
                    sample.metadata.get("no_token_ids")
                    or sample.token_ids.tolist() == list(prompt_ids or ()) + answer
                )
            ]
            if not fits and missing:
                missing -= 1
                continue
            assert fits, f"no sample for {prompt_ids} + {answer}"
            samples.remove(fits[0])
            found.append(fits[0])
        assert samples == []
        return found

    def take(self, count: int, may_lose: int = 0) -> list[shmconn.Sample]:
        """The next samples, as many as there must be; bit for bit what the cache held."""
        self.settle()
        samples = self.read()
        self.seen += len(samples)
        self.lost += count - len(samples)
        assert count - may_lose <= len(samples) <= count, f"{len(samples)} samples, not {count}"
        assert self.idle
        self.check_twins(samples)
        return samples

    def read(self) -> list[shmconn.Sample]:
        """What is in the ring now, copied out."""
        samples = []
        while (sample := self.reader.next(timeout=0)) is not None:
            samples.append(sample.clone())
            sample.release()
        return samples

    def check_twins(self, samples: list[shmconn.Sample]) -> None:
        """They are bit for bit what the cache held."""
        for sample in samples:
            twin = torch.load(
                Path(os.environ["SHMCONN_TWINS"])
                / f"{sample.handle.generation}-{sample.number}.pt",
                map_location="cpu",
            )
            assert sample.hidden_states.shape == twin.shape
            assert sample.hidden_states.dtype == twin.dtype
            assert torch.equal(
                sample.hidden_states.view(torch.uint8), twin.contiguous().view(torch.uint8)
            )
            assert sample.hidden_states.isfinite().all()

    def close(self, lost: int = 0) -> None:
        """Counts add up, with this many requests lost on purpose; nothing is left in /dev/shm."""
        (info,) = directory.rings(self.ring)
        assert (info.published, info.lost) == (self.seen, self.lost + lost)
        assert info.accepted == info.settled == info.published + info.lost
        deadline = time.monotonic() + WATCHDOG_S
        while (info.free_pages, info.free_slots) != (info.pages, info.slots):
            # An idle producer takes back what readers released once a second.
            assert time.monotonic() < deadline, info
            time.sleep(0.1)
            (info,) = directory.rings(self.ring)
        self.engine.engine_core.shutdown()
        assert [end.died for end in self._ends()] == [False]
        self.reader.close()
        left = [path.name for path in Path("/dev/shm").glob(f"*shmconn.{self.ring}*")]
        assert left == []

    def _ends(self) -> list[Any]:
        assert self.reader.next(timeout=10) is None and self.reader.ended
        return list(self.reader.ends)


class Apart(Offline):
    """An engine in a process of its own, as vLLM has it if nothing else is asked for."""

    def __init__(self, model: Path, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        # A fork could not use a CUDA device that its parent has so much as counted.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        super().__init__(model, **options)

    @property
    def usage(self) -> float:
        """0 if vLLM lets go of its prefix cache, which it does only if no block has an owner."""
        return 0.0 if self.llm.reset_prefix_cache() else 1.0

    @property
    def idle(self) -> bool:
        """Whether it has no block any more, and so no request that ever ran."""
        return self.usage == 0

    def settle(self) -> None:
        """Until each request has its sample or tombstone, and the engine its blocks."""
        deadline = time.monotonic() + WATCHDOG_S
        while self._unsettled() or not self.idle:
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there: {directory.rings(self.ring)}")

    def _unsettled(self) -> int:
        (info,) = directory.rings(self.ring)
        return info.accepted - info.settled


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative error of a row, over the hidden axis."""
    got, reference = got.float(), reference.float()
    return float(((got - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def agree(first: Sequence[shmconn.Sample], second: Sequence[shmconn.Sample]) -> float:
    """Two runs of the same prompts: the rows are equal but for the noise of the kernels.

    Returns:
        The largest relative error of a row.
    """
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        tokens = min(one.metadata["prompt_tokens"], other.metadata["prompt_tokens"])
        a, b = one.hidden_states[:tokens], other.hidden_states[:tokens]
        largest = max(largest, error(a, b))
        assert error(a, b) < NOISE[a.dtype], f"{tokens} tokens differ by {error(a, b)}"
        if tokens > 1:
            # The check sees what it is for: a row of a neighbour, or another layer.
            assert error(a.roll(1, 0), b) > NOISE[a.dtype]
            assert error(a.roll(1, 1), b) > NOISE[a.dtype]
    return largest
