# SPDX-License-Identifier: Apache-2.0
"""The files under test and the sender's log, both from outside and so checked field by field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from reader.shard_file import SHARD_FORMAT
from shmconn.checksum import check
from shmconn.errors import FileCorrupt, OptionError
from shmconn.identity import Identity


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
    """One sample's header and token ids; the states stay on disk until they are asked for.

    Attributes:
        path: The file.
        token_ids: int64 [tokens].
        shape: Of the hidden states: tokens, layers, hidden size.
        dtype: Name of the states' dtype.
        layer_ids: Ascending.
        tag, handle, request_id: As the producer wrote them; "" where it wrote none.
        index: Of the sample in a shard; None in a file of its own.
    """

    path: Path
    token_ids: torch.Tensor
    shape: tuple[int, int, int]
    dtype: str
    layer_ids: tuple[int, ...]
    tag: str
    handle: str
    request_id: str
    index: int | None = None

    @property
    def name(self) -> str:
        """What to call it in a report."""
        return _name(self.path, self.index)

    @property
    def identity(self) -> Identity:
        """What it has in common with all others of its folder."""
        return Identity(self.layer_ids, self.shape[2], self.dtype)

    def hidden_states(self) -> torch.Tensor:
        """The states, [tokens, layers, hidden]."""
        with safe_open(self.path, framework="pt") as file:
            states: torch.Tensor = file.get_tensor(f"{_prefix(self.index)}hidden_states")
        return states


@dataclass(frozen=True)
class BadFile:
    """A file, or a sample in one, that is no sample, and why."""

    name: str
    reason: str


def read_samples(directory: Path) -> tuple[list[SampleFile], list[BadFile]]:
    """Every sample of the folder's `*.safetensors`, shards included, by name.

    Raises:
        OptionError: There is no such folder, it cannot be read, or it holds another format.
    """
    try:
        names = sorted(directory.iterdir())
    except OSError as error:
        raise OptionError(
            f"cannot read the folder {str(directory)!r}: {error.strerror}; give the folder that "
            "`shmconn drain --to` wrote"
        ) from error
    paths = [path for path in names if path.suffix == ".safetensors"]
    _refuse_others(directory, names, paths)
    samples: list[SampleFile] = []
    bad: list[BadFile] = []
    for path in paths:
        try:
            indices = _indices(path)
        except (OSError, SafetensorError) as error:
            bad.append(BadFile(path.name, f"{error}".strip() or repr(error)))
            continue
        for index in indices:
            try:
                samples.append(_read_sample(path, index))
            except FileCorrupt as error:
                bad.append(BadFile(_name(path, index), " ".join(error.args[1:])))
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                bad.append(BadFile(_name(path, index), f"{error}".strip() or repr(error)))
    return samples, bad


def _refuse_others(directory: Path, names: list[Path], paths: list[Path]) -> None:
    """What a drain may have written and this command cannot judge is named."""
    parts = [path.name for path in names if path.name.endswith(".safetensors.part")]
    if parts:
        raise OptionError(
            f"{directory / parts[0]} is not sealed yet: wait for its drain to end, or run the same "
            "drain again to finish what one that was killed had open"
        )
    for suffix, form in ((".ckpt", "specforge"), (".pt", "modelopt")):
        if not paths and any(path.suffix == suffix for path in names):
            raise OptionError(
                f"{str(directory)!r} holds {suffix} files of format {form}, which verify does not "
                "read: drain a second output with --format safetensors or shards to verify"
            )


def _name(path: Path, index: int | None) -> str:
    return path.name if index is None else f"{path.name}, sample {index}"


def _prefix(index: int | None) -> str:
    return "" if index is None else f"{index}."


def _indices(path: Path) -> list[int | None]:
    """The samples of a shard, or None for a file of one sample."""
    with safe_open(path, framework="pt") as file:
        names, metadata = file.keys(), file.metadata() or {}
    if not metadata.get("format", "").startswith(SHARD_FORMAT):
        return [None]
    return list(range(sum(name.endswith(".token_ids") for name in names)))


def _read_sample(path: Path, index: int | None) -> SampleFile:
    prefix = _prefix(index)
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        missing = {f"{prefix}hidden_states", f"{prefix}token_ids"} - names
        if missing:
            raise ValueError(f"has no tensor {min(missing)!r}, only {sorted(names)[:8]}")
        states = file.get_slice(f"{prefix}hidden_states")
        shape = tuple(states.get_shape())
        # An empty slice carries the dtype without reading the states.
        dtype = str(states[0:0].dtype).removeprefix("torch.")
        token_ids: torch.Tensor = file.get_tensor(f"{prefix}token_ids")
        metadata = file.metadata() or {}
        whole = file.get_tensor(f"{prefix}hidden_states")
    if index is not None:
        metadata = json.loads(metadata[str(index)])
    check(_name(path, index), metadata, token_ids, whole)
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
        index=index,
    )
