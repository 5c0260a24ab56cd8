# SPDX-License-Identifier: Apache-2.0
"""A model's final norm, for the formats that want the last layer after it.

vLLM hands over the residual stream, so its last layer is before the norm.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reader.model_shape import read_shape
from shmconn.errors import OptionError

if TYPE_CHECKING:
    import torch

# What decoder models of transformers call it.
_NAMES = ("norm", "final_layernorm", "final_norm", "ln_f")


class FinalNorm:
    """The final norm of a model in a folder, as transformers computes it.

    Args:
        model: folder with a config.json and safetensors files.

    Raises:
        OptionError: no such model, or its norm cannot be found.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise OptionError(f"--model {model!r} is not a folder with a config.json")
        self.layers = read_shape(model).layers
        try:
            import torch
            from transformers import AutoConfig, AutoModel
        except ImportError as error:
            raise OptionError(
                f"--model needs transformers ({error}): pip install 'shmconn[verify]'"
            ) from error
        config = AutoConfig.from_pretrained(model).get_text_config()
        with torch.device("meta"):
            skeleton = AutoModel.from_config(config)
        name = next((name for name in _NAMES if hasattr(skeleton, name)), None)
        if name is None:
            raise OptionError(
                f"the final norm of a {type(skeleton).__name__} is not known here: leave --model "
                "out to get the last layer before the norm"
            )
        self._module: Any = getattr(skeleton, name).to_empty(device="cpu").float().eval()
        with torch.no_grad():
            for key, parameter in self._module.named_parameters():
                parameter.copy_(_weight(folder, f"{name}.{key}"))

    def check(self, layer_ids: tuple[int, ...]) -> None:
        """The last layer of a sample must be the model's last.

        Raises:
            OptionError: it is not.
        """
        if layer_ids[-1] != self.layers:
            raise OptionError(
                f"the ring's last layer is {layer_ids[-1]}, the last of {self.model} is "
                f"{self.layers}: start vLLM with layer {self.layers} among --layers"
            )

    def __call__(self, states: "torch.Tensor") -> "torch.Tensor":
        """Normed states [tokens, hidden], in the dtype they came in; computed in float32."""
        import torch

        with torch.inference_mode():
            normed: torch.Tensor = self._module(states.float())
        return normed.to(states.dtype)


def _weight(folder: Path, name: str) -> "torch.Tensor":
    """A weight outside of the layers, by the end of its name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
    else:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as opened:
                files.update(dict.fromkeys(opened.keys(), path.name))
    found = [
        key for key in files if key.endswith(name) and ".layers." not in key and "visual" not in key
    ]
    exact = [key for key in found if key in (name, f"model.{name}")] or found
    if len(exact) != 1:
        raise OptionError(
            f"the safetensors files of {str(folder)!r} hold {len(found)} weights {name!r}, not one"
        )
    with safe_open(folder / files[exact[0]], "pt") as opened:
        weight: torch.Tensor = opened.get_tensor(exact[0])
    return weight
