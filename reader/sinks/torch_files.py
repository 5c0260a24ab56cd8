# SPDX-License-Identifier: Apache-2.0
"""What the formats that are ``torch.save`` files share."""

import os
import pickle
from typing import TYPE_CHECKING, Any

from reader.final_norm import FinalNorm
from reader.folder import Output
from reader.loss_masks import LossMasks
from reader.sinks import SinkOptions
from reader.sinks.files import FileSink
from shmconn.errors import ShmConnError

if TYPE_CHECKING:
    import torch

    from shmconn.sample import Sample

# Trainers pick the keys they know; this one tells a file's own sample from others of its name.
HANDLE = "shmconn_handle"


class TorchFileSink(FileSink):
    """One ``torch.save`` file per sample: a flat dict."""

    def __init__(self, options: SinkOptions) -> None:
        import torch  # noqa: F401  # that it is missing must show before a sample is taken

        self.norm = FinalNorm(options.model) if options.model is not None else None
        self.masks = LossMasks(options.loss_masks) if options.loss_masks is not None else None
        super().__init__(options)

    def payload(self, sample: "Sample") -> dict[str, Any]:
        """What the format keeps of a sample."""
        raise NotImplementedError

    def encode(self, sample: "Sample", output: Output) -> None:
        """Save the payload."""
        import torch

        torch.save(self.payload(sample) | {HANDLE: str(sample.handle)}, output)  # type: ignore[arg-type]

    def owner(self, name: str) -> str | None:
        """The handle in a file."""
        import torch

        if self.folder.size(name) < 0:
            return None  # a link, a folder, a pipe
        try:
            fd = self.folder.open(name)
        except (FileNotFoundError, PermissionError):
            return None
        try:
            found = torch.load(f"/proc/self/fd/{fd}", mmap=True, weights_only=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
            return None  # not a file of torch: somebody else's
        finally:
            os.close(fd)
        handle = found.get(HANDLE) if isinstance(found, dict) else None
        return handle if isinstance(handle, str) else None

    def split(self, sample: "Sample") -> "tuple[torch.Tensor, torch.Tensor]":
        """Copies of the auxiliary layers side by side [tokens, (layers - 1) hidden], and the last.

        The last layer [tokens, hidden] is after the final norm if there is one here.

        Raises:
            ShmConnError: the ring has one layer only.
        """
        states = sample.hidden_states
        if len(sample.layer_ids) < 2:
            raise ShmConnError(
                f"the ring has layer {sample.layer_ids[0]} only: this format wants auxiliary "
                "layers and the last one; start vLLM with more --layers"
            )
        last = states[:, -1].clone()
        if self.norm is not None:
            self.norm.check(sample.layer_ids)
            last = self.norm(last)
        return states[:, :-1].flatten(1).clone(), last
