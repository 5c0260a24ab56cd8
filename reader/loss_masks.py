# SPDX-License-Identifier: Apache-2.0
"""Loss masks from a side file: vLLM does not know which tokens a trainer wants to learn from.

The file has one JSON object a line: ``{"tag": "hs_12", "loss_mask": [0, 0, 1, 1]}``.
"""

import json
from typing import TYPE_CHECKING

from shmconn.errors import OptionError, ShmConnError

if TYPE_CHECKING:
    import torch

    from shmconn.sample import Sample

ALL = "all"


class LossMasks:
    """The masks of a file by tag; or of ones, for ``all``.

    Raises:
        OptionError: the file cannot be read; names the line.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._masks: dict[str, bytes] | None = None if path == ALL else {}
        if self._masks is None:
            return
        try:
            with open(path, encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        tag, mask = _parse(line, f"{path}, line {number}")
                        self._masks[tag] = mask
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read the loss masks {path!r}: {error}") from None

    def of(self, sample: "Sample") -> "torch.Tensor":
        """int64 [tokens].

        One value more than there are tokens is allowed, since vLLM computes no states for the last
        generated token.

        Raises:
            ShmConnError: the file has no mask for the sample, or one of another length.
        """
        import torch

        if self._masks is None:
            return torch.ones(sample.tokens, dtype=torch.int64)
        mask = self._masks.get(sample.tag) if sample.tag is not None else None
        if mask is None:
            raise ShmConnError(
                f"{self._path} has no loss mask for tag {sample.tag!r} (request "
                f"{sample.request_id[:80]}): add it and run the same command again"
            )
        if len(mask) - sample.tokens not in (0, 1):
            raise ShmConnError(
                f"the loss mask of tag {sample.tag!r} in {self._path} has {len(mask)} values, the "
                f"sample has {sample.tokens} tokens"
            )
        return torch.tensor(list(mask[: sample.tokens]), dtype=torch.int64)


def _parse(line: str, where: str) -> tuple[str, bytes]:
    try:
        value = json.loads(line)
        tag, mask = value["tag"], value["loss_mask"]
        if not isinstance(tag, str) or any(item not in (0, 1) for item in mask):
            raise ValueError("values other than 0 and 1")
        return tag, bytes(mask)
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f'{where} is not a loss mask: write {{"tag": "hs_12", "loss_mask": [0, 1]}} ({error})'
        ) from None
