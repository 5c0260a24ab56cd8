# SPDX-License-Identifier: Apache-2.0
"""What a test that failed in the middle may leave of a ring."""

import contextlib

import shmconn
from shmconn import directory


def remove_ring(ring: str) -> None:
    """Removes it, with the groups of dead members."""
    with contextlib.suppress(shmconn.RingMissing):
        for group in directory.groups(ring):
            if group.name and not group.alive:
                directory.remove_group(ring, group.name)
        directory.remove_rings(ring, force=True)
