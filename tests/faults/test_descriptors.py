# SPDX-License-Identifier: Apache-2.0
"""Row 28: descriptors run out, at each call in turn."""

import os

import pytest

from shmconn import segment
from shmconn.ring import Producer
from shmconn.segment import ShmFile


def test_an_open_that_fails_closes_its_descriptor_once(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8)

    def refuse(fd: int) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "LockFile", refuse)
        with pytest.raises(OSError, match="Too many") as caught:
            ShmFile(segment.registry_file(ring))
    # Takes the number that was closed; the object that failed is still in the traceback.
    other = os.open("/dev/null", os.O_RDONLY)
    del caught
    os.fstat(other)
    os.close(other)
    producer.close()
