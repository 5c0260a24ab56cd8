# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says about its hidden states, without loading the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmconn.errors import OptionError

# Where multimodal configurations keep the language model's part.
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class ModelShape:
    """Size of a language model's hidden states.

    Attributes:
        layers: Number of decoder layers. Layer ids run from 0 (embeddings) to `layers`
            (the last layer's output, before the final norm).
        hidden_size: Length of one hidden state.
    """

    layers: int
    hidden_size: int


def read_shape(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """The shape of `model`: a folder with a config.json, or a name on the model hub.

    Raises:
        OptionError: There is no such model, or its configuration has no text model.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        shape = _from_json(_load(file))
        if shape is not None:
            return shape
    elif Path(model).is_dir():
        raise OptionError(f"model {model!r} is a folder without a config.json; is it a model?")
    return _from_transformers(model, revision, trust_remote_code)


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the model's {file}: {error}") from error
    if not isinstance(config, dict):
        raise OptionError(f"the model's {file} is not a JSON object")
    return config


def _from_json(config: dict[str, Any]) -> ModelShape | None:
    """The shape as the file states it, or None where it leaves sizes to the model class."""
    sections = [config[key] for key in _TEXT_SECTIONS if isinstance(config.get(key), dict)]
    text = sections[0] if sections else config
    layers, hidden_size = text.get("num_hidden_layers"), text.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden_size, int):
        return None
    return ModelShape(layers, hidden_size)


def _from_transformers(model: str, revision: str | None, trust_remote_code: bool) -> ModelShape:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise OptionError(
            f"cannot read the configuration of model {model!r}: transformers is not installed "
            f"({error}); give a local folder, or `pip install transformers`"
        ) from error
    try:
        config = AutoConfig.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        )
        text = config.get_text_config()
        return ModelShape(int(text.num_hidden_layers), int(text.hidden_size))
    except (OSError, ValueError, AttributeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise OptionError(
            f"cannot read the configuration of model {model!r}: {reason} "
            "Give a folder with a config.json or the name of a model on the hub."
        ) from error
