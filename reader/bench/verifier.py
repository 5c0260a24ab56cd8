# SPDX-License-Identifier: Apache-2.0
"""A small verifier with random weights, its tokenizer, and data as speculators prepares it.

Nothing is downloaded: it is for machines without a network.
"""

import random
from pathlib import Path
from typing import Any

_SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32_000},
    "wide": {"hidden_size": 4096, "num_hidden_layers": 8, "vocab_size": 32_000},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 500},
}
SHAPES = tuple(_SHAPES)
_HEAD = 64
_SPECIAL = ("<unk>", "<bos>", "<eos>", "<mask>")
MASK_ID = _SPECIAL.index("<mask>")
# EAGLE-3's three auxiliary layers of a model of eight, and the last.
LAYERS = (2, 4, 5, 8)


def write_verifier(folder: Path, shape: str, device: str) -> Path:
    """A Qwen3 of this shape with random weights in bf16, and a tokenizer of its vocabulary."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = _SHAPES[shape]
    heads = sizes["hidden_size"] // _HEAD
    config = AutoConfig.for_model(
        "qwen3",
        **sizes,
        architectures=["Qwen3ForCausalLM"],
        intermediate_size=3 * sizes["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=_HEAD,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=_SPECIAL.index("<bos>"),
        eos_token_id=_SPECIAL.index("<eos>"),
    )
    model = folder / f"verifier-{shape}"
    torch.manual_seed(1)
    with torch.device(device):
        verifier: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    verifier.save_pretrained(model)

    vocabulary = dict.fromkeys((*_SPECIAL, *(f"w{n}" for n in range(sizes["vocab_size"]))))
    words = {word: index for index, word in enumerate(list(vocabulary)[: sizes["vocab_size"]])}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "mask_token"), _SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(model)
    return model


def write_data(folder: Path, shape: str, rows: int, tokens: tuple[int, int]) -> Path:
    """A dataset as `speculators prepare-data` leaves it, of random prompts.

    Args:
        tokens: the least and the most of a row.
    """
    from datasets import Dataset  # type: ignore[import-not-found]

    rng = random.Random(5)
    vocabulary = range(len(_SPECIAL), _SHAPES[shape]["vocab_size"])
    prompts = [rng.choices(vocabulary, k=rng.randint(*tokens)) for _ in range(rows)]
    made = Dataset.from_dict(
        {
            "input_ids": prompts,
            "loss_mask": [[1] * len(prompt) for prompt in prompts],
            "seq_len": [len(prompt) for prompt in prompts],
        }
    )
    made.set_format("torch", columns=["input_ids", "loss_mask"], output_all_columns=True)
    path = folder / f"data-{rows}-{tokens[1]}"
    made.save_to_disk(path)
    return path
