# SPDX-License-Identifier: Apache-2.0
"""Where a drain puts samples: one module per format.

A sink's ``write`` returns only when the sample is whole on the disk; only then may the sample be
released. It may be called from several threads. It raises `OSError` when the disk refuses, which a
drain takes as "later", and `ShmConnError` for a sample that this format can never hold.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shmconn.errors import OptionError

if TYPE_CHECKING:
    from shmconn.sample import Sample

FORMATS: Mapping[str, str] = {
    "safetensors": "one file per sample, with its metadata in the header",
    "shards": "many samples in one safetensors file of --shard-size",
    "specforge": "SpecForge's offline .ckpt files",
    "modelopt": "NVIDIA Model-Optimizer's offline .pt files",
    "vllm": "files and locks as vLLM's own connector leaves them",
    "null": "nothing is kept",
}


@dataclass(frozen=True)
class Stored:
    """What became of a sample.

    Attributes:
        file: name of its file in the folder.
        bytes: that it takes up there.
        fresh: false if it was there before and nothing was written.
        new_file: whether it began a file.
    """

    file: str
    bytes: int
    fresh: bool
    new_file: bool = False


@dataclass(frozen=True)
class SinkOptions:
    """What the user asked of an output.

    Attributes:
        path: its folder.
        fsync: wait until the disk has each sample, before it is released.
        checksum: put a SHA-256 of each sample's bytes into the manifest.
        skip_tags: skip a sample whose tag and token ids the manifest has, under any handle.
        shard_size: bytes after which a shard is sealed.
        model: folder of the model whose final norm is applied to the last layer.
        loss_masks: a side file with loss masks by tag, or "all".
        strategy: of SpecForge, for its files.
    """

    path: str
    fsync: bool = False
    checksum: bool = False
    skip_tags: bool = False
    shard_size: int = 1 << 30
    model: str | None = None
    loss_masks: str | None = None
    strategy: str = "eagle3"


class Sink(Protocol):
    """One output of a drain."""

    path: str

    def write(self, sample: "Sample") -> Stored:
        """Store a sample, or find that it is stored."""
        ...

    def close(self) -> None:
        """Finish what is open."""
        ...


def open_sink(name: str, options: SinkOptions) -> Sink:
    """An output of a format, ready to be written.

    Raises:
        OptionError: no such format, or the folder cannot be written to.
    """
    if name not in FORMATS:
        raise OptionError(f"format {name!r} is unknown: use one of {', '.join(FORMATS)}")
    module: Any = importlib.import_module(f"reader.sinks.{name}")
    sink: Sink = module.open_sink(options)
    return sink
