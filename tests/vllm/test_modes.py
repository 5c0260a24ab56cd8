# SPDX-License-Identifier: Apache-2.0
"""Ways in which people run vLLM: N requests give exactly N right samples, and all blocks go back.

"Right" is bit for bit what the cache held, by a second copy taken in the worker.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rings import remove_ring
from server import Server, make_tiny_model, prompt, take

import shmconn
from shmconn import directory

pytestmark = [pytest.mark.vllm, pytest.mark.long]
HERE = Path(__file__).parent
LAYERS = [1, 2, 4]
Make = Callable[..., Server]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    servers: list[Server] = []

    def build(*flags: str) -> Server:
        twins = tmp_path / "twins"
        twins.mkdir()
        server = Server(
            tmp_path,
            {"ring_size": "16MiB"},
            connector={"kv_connector": "PlantedConnector", "kv_connector_module_path": "planted"},
            flags=["--load-format", "dummy", *flags],
            environment={
                "PYTHONPATH": str(HERE),
                "SHMCONN_TWINS": str(twins),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            model=make_tiny_model(tmp_path / "tiny"),
            layers=LAYERS,
        )
        servers.append(server)
        server.wait_healthy()
        return server

    yield build
    for server in servers:
        server.clear()


def check(server: Server, twins: Path, rings: int) -> None:
    """Twenty requests, two of them the same prompt, from rings of one name."""
    prompts = [prompt(5 + 23 * index, index) for index in range(19)]
    prompts.append(prompts[-1])
    with shmconn.subscribe(server.ring, "tests") as subscription:
        replies = server.complete_all(
            prompts, max_tokens=3, params={"include_output_tokens": True, "tag": "twin"}
        )
        samples = take(subscription, len(prompts))
        assert subscription.next(timeout=1) is None
        for reply in replies:
            sample = samples[reply.kv_transfer_params["request_id"]]
            (choice,) = reply.choices
            assert sample.token_ids.tolist() == choice.prompt_token_ids + choice.token_ids[:-1]
            twin = torch.load(twins / f"{sample.handle.generation}-{sample.number}.pt")
            assert sample.hidden_states.shape == (sample.tokens, len(LAYERS), 128)
            assert sample.hidden_states.view(torch.int32).equal(twin.view(torch.int32))
        infos = directory.rings(server.ring)
        assert len(infos) == rings and sum(info.published for info in infos) == len(prompts)
        assert all(info.lost == 0 and info.settled == info.accepted for info in infos)
    for engine in range(rings):
        assert server.metric("vllm:kv_cache_usage_perc", engine=str(engine)) == 0
    assert server.stop() == 0


def test_two_tensor_parallel_ranks_yield_each_sample_once(make: Make, tmp_path: Path) -> None:
    check(make("--tensor-parallel-size", "2"), tmp_path / "twins", 1)


def test_two_data_parallel_engines_share_a_name_and_a_reader(make: Make, tmp_path: Path) -> None:
    check(make("--data-parallel-size", "2"), tmp_path / "twins", 2)


def test_a_tiny_cache_yields_the_same(make: Make, tmp_path: Path) -> None:
    # vLLM turns async scheduling off on a CPU, asked for or not.
    server = make(
        *("--block-size", "32", "--num-gpu-blocks-override", "16", "--max-model-len", "448")
    )
    check(server, tmp_path / "twins", 1)


OFFLINE = """
    import json, sys, threading
    from vllm import LLM, SamplingParams
    import shmconn

    model, ring, mode, blocks = sys.argv[1:]
    llm = LLM(
        model=model, load_format="dummy", dtype="float32", max_model_len=512, enforce_eager=True,
        max_num_batched_tokens=128, max_num_seqs=8, num_gpu_blocks_override=int(blocks),
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
        },
        kv_transfer_config={
            "kv_connector": "ShmHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "ring": ring, "ring_size": "2MiB", "no_reader_timeout_s": 1},
        },
    )
    prompts = [{"prompt_token_ids": list(range(100, 110 + index))} for index in range(40)]
    tokens, lost = [], 0
    subscription = shmconn.subscribe(ring, "trainer", background=mode == "thread")

    def drain():
        while len(tokens) < len(prompts):
            sample = subscription.next(timeout=10)
            if sample is None:
                return
            tokens.append(sample.tokens)
            sample.release()

    thread = threading.Thread(target=drain)
    if mode == "thread":
        thread.start()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    if mode != "thread":
        thread.start()
    thread.join()
    lost = subscription.lost
    subscription.close()
    replied = sum(output.kv_transfer_params is not None for output in outputs)
    print("RESULT", json.dumps([sorted(tokens), lost, replied]))
"""


def offline(tmp_path: Path, mode: str, blocks: int) -> list[Any]:
    script = tmp_path / "offline.py"
    body = textwrap.indent(textwrap.dedent(OFFLINE), "    ")
    script.write_text(f"if __name__ == '__main__':\n{body}")
    model = make_tiny_model(tmp_path / "tiny")
    ring = f"t-offline-{os.getpid()}-{mode}"
    done = subprocess.run(
        [sys.executable, str(script), str(model), ring, mode, str(blocks)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-3000:]
    remove_ring(ring)
    return list(json.loads(lines[0].removeprefix("RESULT ")))


def test_offline_generation_with_a_thread_that_drains_yields_all(tmp_path: Path) -> None:
    assert offline(tmp_path, "thread", 12) == [list(range(10, 50)), 0, 40]


def test_reading_only_after_offline_generation_does_not_wait_for_itself(tmp_path: Path) -> None:
    # Ring and cache together take fewer requests than there are: somebody has to give way.
    tokens, lost, replied = offline(tmp_path, "afterwards", 6)
    assert replied == 40 and 0 < len(tokens) < 40 and len(tokens) + lost == 40
