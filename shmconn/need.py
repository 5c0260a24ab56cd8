# SPDX-License-Identifier: Apache-2.0
"""Who still needs a sample: the refcount of a slot, computed and never stored.

Need only ever falls. Once no group needs a published slot, no group, present or future, can come
to need it. So one group may be looked at after the other, without a lock.
"""

from typing import TYPE_CHECKING

from shmconn import layout
from shmconn.registry import Registry
from shmconn.segment import RingSegment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def needs(registry: Registry, ring: RingSegment, group: int, slot: int, seq: int) -> bool:
    """Whether a group may still read the sample ``seq`` in ``slot``; by fresh loads."""
    state = registry.state(group)
    if state == layout.FREE:
        return False
    if state == layout.REGISTERING:
        return True
    if seq < ring.words.load(layout.START + 8 * group):
        return False
    released = layout.hold_word(seq, layout.RELEASED)
    return ring.words.load(ring.shape.hold_at(group, slot)) != released


def refcount(registry: Registry, ring: RingSegment, slot: int, seq: int) -> int:
    """Number of groups that still need the sample ``seq`` in ``slot``."""
    return sum(needs(registry, ring, group, slot, seq) for group in range(layout.GROUPS))


def needed(registry: Registry, ring: RingSegment, slot: int, seq: int) -> bool:
    """Whether any group still needs the sample; the first yes ends the look."""
    return any(needs(registry, ring, group, slot, seq) for group in range(layout.GROUPS))


def wanted(
    ring: RingSegment, group: int, seqs: "npt.NDArray[np.uint64]"
) -> "npt.NDArray[np.bool_]":
    """By slot, whether a registered group has not released the sample there: a hint, by copies.

    Args:
        ring: the ring.
        group: row of a group that is neither free nor being registered.
        seqs: sequence number in each slot, 0 = none.
    """
    import numpy as np

    start = np.uint64(ring.words.load(layout.START + 8 * group))
    holds = ring.words.copy(ring.shape.hold_at(group, 0), ring.shape.slots)
    released = seqs << np.uint64(16) | np.uint64(layout.RELEASED)
    needed_by: npt.NDArray[np.bool_] = (
        (seqs != np.uint64(0)) & (seqs >= start) & (holds != released)
    )
    return needed_by
