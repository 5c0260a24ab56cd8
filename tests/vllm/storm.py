# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind at once, ended in every way, through vLLM's engine in its own process:
`python storm.py FOLDER REQUESTS [--async-scheduling] [--ranks N] [--data-parallel N]`.

Plain ones, several answers, structured outputs, stop strings that are met and such that never are,
sessions of streamed inputs; clients that hang up at any moment; chunks, a shared prefix, a small
cache and a ring that holds a few. Whatever becomes of a request: it is settled, its blocks come
back, and each sample has the rows that transformers computes for its very tokens.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import random
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from offline import LAYERS, error, prompt, random_model, set_up
from rings import remove_ring
from server import make_model

import shmconn
from shmconn import directory

WATCHDOG_S = 120
# A row's relative error between vLLM's kernels and those of transformers, in float32.
NOISE = 1e-4
KINDS = ["plain", "output", "several", "structured", "stopped", "unstopped", "session"]


def model_with_words(folder: Path) -> Path:
    """A small random Llama with SmolLM2's tokenizer: stop strings and grammars need words."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(folder, "llama", max_position_embeddings=2048, **fields, **heads)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_model() / name, folder / name)
    return folder


def keep_async_scheduling() -> None:
    """vLLM turns async scheduling off on a CPU, where it gains nothing; its code runs there too."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def engine_of(model: Path, ring: str, options: argparse.Namespace) -> Any:
    """vLLM's asynchronous engine."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            max_model_len=512,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            num_gpu_blocks_override=24,
            block_size=32,
            enforce_eager=True,
            tensor_parallel_size=options.ranks,
            data_parallel_size=options.data_parallel,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
            },
            kv_transfer_config={
                "kv_connector": "ShmHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"ring": ring, "ring_size": "4MiB"},
            },
        )
    )


class Reader:
    """Drains the ring in a thread, with pauses in which it fills up."""

    def __init__(self, ring: str) -> None:
        self.samples: list[shmconn.Sample] = []
        self.problem: BaseException | None = None
        self._stop = threading.Event()
        self._subscription = shmconn.subscribe(ring, "storm", background=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rng = random.Random(1)
        try:
            while not self._stop.is_set() or self._subscription.unread():
                if (sample := self._subscription.next(timeout=0.05)) is not None:
                    self.samples.append(sample.clone())
                    sample.release()
                if rng.random() < 0.02:
                    time.sleep(0.2)
        except BaseException as problem:
            self.problem = problem

    def finish(self) -> list[shmconn.Sample]:
        """All samples, once nothing is unread any more."""
        self._stop.set()
        self._thread.join()
        self._subscription.close()
        if self.problem is not None:
            raise self.problem
        return self.samples


class Storm:
    """Sends the requests and notes what its clients saw."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.shared = prompt(64, seed)
        self.ends: Counter[str] = Counter()
        # Engine requests that there must have been, and replies with a handle, by it.
        self.requests = 0
        # Sessions whose client hung up: their last word may come after the abort, and is then a
        # request of its own to vLLM.
        self.cut = 0
        self.replies: dict[str, tuple[list[int], list[int]]] = {}

    def ids(self, index: int) -> list[int]:
        """A prompt; every third begins as others do."""
        tokens = self.rng.choice([1, 5, 31, 32, 33, 60, 100, 150])
        return (self.shared if index % 3 == 0 else []) + prompt(tokens, index)

    async def one(self, index: int) -> None:
        """A request from its start to its end, whichever that is."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        kind = KINDS[index % len(KINDS)]
        ids, name = self.ids(index), f"{kind}-{index}"
        wish = {"include_output_tokens": kind != "plain", "tag": name}
        fields: dict[str, Any] = {"max_tokens": self.rng.choice([1, 3, 12]), "temperature": 0.0}
        if kind == "several":
            fields |= {"n": 3, "temperature": 1.0}
        elif kind == "structured":
            fields["structured_outputs"] = StructuredOutputsParams(regex="[a-f]{1,12}")
        elif kind in ("stopped", "unstopped"):
            fields |= {"stop": ["e", "a"] if kind == "stopped" else ["~never met~"]}
            fields["max_tokens"] = 24
        params = SamplingParams(extra_args={"kv_transfer_params": wish}, **fields)
        given: Any = {"prompt_token_ids": ids}
        if kind == "session":
            given = self.inputs(ids, index)
        hang_up = self.rng.random() < 0.3
        patience = self.rng.random() * 0.4 if hang_up else None
        self.requests += 3 if kind == "several" else 1
        try:
            await asyncio.wait_for(self.follow(name, ids, given, params), patience)
        except TimeoutError:
            self.ends["hung up"] += 1
            self.cut += kind == "session"

    async def inputs(self, ids: list[int], index: int) -> AsyncIterator[Any]:
        """What a client of a session sends, with pauses."""
        from vllm.engine.protocol import StreamingInput

        for part in range(self.rng.choice([1, 2, 3])):
            if part:
                await asyncio.sleep(self.rng.random() * 0.2)
            yield StreamingInput(
                prompt={"prompt_token_ids": ids if part == 0 else prompt(7, index)}
            )

    async def follow(self, name: str, ids: list[int], given: Any, params: Any) -> None:
        last = None
        async for output in self.engine.generate(given, params, name):
            last = output
        assert last is not None
        self.ends[str(last.outputs[0].finish_reason)] += 1
        reply = last.kv_transfer_params
        plain = params.n == 1 and not name.startswith("session")
        # One that ended in an error of vLLM says itself that it has no sample.
        if plain and reply and "handle" in reply and "error" not in reply:
            self.replies[reply["handle"]] = (ids, list(last.outputs[0].token_ids))

    async def run(self, count: int, at_once: int) -> None:
        """All of them, so many at once."""
        gate = asyncio.Semaphore(at_once)

        async def gated(index: int) -> None:
            async with gate:
                await self.one(index)

        await asyncio.gather(*(gated(index) for index in range(count)))

    async def settle(self, ring: str) -> list[directory.RingInfo]:
        """Until each request has its sample or tombstone, and the engine its blocks."""
        deadline = time.monotonic() + WATCHDOG_S
        while True:
            infos = directory.rings(ring)
            open_ = [one for one in infos if one.accepted != one.settled]
            if not open_ and await self.engine.reset_prefix_cache():
                return infos
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there: {infos}")
            await asyncio.sleep(0.1)


def check_rows(model: Path, samples: list[shmconn.Sample]) -> float:
    """Every sample's rows beside those of transformers; the largest relative error of a row."""
    from transformers import AutoModelForCausalLM

    body = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).model
    rows: list[torch.Tensor] = []
    for layer in LAYERS:
        body.layers[layer - 1].register_forward_hook(
            lambda module, args, output: rows.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    worst = 0.0
    for sample in samples:
        rows.clear()
        with torch.inference_mode():
            body(sample.token_ids.unsqueeze(0), use_cache=False)
        wanted = torch.stack([one.reshape(sample.tokens, -1) for one in rows], 1)
        found = error(sample.hidden_states, wanted)
        wrong = [
            at for at in range(sample.tokens) if error(sample.hidden_states[at], wanted[at]) > NOISE
        ]
        assert not wrong, (
            f"{sample.tag} {sample.metadata}: rows {wrong} of {sample.tokens}, {found}"
        )
        worst = max(worst, found)
    # The check sees what it is for: a row of a neighbour.
    assert error(sample.hidden_states.roll(1, 1), wanted) > NOISE
    return worst


async def weather(model: Path, options: argparse.Namespace) -> None:
    """The storm and what it must leave behind."""
    ring = f"t-{secrets.token_hex(6)}"
    print("RING", ring, flush=True)
    engine = engine_of(model, ring, options)
    try:
        reader = Reader(ring)
        storm = Storm(engine, options.seed)
        await storm.run(options.requests, at_once=24)
        infos = await storm.settle(ring)
        samples = reader.finish()
    finally:
        engine.shutdown()
        remove_ring(ring)
    accepted = sum(info.accepted for info in infos)
    published = sum(info.published for info in infos)
    lost: Counter[str] = Counter()
    for info in infos:
        lost.update({why: count for why, count in info.lost_by_reason.items() if count})
    print("ENDS", json.dumps(storm.ends), "LOST", json.dumps(lost))
    print("ACCOUNT", f"{accepted} accepted, {published} published, {len(infos)} rings")
    # A client that hangs up before its request has reached the engine leaves no trace there.
    assert storm.requests - 3 * storm.ends["hung up"] <= accepted
    assert accepted <= storm.requests + storm.cut
    assert accepted == published + sum(lost.values()) and published == len(samples)
    assert set(lost) <= {"aborted", "short"} and lost["short"] <= accepted // 100
    assert max(Counter(str(sample.handle) for sample in samples).values()) == 1
    by_handle = {str(sample.handle): sample for sample in samples}
    for handle, (ids, answer) in storm.replies.items():
        if (sample := by_handle.get(handle)) is None:
            lost["short"] -= 1
            continue
        found = sample.token_ids.tolist()
        assert found in (ids, ids + answer[:-1]) and sample.metadata.get("aborted") is None
    assert lost["short"] >= 0
    flagged = Counter(str(one.tag).split("-")[0] for one in samples if one.metadata.get("aborted"))
    assert set(flagged) <= {"stopped", "unstopped", "session"} and flagged["stopped"] > 0
    print("ABORTED", json.dumps(flagged), "REPLIES", len(storm.replies))
    print("ROWS", f"{sum(one.tokens for one in samples)} within {check_rows(model, samples):.1e}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--async-scheduling", action="store_true")
    options = parser.parse_args()
    # Far more than the slowest vLLM takes.
    faulthandler.dump_traceback_later(300 + 6 * options.requests, exit=True)
    set_up(options.folder)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if options.async_scheduling:
        keep_async_scheduling()
    model = model_with_words(options.folder / "words")
    asyncio.run(weather(model, options))
    print("DONE")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
