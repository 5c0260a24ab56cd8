# SPDX-License-Identifier: Apache-2.0
"""The connector's options: what stands in ``kv_connector_extra_config``."""

import difflib
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shmconn import layout
from shmconn.errors import NoSpace, OptionError
from shmconn.handle import check_name, parse_size
from shmconn.headroom import headroom

DEFAULT_RING_SIZE = 8 << 30
# vLLM gives each data-parallel engine its own engine_id by one of these endings.
_RANK = re.compile(r"(_dp_rank_|_dp)\d+$")


class GroupOption(BaseModel):
    """A group that must see every sample from the first one on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    by_handle: bool = Field(default=False, strict=True)

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return check_name(value, "group")


class ConnectorConfig(BaseModel):
    """Options of the connector, checked.

    Attributes:
        ring: name of the ring; ``None``: derived from the engine's id.
        ring_size: bytes of the segment; ``None``: the least of 8 GiB and a quarter of what is
            free in /dev/shm, and of what the control groups still allow.
        slots: most samples that the ring holds at once; ``None``: the least of pages and 4,096.
        page_size: bytes; a power of two, 64 KiB or more.
        groups: groups that exist before any reader has joined.
        on_full: ``hold`` keeps a request's KV blocks until there is room; ``drop`` loses it.
        no_reader_timeout_s: how long to hold while no live reader can make room.
        unclaimed_ttl_s: age at which a sample that a by-handle group never claimed is released.
        shutdown_grace_s: how long a shutdown goes on publishing what is held.
        mode: permissions of the segments.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ring: str | None = None
    ring_size: int | None = None
    slots: int | None = Field(default=None, ge=1, le=layout.MAX_SLOTS, strict=True)
    page_size: int = layout.MIN_PAGE
    groups: tuple[GroupOption, ...] = ()
    on_full: Literal["hold", "drop"] = "hold"
    no_reader_timeout_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    unclaimed_ttl_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    shutdown_grace_s: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    mode: int = 0o600

    @field_validator("ring", mode="before")
    @classmethod
    def _check_ring(cls, value: object) -> str | None:
        return None if value is None else check_name(value)

    @field_validator("ring_size", mode="before")
    @classmethod
    def _check_ring_size(cls, value: object) -> int | None:
        return None if value is None else parse_size(value, "ring_size")

    @field_validator("page_size", mode="before")
    @classmethod
    def _check_page_size(cls, value: object) -> int:
        size = parse_size(value, "page_size")
        if size < layout.MIN_PAGE or size & (size - 1):
            raise OptionError(f"page_size {value!r} must be a power of two of 64KiB or more")
        return size

    @field_validator("groups", mode="before")
    @classmethod
    def _check_groups(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise OptionError(f"groups {value!r} must be a list of names or of {{name, by_handle}}")
        entries = [{"name": one} if isinstance(one, str) else one for one in value]
        names = [one.get("name") for one in entries if isinstance(one, Mapping)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise OptionError(f"groups names {twice!r} twice")
        return entries

    @field_validator("mode", mode="before")
    @classmethod
    def _check_mode(cls, value: object) -> int:
        text = value.removeprefix("0o") if isinstance(value, str) else ""
        if re.fullmatch(r"0*[0-7]{1,3}", text) is None or int(text, 8) & 0o600 != 0o600:
            raise OptionError(
                f"mode {value!r} must be octal digits in quotes that let the owner read and write, "
                'such as "0600" or "0660"'
            )
        return int(text, 8)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> "ConnectorConfig":
        """The options of ``kv_connector_extra_config``.

        Raises:
            OptionError: an option is unknown (the nearest known one is named) or has a value that
                it cannot have; all of them are named in one line.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            problems = [_problem(dict(one)) for one in error.errors(include_url=False)]
        raise OptionError("kv_connector_extra_config: " + "; ".join(problems))

    def groups_for_ring(self) -> list[dict[str, Any]]:
        """The groups as `Producer.create` takes them."""
        return [group.model_dump() for group in self.groups]


def auto_ring_name(engine_id: str) -> str:
    """The name of an engine's ring if none is given: equal for all its data-parallel ranks."""
    base = _RANK.sub("", engine_id)
    return "auto-" + hashlib.sha256(base.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def default_ring_size(free: int | None = None) -> int:
    """Bytes of the ring if no size is given.

    Args:
        free: bytes that can be taken; ``None`` asks /dev/shm and the control groups.

    Raises:
        NoSpace: /dev/shm is not there.
    """
    if free is None:
        try:
            free = headroom().free
        except OSError as error:
            raise NoSpace(
                f"{layout.SHM_DIR} cannot be used ({error.strerror}): mount a tmpfs there "
                "(in a container: --shm-size or --ipc=host)"
            ) from error
    return min(DEFAULT_RING_SIZE, free // 4)


def _problem(error: dict[str, Any]) -> str:
    """One fault of the options as a person would say it."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(GroupOption.model_fields if len(error["loc"]) > 1 else _OPTIONS)
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        return f"unknown option {where!r} ({hint})"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, OptionError):
        return str(cause)
    message = str(error["msg"])
    return f"{where} is {error['input']!r}: {message[0].lower()}{message[1:]}"


_OPTIONS = ConnectorConfig.model_fields
