# SPDX-License-Identifier: Apache-2.0
"""Which ring is meant where none is named, and what to say when one is not there."""

from shmconn.errors import RingMissing
from shmconn.segment import ring_files, split_ring_name


def the_only_ring() -> str:
    """The name of the one ring on this host.

    Raises:
        RingMissing: there is none, or there are several; lists them.
    """
    names = sorted({split_ring_name(file).name for file in ring_files()})
    if len(names) == 1:
        return names[0]
    if not names:
        raise RingMissing(missing_text(None))
    raise RingMissing(f"name the ring you mean; there are: {', '.join(names)}")


def missing_text(name: str | None) -> str:
    """What to say when a ring is not there."""
    names = sorted({split_ring_name(file).name for file in ring_files()})
    what = f"there is no ring {name!r}" if name else "there is no ring on this host"
    if names:
        return f"{what}; there are: {', '.join(names)}"
    return f"{what}. Start vLLM with the connector (shmconn serve), or wait for it (--wait, wait_s)"
