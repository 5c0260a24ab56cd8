# SPDX-License-Identifier: Apache-2.0
"""What a shell may complete: names that are there now."""

from reader.sinks import FORMATS
from shmconn.directory import rings
from shmconn.errors import ShmConnError


def ring_names(incomplete: str) -> list[str]:
    """Names of rings."""
    try:
        names = {ring.name for ring in rings()}
    except (OSError, ShmConnError):
        return []  # a shell shows no errors
    return sorted(name for name in names if name.startswith(incomplete))


def formats(incomplete: str) -> list[tuple[str, str]]:
    """Formats of a drain, with what they are."""
    return [(name, text) for name, text in FORMATS.items() if name.startswith(incomplete)]
