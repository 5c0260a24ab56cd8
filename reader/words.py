# SPDX-License-Identifier: Apache-2.0
"""Numbers with their nouns, for people."""


def count(number: int, noun: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
