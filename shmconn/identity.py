# SPDX-License-Identifier: Apache-2.0
"""What the samples of one folder have in common: layers, hidden size and dtype.

A folder of samples that differ in one of them trains a wrong model without an error.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shmconn.sample import Sample

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names


class Identity(NamedTuple):
    """Of a sample, and of every sample beside it."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    def __str__(self) -> str:
        return f"layers {list(self.layer_ids)}, hidden size {self.hidden_size}, {self.dtype}"

    @classmethod
    def of(cls, sample: "Sample") -> "Identity":
        """Of a sample in memory."""
        return cls(tuple(sample.layer_ids), sample.shape[2], sample.dtype)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "Identity":
        """Out of the JSON of `_asdict`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        layer_ids, hidden, dtype = (values[name] for name in cls._fields)
        return cls(tuple(map(int, layer_ids)), int(hidden), str(dtype))

    @classmethod
    def of_header(cls, states: Mapping[str, Any], metadata: Mapping[str, Any]) -> "Identity | None":
        """Out of a safetensors header: the states' entry, and the sample's own metadata.

        None if they do not say it all, or contradict each other.
        """
        try:
            _, layers, hidden = states["shape"]
            layer_ids = json.loads(metadata["layer_ids"])
            dtype = DTYPES.get(states["dtype"], states["dtype"])
            made = cls(tuple(map(int, layer_ids)), int(hidden), str(dtype))
        except (KeyError, TypeError, ValueError):
            return None
        return made if len(made.layer_ids) == layers else None
