# SPDX-License-Identifier: Apache-2.0
"""Row 28: descriptors run out, at each call in turn."""

import gc
import os
import resource
from collections.abc import Callable
from typing import TypeVar

import pytest
from crash.survivors import create
from harness import figures, payload
from harness.isolation import left_of
from harness.processes import Child, Shared

from shmconn import segment
from shmconn.directory import groups, remove_group
from shmconn.errors import NoDescriptors
from shmconn.ring import Producer
from shmconn.segment import ShmFile
from shmconn.subscription import subscribe

Made = TypeVar("Made")
MOST = 64  # far more than anything here needs


def test_an_open_that_fails_closes_its_descriptor_once(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer.create(ring, size="2MiB", layer_ids=[0], hidden_size=8)

    def refuse(fd: int) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "LockFile", refuse)
        with pytest.raises(OSError, match="Too many") as caught:
            ShmFile(segment.registry_file(ring))
    # Takes the number that was closed; the object that failed is still in the traceback.
    other = os.open("/dev/null", os.O_RDONLY)
    del caught
    os.fstat(other)
    os.close(other)
    producer.close()


def open_now() -> int:
    """Open descriptors of this process; the listing has one of its own."""
    return len(os.listdir("/proc/self/fd")) - 1


def fill_gaps() -> None:
    """Opens what is missing below the highest descriptor: the limit is one of numbers."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while os.open("/dev/null", os.O_RDONLY) < highest:
        pass


class Limit:
    """A process that may open so many files more, and what came of it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        fill_gaps()
        gc.freeze()  # so that collections look at what came since only

    def until_it_works(
        self, what: str, use: Callable[[], Made], after_a_failure: Callable[[], object] = int
    ) -> Made:
        """Tries with 0 descriptors, 1, 2 ... until there are enough; each failure is named."""
        for free in range(MOST):
            gc.collect()
            before = open_now()
            self._shared.words[0] += 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + free, self._limits[1]))
            try:
                made = use()
            except NoDescriptors as error:
                resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
                for said in (f"no more than {before + free} files", "ulimit -n", what):
                    assert said in str(error), error
                self._shared.words[1] += 1
            else:
                resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
                return made
            gc.collect()
            after_a_failure()
            assert open_now() == before, f"{what} with {free} free left descriptors open"
        raise AssertionError(f"{what} does not work with {MOST} descriptors")


def run(ring: str, what: str, script: Callable[[Limit], object]) -> None:
    shared = Shared()
    Child(lambda: script(Limit(shared)), shared).finish()
    tried, refused = shared.words[0], shared.words[1]
    figures.record(
        "28",
        f"descriptors run out at each call in turn: {what}",
        trials=tried,
        exercised=refused,
        failures=0,
    )
    assert refused > 0
    assert left_of(ring) == []


def test_a_start_without_descriptors_says_so_and_leaves_no_ring(ring: str) -> None:
    def script(limit: Limit) -> None:
        def nothing_is_left() -> None:
            assert segment.ring_files(ring) == []

        producer = limit.until_it_works(
            f"ring {ring!r}", lambda: create(ring, ("one", "two")), nothing_is_left
        )
        # Groups registered by a start that failed later are those that this one names.
        assert [group.name for group in groups(ring)] == ["one", "two"]
        producer.close()
        for group in ("one", "two"):
            remove_group(ring, group)

    run(ring, "start", script)


@pytest.mark.parametrize("group", ("one", "new"))
def test_a_subscription_without_descriptors_says_so_and_joins_nothing(
    ring: str, group: str
) -> None:
    def script(limit: Limit) -> None:
        producer = create(ring, ("one",))
        payload.put(producer)
        what = f"a subscription of ring {ring!r}"
        subscription = limit.until_it_works(what, lambda: subscribe(ring, group))
        members = {found.name: len(found.members) for found in groups(ring)}
        assert members[group] == 1, members
        assert set(members) == {"one", group}
        payload.put(producer)
        sample = subscription.next(5)
        # A group that is new starts with the next sample; one that was there has all.
        assert sample is not None and sample.seq == (1 if group == "one" else 2)
        sample.release()
        producer.close()
        subscription.close()
        if group != "one":
            remove_group(ring, "one")

    run(ring, "subscribe", script)


def test_a_reader_that_cannot_open_the_next_generation_says_so_and_loses_nothing(
    ring: str,
) -> None:
    def script(limit: Limit) -> None:
        create(ring).close()
        subscription = subscribe(ring, "one", wait_s=60, follow=True)
        with subscription, create(ring) as producer:
            for _ in range(3):
                payload.put(producer)
            what = f"the next generation of ring {ring!r}"
            for seq in range(1, 4):
                sample = limit.until_it_works(what, lambda: subscription.next(5))
                assert sample is not None and sample.seq == seq
                assert payload.problems(sample, payload.slot_of(subscription, sample)) == []
                del sample

    run(ring, "follow", script)


def test_ends_without_descriptors_are_clean_and_leave_the_rest_to_the_next(ring: str) -> None:
    def script() -> None:
        producer = create(ring, ("stays",))
        stays, goes = subscribe(ring, "stays"), subscribe(ring, "goes")
        payload.put(producer)
        for reader in (stays, goes):
            sample = reader.next(5)
            assert sample is not None
            sample.release()
            del sample
        fill_gaps()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now(), limits[1]))
        goes.close()
        producer.close()
        assert stays.next(1) is None and stays.ended
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # The ring's files could not be looked at; the next end does it.
        assert [group.name for group in groups(ring)] == ["stays"]
        stays.close()
        assert left_of(ring) == []

    Child(script).finish()
    figures.record("28", "ends without a descriptor left", trials=2, exercised=2, failures=0)


def test_a_producer_publishes_to_new_groups_without_descriptors(ring: str) -> None:
    """Else the engine would fail at a sample that is already published."""
    shared = Shared()

    def script() -> None:
        producer = create(ring)
        with subscribe(ring, "one") as one, subscribe(ring, "two") as two:
            fill_gaps()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Not one more: the doorbells of the new groups cannot be opened.
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_now(), limits[1]))
            with pytest.raises(OSError):
                os.open("/dev/null", os.O_RDONLY)
            for _ in range(2):
                assert payload.put(producer) is not None
            for reader in (one, two):
                for seq in (1, 2):
                    sample = reader.next(5)
                    assert sample is not None and sample.seq == seq
                    sample.release()
            producer.reclaim()
            assert producer.free_slots == producer.shape.slots
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            producer.close()

    Child(script, shared).finish()
    figures.record("28", "published without a descriptor left", trials=2, exercised=2, failures=0)
