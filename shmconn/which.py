# SPDX-License-Identifier: Apache-2.0
"""Which ring is meant where none is named, and what to say when one is not there."""

from shmconn.errors import RingMissing, ShmConnError
from shmconn.registry import Registry
from shmconn.segment import RingSegment, path_of, registry_file, ring_files, split_ring_name
from shmconn.unlinked import CAUSE, REMEDY, unlinked_rings


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
    if name is not None and _without_registry(name):
        return (
            f"ring {name!r} cannot be joined: its registry {path_of(registry_file(name))} was "
            f"removed {CAUSE}. To mend it {REMEDY}"
        )
    gone = unlinked_rings(name)
    if gone:
        return f"{'; '.join(ring.text for ring in gone)}. To mend it {REMEDY}"
    what = f"there is no ring {name!r}" if name else "there is no ring on this host"
    if names:
        return f"{what}; there are: {', '.join(names)}"
    return f"{what}. Start vLLM with the connector (shmconn serve), or wait for it (--wait, wait_s)"


def _without_registry(name: str) -> bool:
    """Whether a live ring of the name belongs to a registry that is not there any more."""
    try:
        registry = Registry.peek(name)
    except ShmConnError:
        return False  # it is there
    there = None if registry is None else registry.id
    if registry is not None:
        registry.close()
    for file in ring_files(name):
        try:
            ring = RingSegment.attach(file, whole=False)
        except ShmConnError:
            continue  # that it cannot be read is told by who wants to read it
        if ring is not None and ring.registry_id != there and ring.producer_alive():
            return True
    return False
