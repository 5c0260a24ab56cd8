# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM calls our hooks as we need it, and each way of not doing so is named."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import Call, breaches
from rings import remove_ring

HERE = Path(__file__).parent
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls of one engine."""
    folder = tmp_path_factory.mktemp("contract")
    done = subprocess.run(
        [sys.executable, str(HERE / "contract.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    for ring in re.findall(r"^RING (\S+)$", done.stdout, re.M):
        remove_ring(ring)
    found = re.search(r"^CALLS (.*)$", done.stdout, re.M)
    assert found is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return list(json.loads(found[1]))


def test_the_installed_vllm_keeps_the_contract(calls: list[Call]) -> None:
    assert breaches(calls) == []
    ended = [call for call in calls if call["hook"].startswith("request_finished")]
    assert sorted(call["held"] for call in ended) == [False, True, True, True]
    assert sum(call["hook"] == "rows" for call in calls) >= 4


def swap(calls: list[Call], first: str, second: str) -> None:
    """The first calls of two hooks, from the first work on, change places."""
    start = next(i for i, call in enumerate(calls) if call.get("work"))
    a, b = (
        next(i for i in range(start, len(calls)) if calls[i]["hook"] == hook)
        for hook in (first, second)
    )
    calls[a], calls[b] = calls[b], calls[a]


def at(calls: list[Call], hook: str, which: int = -1) -> Call:
    """One call of a hook."""
    return [call for call in calls if call["hook"] == hook][which]


def drop(calls: list[Call], hook: str) -> None:
    """The last call of a hook was never made."""
    calls.remove(at(calls, hook))


def early(calls: list[Call]) -> None:
    """A held request's blocks are freed as soon as it ends."""
    request = next(call for call in calls if call.get("held"))["request"]
    (freed,) = [call for call in calls if call["hook"] == "freed" and call["request"] == request]
    calls.remove(freed)
    calls.insert(next(i for i, call in enumerate(calls) if call.get("request") == request), freed)


PLANTED: list[tuple[str, Callable[[list[Call]], object]]] = [
    ("get_finished is called in more", lambda calls: at(calls, "get_finished").update(thread=0)),
    ("register_kv_caches / get_hand", lambda calls: swap_start(calls)),
    ("set_xfer_handshake_metadata brings", lambda calls: no_handshake(calls)),
    ("bind_connector_metadata: ", lambda calls: drop(calls, "bind_connector_metadata")),
    ("rows come as", lambda calls: swap(calls, "build_connector_meta", "bind_connector_metadata")),
    ("rows come as", lambda calls: swap(calls, "bind_connector_metadata", "get_finished")),
    ("rows come as", lambda calls: calls.insert(first_bind(calls), {"hook": "rows", "thread": 0})),
    ("rows come as", lambda calls: drop(calls, "clear_connector_metadata")),
    ("get_finished is given", lambda calls: at(calls, "get_finished").update(kinds=["int"])),
    ("2 times for", lambda calls: calls.append(next(one for one in calls if one.get("held")))),
    (
        "given blocks that are",
        lambda calls: next(one for one in calls if one.get("held")).update(groups=[["tuple"]]),
    ),
    ("freed before it says so", early),
    ("are never freed", lambda calls: drop(calls, "freed")),
    ("shutdown is not called", lambda calls: no_shutdown(calls)),
]


def first_bind(calls: list[Call]) -> int:
    """Where the first work is bound."""
    start = next(i for i, call in enumerate(calls) if call.get("work"))
    return next(
        i for i in range(start, len(calls)) if calls[i]["hook"] == "bind_connector_metadata"
    )


def swap_start(calls: list[Call]) -> None:
    """The ring is made after it was asked for."""
    a = calls.index(at(calls, "register_kv_caches", 0))
    b = calls.index(at(calls, "get_handshake_metadata", 0))
    calls[a], calls[b] = calls[b], calls[a]


def no_handshake(calls: list[Call]) -> None:
    """What the worker announced does not arrive."""
    at(calls, "set_xfer_handshake_metadata")["ours"] = []


def no_shutdown(calls: list[Call]) -> None:
    """The engine ends without a word."""
    calls[:] = [call for call in calls if call["hook"] != "shutdown"]


@pytest.mark.parametrize(("said", "plant"), PLANTED)
def test_a_breach_is_named(
    calls: list[Call], said: str, plant: Callable[[list[Call]], object]
) -> None:
    changed = copy.deepcopy(calls)
    plant(changed)
    found = breaches(changed)
    assert any(said in line for line in found), found
