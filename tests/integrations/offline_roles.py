# SPDX-License-Identifier: Apache-2.0
"""Scripts with a real vLLM in their own process: `python offline_roles.py ROLE MODEL`."""

import os
import sys
from typing import Any

LAYERS = [8, 15, 22, 30]
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "speculative_config": {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    },
}


def connector(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "ShmHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": list(range(100 + number, 164 + number))} for number in range(count)
    ]


def bound(model: str) -> None:
    """More than fits in memory; then as much as fits, from the same engine."""
    from shmconn.integrations.vllm import LLM, DrainFull, cleanup_hidden_states, load_hidden_states

    llm = LLM(
        model,
        kv_transfer_config=connector(ring_size="3MiB"),
        hidden_states_memory="3MiB",
        **OPTIONS,
    )
    try:
        llm.generate(prompts(60))
    except DrainFull as error:
        print("FULL", error, flush=True)
    for handle in list(llm.hidden_states_drain._kept):
        cleanup_hidden_states(handle)
    outputs = llm.generate(prompts(6))
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        # No block has an owner any more, though nobody takes a step after `generate`.
        assert llm.reset_prefix_cache()
        print("RESET")
    for number, output in enumerate(outputs):
        data = load_hidden_states(output)
        if data["token_ids"].tolist() != list(range(100 + number, 164 + number)):
            raise SystemExit(f"output {number} has the tokens {data['token_ids'].tolist()}")
        cleanup_hidden_states(output)
    print("LOADED", len(outputs), list(data["hidden_states"].shape), flush=True)


def no_drain(model: str) -> None:
    """vLLM's own LLM and a ring smaller than the data: no hang, and an error that helps."""
    from vllm import LLM

    from shmconn import SampleLost
    from shmconn.integrations.vllm import load_hidden_states

    options = connector(ring="offline-no-drain", ring_size="3MiB", no_reader_timeout_s=1)
    llm = LLM(model, kv_transfer_config=options, **OPTIONS)
    outputs = llm.generate(prompts(30))
    loaded, lost = 0, ""
    for output in outputs:
        try:
            load_hidden_states(output, timeout=60)
            loaded += 1
        except SampleLost as error:
            lost = str(error)
    print("LOADED", loaded, flush=True)
    print("LOST", lost, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
