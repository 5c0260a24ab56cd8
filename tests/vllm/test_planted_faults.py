# SPDX-License-Identifier: Apache-2.0
"""A fault in each function of ours that runs while vLLM does, one after the other in one engine.

Which these are is not written down: a run is profiled first. Then each of them raises once, before
it does its work, while requests come, are held, are aborted and are read. Each time at most one
sample may be missing, with a tombstone; every block must come back, and the engine goes on.
"""

import functools
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engine import BLOCK, Engine
from test_scheduler import Reader, ids, make, ring_of  # noqa: F401

from shmconn import (
    capture,
    connector,
    copier,
    directory,
    fill,
    hold,
    intake,
    ring,
    seen,
    tally,
    worker,
)

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MODULES = (capture, connector, copier, fill, hold, intake, ring, seen, tally, worker)
FILES = {str(Path(str(one.__file__))): one for one in MODULES}
# Nothing in them can fail: they return a constant, or do nothing.
EMPTY = {
    "ShmHiddenStatesConnector.get_finished_count",
    "ShmHiddenStatesConnector.update_state_after_alloc",
}
# All that these do is done inside a guard of their own.
GUARDS = {"Copier.submit", "Copier._settle"}
# Before a request has a number it has no handle either: nobody can wait for its sample.
UNNUMBERED = {"ShmHiddenStatesConnector.request_finished_all_groups", "Intake.finish"}


class Planted(RuntimeError):
    """A fault that a test planted."""


class GatedReader(Reader):
    """A reader that can be stopped."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        super().__init__(engine)

    def _run(self) -> None:
        while not self._stop.is_set() or self._subscription.unread():
            self.open.wait()
            sample = self._subscription.next(timeout=0.01)
            if sample is not None:
                assert sample.request_id not in self.samples
                self.samples[sample.request_id] = sample.clone()
                sample.release()


def settled(ring: str, requests: int) -> directory.RingInfo:
    """Waits until every request was published or has a tombstone."""
    deadline = time.monotonic() + 30
    while True:
        (info,) = directory.rings(ring)
        if info.settled == info.accepted == requests:
            return info
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {requests} requests: {info}")
        time.sleep(0.002)


def play(engine: Engine, reader: GatedReader, name: str) -> list[str]:
    """Eight requests, of which not all find room at once, and one that is aborted amid them."""
    reader.open.clear()
    names = [f"{name} {index}" for index in range(8)]
    for index, one in enumerate(names):
        engine.add(one, ids(BLOCK, index))
    engine.add(f"{name} abort", ids(400, 9), 50)
    for _ in range(6):
        engine.step()
    engine.abort(f"{name} abort")
    for _ in range(3):
        engine.step()
    time.sleep(0.01)
    reader.open.set()
    engine.run()
    return names


def owner_of(module: Any, qualname: str) -> tuple[Any, str]:
    """Where a function is to be replaced."""
    *path, last = qualname.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    return owner, last


def call_late(owner: Any, name: str, *args: Any) -> Any:
    """Calls what is a method now."""
    return getattr(owner, name)(*args)


@contextmanager
def planted(module: Any, qualname: str) -> Iterator[list[int]]:
    """The function raises at its first call; how often it was called is in the list."""
    owner, name = owner_of(module, qualname)
    owners = [owner]
    if owner is module:
        # Others of ours may have it by its name.
        found = getattr(module, name)
        owners = [one for one in MODULES if getattr(one, name, None) is found]
    calls: list[int] = []
    found = inspect.getattr_static(owner, name)
    inner = found.fget if isinstance(found, property) else found
    if isinstance(inner, classmethod | staticmethod):
        inner = inner.__func__
    guarded = getattr(inner, "__wrapped__", None)
    real: Callable[..., Any] = guarded or inner

    def raises_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise Planted(qualname)
        return real(*args, **kwargs)

    if guarded is not None:
        # The guard stays around it, as it is what is tried.
        (cell,) = (one for one in inner.__closure__ if one.cell_contents is guarded)
        cell.cell_contents = raises_once
    elif isinstance(found, property):
        setattr(owner, name, property(raises_once))
    elif isinstance(found, classmethod | staticmethod):
        setattr(owner, name, type(found)(raises_once))
    else:
        for one in owners:
            setattr(one, name, raises_once)
    try:
        yield calls
    finally:
        if guarded is not None:
            cell.cell_contents = guarded
        else:
            for one in owners:
                setattr(one, name, found)


def test_a_fault_in_any_function_of_ours_costs_at_most_one_sample(
    make: Callable[..., Engine],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # How long the copier rests after a fault that no request is to blame for.
    monkeypatch.setattr(copier, "IDLE_INTERVAL_S", 0.02)
    seen: set[tuple[str, str]] = set()
    watching = False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if watching and event == "call" and frame.f_code.co_filename in FILES:
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(watch)
    try:
        engine = make(ring_size="1MiB")
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    # These were bound when the engine started; now they are looked up at each call.
    writer = engine.worker._worker
    for name in ("submit", "take_done", "drain_stats"):
        bound = getattr(writer, name)
        late = functools.partial(call_late, bound.__self__, bound.__name__)
        monkeypatch.setattr(writer, name, late)
    reader, ring_name = GatedReader(engine), ring_of(engine)
    sys.setprofile(watch)
    watching = True
    play(engine, reader, "watched")
    settled(ring_name, len(engine.requests))
    watching = False
    sys.setprofile(None)
    places = sorted(
        (file, name) for file, name in seen if "<" not in name and name not in EMPTY | GUARDS
    )
    wanted = {"Producer.allocate", "Producer.publish", "HostCapture.copy", "Tally.published"}
    assert wanted <= {name for _, name in places} and len(places) > 40
    unnumbered = 0
    wrong: list[str] = []
    for file, name in places:
        before = settled(ring_name, len(engine.requests) - unnumbered)
        print("planted", name)
        with planted(FILES[file], name) as calls:
            names = play(engine, reader, name)
            while not calls and len(names) < 32:
                # Some run only when threads meet in a certain way.
                names += play(engine, reader, f"{name} {len(names)}")
        unnumbered += name in UNNUMBERED
        after = settled(ring_name, len(engine.requests) - unnumbered)
        deadline = time.monotonic() + 30
        while len(reader.samples) < after.published and time.monotonic() < deadline:
            time.sleep(0.002)
        missing = [one for one in names if one not in reader.samples]
        accepted = after.accepted - before.accepted
        ended = after.published - before.published + after.lost - before.lost
        held = Counter(one for one in engine.reported if one.startswith(f"{name} "))
        checks = {
            "was not called": not calls,
            f"cost {missing}": len(missing) > 1,
            f"{accepted} were accepted, {ended} published or lost": accepted != ended,
            "blocks are still held": engine.usage > 0 or bool(engine.scheduler.requests),
            "a request was reported twice": max(held.values()) > 1,
        }
        wrong += [f"{name}: {what}" for what, is_so in checks.items() if is_so]
    samples = reader.finish()
    assert wrong == []
    for sample in samples.values():
        assert sample.hidden_states.equal(engine.expected(sample))
