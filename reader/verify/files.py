# SPDX-License-Identifier: Apache-2.0
"""The files under test and the sender's log, both from outside and so checked field by field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from shmconn.errors import OptionError


class Send(BaseModel):
    """One line of the sender's log: what was asked, and what the server answered.

    Attributes:
        tag: The name that the request gave its sample, if any.
        handle: The handle in the reply.
        prompt_token_ids: The reply's, with `return_token_ids`.
        token_ids: The generated tokens, likewise.
        finish_reason: The reply's.
        include_output_tokens: Whether the request asked for the generated tokens' states.
        temperature: 0 if the server chose the likeliest tokens; otherwise they are not checked.
        layer_ids, shape, dtype: The reply's, where the log has them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    handle: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    tag: str | None = None
    finish_reason: str | None = None
    include_output_tokens: bool = False
    temperature: float = 0.0
    layer_ids: list[int] | None = None
    shape: list[int] | None = None
    dtype: str | None = None

    @property
    def sample_token_ids(self) -> list[int]:
        """The tokens whose states were computed: the last generated one never is."""
        if self.include_output_tokens:
            return self.prompt_token_ids + self.token_ids[:-1]
        return self.prompt_token_ids

    @property
    def name(self) -> str:
        """What to call it in a report."""
        return self.tag or self.handle


def read_sends(file: Path) -> list[Send]:
    """The sender's log, one JSON object a line.

    Raises:
        OptionError: It cannot be read, a line is not a send, or a handle stands twice.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the sender's log {str(file)!r}: {error}") from error
    sends: list[Send] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            send = Send.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise OptionError(
                f"{file}, line {number}: {f'{field}: ' if field else ''}{first['msg']}; each line "
                "needs handle, prompt_token_ids and token_ids of one reply"
            ) from None
        if send.handle in seen:
            raise OptionError(
                f"{file}, line {number}: the handle of line {seen[send.handle]} again, "
                f"{send.handle}; is the log that of one run?"
            )
        seen[send.handle] = number
        sends.append(send)
    if not sends:
        raise OptionError(f"the sender's log {str(file)!r} is empty: there is nothing to verify")
    return sends


@dataclass(frozen=True)
class SampleFile:
    """One file's header and token ids; the states stay on disk until they are asked for.

    Attributes:
        path: The file.
        token_ids: int64 [tokens].
        shape: Of the hidden states: tokens, layers, hidden size.
        dtype: Name of the states' dtype.
        layer_ids: Ascending.
        tag, handle, request_id: As the producer wrote them; "" where it wrote none.
    """

    path: Path
    token_ids: torch.Tensor
    shape: tuple[int, int, int]
    dtype: str
    layer_ids: tuple[int, ...]
    tag: str
    handle: str
    request_id: str

    def hidden_states(self) -> torch.Tensor:
        """The states, [tokens, layers, hidden]."""
        with safe_open(self.path, framework="pt") as file:
            states: torch.Tensor = file.get_tensor("hidden_states")
        return states


@dataclass(frozen=True)
class BadFile:
    """A file that is no sample, and why."""

    path: Path
    reason: str


def read_samples(directory: Path) -> tuple[list[SampleFile], list[BadFile]]:
    """Every `*.safetensors` of the folder, by name.

    Raises:
        OptionError: There is no such folder, or it cannot be read.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise OptionError(
            f"cannot read the folder {str(directory)!r}: {error.strerror}; give the folder that "
            "`shmconn drain --to` wrote"
        ) from error
    samples: list[SampleFile] = []
    bad: list[BadFile] = []
    for path in paths:
        try:
            samples.append(_read_sample(path))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            bad.append(BadFile(path, f"{error}".strip() or repr(error)))
    return samples, bad


def _read_sample(path: Path) -> SampleFile:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        missing = {"hidden_states", "token_ids"} - names
        if missing:
            raise ValueError(f"has no tensor {min(missing)!r}, only {sorted(names)}")
        states = file.get_slice("hidden_states")
        shape = tuple(states.get_shape())
        # An empty slice carries the dtype without reading the states.
        dtype = str(states[0:0].dtype).removeprefix("torch.")
        token_ids: torch.Tensor = file.get_tensor("token_ids")
        metadata = file.metadata() or {}
    if len(shape) != 3 or shape[0] < 1:
        raise ValueError(f"hidden_states has shape {list(shape)}, not [tokens, layers, hidden]")
    if token_ids.dtype != torch.int64 or tuple(token_ids.shape) != shape[:1]:
        raise ValueError(
            f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, not int64 [{shape[0]}]"
        )
    layer_ids = json.loads(metadata.get("layer_ids", "null"))
    if (
        not isinstance(layer_ids, list)
        or not all(isinstance(layer, int) for layer in layer_ids)
        or len(layer_ids) != shape[1]
    ):
        raise ValueError(f"layer_ids {layer_ids!r} in the metadata does not name {shape[1]} layers")
    stated = (
        metadata.get("dtype", dtype),
        json.loads(metadata.get("shape", "null")) or list(shape),
    )
    if stated != (dtype, list(shape)):
        raise ValueError(f"the metadata says {stated}, the tensor is {(dtype, list(shape))}")
    return SampleFile(
        path=path,
        token_ids=token_ids,
        shape=(shape[0], shape[1], shape[2]),
        dtype=dtype,
        layer_ids=tuple(layer_ids),
        tag=metadata.get("tag", ""),
        handle=metadata.get("handle", ""),
        request_id=metadata.get("request_id", ""),
    )
