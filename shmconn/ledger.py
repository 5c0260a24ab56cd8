# SPDX-License-Identifier: Apache-2.0
"""Which requests are settled, and the tombstones of those that yielded no sample.

accepted = published + tombstones. A number is settled once its sample is published or its
tombstone stands; ``settled`` says up to which number all are. The table of tombstones is circular:
an overwritten one costs its reason, never a wait in vain, since the number is settled.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shmconn import layout
from shmconn.seen import Seen
from shmconn.words import Words

# Reasons after which the same request may well yield a sample.
_RETRY = {"aborted", "short", "no_reader", "dropped", "fault", "shutdown", "expired"}


class Ledger:
    """The producer's account of its requests. The producer's lock guards it."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._known = Seen()
        self.lost = dict.fromkeys(layout.REASONS, 0)
        self._tombstones = 0

    @property
    def settled(self) -> int:
        """The fate of every request up to this number is known."""
        return self._known.up_to

    def settle(self, number: int) -> None:
        """Takes note of a request whose fate is known."""
        self._known.add(number)
        self._words.store(layout.SETTLED, self.settled)

    def open_up_to(self, accepted: int) -> list[int]:
        """Numbers up to ``accepted`` whose fate is not known."""
        return self._known.missing(accepted)

    def entomb(self, number: int, digest: bytes, reason: str, mask: int) -> None:
        """Writes a tombstone; then, unless its sample had been published, settles the number."""
        code = layout.REASONS.index(reason)
        row = layout.TOMBSTONE_TABLE + self._tombstones % layout.TOMBSTONES * layout.TOMBSTONE
        words = self._words
        words.store(row + layout.TOMB_INDEX, 0)
        words.store(row + layout.TOMB_NUMBER, number)
        words.write(row + layout.TOMB_DIGEST, digest)
        words.store(row + layout.TOMB_REASON, code)
        words.store(row + layout.TOMB_GROUPS, mask)
        self._tombstones += 1
        words.store(row + layout.TOMB_INDEX, self._tombstones)
        self.lost[reason] += 1
        words.store(layout.LOST_BY_REASON + 8 * code, self.lost[reason])
        if reason != "expired":
            total = sum(count for why, count in self.lost.items() if why != "expired")
            words.store(layout.LOST, total)
            self.settle(number)


@dataclass(frozen=True)
class Tombstone:
    """A request that yielded no sample, as a reader finds it."""

    number: int
    reason: str
    groups: list[int]

    @property
    def retry(self) -> bool:
        """Whether sending the request again may help."""
        return self.reason in _RETRY


def tombstones_of(words: Words, number: int) -> Iterator[Tombstone]:
    """The tombstones of a request, each whole between two equal loads of its index."""
    # A number of ours was written before what made us look here (settled).
    numbers = words.column(
        layout.TOMBSTONE_TABLE + layout.TOMB_NUMBER, layout.TOMBSTONE, layout.TOMBSTONES
    )
    for index in (numbers == number).nonzero()[0]:
        row = layout.TOMBSTONE_TABLE + int(index) * layout.TOMBSTONE
        stamp = words.load(row + layout.TOMB_INDEX)
        if not stamp or words.load(row + layout.TOMB_NUMBER) != number:
            continue
        code = words.load(row + layout.TOMB_REASON)
        mask = words.load(row + layout.TOMB_GROUPS)
        if words.load(row + layout.TOMB_INDEX) == stamp:
            reason = layout.REASONS[code] if code < len(layout.REASONS) else "fault"
            groups = [group for group in range(layout.GROUPS) if mask >> group & 1]
            yield Tombstone(number, reason, groups)
