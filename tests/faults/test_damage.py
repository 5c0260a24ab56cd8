# SPDX-License-Identifier: Apache-2.0
"""Rows 9 to 11: damaged segments give errors with names, never a signal, never a hang."""

import contextlib
import mmap
import os
import random
import secrets
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from harness import figures, payload
from harness.processes import Child, Shared

from faults import damage
from faults.damage import Damaged, Mutation, Tally, at_random, each_bit, try_all
from shmconn import layout
from shmconn.errors import NotReady, ProducerDied, SegmentCorrupt, ShmConnError
from shmconn.ring import Producer
from shmconn.segment import RingSegment
from shmconn.subscription import subscribe

SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(32)


@pytest.fixture
def ring(damaged_ring: str) -> str:
    """What damage leaves behind is not the ring's fault."""
    return damaged_ring


@pytest.fixture
def damaged(ring: str) -> Iterator[Damaged]:
    made = Damaged(ring)
    yield made
    made.close()


def check(row: str, what: str, tally: Tally) -> None:
    figures.record(
        row,
        what,
        trials=tally.mutations,
        exercised=tally.mutations - tally.outcomes["as if nothing were"],
        failures=len(tally.signals) + len(tally.hangs) + len(tally.unnamed),
        signals=len(tally.signals),
        hangs=len(tally.hangs),
        outcomes=dict(tally.outcomes.most_common()),
        undetected=dict(tally.undetected),
    )
    assert tally.signals == []
    assert tally.hangs == []
    assert tally.unnamed == []


def counters() -> Iterator[Mutation]:
    shape = damage.SHAPE
    for name, at in (
        ("published", layout.PUBLISHED),
        ("accepted", layout.ACCEPTED),
        ("settled", layout.SETTLED),
        ("closed", layout.CLOSED),
        ("start", layout.START),
        ("seq", shape.seq_at(1)),
        ("hold", shape.hold_at(0, 1)),
    ):
        yield from each_bit("ring", at, at + 8, name)


def test_every_bit_of_a_head_flipped_gives_a_named_error_or_does_no_harm(damaged: Damaged) -> None:
    head = chain(each_bit("ring", 0, 152, "ring head"), each_bit("ring", 1024, 1032, "layer ids"))
    uses = (damage.list_all, damage.read_all)
    check("9", "each bit of a ring's head flipped", try_all(damaged, head, uses))
    registry = each_bit("registry", 0, 48, "registry head")
    check("9", "each bit of a registry's head flipped", try_all(damaged, registry, uses))


def test_every_bit_of_a_slot_row_flipped_gives_a_named_error_or_does_no_harm(
    damaged: Damaged,
) -> None:
    row = damage.SHAPE.row_at(1)
    uses = (damage.read_all,)
    tally = try_all(damaged, each_bit("ring", row, row + 112, "slot row"), uses)
    check("10", "each bit of a slot's row flipped", tally)


def test_a_start_beside_a_damaged_registry_gives_a_named_error_or_works(damaged: Damaged) -> None:
    dice = random.Random(SEED)
    registry = [area for area in damage.AREAS if area[1] == "registry"]
    mutations = at_random(dice, 300, registry)
    tally = try_all(damaged, mutations, (damage.start_again,))
    check("9", "random mutations of a registry, then a start", tally)


def test_random_mutations_give_named_errors_or_do_no_harm(damaged: Damaged) -> None:
    print(f"SHMCONN_SEED={SEED}")
    tally = try_all(damaged, at_random(random.Random(SEED), 1000))
    check("9", "random mutations before attach", tally)


@pytest.mark.long
def test_every_bit_of_what_changes_flipped_gives_a_named_error_or_does_no_harm(
    damaged: Damaged,
) -> None:
    groups = layout.GROUP_ROWS
    words = chain(
        counters(),
        each_bit("registry", layout.GROUP_STATES, layout.GROUP_STATES + 24, "group states"),
        each_bit("registry", groups, groups + 2 * layout.GROUP_ROW, "group rows"),
        each_bit("registry", layout.MEMBER_ROWS, layout.MEMBER_ROWS + 192, "member row"),
    )
    check("9", "each bit of counters, groups and members flipped", try_all(damaged, words))


@pytest.mark.long
def test_many_random_mutations_give_named_errors_or_do_no_harm(damaged: Damaged) -> None:
    print(f"SHMCONN_SEED={SEED}")
    tally = try_all(damaged, at_random(random.Random(SEED), 100_000))
    check("9", "random mutations before attach", tally)


# What a row may not say, and what is true of each: its sample is refused, the others are read.
BAD_ROWS = {
    "first page": (layout.SLOT_FIRST_PAGE, damage.PAGES),
    "first page, far": (layout.SLOT_FIRST_PAGE, 1 << 60),
    "no pages": (layout.SLOT_PAGES, 0),
    "pages": (layout.SLOT_PAGES, damage.PAGES + 1),
    "tokens": (layout.SLOT_TOKENS, 3),
    "tokens, many": (layout.SLOT_TOKENS, 1 << 50),
    "layers": (layout.SLOT_LAYERS, 2),
    "hidden": (layout.SLOT_HIDDEN, payload.HIDDEN * 2),
    "dtype": (layout.SLOT_DTYPE, layout.DTYPES["bfloat16"]),
    "dtype, unknown": (layout.SLOT_DTYPE, 77),
    "states": (layout.SLOT_STATES_BYTES, 1 << 40),
    "token ids": (layout.SLOT_IDS_OFFSET, 1 << 40),
    "json": (layout.SLOT_JSON_OFFSET, 8),
    "json, long": (layout.SLOT_JSON_BYTES, 1 << 40),
    "json, short": (layout.SLOT_JSON_BYTES, 5),
    "hash": (layout.SLOT_DIGEST, 5),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_row_damaged_after_the_commit_costs_its_sample_alone(damaged: Damaged, what: str) -> None:
    field, value = BAD_ROWS[what]
    subscription = subscribe(damaged.name, "every")
    at = damage.SHAPE.row_at(1) + field
    damaged.write("ring", at, value.to_bytes(8, "little"))
    seqs = []
    for _ in range(2 * damage.SAMPLES):
        sample = subscription.next(0)
        if sample is not None:
            assert payload.problems(sample, payload.slot_of(subscription, sample)) == []
            seqs.append(sample.seq)
            sample.release()
    corrupt = subscription.corrupt
    subscription._close(clean=False)
    figures.record(
        "10",
        "rows damaged between commit and read",
        trials=1,
        exercised=1,
        failures=int((seqs, corrupt) != ([1, 3], 1)),
        refused=corrupt,
    )
    assert (seqs, corrupt) == ([1, 3], 1)


@pytest.mark.parametrize(
    "size", (0, 1, 100, 4095, 4096, layout.SEQ - 1, damage.SHAPE.data, damage.SHAPE.size - 1)
)
def test_a_ring_truncated_before_attach_is_refused_by_name(damaged: Damaged, size: int) -> None:
    shared = Shared(8)

    def use() -> None:
        with pytest.raises(SegmentCorrupt) as caught:
            subscribe(damaged.name, "every").next(0)
        shared.note = caught.value.field

    # A truncated one is found as such when its producer has died.
    damaged.producer._ring.file.locks.close()
    os.truncate(damaged.paths["ring"], size)
    reader = Child(use, shared)
    reader.wait()
    assert reader.status in (0, 1)
    if size:
        assert shared.note == "size"
    else:
        # It could be one whose maker died at once, so it goes: there is no such ring.
        assert reader.status == 1
    figures.record("11", "truncated before attach", trials=1, exercised=1, failures=0)


def test_a_ring_truncated_under_a_reader_costs_that_reader_alone(ring: str) -> None:
    """Documented: whoever touches what was cut off gets SIGBUS; the next start works."""

    def produce() -> None:
        producer = Producer.create(
            ring,
            size=damage.SHAPE.size,
            layer_ids=[0],
            hidden_size=payload.HIDDEN,
            dtype="float32",
            slots=damage.SLOTS,
            groups=("every",),
        )
        payload.put(producer)
        time.sleep(60)

    producer = Child(produce)
    shared = Shared(8)

    def read() -> None:
        sample = subscribe(ring, "every", wait_s=30).next(30)
        assert sample is not None
        shared.words[0] = 1
        while not shared.words[1]:
            time.sleep(0.001)
        payload.problems(sample, 0)

    reader = Child(read, shared)
    while reader.running and not shared.words[0]:
        time.sleep(0.001)
    (file,) = [
        name for name in os.listdir("/dev/shm") if name.startswith(layout.PREFIX + ring + ".")
    ]
    os.truncate(f"/dev/shm/{file}", damage.SHAPE.data)
    shared.words[1] = 1
    reader.wait()
    assert reader.status == -7
    assert producer.running
    producer.kill()
    os.unlink(f"/dev/shm/{file}")
    with Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8):
        assert subscribe(ring, "every")._close(clean=True) is None
    figures.record("11", "truncated under a reader: SIGBUS", trials=1, exercised=1, failures=0)


def mutate(ring: Damaged, seed: int, seconds: float) -> None:
    """Damages a segment in use, again and again."""
    dice = random.Random(seed)
    maps = {}
    for which, path in ring.paths.items():
        with open(path, "r+b") as file:
            maps[which] = mmap.mmap(file.fileno(), 0)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        _, which, start, end = dice.choice(damage.AREAS)
        at = dice.randrange(start, end) & ~7
        value = dice.choice((dice.getrandbits(64), dice.choice(damage.INTERESTING)))
        maps[which][at : at + 8] = value.to_bytes(8, "little")
        time.sleep(0.0002)


@pytest.mark.parametrize("round_", range(3))
def test_mutations_of_a_ring_in_use_kill_and_hang_nobody(damaged: Damaged, round_: int) -> None:
    seconds = 1.0
    run_mutations(damaged, SEED + round_, seconds)


@pytest.mark.long
@pytest.mark.parametrize("round_", range(60))
def test_many_mutations_of_a_ring_in_use_kill_and_hang_nobody(
    damaged: Damaged, round_: int
) -> None:
    run_mutations(damaged, SEED + round_, 5.0)


def run_mutations(damaged: Damaged, seed: int, seconds: float) -> None:
    print(f"seed {seed}")
    name = damaged.name
    calls = Shared(8)

    def produce() -> None:
        producer = Producer.create(
            name,
            size=damage.SHAPE.size,
            layer_ids=[0],
            hidden_size=payload.HIDDEN,
            dtype="float32",
            slots=damage.SLOTS,
            groups=damage.GROUPS,
            unclaimed_ttl_s=0.01,
        )
        calls.note = f"/dev/shm/{producer._ring.file.name}"
        calls.words[2] = 1
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            # The engine is never hurt: none of these may raise, whatever the segment says.
            payload.put(producer)
            producer.tick()
            producer.can_progress()
            producer.stall_text()
            calls.words[0] += 1

    def read() -> None:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            calls.words[1] += 1
            try:
                subscription = subscribe(name, "every", wait_s=0.01)
            except ShmConnError:
                continue
            with contextlib.suppress(NotReady, ProducerDied, ShmConnError):
                while time.monotonic() < stop:
                    sample = subscription.next(0.005)
                    calls.words[1] += 1
                    if sample is not None:
                        payload.problems(sample, 0)
                        sample.release()
                    if subscription.ended:
                        break
            with contextlib.suppress(ShmConnError):
                subscription._close(clean=False)

    producer = Child(produce, calls)
    while producer.running and not calls.words[2]:
        time.sleep(0.001)
    own_path, calls_path = damaged.paths["ring"], calls.note
    damaged.paths["ring"] = calls_path
    calls.note = ""
    readers = [Child(read, calls), Child(read, calls)]
    mutator = Child(lambda: mutate(damaged, seed, seconds))
    ended = [child.wait(seconds + damage.HANG_S) for child in (producer, *readers, mutator)]
    ill = [child.status for child in (producer, *readers, mutator) if child.status != 0]
    figures.record(
        "10",
        "mutations while it is used",
        trials=calls.words[0] + calls.words[1],
        exercised=calls.words[0] + calls.words[1],
        failures=len(ill) + ended.count(False),
        signals=sum(status is not None and status < 0 for status in ill),
        hangs=ended.count(False),
    )
    # Its producer has ended: a reader to whom the bytes say that nobody waits for it may have
    # taken it away.
    Path(calls_path).unlink(missing_ok=True)
    damaged.paths["ring"] = own_path
    assert all(ended), "somebody hangs"
    assert ill == [], calls.note


def test_a_ring_file_of_another_kind_is_no_ring(ring: str) -> None:
    trials = 0
    with Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8) as producer:
        stranger = f"/dev/shm/{layout.PREFIX}{ring}.{'0' * 32}"
        for make, remove in (
            (lambda path: os.symlink("/etc/passwd", path), os.unlink),
            (lambda path: os.symlink("/nowhere", path), os.unlink),
            (os.mkdir, os.rmdir),
            (os.mkfifo, os.unlink),
            (lambda path: os.mknod(path, 0o600 | 0o140000), os.unlink),
        ):
            make(stranger)
            with contextlib.suppress(ShmConnError):
                subscribe(ring, "every").close()
            RingSegment.attach(producer._ring.file.name, whole=False)
            with contextlib.suppress(ShmConnError):
                Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8).close()
            trials += 1
            remove(stranger)
    figures.record(
        "9",
        "files of another kind under a ring's name",
        trials=trials,
        exercised=trials,
        failures=0,
    )
