# SPDX-License-Identifier: Apache-2.0
"""A ring whose bytes can be put back, users that read whatever they find, and what came of it."""

import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from harness import payload
from harness.processes import Child, Shared

from shmconn import layout
from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.errors import ProducerDied, ShmConnError
from shmconn.handle import Handle
from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.segment import path_of, registry_file
from shmconn.subscription import subscribe

SLOTS, PAGES = 4, 6
SHAPE = RingShape(layout.MIN_PAGE, PAGES, SLOTS)
SAMPLES = 3
GROUPS = ("every", {"name": "asked", "by_handle": True})
BATCH = 500
HANG_S = 20.0


class Damaged:
    """A live ring with three samples, its control bytes kept, to be damaged again and again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.producer = Producer.create(
            name,
            size=SHAPE.size,
            layer_ids=[0],
            hidden_size=payload.HIDDEN,
            dtype="float32",
            slots=SLOTS,
            groups=GROUPS,
        )
        for _ in range(SAMPLES):
            payload.put(self.producer)
        self.handles = [
            Handle.make(name, self.generation, n + 1, payload.request_id(self.generation, n + 1))
            for n in range(SAMPLES)
        ]
        self.paths = {
            "ring": path_of(self.producer._ring.file.name),
            "registry": path_of(registry_file(name)),
        }
        sizes = {"ring": SHAPE.data, "registry": layout.REGISTRY_SIZE}
        self._kept: dict[str, bytes] = {}
        for which, path in self.paths.items():
            with open(path, "rb") as file:
                self._kept[which] = file.read(sizes[which])

    @property
    def generation(self) -> str:
        """Generation of the ring."""
        return self.producer.generation

    def kept(self, which: str, at: int, length: int = 1) -> bytes:
        """The bytes as they were made."""
        return self._kept[which][at : at + length]

    def write(self, which: str, at: int, data: bytes) -> None:
        """Damages a segment."""
        fd = os.open(self.paths[which], os.O_RDWR)
        os.pwrite(fd, data, at)
        os.close(fd)

    def restore(self) -> None:
        """Puts all control bytes back."""
        for which, data in self._kept.items():
            self.write(which, 0, data)

    def close(self) -> None:
        """Ends the ring, and removes what is damaged."""
        if self.producer._ring.file.locks.fd >= 0:
            self.restore()
            self.producer.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.paths["ring"])
        self.producer._registry.close()
        for group in ("every", "asked"):
            with contextlib.suppress(ShmConnError):
                remove_group(self.name, group)
        with contextlib.suppress(ShmConnError):
            remove_rings(self.name, force=True)


Use = Callable[[Damaged], str]


def look(ring: Damaged, uses: tuple[Use, ...]) -> str:
    """Uses what is there in each way; what happened, in a few words."""
    outcome = "as if nothing were"
    for use in uses:
        try:
            found = use(ring)
        except ShmConnError as error:
            # One error with a name is what a user sees; the other ways are tried all the same.
            outcome = type(error).__name__
        except Exception as error:
            return f"UNNAMED {type(error).__name__} in {use.__name__}: {error}"
        else:
            if found and outcome == "as if nothing were":
                outcome = found
    return outcome


def list_all(ring: Damaged) -> str:
    """What `ls`, `stat` and `groups` ask for."""
    found = rings(ring.name)
    groups(ring.name)
    return "shown as damaged" if any(info.problem for info in found) else ""


def read_all(ring: Damaged) -> str:
    """A trainer that reads in turn."""
    subscription = subscribe(ring.name, "every")
    wrong = []
    try:
        for _ in range(2 * SAMPLES):
            try:
                sample = subscription.next(0)
            except ProducerDied:
                break
            if sample is not None:
                wrong += payload.problems(sample, payload.slot_of(subscription, sample))
                sample.release()
        corrupt = subscription.corrupt
    finally:
        subscription._close(clean=False)
    if wrong:
        return "undetected"
    return "counted as corrupt" if corrupt else ""


def ask_all(ring: Damaged) -> str:
    """A trainer that asks by handle."""
    subscription = subscribe(ring.name, "asked", by_handle=True)
    named = ""
    try:
        for handle in ring.handles:
            try:
                subscription.get(handle, timeout=0).release()
            except ShmConnError as error:
                named = type(error).__name__
    finally:
        subscription._close(clean=False)
    return named


def start_again(ring: Damaged) -> str:
    """Another start under the name, which cleans first."""
    with Producer.create(ring.name, size="2MiB", layer_ids=[0], hidden_size=8) as producer:
        producer.tick()
    return ""


READERS: tuple[Use, ...] = (list_all, read_all, ask_all)
Mutation = tuple[str, Callable[[Damaged], None]]


@dataclass
class Tally:
    """What came of many mutations."""

    mutations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    signals: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    undetected: Counter[str] = field(default_factory=Counter)


def try_all(ring: Damaged, mutations: Iterator[Mutation], uses: tuple[Use, ...] = READERS) -> Tally:
    """Applies each mutation and looks, in forked children, so that a signal is one more outcome."""
    tally = Tally()
    while batch := [mutation for _, mutation in zip(range(BATCH), mutations, strict=False)]:
        done = 0
        while done < len(batch):
            done += _run(ring, batch[done:], uses, tally)
    ring.restore()
    return tally


def _run(ring: Damaged, batch: list[Mutation], uses: tuple[Use, ...], tally: Tally) -> int:
    """One child; how many mutations it came through, with the one that ended it."""
    shared = Shared(8)
    with tempfile.TemporaryFile("w+") as file:

        def work() -> None:
            for what, damage in batch:
                ring.restore()
                shared.note = what
                shared.words[0] += 1
                damage(ring)
                print(f"{what}\t{look(ring, uses)}".replace("\n", " "), file=file, flush=True)

        child = Child(work, shared)
        seen = -1
        while not child.wait(HANG_S):
            if shared.words[0] == seen:
                tally.hangs.append(shared.note)
                child.kill()
                break
            seen = shared.words[0]
        file.seek(0)
        lines = file.read().splitlines()
    for line in lines:
        what, _, outcome = line.partition("\t")
        tally.mutations += 1
        tally.outcomes[outcome.split(" in ")[0] if outcome.startswith("UNNAMED") else outcome] += 1
        if outcome.startswith("UNNAMED"):
            tally.unnamed.append(f"{what}: {outcome}")
        if outcome.startswith("undetected"):
            tally.undetected[what.split(",")[0]] += 1
    if child.status == 0:
        return len(batch)
    if child.status is not None and child.status < 0 and not tally.hangs:
        tally.signals.append(f"{shared.note}: signal {-child.status}")
    elif child.status != 0 and not tally.hangs:
        tally.unnamed.append(f"{shared.words[0]}: {shared.note}")
    tally.mutations += 1
    return len(lines) + 1


Area = tuple[str, str, int, int]  # what, which segment, from, to
AREAS: tuple[Area, ...] = (
    ("ring head", "ring", 0, 1024 + 8),
    ("producer's words", "ring", 4096, 4096 + 2048 + 8 * layout.GROUPS),
    ("tombstones", "ring", layout.TOMBSTONE_TABLE, layout.TOMBSTONE_TABLE + 8 * layout.TOMBSTONE),
    ("seq and hold", "ring", layout.SEQ, SHAPE.rows),
    ("slot rows", "ring", SHAPE.rows, SHAPE.rows + SLOTS * layout.SLOT_ROW),
    ("registry head", "registry", 0, layout.GROUP_ROWS + 4 * layout.GROUP_ROW),
    ("member rows", "registry", layout.MEMBER_ROWS, layout.MEMBER_ROWS + 4 * layout.MEMBER_ROW),
)
INTERESTING = (0, 1, 2, 0xFF, 0xFFFF, 1 << 16, 1 << 31, 1 << 32, 1 << 47, 1 << 48, 1 << 63)


def at_random(dice: random.Random, count: int, areas: Sequence[Area] = AREAS) -> Iterator[Mutation]:
    """Random mutations: one to four words, of random or well-chosen values."""
    for index in range(count):
        writes = []
        for _ in range(dice.randint(1, 4)):
            area, which, start, stop = dice.choice(areas)
            at = dice.randrange(start, stop) & ~7
            value = dice.choice(
                (dice.getrandbits(64), dice.choice(INTERESTING), dice.randrange(64))
            )
            length = dice.choice((1, 8, 8))
            at += dice.randrange(8) if length == 1 else 0
            writes.append((which, at, value.to_bytes(8, "little")[:length]))

        def damage(ring: Damaged, writes: list[tuple[str, int, bytes]] = writes) -> None:
            for which, at, data in writes:
                ring.write(which, at, data)

        yield f"{area}, mutation {index}: {writes}", damage


def each_bit(which: str, start: int, stop: int, area: str) -> Iterator[Mutation]:
    """Every bit of a part of a segment, flipped alone."""
    for at in range(start, stop):
        for bit in range(8):

            def damage(ring: Damaged, at: int = at, bit: int = bit) -> None:
                ring.write(which, at, bytes([ring.kept(which, at)[0] ^ 1 << bit]))

            yield f"{area}, byte {at} bit {bit}", damage
