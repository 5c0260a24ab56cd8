# SPDX-License-Identifier: Apache-2.0
"""A folder of samples as an honest server and drain leave it, of a model made for tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shmconn.handle import Handle

LAYERS = 4
HIDDEN = 32
VOCABULARY = 97
LAYER_IDS = [1, 2, 4]
PROMPTS = {
    "short": list(range(5, 12)),
    "long": [(7 * i * i + 3 * i) % VOCABULARY for i in range(150)],
    "output": list(range(40, 60)),
}
OUTPUT_TOKENS = 5


def make_model(folder: Path) -> Path:
    """A random Llama whose layers differ enough to be told apart."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Verified:
    """The folder, the log, and tools to spoil them."""

    directory: Path
    sends: Path

    def file(self, tag: str) -> Path:
        """The sample's file."""
        return self.directory / f"{tag}.safetensors"

    def change(self, tag: str, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
        """Rewrite a file after `change(tensors, metadata)`."""
        with safe_open(self.file(tag), framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        change(tensors, metadata)
        save_file(tensors, self.file(tag), metadata=metadata)

    def change_states(self, tag: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Rewrite a file's hidden states [tokens, layers, hidden]."""

        def apply(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
            states = change(tensors["hidden_states"]).contiguous()
            tensors["hidden_states"] = states
            metadata["shape"] = json.dumps(list(states.shape))

        self.change(tag, apply)

    def change_send(self, tag: str, **fields: Any) -> None:
        """Rewrite fields of a line of the log."""
        lines = [json.loads(line) for line in self.sends.read_text().splitlines()]
        for line in lines:
            if line["tag"] == tag:
                line.update(fields)
        self.sends.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_samples(model: Path, folder: Path, dtype: str) -> Verified:
    """Each of `PROMPTS` twice; "output" with generated tokens.

    The states come from transformers' own list of hidden states, not from what is under test.
    """
    import transformers

    network: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before_norm: list[torch.Tensor] = []
    network.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    verified = Verified(folder / "files", folder / "sends.jsonl")
    verified.directory.mkdir(parents=True)
    lines = []
    number = 0
    for name, prompt in PROMPTS.items():
        generated: list[int] = []
        with torch.inference_mode():
            while len(generated) < (OUTPUT_TOKENS if name == "output" else 1):
                logits = network(torch.tensor([prompt + generated])).logits
                generated.append(int(logits[0, -1].argmax()))
            ids = prompt + (generated[:-1] if name == "output" else [])
            before_norm.clear()
            outputs = network(torch.tensor([ids]), output_hidden_states=True).hidden_states
        every = [states[0] for states in outputs[:LAYERS]] + [before_norm[0][0]]
        states = torch.stack([every[layer] for layer in LAYER_IDS], dim=1)
        states = states.to(getattr(torch, dtype)).contiguous()
        for send in (1, 2):
            number += 1
            tag = f"{name}-{send}"
            reply = {
                "handle": str(Handle.make("t", "0" * 32, number, tag)),
                "layer_ids": LAYER_IDS,
                "shape": list(states.shape),
                "dtype": dtype,
            }
            metadata = {
                "request_id": f"cmpl-{number}",
                "tag": tag,
                "handle": reply["handle"],
                "layer_ids": json.dumps(LAYER_IDS),
                "shape": json.dumps(reply["shape"]),
                "dtype": dtype,
            }
            tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
            save_file(tensors, verified.file(tag), metadata=metadata)
            line = {
                "tag": tag,
                "prompt_token_ids": prompt,
                "token_ids": generated,
                "finish_reason": "length",
                "include_output_tokens": name == "output",
                "temperature": 0,
                **reply,
            }
            lines.append(json.dumps(line) + "\n")
    verified.sends.write_text("".join(lines))
    return verified
