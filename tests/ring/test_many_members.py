# SPDX-License-Identifier: Apache-2.0
"""A group as large as it may be: 8 ranks with 12 DataLoader workers each, and more."""

import os
import signal
from collections.abc import Callable

import pytest
from harness.figures import record
from ring_tools import give_up, put, wait

from shmconn import Producer, RegistryFull, layout, subscribe
from shmconn.registry import Registry

Make = Callable[..., Producer]
Fork = Callable[[Callable[[], object]], int]


def test_a_group_takes_256_members_and_says_what_counts_as_one(make: Make) -> None:
    producer = make(groups=["g"])
    members = [subscribe(producer.name, "g") for _ in range(layout.MEMBERS)]
    assert len(members) == 256
    with pytest.raises(RegistryFull, match=r"256 live members.*num_workers.*once more"):
        subscribe(producer.name, "g")
    for number in (0, 1):
        put(producer, number)
    first, last = members[0].next(5), members[-1].next(5)
    assert (first.request_id, last.request_id) == ("r0", "r1")  # type: ignore[union-attr]
    # What the last one holds is its own: nobody takes it for a dead member's.
    assert members[1].next(0) is None
    del first, last
    for member in members:
        member.close()


@pytest.mark.long
def test_a_whole_group_joins_at_once_shares_the_samples_and_dies(make: Make, fork: Fork) -> None:
    producer = make(size="32MiB", groups=["g"])
    for number in range(layout.MEMBERS):
        assert put(producer, number)
    go, said = os.pipe(), os.pipe()

    def member() -> None:
        os.read(go[0], 1)
        subscription = subscribe(producer.name, "g")
        sample = subscription.next(60)
        assert sample is not None
        os.write(said[1], sample.request_id.encode().ljust(8))
        signal.pause()

    children = [fork(member) for _ in range(layout.MEMBERS)]
    os.write(go[1], bytes(layout.MEMBERS))
    got = [os.read(said[0], 8).decode().strip() for _ in range(layout.MEMBERS)]
    assert sorted(got) == sorted(f"r{number}" for number in range(layout.MEMBERS))
    for child in children:
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
    with subscribe(producer.name, "g") as subscription:
        again = [sample.request_id for _ in children if (sample := subscription.next(5))]
        assert again == [f"r{number}" for number in range(layout.MEMBERS)]
        del sample
    # Its dead members have not left.
    give_up(producer)
    record("members", "a full group joins at once and is killed", trials=len(got),
           exercised=len(again), failures=0)  # fmt: skip


def test_a_claim_asks_for_each_mate_s_life_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would ask for each sample that mates hold, under the lock that they wait for."""
    producer = make(size="32MiB", groups=["g"])
    mates = [subscribe(producer.name, "g") for _ in range(3)]
    held = []
    for number in range(60):
        assert put(producer, number)
        held.append(mates[number % 2].next(5))
    asked = []
    alive = Registry.alive

    def counted(self: Registry, group: int, member: int) -> bool:
        asked.append(member)
        return alive(self, group, member)

    monkeypatch.setattr(Registry, "alive", counted)
    assert mates[2].next(0) is None
    assert sorted(asked) == [0, 1]
    assert put(producer, 60)
    sample = mates[2].next(5)
    assert sample is not None and sample.request_id == "r60"
    held.clear()
    del sample
    for mate in mates:
        mate.close()
