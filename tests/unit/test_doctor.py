# SPDX-License-Identifier: Apache-2.0
"""The doctor's look at rings: one that cannot be read hides no other."""

import os

from reader.doctor import BAD, OK, check_rings
from shmconn import Producer, layout
from shmconn.segment import path_of, registry_file


def test_a_registry_that_cannot_be_read_is_a_finding_beside_the_others(ring_name: str) -> None:
    names = [f"{ring_name}-a", f"{ring_name}-b"]
    made = [
        Producer.create(name, size="1MiB", layer_ids=[1], hidden_size=8, dtype="float32")
        for name in names
    ]
    registry = os.open(path_of(registry_file(names[0])), os.O_RDWR)
    version = os.pread(registry, 8, layout.VERSION_AT)
    os.pwrite(registry, (99).to_bytes(8, "little"), layout.VERSION_AT)
    found = check_rings()
    os.pwrite(registry, version, layout.VERSION_AT)
    os.close(registry)
    for producer in made:
        producer.close()
    states = {finding.subject: finding.state for finding in found}
    assert states[f"groups of {names[0]}"] == BAD
    (text,) = [one.text for one in found if one.subject == f"groups of {names[0]}"]
    assert "layout version 99" in text
    for producer in made:
        assert states[f"ring {producer.name}.{producer.generation[:8]}"] == OK
