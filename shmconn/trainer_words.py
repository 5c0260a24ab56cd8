# SPDX-License-Identifier: Apache-2.0
"""A few words that a trainer shares with its DataLoader workers.

They are memory of torch's, so they come through a fork, and through the pickle of a spawn. Workers
write and the trainer reads; only ``stop`` goes the other way. Nothing of the ring depends on them.
"""

import contextlib
import os
import socket

import torch
from torch.utils.data import get_worker_info

from shmconn.directory import GroupInfo, groups, remove_group
from shmconn.errors import OptionError, ProducerDied, RingMissing

_WORKERS = 128
_STOPPED, _DIED, _ACCEPTED, _SETTLED, _JOINED = range(5)
# From here on one word per worker; the last is of whoever is none.
_SKIPPED = 5
_PIDS = _SKIPPED + _WORKERS + 1
_HANDED_OVER = _PIDS + _WORKERS + 1
_END = _HANDED_OVER + _WORKERS + 1


class TrainerWords:
    """Whether to stop, who works, how it ended. Owned by the process that made them."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._words = torch.zeros(_END, dtype=torch.int64)
        self._words.share_memory_()  # type: ignore[no-untyped-call]

    def inherited(self) -> bool:
        """Whether they are another process's: we were forked from it, or unpickled."""
        return self._pid != os.getpid()

    # --- written by a worker --------------------------------------------------------------------

    def enter_worker(self) -> None:
        """Takes note of this worker."""
        self._words[_PIDS + _number()] = os.getpid()

    def note_joined(self) -> None:
        """The ring was there."""
        self._words[_JOINED] = 1

    @property
    def joined(self) -> bool:
        """Whether any process of this dataset has found the ring."""
        return bool(self._words[_JOINED])

    def count_skipped(self) -> None:
        """One more sample that had been handed out before."""
        self._words[_SKIPPED + _number()] += 1

    def count_handed_over(self, samples: int) -> None:
        """So many more samples went to the trainer."""
        self._words[_HANDED_OVER + _number()] += samples

    def note_death(self, error: ProducerDied) -> None:
        """All is read, and the producer was killed."""
        self._words[_ACCEPTED] = error.accepted
        self._words[_SETTLED] = error.settled
        self._words[_DIED] = 1

    # --- read and written by the trainer --------------------------------------------------------

    def stop(self) -> None:
        """Has the workers end."""
        self._words[_STOPPED] = 1

    @property
    def stopped(self) -> bool:
        """Whether the dataset was closed."""
        return bool(self._words[_STOPPED])

    @property
    def skipped(self) -> int:
        """Samples that came again, in all workers."""
        return int(self._words[_SKIPPED:_PIDS].sum())

    @property
    def handed_over(self) -> int:
        """Samples that all workers gave to the trainer, also what still lies in torch's queues."""
        return int(self._words[_HANDED_OVER:_END].sum())

    def death(self, ring: str | None) -> ProducerDied | None:
        """The end that a worker read, if the producer was killed."""
        if not self._words[_DIED]:
            return None
        accepted, settled = int(self._words[_ACCEPTED]), int(self._words[_SETTLED])
        return ProducerDied(
            f"the producer of {f'ring {ring!r}' if ring else 'the ring'} died; all that it had "
            f"published was handed out. It had accepted {accepted} requests; "
            f"{max(0, accepted - settled)} of them were never published",
            accepted=accepted,
            settled=settled,
        )

    def leave_for_killed_workers(self, ring: str, group: str) -> None:
        """Ends a group that only killed workers of this trainer have not left.

        torch kills a worker that waits for a sample when its loader ends. That is no crash of the
        training, so it must not keep the group's place.
        """
        pids = set(self._words[_PIDS:_HANDED_OVER].tolist()) - {0}
        found = _find(ring, group) if pids else None
        if found is None or found.durable or not found.members:
            return
        if all(
            not member.alive and member.pid in pids and member.host == socket.gethostname()
            for member in found.members
        ):
            # Refused if somebody has joined meanwhile: then it is not ours to end.
            with contextlib.suppress(OptionError, RingMissing):
                remove_group(ring, group)


def _number() -> int:
    """Index of this worker's word."""
    info = get_worker_info()
    return _WORKERS if info is None else int(info.id) % _WORKERS


def _find(ring: str, group: str) -> GroupInfo | None:
    try:
        return next((one for one in groups(ring) if one.name == group), None)
    except RingMissing:
        return None
