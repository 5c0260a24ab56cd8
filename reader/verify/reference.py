# SPDX-License-Identifier: Apache-2.0
"""What the model computes for a sequence, by transformers in float32: the truth to verify against.

float32 over the same weights lies nearer to the truth than a run in bfloat16, whose own noise would
be added to that of the sample.
"""

from __future__ import annotations

from typing import Any

import torch

from shmconn.errors import OptionError

# Lengths are padded to few shapes: each new shape costs the CPU kernels up to a second.
_SHORT, _STEP = 64, 256


class Reference:
    """A causal language model of transformers.

    Attributes:
        layers: Number of decoder layers.
        hidden_size: Length of a hidden state.
    """

    def __init__(self, model: str, device: str = "cpu") -> None:
        """Load `model`, a folder or a name on the hub, in float32.

        Raises:
            OptionError: transformers is missing, or it cannot load the model.
        """
        try:
            import transformers
        except ImportError as error:
            raise OptionError(
                f"verify needs transformers ({error}): pip install 'shmconn[verify]'"
            ) from error
        transformers.utils.logging.disable_progress_bar()
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32
            )
            self._model = loaded.to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise OptionError(f"cannot load the model {model!r}: {reason}") from error
        decoder = self._model.get_decoder()
        if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
            raise OptionError(
                f"verify does not know {type(decoder).__name__} of {model!r}: it needs a decoder "
                "with `layers` and a final `norm`"
            )
        self._decoder = decoder
        self._device = device
        self.layers = len(decoder.layers)
        self.hidden_size = int(self._model.config.get_text_config().hidden_size)
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)

    def states(self, token_ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """Hidden states of one sequence, float32 [tokens, layers, hidden] on the CPU.

        Layer k is the output of the k-th decoder layer, 0 the embeddings; the last one is taken
        before the final norm.
        """
        tokens = len(token_ids)
        padded = _SHORT if tokens <= _SHORT else -(-tokens // _STEP) * _STEP
        # Padding on the right changes nothing to its left: attention is causal.
        ids = torch.zeros((1, padded), dtype=torch.int64)
        ids[0, :tokens] = token_ids
        caught: dict[int, torch.Tensor] = {}
        hooks = [self._catch(layer, caught, tokens) for layer in layer_ids]
        try:
            with torch.inference_mode():
                self._decoder(input_ids=ids.to(self._device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([caught[layer] for layer in layer_ids], dim=1)

    def _catch(self, layer: int, caught: dict[int, torch.Tensor], tokens: int) -> Any:
        """Hook what enters the module after layer `layer`: the next layer, or the final norm."""
        module = self._decoder.norm if layer == self.layers else self._decoder.layers[layer]

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            caught[layer] = states[0, :tokens].clone().cpu()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def next_token_gap(self, rows: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
        """How much likelier the best next token is than the one given, in nats, for each row.

        Args:
            rows: Last layer's states before the final norm, [rows, hidden], any dtype.
            token_ids: The token that followed each row.
        """
        with torch.inference_mode():
            normed = self._decoder.norm(rows.float().to(self._device))
            # The server rounds here as well.
            logits = self._model.get_output_embeddings()(normed.to(rows.dtype).float())
            scores = logits.float().log_softmax(dim=-1).cpu()
        chosen = scores[torch.arange(len(token_ids)), torch.tensor(token_ids)]
        gap: torch.Tensor = scores.max(dim=-1).values - chosen
        return gap
