# SPDX-License-Identifier: Apache-2.0
"""Row 14: other users of the host, with a common group and without."""

import os
from collections.abc import Callable

import pytest
from crash.survivors import create
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared

from places.namespaces import become, ended, sticky, until
from shmconn.cleanup import sweep_others
from shmconn.directory import remove_rings
from shmconn.errors import AccessDenied, ProducerDied, RingMissing
from shmconn.ring import Producer
from shmconn.segment import path_of, ring_files
from shmconn.subscription import subscribe

pytestmark = sticky

OWNER, READER = 65533, 65534
COMMON, OTHER = 65532, 65531
MODES = (0o600, 0o640, 0o660, 0o666)
SAMPLES = 3
MADE, GO, DONE, DENIALS = range(4)


def produce(name: str, mode: int, shared: Shared, groups: tuple[str, ...] = ()) -> None:
    """As the owner: publishes, waits, closes. The umask is what people have."""
    become(OWNER, COMMON)
    os.umask(0o022)
    with _open_to(name, mode, groups) as producer:
        for _ in range(SAMPLES):
            payload.put(producer)
        shared.words[MADE] = 1
        until(lambda: shared.words[GO], "the word to go on")


def _open_to(name: str, mode: int, groups: tuple[str, ...]) -> Producer:
    return Producer.create(
        name,
        size="2MiB",
        layer_ids=[0],
        hidden_size=payload.HIDDEN,
        dtype="float32",
        groups=groups,
        mode=mode,
    )


def denied(use: Callable[[], object], mode: int, shared: Shared) -> None:
    """That something is refused, by an error that says whose it is."""
    try:
        use()
    except AccessDenied as error:
        text = str(error)
        assert f"uid {OWNER}, mode {mode:04o}" in text, text
        assert f"uid {READER}" in text and "mode=0660" in text, text
    else:
        raise AssertionError("was not refused")
    shared.words[DENIALS] += 1


def try_everything(name: str, mode: int, group: int, shared: Shared) -> None:
    """As another user: reads, and tries to do what a stranger must not."""
    become(READER, group)
    os.umask(0o022)
    (file_name,) = ring_files(name)
    allowed = mode == 0o666 or (mode == 0o660 and group == COMMON)
    if allowed:
        with subscribe(name, "reader") as subscription:
            for seq in range(1, SAMPLES + 1):
                sample = subscription.next(10)
                assert sample is not None and sample.seq == seq
                slot = payload.slot_of(subscription, sample)
                assert payload.problems(sample, slot) == []
                del sample
    else:
        denied(lambda: subscribe(name, "reader"), mode, shared)
        denied(lambda: create(name), mode, shared)
        denied(lambda: remove_rings(name, force=True), mode, shared)
        with pytest.raises(PermissionError):
            os.close(os.open(path_of(file_name), os.O_RDWR))
    with pytest.raises(PermissionError):
        os.unlink(path_of(file_name))
    sweep_others("")
    assert ring_files(name) == [file_name]


@pytest.mark.parametrize("group", (COMMON, OTHER), ids=("common group", "stranger"))
@pytest.mark.parametrize("mode", MODES, ids=oct)
def test_another_user_reads_what_the_mode_allows_and_removes_nothing(
    damaged_ring: str, mode: int, group: int
) -> None:
    ring = damaged_ring
    shared = Shared()
    owner = Child(lambda: produce(ring, mode, shared), shared)
    with ended(owner):
        until(lambda: shared.words[MADE], "the ring", owner)
        Child(lambda: try_everything(ring, mode, group, shared), Shared()).finish()
        (file_name,) = ring_files(ring)
        status = os.stat(path_of(file_name))
        assert (status.st_uid, status.st_mode & 0o777) == (OWNER, mode)
        shared.words[GO] = 1
        owner.finish()
    figures.record(
        "14",
        "mode and user: reading, joining, starting, removing",
        trials=1,
        exercised=1,
        failures=0,
        denials=shared.words[DENIALS] + 1,
    )


def test_a_reader_of_another_user_leaves_quietly_what_only_the_owner_may_remove(
    damaged_ring: str,
) -> None:
    ring = damaged_ring
    shared = Shared()
    owner = Child(lambda: produce(ring, 0o660, shared, ("reader",)), shared)

    def read_to_the_end(died: bool) -> None:
        become(READER, COMMON)
        subscription = subscribe(ring, "reader")
        shared.words[DONE] += 1
        try:
            assert [sample.seq for sample in subscription] == [1, 2, 3]
        except ProducerDied:
            assert died
        # Its clean-up finds the ring at its end, and may not remove it.
        subscription.close()

    with ended(owner):
        until(lambda: shared.words[MADE], "the ring", owner)
        owner.kill()
        Child(lambda: read_to_the_end(True), Shared()).finish()
        assert len(ring_files(ring)) == 1

        def remove() -> None:
            become(READER, COMMON)
            swept = remove_rings(ring, force=True)
            assert swept.removed == [] and len(swept.foreign) == 1

        Child(remove, Shared()).finish()
        shared.words[MADE] = 0
        shared.words[GO] = 1
        # The owner's next start clears what was left, and its end leaves nothing.
        owner = Child(lambda: produce(ring, 0o660, shared), shared)
        owner.finish()

        def give_up() -> None:
            become(OWNER, COMMON)
            remove_rings(ring)

        Child(give_up, Shared()).finish()
    assert left_of(ring) == []
    figures.record(
        "14", "a reader of another user outlives the ring", trials=1, exercised=1, failures=0
    )


def test_the_owner_ends_quietly_beside_a_doorbell_of_another_user(damaged_ring: str) -> None:
    ring = damaged_ring
    shared = Shared()
    owner = Child(lambda: produce(ring, 0o660, shared), shared)

    def join_and_leave() -> None:
        become(READER, COMMON)
        os.umask(0o022)
        # The group is new, so its doorbell is this user's.
        subscribe(ring, "reader").close()

    with ended(owner):
        until(lambda: shared.words[MADE], "the ring", owner)
        Child(join_and_leave, Shared()).finish()
        bell = next(name for name in left_of(ring) if ".g" in name)
        status = os.stat(path_of(bell))
        assert (status.st_uid, status.st_mode & 0o777) == (READER, 0o660), "the owner may not ring"
        shared.words[GO] = 1
        owner.finish()
    assert ring_files(ring) == []
    with pytest.raises(RingMissing):
        subscribe(ring, "reader")


def test_the_start_of_one_user_removes_nothing_dead_of_another(damaged_ring: str) -> None:
    ring = damaged_ring
    shared = Shared()
    owner = Child(lambda: produce(ring, 0o666, shared), shared)
    with ended(owner):
        until(lambda: shared.words[MADE], "the ring", owner)
        owner.kill()
        (file_name,) = ring_files(ring)

        def start_elsewhere() -> None:
            become(READER, OTHER)
            create(f"{ring}-2").close()
            # Under the same name it may join, and still removes nothing.
            _open_to(ring, 0o666, ()).close()
            assert file_name in ring_files(ring)

        Child(start_elsewhere, Shared()).finish()
        assert ring_files(ring) == [file_name]
