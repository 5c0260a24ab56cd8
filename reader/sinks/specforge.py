# SPDX-License-Identifier: Apache-2.0
"""SpecForge's offline feature files: one ``.ckpt`` per sample.

==================  ==========================================================================
strategy            keys, beside ``input_ids`` [T] and ``loss_mask`` [T]
==================  ==========================================================================
eagle3              ``aux_hidden_state`` [1, T, (L-1) H], ``hidden_state`` [1, T, H] after the norm
dflash, domino      ``hidden_states`` [1, T, L H]
dspark              ``hidden_states`` [1, T, (L-1) H], ``target_last_hidden_states`` [1, T, H] after
                    the norm
==================  ==========================================================================

SpecForge's head on the last layer is only the ``lm_head``: hence after the norm.
"""

from typing import TYPE_CHECKING, Any

from reader.sinks import SinkOptions
from reader.sinks.torch_files import TorchFileSink
from shmconn.errors import OptionError

if TYPE_CHECKING:
    from shmconn.sample import Sample

STRATEGIES = ("eagle3", "dflash", "domino", "dspark")
_NORMED = ("eagle3", "dspark")


class SpecForgeSink(TorchFileSink):
    """Writes ``{tag or request id}.ckpt``."""

    suffix = ".ckpt"

    def __init__(self, options: SinkOptions) -> None:
        self._strategy = options.strategy
        if options.strategy not in STRATEGIES:
            raise OptionError(
                f"--strategy {options.strategy!r} is unknown: use one of {', '.join(STRATEGIES)}"
            )
        if options.loss_masks is None:
            raise OptionError(
                "format specforge needs the loss masks, which vLLM does not know: --loss-masks "
                "FILE, or --loss-masks all to learn from every token"
            )
        if options.model is None and options.strategy in _NORMED:
            raise OptionError(
                f"strategy {options.strategy} wants the last layer after the final norm: name the "
                "model's folder with --model"
            )
        super().__init__(options)

    def payload(self, sample: "Sample") -> dict[str, Any]:
        """The keys of the strategy."""
        if self.masks is None:
            raise OptionError("format specforge needs --loss-masks")
        common = {
            "input_ids": sample.token_ids.clone(),
            "loss_mask": self.masks.of(sample),
        }
        if self._strategy in ("dflash", "domino"):
            return common | {"hidden_states": sample.hidden_states.flatten(1).clone()[None]}
        aux, last = self.split(sample)
        if self._strategy == "eagle3":
            return common | {"aux_hidden_state": aux[None], "hidden_state": last[None]}
        return common | {"hidden_states": aux[None], "target_last_hidden_states": last[None]}


def open_sink(options: SinkOptions) -> SpecForgeSink:
    """An output of this format."""
    return SpecForgeSink(options)
