# SPDX-License-Identifier: Apache-2.0
"""Throws samples away: to measure the rest, or to keep a ring empty."""

from typing import TYPE_CHECKING

from reader.sinks import SinkOptions, Stored

if TYPE_CHECKING:
    from shmconn.sample import Sample


class NullSink:
    """Counts bytes."""

    path = "nowhere"

    def write(self, sample: "Sample") -> Stored:
        """Forget a sample."""
        return Stored("", sample.nbytes, fresh=True)

    def close(self) -> None:
        """Nothing is open."""


def open_sink(options: SinkOptions) -> NullSink:
    """An output of this format."""
    return NullSink()
