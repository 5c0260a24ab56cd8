# SPDX-License-Identifier: Apache-2.0
"""A producer and three readers under load, killed at random and started again.

Everybody writes into memory that outlives him what he did: the producer what it published, each
reader what it received and released. The account at the end is made from that, not from the ring.
"""

import contextlib
import mmap
import os
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from harness import payload
from harness.processes import Child, Shared

from crash.survivors import Reader
from shmconn import words
from shmconn.directory import remove_group
from shmconn.errors import OptionError, RingMissing, ShmConnError
from shmconn.layout import RingShape
from shmconn.ring import Producer
from shmconn.sample import Sample
from shmconn.subscription import Subscription, subscribe

GROUPS = ("pair", "single")
ROLES = ("producer", "pair-1", "pair-2", "single-1")
PAGES, SLOTS = 48, 24
MAX_TOKENS = 512  # 128 KiB
SEQS = 4096  # samples of one generation; a producer that reaches it starts again
NO_PROGRESS_S = 30.0

PHASES = ("starts", "idle", "allocates", "fills", "publishes", "waits")
STARTS, IDLE, ALLOCATES, FILLS, PUBLISHES, WAITS = range(len(PHASES))


class Log:
    """What all of them write down, by group, life of the producer, and sequence number."""

    def __init__(self, lives: int, seqs: int = SEQS) -> None:
        self.lives = lives
        self.seqs = seqs
        self.generations = self._array(np.uint64, (lives, 2))
        self.acked = self._array(np.uint64, (lives,))
        self.first_at = self._array(np.float64, (lives,))
        self.received = self._array(np.uint8, (len(GROUPS), lives, seqs + 1))
        self.released = self._array(np.uint8, (len(GROUPS), lives, seqs + 1))
        # By role: what it is doing, how many leases it has, and what it ever received.
        self.phase = self._array(np.int64, (len(ROLES),))
        self.leases = self._array(np.int64, (len(ROLES),))
        self.total = self._array(np.int64, (len(ROLES),))

    @staticmethod
    def _array(kind: type, shape: tuple[int, ...]) -> "np.ndarray":
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        return np.frombuffer(mmap.mmap(-1, size), dtype=kind).reshape(shape)

    def life_of(self, generation: str) -> int:
        """Which life of the producer a generation was."""
        high, low = np.uint64(int(generation[:16], 16)), np.uint64(int(generation[16:], 16))
        (found,) = np.flatnonzero(
            (self.generations[:, 0] == high) & (self.generations[:, 1] == low)
        )
        return int(found)


@dataclass
class Tally:
    """What a load came to."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    holding: int = 0  # readers killed with a lease
    published: int = 0
    twice: int = 0
    leases_killed: int = 0
    recovery_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def produce(name: str, log: Log, life: int, seed: int) -> None:
    """A life of the producer, until it is killed."""
    dice = random.Random(seed)
    log.phase[0] = STARTS
    producer = Producer.create(
        name,
        size=RingShape(65536, PAGES, SLOTS).size,
        layer_ids=[0],
        hidden_size=payload.HIDDEN,
        dtype="float32",
        slots=SLOTS,
        groups=GROUPS,
    )
    log.generations[life] = (
        int(producer.generation[:16], 16),
        int(producer.generation[16:], 16),
    )

    def filling(name: str) -> None:
        if name == "fill":
            log.phase[0] = FILLS
        elif name.startswith("write"):
            log.phase[0] = PUBLISHES

    words.watch(filling)
    while producer.published < log.seqs:
        log.phase[0] = ALLOCATES
        if payload.put(producer, dice.randint(1, MAX_TOKENS), chunks=4, passes=24) is None:
            log.phase[0] = WAITS
            producer.wait(0.1)
            continue
        log.acked[life] = producer.published
        log.phase[0] = IDLE


class Account:
    """One reader's bookkeeping: what it holds, checked when it comes and again when it goes."""

    def __init__(self, subscription: Subscription, log: Log, role: int) -> None:
        self.subscription = subscription
        self._log = log
        self._role = role
        self._group = GROUPS.index(subscription.group)
        self._held: deque[tuple[Sample, int]] = deque()

    def take(self, sample: Sample) -> None:
        """Checks a sample and writes it down."""
        slot = payload.slot_of(self.subscription, sample)
        life = self._log.life_of(sample.handle.generation)
        if self._log.released[self._group, life, sample.seq]:
            raise AssertionError(f"sample {sample.seq} of life {life} came after its release")
        self._check(sample, slot)
        self._log.received[self._group, life, sample.seq] += 1
        self._log.total[self._role] += 1
        if not self._log.first_at[life]:
            self._log.first_at[life] = time.monotonic()
        self._held.append((sample, slot))
        self._log.leases[self._role] = len(self._held)

    def let_go(self, keep: int) -> None:
        """Checks again and releases, until ``keep`` are held."""
        while len(self._held) > keep:
            sample, slot = self._held.popleft()
            self._check(sample, slot)
            life, seq = self._log.life_of(sample.handle.generation), sample.seq
            sample.release()
            self._log.released[self._group, life, seq] = 1
            self._log.leases[self._role] = len(self._held)

    @staticmethod
    def _check(sample: Sample, slot: int) -> None:
        found = payload.problems(sample, slot)
        if found:
            raise AssertionError(found)


def read(name: str, log: Log, role: int, seed: int) -> None:
    """A life of a reader, until it is killed."""
    dice = random.Random(seed)
    log.leases[role] = 0
    subscription = subscribe(name, ROLES[role].split("-")[0], wait_s=60, follow=True)
    account = Account(subscription, log, role)
    while True:
        sample = subscription.next(0.05)
        if sample is not None:
            account.take(sample)
            del sample
        account.let_go(dice.randint(0, 3))


class Load:
    """One ring name under load. ``run`` kills, ``finish`` reads the rest and makes the account."""

    def __init__(
        self, name: str, seed: int, lives: int, mean_life_s: float = 0.03, seqs: int = SEQS
    ) -> None:
        self.name = name
        self.log = Log(lives, seqs)
        self.tally = Tally()
        self._dice = random.Random(seed)
        self._mean = mean_life_s
        self._life = -1
        self._children: dict[int, Child] = {}
        self._dies_at: dict[int, float] = {}
        self._must_die_at: dict[int, float] = {}
        self._lives_s: dict[int, float] = {}
        self._killed_at: dict[int, float] = {}
        self._zombies: list[Child] = []

    def _start(self, role: int) -> None:
        seed = self._dice.getrandbits(32)
        if role == 0:
            self._life += 1
            life = self._life
            child = Child(lambda: produce(self.name, self.log, life, seed), Shared(1))
        else:
            child = Child(lambda: read(self.name, self.log, role, seed), Shared(1))
        self._children[role] = child
        # By processor time, so that a busy machine does not kill all before they work; but one
        # that waits dies too.
        self._lives_s[role] = self._dice.uniform(0.1, 1.9) * self._mean
        self._dies_at[role] = time.monotonic() + self._lives_s[role]
        self._must_die_at[role] = time.monotonic() + 10 * self._lives_s[role]

    @property
    def killed(self) -> int:
        """Kills so far."""
        return sum(self.tally.kills.values())

    @property
    def full(self) -> bool:
        """Whether the log has no room for another life of the producer."""
        return self._life + 1 >= self.log.lives

    def run(self, kills: int, until: float = float("inf")) -> None:
        """Kills and restarts, until there were so many kills, or that time has come."""
        for role in range(len(ROLES)):
            self._start(role)
        moved_at, moved = time.monotonic(), -1
        while self.killed < kills and not self.full and time.monotonic() < until:
            role = min(self._dies_at, key=lambda role: self._dies_at[role])
            time.sleep(max(0.0, self._dies_at[role] - time.monotonic()))
            left = self._lives_s[role] - self._children[role].cpu_s
            if left > 0 and time.monotonic() < self._must_die_at[role] and self.running(role):
                self._dies_at[role] = time.monotonic() + max(left, 0.001)
                continue
            self._kill(role)
            if self.tally.problems:
                break
            self._start(role)
            now, total = time.monotonic(), int(self.log.total.sum())
            if total != moved:
                moved_at, moved = now, total
            elif now - moved_at > NO_PROGRESS_S:
                self.tally.problems.append(f"nothing moved for {NO_PROGRESS_S:.0f} s")
                break
        for role in list(self._children):
            self._kill(role, counts=False)

    def running(self, role: int) -> bool:
        """Whether a role's process lives."""
        return self._children[role].running

    def _kill(self, role: int, *, counts: bool = True) -> None:
        child = self._children.pop(role)
        if not child.running:
            child.reap()
            if role == 0 and child.status == 0:
                return  # It had used up its sequence numbers.
            self.tally.problems.append(f"{ROLES[role]}: {child.status}: {child.shared.note}")
            return
        child.kill(reap=self._dice.random() < 0.5)
        self._zombies.append(child)
        if len(self._zombies) > 32:
            self._reap()
        leases = int(self.log.leases[role]) if role else 0
        if role:
            self.tally.leases_killed += leases + 1  # and one that it may just have claimed
        if not counts:
            return
        self.tally.kills["reader" if role else "producer"] += 1
        if role == 0:
            self.tally.phases[PHASES[self.log.phase[0]]] += 1
            self._killed_at[self._life] = time.monotonic()
        else:
            self.tally.holding += leases > 0

    def _reap(self) -> None:
        for child in self._zombies:
            child.reap()
        self._zombies.clear()

    def finish(self) -> Tally:
        """Reads what is left, ends the groups, and compares what was received with what was."""
        problems = self.tally.problems
        self._reap()
        rest = []
        with contextlib.suppress(RingMissing):
            for index, group in enumerate(GROUPS):
                reader = Reader(subscribe(self.name, group), problems)
                reader.read_until("the end", lambda reader=reader: reader.over)
                for generation, seqs in reader.got.items():
                    life = self.log.life_of(generation)
                    for seq in seqs:
                        self.log.received[index, life, seq] += 1
                rest.append(reader)
        for reader in rest:
            reader.subscription.close()
        with contextlib.suppress(RingMissing, OptionError):
            for group in GROUPS:
                remove_group(self.name, group)
        self._account()
        return self.tally

    def _account(self) -> None:
        problems = self.tally.problems
        for life in range(self._life + 1):
            got = self.log.received[:, life]
            seen = int(np.flatnonzero(got.any(axis=0)).max(initial=0))
            acked = int(self.log.acked[life])
            if not acked <= seen <= acked + 1:
                problems.append(f"life {life}: published {acked}, but {seen} were seen")
            published = max(acked, seen)
            self.tally.published += published
            for index, group in enumerate(GROUPS):
                counts = got[index, 1 : published + 1]
                missing = (np.flatnonzero(counts == 0) + 1).tolist()
                if missing:
                    problems.append(f"life {life}: group {group} never got {missing[:9]}")
                self.tally.twice += int((counts.astype(int) - 1).clip(0).sum())
        if self.tally.twice > self.tally.leases_killed:
            problems.append(
                f"{self.tally.twice} samples came twice, the killed had {self.tally.leases_killed}"
            )
        for life, killed_at in self._killed_at.items():
            following = self.log.first_at[life + 1] if life + 1 < self.log.lives else 0.0
            if following:
                self.tally.recovery_s.append(float(following - killed_at))


def run(name: str, seed: int, kills: int) -> Tally:
    """A load with so many kills, to its end."""
    load = Load(name, seed, lives=kills)
    try:
        load.run(kills)
        return load.finish()
    except ShmConnError as error:
        load.tally.problems.append(f"{type(error).__name__}: {error}")
        return load.tally


def fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
