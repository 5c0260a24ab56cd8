# SPDX-License-Identifier: Apache-2.0
"""Which request numbers were met, in whatever order they come."""


class Seen:
    """Numbers from 1 on, each met once.

    Attributes:
        up_to: all numbers up to this one were met.
    """

    def __init__(self) -> None:
        self.up_to = 0
        self._beyond: set[int] = set()

    def add(self, number: int) -> bool:
        """Meets a number; whether for the first time."""
        if number <= self.up_to or number in self._beyond:
            return False
        self._beyond.add(number)
        while self.up_to + 1 in self._beyond:
            self.up_to += 1
            self._beyond.remove(self.up_to)
        return True

    def missing(self, last: int) -> list[int]:
        """Numbers up to ``last`` that were not met."""
        return [n for n in range(self.up_to + 1, last + 1) if n not in self._beyond]
