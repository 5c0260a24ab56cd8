# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Model-Optimizer's offline files: one ``.pt`` per sample.

``input_ids`` [T], ``hidden_states`` [T, H] (the last layer), ``aux_hidden_states`` [T, (L-1) H],
``conversation_id``, ``loss_mask`` [T] if there is one, and ``hidden_states_prenorm``: whether the
last layer is before the final norm, as vLLM hands it over. With ``--model`` it is after it.
"""

from typing import TYPE_CHECKING, Any

from reader.sinks import SinkOptions
from reader.sinks.torch_files import TorchFileSink

if TYPE_CHECKING:
    from shmconn.sample import Sample


class ModelOptSink(TorchFileSink):
    """Writes ``{tag or request id}.pt``."""

    suffix = ".pt"

    def payload(self, sample: "Sample") -> dict[str, Any]:
        """What `OfflineSupervisedDataset` reads."""
        aux, last = self.split(sample)
        found: dict[str, Any] = {
            "conversation_id": sample.tag or sample.request_id,
            "input_ids": sample.token_ids.clone(),
            "hidden_states": last,
            "aux_hidden_states": aux,
            "hidden_states_prenorm": self.norm is None,
        }
        if self.masks is not None:
            found["loss_mask"] = self.masks.of(sample)
        return found


def open_sink(options: SinkOptions) -> ModelOptSink:
    """An output of this format."""
    return ModelOptSink(options)
