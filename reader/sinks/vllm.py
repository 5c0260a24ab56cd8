# SPDX-License-Identifier: Apache-2.0
"""Files and locks as vLLM's own connector leaves them, so that its ``load_hidden_states`` works.

``{tag or request id}.safetensors`` with ``hidden_states`` and ``token_ids``, and beside it an empty
``.lock`` file, which is locked until the sample is whole. Locks that the file system refuses are
left out: the file itself appears whole or not at all.
"""

import os

from reader.folder import Output, lock_file
from reader.sinks import SinkOptions
from reader.sinks.safetensors import SafetensorsSink


class VllmSink(SafetensorsSink):
    """Writes a lock and a safetensors file."""

    def publish(self, output: Output, name: str, *, replace: bool) -> None:
        """Make the lock first: whoever sees the file finds it."""
        lock = self.folder.open(f"{name}.lock", os.O_RDWR | os.O_CREAT)
        try:
            lock_file(lock)
            super().publish(output, name, replace=replace)
        except OSError:
            if not self.folder.exists(name):
                os.unlink(f"{name}.lock", dir_fd=self.folder.fd)
            raise
        finally:
            os.close(lock)


def open_sink(options: SinkOptions) -> VllmSink:
    """An output of this format."""
    return VllmSink(options)
