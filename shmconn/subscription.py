# SPDX-License-Identifier: Apache-2.0
"""The reader's side: a group's samples, one after the other or by handle.

A subscription reads all rings of a name: data-parallel ranks, the rest of a dead generation, the
next one. It ends when every ring that it saw was closed, or its producer died, and a whole claim
attempt begun after that found nothing.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from shmconn import layout
from shmconn.doorbell import INTERVAL_S
from shmconn.errors import (
    Busy,
    Closed,
    NotReady,
    OptionError,
    ProducerDied,
    RingMissing,
    SampleGone,
    SegmentCorrupt,
)
from shmconn.find import find
from shmconn.handle import Handle, check_name
from shmconn.member import Member
from shmconn.registry import Group
from shmconn.sample import Sample
from shmconn.segment import RingSegment, descriptors_named, path_of, ring_files
from shmconn.standstill import Watch
from shmconn.unlinked import CAUSE, REMEDY
from shmconn.views import RingEnd, Views
from shmconn.which import missing_text, the_only_ring

_log = logging.getLogger("shmconn")
_SAY_EVERY_S = 10.0


def subscribe(
    name: str | None = None,
    group: str | None = None,
    by_handle: bool = False,
    durable: bool = False,
    wait_s: float = 0.0,
    follow: bool = False,
    background: bool = False,
    pin: bool = False,
) -> "Subscription":
    """Joins a group of a ring.

    Args:
        name: the ring; may be left out when there is one on this host.
        group: whom you read for. Every group gets every sample once; several processes that name
            the same group share them.
        by_handle: samples are asked for with ``get`` only; what nobody asks for is released after
            the producer's ``unclaimed_ttl_s``.
        durable: keep the group, and what it has not read, when its last member leaves.
        wait_s: seconds to wait for a ring that is not there yet.
        follow: go on with the next generation when vLLM is started again.
        background: this process drains in a thread of its own while its engine generates.
        pin: register the pages with the CUDA device, so that ``sample.to("cuda",
            non_blocking=True)`` is one DMA out of the ring. Takes about 0.3 s a GiB, once a ring;
            where it cannot be done, one warning says so and copies go the slower way.

    Raises:
        OptionError: a name is wrong, or the group exists with another kind.
        RingMissing: there is no such ring; lists those there are.
        AccessDenied, LayoutMismatch, SegmentCorrupt, RegistryFull, NoDescriptors, NoMemory, Busy:
            see the classes.
    """
    if group is None:
        raise OptionError("subscribe needs a group: the name of whom you read for, e.g. 'trainer'")
    check_name(group, "group")
    name = check_name(name) if name is not None else the_only_ring()
    check_wait(wait_s)
    there = bool(ring_files(name))
    if not there and wait_s == 0:
        raise RingMissing(missing_text(name))
    if not follow:
        # A ring that cannot be read is told before joining: to leave again would give up what
        # the group has just been given in the others.
        with descriptors_named(f"a subscription of ring {name!r}"):
            for file_name in ring_files(name):
                RingSegment.attach(file_name, whole=False)
    with descriptors_named(f"a subscription of ring {name!r}"):
        member = Member.join(
            name,
            Group(group, by_handle),
            create=True,
            durable=durable,
            background=background,
            wait_s=5.0,
        )
        return Subscription(
            name, group, member, wait_s=wait_s, follow=follow, by_handle=by_handle, pin=pin
        )


def check_wait(wait_s: object) -> None:
    """Refuses what is no time to wait.

    Raises:
        OptionError: it is not a number, or below 0.
    """
    if not isinstance(wait_s, int | float) or not wait_s >= 0:
        raise OptionError(f"wait_s {wait_s!r} must be 0 or more seconds")


class Subscription:
    """A member of a group. Iterate over it, or ask it for one request's sample; or both.

    Leave it with ``close()`` or as a ``with`` block. An exception that leaves the block counts as
    a death: the group's place and its unread samples are kept until it comes back. Methods may
    be called from several threads.
    """

    def __init__(
        self,
        name: str,
        group: str,
        member: Member,
        *,
        wait_s: float,
        follow: bool,
        by_handle: bool,
        pin: bool = False,
    ) -> None:
        self.name = name
        self.group = group
        self.by_handle = by_handle
        self.corrupt = 0
        self._member = member
        self._follow = follow
        self._bell = member.bell
        self._views = Views(name, member.registry, follow=follow, pin=pin)
        self.ends: list[RingEnd] = self._views.ends
        self._watch = Watch(group)
        self._turn = 0
        self._say_busy_at = 0.0
        # One thread at a time looks at the rings, and none while they are let go of.
        self._looking = threading.RLock()
        self._closed = False
        self._give_up_at = time.monotonic() + wait_s
        self.ended = False
        try:
            self._views.look()
        except BaseException:
            # Interrupted, or out of memory, while rings were mapped: what the group is owed was
            # not given up by anybody.
            self._close(clean=False)
            raise

    # --- samples in turn ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        sample = self.next(None)
        if sample is None:
            raise StopIteration
        return sample

    def next(self, timeout: float | None = None) -> Sample | None:
        """The group's next sample.

        Args:
            timeout: seconds to wait; None = until there is one, or the end.

        Returns:
            The sample; None when the timeout is over or the stream has ended (then ``ended``).

        Raises:
            ProducerDied: all is read, and a producer was killed.
            RingMissing: no ring came within ``wait_s`` of ``subscribe``.
            Standstill: without a timeout: what this thread holds fills the ring, for good.
            Closed: the subscription was closed.
        """
        if self.by_handle:
            raise OptionError(f"group {self.group!r} is by handle: use get(handle), not iteration")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            self._bell.clear()
            sample = self._try_next()
            if sample is not None or self.ended:
                return sample
            if deadline is None:
                self.check_standstill()
            left = INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            self._bell.wait(left)

    def _try_next(self) -> Sample | None:
        with self._looking:
            self._check_open()
            return self._look_once()

    def _look_once(self) -> Sample | None:
        epoch = self._views.look()
        views = list(self._views.live.values())
        self._turn += 1
        for index in range(len(views)):
            view = views[(self._turn + index) % len(views)]
            # First the fate, then the claim: what was published just before a death is read.
            fate = view.fate()
            try:
                sample = self._member.claim(view)
            except Busy as error:
                self._say_busy(error)
                return None
            except SegmentCorrupt as error:
                self.corrupt += 1
                _log.error("a sample was lost: %s", error)
                return None
            if sample is not None:
                self._watch.reset()
                return sample
            if fate is not None:
                self._views.end(view, fate)
        self._look_for_the_end(epoch)
        self._watch.look(self._member, self._views.live.values())
        return None

    def _say_busy(self, error: Busy) -> None:
        """A stopped mate is alive and may go on: that is a reason to wait, and to say so."""
        now = time.monotonic()
        if now >= self._say_busy_at:
            self._say_busy_at = now + _SAY_EVERY_S
            _log.warning("waiting: %s", error)

    def _look_for_the_end(self, epoch: int) -> None:
        if self._views.live:
            return
        if self._member.registry.words.load(layout.EPOCH) != epoch:
            return
        if self._follow or not self.ends:
            self._check_not_cut_off()
        if not self.ends:
            self._check_waiting()
            return
        if self._follow or self._views.unattached():
            return
        self.ended = True
        died = [end for end in self.ends if end.died]
        if died:
            raise ProducerDied(
                f"the producer of ring {self.name!r} died; all {sum(e.published for e in died)} "
                f"samples that it had published were handed out. It had accepted "
                f"{sum(e.accepted for e in died)} requests; "
                f"{sum(max(0, e.accepted - e.settled) for e in died)} of them were never published",
                accepted=sum(end.accepted for end in died),
                settled=sum(end.settled for end in died),
            )

    def _check_not_cut_off(self) -> None:
        """Raises RingMissing if no ring can come any more by the registry that we joined."""
        if self._views.cut_off():
            registry = path_of(self._member.registry.file.name)
            raise RingMissing(
                f"no further ring {self.name!r} can reach this subscription: {registry} was "
                f"removed {CAUSE}. Subscribe again; to mend it {REMEDY}"
            )

    def _check_waiting(self) -> None:
        if time.monotonic() >= self._give_up_at and not self._views.unattached():
            raise RingMissing(missing_text(self.name))

    # --- one request's sample -------------------------------------------------------------------

    def get(self, handle: Any, timeout: float | None = None) -> Sample:
        """The sample of one request.

        Args:
            handle: a reply's ``kv_transfer_params``, or the handle in it.
            timeout: seconds to wait for it; None = until it comes or cannot come any more.

        Raises:
            OptionError: not a handle, or one of another ring.
            SampleLost: the request yielded no sample; says why, and whether to retry.
            SampleGone: this group was given it before, or its trace is overwritten.
            NotReady: the timeout is over; says who holds it, if anybody does.
            ProducerDied: the producer died before it took the request in, or published it.
        """
        wanted = Handle.parse(handle)
        if wanted.ring != self.name:
            raise OptionError(
                f"the handle is of ring {wanted.ring!r}, this subscription reads {self.name!r}"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_open()
            self._bell.clear()
            sample, held = self._find(wanted)
            if sample is not None:
                return sample
            left = INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise NotReady(
                    f"sample {wanted.number} of ring {self.name!r} did not come within "
                    f"{timeout:g} s{held}"
                )
            self._bell.wait(left)

    def _find(self, wanted: Handle) -> tuple[Sample | None, str]:
        """The sample, or None and what it waits for."""
        with self._looking:
            self._check_open()
            return self._look_for(wanted)

    def _look_for(self, wanted: Handle) -> tuple[Sample | None, str]:
        self._views.look()
        view = self._views.of(wanted.generation)
        if view is not None:
            try:
                sample, held = find(self._member, view, wanted)
                if sample is None:
                    self._watch.look(self._member, [view])
                else:
                    self._watch.reset()
                return sample, held
            except Busy as error:
                self._say_busy(error)
                return None, f": {error}"
        self._check_not_cut_off()
        if self._views.all_attached():
            raise SampleGone(
                f"sample {wanted.number} is of generation {wanted.generation}, which is not "
                f"there any more: its vLLM has ended and all groups had read it"
            )
        return None, ", its ring is not there yet"

    def give_back(self, sample: Sample) -> bool:
        """Makes a sample that we hold the group's to claim again, as if we had never had it.

        Its tensors must not be used any more: they may show another sample soon.

        Returns:
            Whether we still held it.
        """
        for lease in list(self._member.leases):
            if lease.seq == sample.seq and lease.view.generation == sample.handle.generation:
                lease.give_back()
                sample.release()
                return True
        return False

    # --- the rest -------------------------------------------------------------------------------

    def unread(self) -> int:
        """Published samples that the group has not taken yet, about."""
        return sum(self._member.unread(view) for view in list(self._views.live.values()))

    def short_of_room(self) -> bool:
        """Whether a producer waits for room, or may have to for its next sample."""
        return any(view.short_of_room() for view in list(self._views.live.values()))

    def check_standstill(self) -> None:
        """For a wait that nothing else in this process ends.

        Raises:
            Standstill: what this thread holds fills the ring, for good; says how much that is.
        """
        self._watch.check()

    def tokens_capacity(self, sample: Sample) -> int | None:
        """Tokens whose states fill the ring of a sample; None of a ring that has ended."""
        view = self._views.live.get(sample.handle.generation)
        if view is None or not sample.tokens:
            return None
        shape = view.ring.shape
        return shape.pages * shape.page_size * sample.tokens // max(1, sample.nbytes)

    @property
    def lost(self) -> int:
        """Requests that yielded no sample while we were joined; aborted ones do not count."""
        by_reason = self.lost_by_reason
        return sum(by_reason.values()) - by_reason.get("aborted", 0)

    @property
    def lost_by_reason(self) -> dict[str, int]:
        """Requests that yielded no sample while we were joined, by reason; with aborted ones."""
        return dict(self._views.lost() + Counter(corrupt=self.corrupt))

    @property
    def leases(self) -> int:
        """Samples that this process holds."""
        return len(self._member.leases)

    def close(self) -> None:
        """Leaves the group; live tensors stay valid, and the group's place ends with them."""
        self._close(clean=True)

    def abandon(self) -> None:
        """Ends like a death: the group's place and its unread samples are kept."""
        self._close(clean=False)

    def _close(self, *, clean: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if self._member.registry.locks.forked:
            return
        # Without a ring there is nothing to keep a place for; one that was not looked at counts.
        clean = clean or not (self._views.live or self.ends or self._views.any_there())
        if clean and not self.ended and not self.by_handle:
            self._warn_of_unread()
        if not clean and not (self._views.live or self.ends):
            _log.warning(
                "group %r of ring %r keeps its place, and its unread samples, although this "
                "process has read nothing: subscribe again, or give them up with "
                "`shmconn groups rm %s %s`",
                self.group,
                self.name,
                self.name,
                self.group,
            )
        with self._looking:
            self._views.clear()
            self._member.leave(clean=clean)

    def _warn_of_unread(self) -> None:
        registry = self._member.registry
        alone = registry.joined(self._member.group) == [self._member.row]
        unread = self.unread()
        if unread and alone and not registry.durable(self._member.group):
            _log.warning(
                "group %r leaves ring %r with %d samples unread; they are given up. "
                "subscribe(durable=True) keeps them",
                self.group,
                self.name,
                unread,
            )

    def _all_read(self) -> bool:
        """Whether every ring is over and read; an error may be of another ring, or one handle."""
        live = list(self._views.live.values())
        return self.ended or (all(view.fate() for view in live) and not self.unread())

    def _check_open(self) -> None:
        self._member.registry.locks.check_process()
        if self._closed:
            raise Closed(f"the subscription of group {self.group!r} was closed")

    def __del__(self) -> None:
        # Tensors that are still in use keep the member, and a process that ends needs no word.
        if getattr(self, "_closed", True) or self._member.leases or sys.is_finalizing():
            return
        if not self._member.registry.locks.forked:
            _log.warning(
                "a subscription of group %r of ring %r was dropped without close(): the group's "
                "place and its unread samples are kept, as after a crash. Use it as a `with` "
                "block, or close() it",
                self.group,
                self.name,
            )

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Once all is read of a producer that died, nothing is left to keep the place for.
        over = kind is not None and issubclass(kind, ProducerDied) and self._all_read()
        self._close(clean=kind is None or over)
