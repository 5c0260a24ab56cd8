# SPDX-License-Identifier: Apache-2.0
"""Names: of rings and groups, of one sample for ever, and of sizes in bytes."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmconn.errors import OptionError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HANDLE = re.compile(
    r"shmconn:(?P<ring>[A-Za-z0-9_-]{1,64}):(?P<generation>[0-9a-f]{32})"
    r":(?P<number>[1-9][0-9]{0,18}):(?P<digest>[0-9a-f]{32})"
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_UNITS = ("", "k", "m", "g", "t")


def check_name(text: object, what: str = "ring") -> str:
    """A name of a ring or group, or an error that says which characters are allowed.

    Raises:
        OptionError: not 1 to 64 of ``[A-Za-z0-9_-]``.
    """
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        raise OptionError(
            f"{what} name {text!r} is not allowed: use 1 to 64 letters, digits, '_' or '-'"
        )
    return text


def parse_size(value: object, what: str = "size") -> int:
    """Bytes from an int or from text such as ``"8GiB"``, ``"512M"``, ``"1048576"``.

    Both ``GiB`` and ``G`` mean 2**30; ``GB`` means 10**9.

    Raises:
        OptionError: not a size, or not positive.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise OptionError(f"{what} {value!r} is not a size: write it like 8GiB, 512MiB or 1048576")
    number, unit, binary = match.groups()
    decimal = value.strip().lower().endswith("b") and not binary and unit  # type: ignore[attr-defined]
    size = int(float(number) * (1000 if decimal else 1024) ** _UNITS.index(unit.lower()))
    if size <= 0:
        raise OptionError(f"{what} {value!r} must be more than 0 bytes")
    return size


def format_size(size: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def digest_of(request_id: str) -> str:
    """First 128 bits of the SHA-256 of a request id, as 32 hex digits."""
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Handle(NamedTuple):
    """The name of one sample for ever: ``shmconn:RING:GENERATION:NUMBER:DIGEST``."""

    ring: str
    generation: str
    number: int
    digest: str

    def __str__(self) -> str:
        return f"shmconn:{self.ring}:{self.generation}:{self.number}:{self.digest}"

    @classmethod
    def make(cls, ring: str, generation: str, number: int, request_id: str) -> "Handle":
        """The handle of a request's sample."""
        return cls(ring, generation, number, digest_of(request_id))

    @classmethod
    def parse(cls, source: Any) -> "Handle":
        """A handle from its text, or from a reply's ``kv_transfer_params``.

        Raises:
            OptionError: neither a handle nor a mapping that holds one.
        """
        if isinstance(source, Handle):
            return source
        text = source.get("handle") if isinstance(source, Mapping) else source
        if isinstance(source, Mapping) and text is None:
            error = source.get("error")
            raise OptionError(
                f"the reply names no handle{f': {error}' if error else ''}; pass the "
                "`kv_transfer_params` of a reply that has one"
            )
        match = _HANDLE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise OptionError(
                f"{text!r} is not a handle: expected shmconn:RING:GENERATION:NUMBER:DIGEST as it "
                "stands in a reply's kv_transfer_params"
            )
        return cls(match["ring"], match["generation"], int(match["number"]), match["digest"])
