# SPDX-License-Identifier: Apache-2.0
"""A registry that another version of shmconn uses, or that is damaged, is left as it is."""

import mmap
import os
import subprocess
from pathlib import Path

import pytest
import torch
from harness.isolation import left_of

from shmconn import layout
from shmconn.cleanup import sweep_others
from shmconn.directory import groups, remove_rings
from shmconn.errors import LayoutMismatch, SegmentCorrupt, ShmConnError
from shmconn.ring import Producer
from shmconn.segment import path_of, registry_file
from shmconn.subscription import subscribe


def plant(name: str, size: int, words: dict[int, int]) -> str:
    """A registry file of a test's own making."""
    path = path_of(registry_file(name))
    with open(path, "wb") as file:
        file.truncate(size)
        for at, value in words.items():
            file.seek(at)
            file.write(value.to_bytes(8, "little"))
    return path


def start(name: str) -> None:
    Producer.create(name, size="2MiB", layer_ids=[0], hidden_size=8)


# What version 1 had: 64 members for each of 16 groups.
OLDER_SIZE = 266_240


@pytest.mark.parametrize(
    ("version", "size"),
    (
        (layout.REGISTRY_VERSION - 1, OLDER_SIZE),
        (layout.REGISTRY_VERSION - 1, layout.REGISTRY_SIZE),
        (layout.REGISTRY_VERSION + 1, layout.REGISTRY_SIZE // 2),
        (layout.REGISTRY_VERSION + 1, layout.REGISTRY_SIZE + 4096),
    ),
)
def test_a_registry_of_another_version_is_refused_and_not_made_anew(
    ring: str, version: int, size: int
) -> None:
    path = plant(
        ring,
        size,
        {layout.MAGIC: layout.REGISTRY_MAGIC, layout.VERSION_AT: version, layout.SIZE_AT: size},
    )
    before = Path(path).read_bytes()
    said = set()
    for use in (start, lambda name: subscribe(name, "group", wait_s=1), groups):
        with pytest.raises(LayoutMismatch, match=f"version {version}, this") as caught:
            use(ring)
        said.add(str(caught.value))
    sweep_others("another-name")
    assert Path(path).read_bytes() == before
    # The remedy is a command that works.
    (text,) = said
    subprocess.run(text[text.index("rm -f") :], shell=True, check=True)
    assert left_of(ring) == []
    start(ring)
    remove_rings(ring)


@pytest.mark.parametrize("size", (8, 100, 4096, layout.REGISTRY_SIZE - 1))
def test_a_registry_that_was_truncated_is_refused_by_name(ring: str, size: int) -> None:
    path = plant(
        ring,
        size,
        {layout.MAGIC: layout.REGISTRY_MAGIC, layout.VERSION_AT: layout.REGISTRY_VERSION},
    )
    for use in (start, lambda name: subscribe(name, "group", wait_s=1), groups):
        with pytest.raises(SegmentCorrupt, match="size"):
            use(ring)
    os.unlink(path)


def test_a_registry_whose_magic_is_not_ours_is_refused_by_name(ring: str) -> None:
    path = plant(ring, layout.REGISTRY_SIZE, {layout.MAGIC: 0x21646C726F77})
    for use in (start, lambda name: subscribe(name, "group", wait_s=1), groups):
        with pytest.raises(SegmentCorrupt, match="magic"):
            use(ring)
    os.unlink(path)


@pytest.mark.parametrize("size", (0, 4096, layout.REGISTRY_SIZE))
def test_a_registry_that_was_never_made_whole_is_made_anew(ring: str, size: int) -> None:
    plant(ring, size, {})
    producer = Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8)
    producer.close()


def test_a_registry_in_use_keeps_its_memory_whatever_others_do(ring: str) -> None:
    size = layout.REGISTRY_SIZE // 2
    path = plant(
        ring,
        size,
        {layout.MAGIC: layout.REGISTRY_MAGIC, layout.VERSION_AT: 2, layout.SIZE_AT: size},
    )
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        with pytest.raises(ShmConnError):
            start(ring)
        # Had it been emptied, this would be SIGBUS.
        assert mapped[size - 1] == 0
    os.unlink(path)


@pytest.mark.parametrize("with_ring", [True, False])
def test_a_registry_in_use_that_lost_its_magic_is_refused_and_not_made_anew(
    ring: str, with_ring: bool
) -> None:
    producer = Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8)
    with subscribe(ring, "mine") as subscription:
        producer.put(torch.ones(3, 1, 8, dtype=torch.bfloat16), [1, 2, 3], request_id="r")
        sample = subscription.next(5)
        assert sample is not None
        if not with_ring:
            producer.close()
            assert subscription.next(5) is None and subscription.ended
        path = path_of(registry_file(ring))
        registry = Path(path)
        whole = registry.read_bytes()
        with open(path, "r+b") as file:
            file.seek(layout.MAGIC)
            file.write(bytes(8))
        for use in (start, lambda name: subscribe(name, "group", wait_s=1)):
            with pytest.raises(SegmentCorrupt, match="magic"):
                use(ring)
        sweep_others("another-name")
        now = registry.read_bytes()
        # The note of who locks it comes and goes.
        assert now[layout.GROUP_STATES :] == whole[layout.GROUP_STATES :]
        assert sample.hidden_states.sum() == 24
        sample.release()
        with open(path, "r+b") as file:
            file.seek(layout.MAGIC)
            file.write(layout.REGISTRY_MAGIC.to_bytes(8, "little"))
    producer.close()
