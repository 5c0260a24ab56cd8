# SPDX-License-Identifier: Apache-2.0
"""Hidden states of many prompts, all generated first and read then: vLLM's stock script with one
import changed. The ring is smaller than the data; a thread of LLM's empties it meanwhile.

    python examples/offline_llm/offline.py .cache/smollm2
"""

import argparse

from rich.progress import track

# Of vLLM's own: `from vllm import LLM` and `from vllm.distributed.kv_transfer.kv_connector.v1
# .example_hidden_states_connector import cleanup_hidden_states, load_hidden_states`.
from shmconn.integrations.vllm import LLM, cleanup_hidden_states, load_hidden_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="folder or name of a model")
    parser.add_argument("--layers", default="8,15,22,30", help="layer ids, with commas")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--ring-size", default="3MiB")
    parser.add_argument("--memory", default="1GiB", help="bound of what waits to be read")
    parser.add_argument("--folder", help="write files here instead")
    arguments = parser.parse_args()
    layers = [int(layer) for layer in arguments.layers.split(",")]

    connector = {"ring_size": arguments.ring_size}
    if arguments.folder:
        connector["shared_storage_path"] = arguments.folder
    llm = LLM(
        model=arguments.model,
        max_model_len=512,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": connector,
        },
        hidden_states_memory=arguments.memory,
    )
    prompts = [f"{number} bottles of beer on the wall. " * 8 for number in range(arguments.prompts)]
    outputs = llm.generate(prompts)
    size = 0
    for output in track(outputs, "reading"):
        path = output.kv_transfer_params["hidden_states_path"]
        data = load_hidden_states(path)
        states = data["hidden_states"]
        if data["token_ids"].tolist() != output.prompt_token_ids:
            raise SystemExit(f"{path}: the token ids are not those of the prompt")
        size += states.nbytes
        cleanup_hidden_states(path)
    print(
        f"{len(outputs)} prompts, the last of shape {list(states.shape)}, {size / 2**20:.1f} MiB "
        f"in all through a ring of {arguments.ring_size}"
    )


if __name__ == "__main__":
    main()
