# SPDX-License-Identifier: Apache-2.0
"""The searches: honest ones that must find nothing, and one or more for each seeded fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .faults import Fault
from .scenarios import by_handle, one_ring, runs_of_pages, several_rings, whole_life
from .steps import Model

PUT_BURY_PUT = (("put", 1), ("bury", 2), ("put", 3))
OUT_OF_TURN = (("put", 2), ("bury", 1), ("put", 3))
TWO_PUTS = (("put", 1), ("put", 2))


class Case(NamedTuple):
    """One search.

    `finish`: also ask whether all can finish from each state. `partial`: known to be too large
    to be searched to the end.
    """

    name: str
    scenario: Callable[..., Model]
    options: dict[str, Any]
    finish: bool = True
    partial: bool = False

    def model(self, fault: Fault | None = None, *, harm_only: bool = False) -> Model:
        """Make a fresh model."""
        return self.scenario(**self.options, fault=fault, harm_only=harm_only)


def _case(
    name: str,
    scenario: Callable[..., Model],
    finish: bool = True,
    partial: bool = False,
    **options: Any,
) -> Case:
    return Case(name, scenario, options, finish, partial)


# Each ends in seconds.
PUSH = (
    _case("one member, 2 kills", one_ring, kills=2),
    _case("two members, 1 kill", one_ring, groups=(2,), kills=1),
    _case("two members that give back, 1 kill", one_ring, groups=(2,), gives_back=True, kills=1),
    _case("a newcomer", one_ring, groups=(1, 1)),
    _case("a newcomer that is killed", one_ring, groups=(1, 1), kills=1, killed="B"),
    _case("a leaving group and a newcomer", one_ring, groups=(1, 1), leaves_early=(1,)),
    _case("two members, store buffers, 1 kill", one_ring, groups=(2,), buffer=3, kills=1),
    _case("a newcomer, store buffers", one_ring, groups=(1, 1), buffer=3),
    _case("expiry", one_ring, by_handle=(1,), kills=1),
    _case("two rings, 1 kill", several_rings, kills=1),
    _case("start, read, clean up", whole_life),
    _case("start, read, clean up, 1 kill", whole_life, kills=1, killed="A"),
    _case("a start with a named group fails", whole_life, wishes=(1,), may_fail=True, kills=1),
    _case("open and clean up, 1 kill", whole_life, producers=0, groups=(2,), kills=1),
    _case(
        "what a kill left is swept",
        whole_life,
        producers=0,
        groups=(1, 1),
        kills=1,
        for_good="AB",
        swept=True,
        registries=5,
    ),
    _case("get, one member", by_handle, script=PUT_BURY_PUT, asks=((1, 2, 3),), kills=1),
    _case("get, settled out of turn", by_handle, script=OUT_OF_TURN, asks=((3, 1, 2),), kills=1),
    _case("get, two members", by_handle, script=TWO_PUTS[:1], asks=((1,), (1,)), gives_back=True),
    _case("runs of pages", runs_of_pages, sizes=(1, 2, 1)),
    _case("two leases at once, 1 kill", one_ring, slots=2, samples=3, keeps=2, kills=1),
)

LONG = (
    _case(
        "two members, 2 slots, 3 samples, 2 kills",
        one_ring,
        groups=(2,),
        slots=2,
        samples=3,
        kills=2,
    ),
    _case(
        "two members that give back, 2 slots, 3 samples, 2 kills",
        one_ring,
        groups=(2,),
        slots=2,
        samples=3,
        gives_back=True,
        kills=2,
    ),
    _case(
        "two members with two leases each, 1 kill",
        one_ring,
        groups=(2,),
        slots=2,
        samples=3,
        keeps=2,
        kills=1,
    ),
    _case("three members, 1 kill", one_ring, groups=(3,), kills=1),
    _case("a newcomer, 1 kill", one_ring, groups=(1, 1), kills=1),
    _case("a newcomer, 2 slots, 3 samples", one_ring, groups=(1, 1), slots=2, samples=3),
    _case(
        "two groups that may leave, 1 kill",
        one_ring,
        False,
        groups=(1, 1),
        leaves_early=(1, 2),
        kills=1,
    ),
    _case(
        "a leaving group and a newcomer, store buffers, 1 kill",
        one_ring,
        groups=(1, 1),
        leaves_early=(1,),
        buffer=3,
        kills=1,
    ),
    _case(
        "two members, store buffers, 2 slots, 3 samples, 2 kills",
        one_ring,
        groups=(2,),
        slots=2,
        samples=3,
        buffer=3,
        kills=2,
    ),
    _case(
        "a group that never returns is removed by hand",
        one_ring,
        groups=(1, 1),
        kills=1,
        killed="B",
        for_good="B",
        removes=2,
    ),
    _case(
        "expiry beside a group of every sample, 1 kill",
        one_ring,
        groups=(1, 1),
        by_handle=(1,),
        kills=1,
    ),
    _case("two newcomers", one_ring, groups=(1, 1, 1), rows=3),
    _case("two members and a newcomer", one_ring, groups=(2, 1)),
    _case("two members and a newcomer, 1 kill", one_ring, groups=(2, 1), kills=1),
    _case("two members and a newcomer, store buffers", one_ring, groups=(2, 1), buffer=3),
    _case("two rings, two members, 1 kill", several_rings, groups=(2,), kills=1),
    _case("two rings of two samples, 1 kill", several_rings, samples=(2, 2), kills=1),
    _case("three rings, 1 kill", several_rings, samples=(1, 1, 1), kills=1),
    _case("two rings, a newcomer", several_rings, groups=(1, 1)),
    _case("two rings, a newcomer, store buffers", several_rings, groups=(1, 1), buffer=2),
    _case("start, read, clean up, a newcomer", whole_life, groups=(1, 1)),
    _case(
        "start, read, clean up, two members, 1 kill of a member",
        whole_life,
        groups=(2,),
        kills=1,
        killed="A",
    ),
    _case(
        "start, read, clean up, two members, 1 kill of a producer",
        whole_life,
        groups=(2,),
        kills=1,
        killed="producer",
        partial=True,
    ),
    _case(
        "start, read, clean up, a newcomer, 1 kill of a member",
        whole_life,
        groups=(1, 1),
        kills=1,
        killed="AB",
    ),
    _case(
        "two starts at once, 1 kill of a member",
        whole_life,
        producers=2,
        kills=1,
        killed="A",
    ),
    _case(
        "two starts at once, 1 kill of a producer",
        whole_life,
        producers=2,
        kills=1,
        killed="producer",
        partial=True,
    ),
    _case(
        "two starts that may fail, 1 kill of a member",
        whole_life,
        producers=2,
        wishes=(1,),
        may_fail=True,
        kills=1,
        killed="A",
    ),
    _case(
        "two starts that may fail, 1 kill of a producer",
        whole_life,
        producers=2,
        wishes=(1,),
        may_fail=True,
        kills=1,
        killed="producer",
        partial=True,
    ),
    _case(
        "a start with a named group fails, store buffers",
        whole_life,
        wishes=(1,),
        may_fail=True,
        buffer=2,
        kills=1,
    ),
    _case(
        "three that open and clean up, 1 kill",
        whole_life,
        producers=0,
        groups=(3,),
        kills=1,
        registries=5,
    ),
    _case("three groups open and clean up", whole_life, producers=0, groups=(1, 1, 1), rows=3),
    _case(
        "get, two members, 1 kill",
        by_handle,
        script=TWO_PUTS,
        asks=((1, 2), (1, 2)),
        gives_back=True,
        kills=1,
    ),
    _case(
        "get, two members out of turn",
        by_handle,
        script=OUT_OF_TURN,
        asks=((3, 1, 2), (1, 2, 3)),
        tombstones=3,
    ),
    _case(
        "get, 2 slots, store buffers, 1 kill",
        by_handle,
        script=PUT_BURY_PUT,
        asks=((1, 2, 3),),
        slots=2,
        tombstones=2,
        buffer=3,
        kills=1,
    ),
    _case("runs of pages, 3 slots, 4 pages", runs_of_pages, sizes=(1, 2, 1, 2), slots=3, pages=4),
    _case("runs of pages, a newcomer", runs_of_pages, sizes=(1, 2, 1), groups=(1, 1)),
    _case(
        "runs of pages, two members, 1 kill", runs_of_pages, sizes=(2, 1, 2), groups=(2,), kills=1
    ),
)

# Section 6 of docs/protocol.md, row by row. With `harm_only` the invariants whose breach alone
# harms nobody are not looked at: then the search must go on to what a user would see.
SEEDED: dict[Fault, Case] = {
    Fault.TAKEOVER_WITHOUT_RELOAD: _case("", one_ring, groups=(2,), kills=1),
    Fault.START_BEFORE_VISIBLE: _case("", one_ring, groups=(1, 1)),
    Fault.BACKLOG_BESIDE_OTHERS: _case("", one_ring, groups=(1, 1)),
    Fault.ACTIVE_BEFORE_START: _case("", one_ring, groups=(1, 1), kills=1),
    Fault.DEAD_REGISTRANT_STAYS: _case(
        "", one_ring, groups=(1, 1), kills=1, killed="B", for_good="B", removes=2
    ),
    Fault.REGISTRY_FREE_BEFORE_JOIN: _case("", one_ring, groups=(2,)),
    Fault.LAST_LIVE_MEMBER_REMOVES: _case("", one_ring, groups=(2,), kills=1),
    Fault.GROUPS_PER_GENERATION: _case("", several_rings, groups=(1, 1), samples=(0, 1)),
    Fault.SCAN_BEFORE_TEST: _case("", one_ring),
    Fault.NO_SWEEP: _case("", one_ring, kills=1),
    Fault.CLEAR_THEN_RELEASE: _case("", one_ring, groups=(2,)),
    Fault.EXPIRE_WITHOUT_LOCK: _case("", one_ring, by_handle=(1,)),
    Fault.CLAIM_WITHOUT_LOCK: _case("", one_ring, groups=(2,)),
    Fault.SEQ_BEFORE_PAGES: _case("", one_ring),
    Fault.NAMELESS_FROM_BEGINNING: _case("", one_ring, groups=(1, 1), leaves_early=(1,)),
    Fault.NO_NAMELESS_ROW: _case("", one_ring, groups=(1, 1)),
    Fault.NO_FENCE: _case("", one_ring, groups=(1, 1), buffer=3),
    Fault.LEAVER_TRUSTS_REGISTERING: _case(
        "", one_ring, groups=(1, 1), leaves_early=(1,), kills=1, killed="B"
    ),
    Fault.UNDO_WITHOUT_LOOK: _case("", whole_life, wishes=(1,), may_fail=True),
    Fault.GROUPS_BEFORE_RESERVE: _case(
        "", whole_life, producers=2, groups=(), wishes=(1,), may_fail=True
    ),
    Fault.UNCLAIMED_IS_NOTHING: _case(
        "", by_handle, script=TWO_PUTS[:1], asks=((1,), (1,)), gives_back=True
    ),
    Fault.EMPTY_REGISTRY_STAYS: _case(
        "", whole_life, producers=0, kills=1, for_good="A", swept=True
    ),
}

MORE_SEEDED: dict[Fault, Case] = {
    Fault.OPEN_WITHOUT_LOOK: _case("", whole_life, producers=0, groups=(1, 1)),
    Fault.CLEAN_WITHOUT_LOOK: _case("", whole_life, groups=(1, 1)),
    Fault.CLEAN_WITHOUT_NEED: _case("", whole_life),
    Fault.PRODUCER_LOCK_AFTER_R: _case("", whole_life),
    Fault.END_WITHOUT_EPOCH: _case("", whole_life, kills=1, killed="producer"),
    Fault.MAGIC_BEFORE_LOCK: _case("", whole_life, producers=2),
    Fault.SETTLED_AFTER_SLOTS: _case("", by_handle, script=TWO_PUTS),
    Fault.SETTLED_BEFORE_TOMBSTONE: _case("", by_handle, script=PUT_BURY_PUT, tombstones=2),
    Fault.FIND_BEFORE_END: _case("", by_handle, script=TWO_PUTS[:1], asks=((1,),)),
    Fault.RUN_BY_ITS_FIRST_PAGE: _case("", runs_of_pages, sizes=(1, 2, 2)),
    Fault.SEQ_AT_ALLOCATION: _case("", runs_of_pages, sizes=(1, 1)),
}
