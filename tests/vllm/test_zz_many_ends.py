# SPDX-License-Identifier: Apache-2.0
"""Row 25: servers that end under load, one after the other, and a reader that follows them.

How often is for ``SHMCONN_ENDS`` and ``SHMCONN_RANK_ENDS`` to say; a server takes half a minute.
"""

import faulthandler
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import figures
from lives import PROMPTS, Follower, Given, Load, Rows, account, kill, terminate
from rings import remove_ring
from server import WATCHDOG_S, Server, make_tiny_model
from test_zz_ends import segments

import shmconn
from shmconn import directory
from shmconn.handle import Handle
from shmconn.views import RingEnd

ENDS = int(os.environ.get("SHMCONN_ENDS", "20"))
RANK_ENDS = int(os.environ.get("SHMCONN_RANK_ENDS", "4"))
SEED = int(os.environ.get("SHMCONN_SEED", "0")) or secrets.randbits(31)

# By name: what ends a server and says when, and whether it kills the process that made the ring.
Ways = dict[str, tuple[Callable[[Server], float], bool | None]]
TERMINATED: Ways = {"SIGTERM": (terminate, False)}
# A worker that loses its engine ends by itself, and closes the ring.
KILLED: Ways = {
    "SIGKILL of the engine core": (lambda server: kill(server, "EngineCore"), False),
    "SIGKILL of the whole server": (kill, True),
}
# vLLM kills the rank that waits for the killed one, unless that ends by itself in time.
RANKS: Ways = {
    "SIGKILL of rank 1 of 2": (lambda server: kill(server, "Worker_TP1"), None),
    "SIGKILL of rank 0 of 2": (lambda server: kill(server, "Worker_TP0"), True),
}


@pytest.fixture
def ring_of_lives() -> Iterator[str]:
    """A name for the rings of all servers of a test."""
    name = f"t-{secrets.token_hex(6)}"
    yield name
    remove_ring(name)


def live_and_end(
    folder: Path, ring: str, ways: Ways, ends: int, flags: tuple[str, ...] = ()
) -> list[str]:
    """Servers one after the other, each ended under load; what was wrong."""
    print(f"SHMCONN_SEED={SEED}")
    faulthandler.cancel_dump_traceback_later()
    model = make_tiny_model(folder / "tiny")
    follower = Follower(ring, SEED)
    problems: list[str] = []
    try:
        for turn in range(ends):
            how = list(ways)[turn % len(ways)]
            server = Server(
                folder,
                {"ring": ring, "ring_size": "8MiB"},
                flags=["--load-format", "dummy", *flags],
                environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                model=model,
                layers=[1, 2, 4],
            )
            left: list[Path] = []
            try:
                found = live(server, follower, turn, how, *ways[how], left)
            except Exception as fault:
                found = [f"{type(fault).__name__}: {fault}"]
            finally:
                server.kill()
                for path in left:
                    path.unlink(missing_ok=True)
            problems += [f"{turn}, {how}: {one}" for one in found]
            if found:
                print(f"{turn}, {how}: {found}\n{server.log()[-5000:]}")
                break
            if server.processes():
                problems.append(f"{turn}, {how}: processes are left")
    finally:
        follower.close()
    problems += follower.problems
    if segments(ring):
        problems.append(f"left: {segments(ring)}")
    with pytest.raises(shmconn.RingMissing):
        directory.groups(ring)
    return problems


def live(
    server: Server,
    follower: Follower,
    turn: int,
    how: str,
    end_it: Callable[[Server], float],
    killed: bool | None,
    left: list[Path],
) -> list[str]:
    """One server, from its start to what the reader was told of its end.

    Segments of vLLM's own, which it leaves when it is killed, are put into ``left``.
    """
    server.wait_healthy()
    if turn == 0:
        # One at a time, nobody beside them: what all others are compared with.
        for index, ids in enumerate(PROMPTS):
            server.complete(ids, params={"tag": str(index)})
    load = Load(server, SEED + turn)
    give_up = time.monotonic() + WATCHDOG_S
    while load.answered < 20 and not load.refused and time.monotonic() < give_up:
        time.sleep(0.01)
    time.sleep(random.Random(SEED + turn).random())
    left += server.vllm_segments()
    generation = server.info().generation
    refused_before = list(load.refused)
    if end_it is terminate:
        load.ask_no_more()
    under_way, answered = load.under_way, load.answered
    read = len(follower.given.get(generation, ()))
    ended_at = end_it(server)
    end = follower.wait_end(turn + 1)
    told_s = follower.told_at[-1] - ended_at
    load.finish()
    given = follower.given.get(end.generation, [])
    problems = account(given, end, load.replies, killed=killed)
    if refused_before:
        problems.append(f"refused before the end: {refused_before}")
    figures.record(
        "25",
        f"{how}, a real server under load",
        trials=1,
        exercised=int(under_way > 0),
        failures=len(problems),
        recovery_s=[told_s],
        requests_under_way=under_way,
        answered_after=load.answered - answered,
        published=end.published,
        read_after=end.published - read,
        told_as_a_death=int(end.died),
        unpublished=end.accepted - end.settled,
        given_twice=len(given) - len({one.seq for one in given}),
    )
    return problems


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("ways", [TERMINATED, KILLED], ids=["SIGTERM", "SIGKILL"])
def test_a_reader_follows_servers_through_their_ends_under_load(
    tmp_path: Path, ring_of_lives: str, ways: Ways
) -> None:
    assert live_and_end(tmp_path, ring_of_lives, ways, ENDS) == []


@pytest.mark.long
@pytest.mark.vllm
def test_a_killed_rank_of_two_ends_the_server_and_the_reader_is_told(
    tmp_path: Path, ring_of_lives: str
) -> None:
    flags = ("--tensor-parallel-size", "2")
    assert live_and_end(tmp_path, ring_of_lives, RANKS, RANK_ENDS, flags) == []


GENERATION = "a" * 32
END = RingEnd(GENERATION, True, published=3, accepted=5, settled=4)
GIVEN = [Given(1, 1, "a"), Given(2, 2, "b"), Given(3, 4, "d")]
HANDLES = [Handle.make("r", GENERATION, number, name) for number, name in ((1, "a"), (5, "e"))]


def test_the_account_of_a_life_finds_every_planted_fault() -> None:
    assert account(GIVEN, END, HANDLES, killed=True) == []
    clean = RingEnd(GENERATION, False, published=3, accepted=5, settled=5)
    planted = {
        "lost": account(GIVEN[:2], END, HANDLES, killed=True),
        "twice": account([*GIVEN, GIVEN[0]], END, HANDLES, killed=True),
        "another number": account([*GIVEN[:2], Given(3, 4, "a")], END, HANDLES, killed=True),
        "answered and never given": account(
            GIVEN, END, [Handle.make("r", GENERATION, 3, "c")], killed=True
        ),
        "another generation": account(
            GIVEN, END, [Handle.make("r", "b" * 32, 1, "a")], killed=True
        ),
        "a death told as an end": account(GIVEN, clean, [], killed=True),
        "an end told as a death": account(GIVEN, END, HANDLES, killed=False),
        "unsettled": account(
            GIVEN, RingEnd(GENERATION, False, 3, accepted=5, settled=4), [], killed=False
        ),
    }
    rows, states = Rows(), torch.randn(len(PROMPTS[3]), 3, 128)
    assert rows.check(3, PROMPTS[3], states) == rows.check(3, PROMPTS[3], states * 1.0001) == []
    torn = states.clone()
    torn[-1] = 0
    planted |= {
        "one row of zeros": rows.check(3, PROMPTS[3], torn),
        "rows of another token": rows.check(3, PROMPTS[3], states.roll(1, 0)),
        "not a number": rows.check(3, PROMPTS[3], states * float("nan")),
        "other token ids": rows.check(3, PROMPTS[4], states),
    }
    missed = [name for name, found in planted.items() if not found]
    figures.detected("25", "the account of a life", len(planted), missed)
    assert missed == []
