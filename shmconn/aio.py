# SPDX-License-Identifier: Apache-2.0
"""Subscriptions for asyncio.

    async for sample in shmconn.aio.aiter(subscription):
        ...
    sample = await shmconn.aio.aget(subscription, reply.kv_transfer_params, timeout=30)

All that wait for one subscription share one thread, which sleeps on its doorbell and ends when
nobody waits. A task that is cancelled loses nothing, nor does one whose loop is stopped for good: a
sample that was claimed for it is given back to its group.
"""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

from shmconn.doorbell import INTERVAL_S
from shmconn.errors import NotReady, OptionError
from shmconn.handle import Handle
from shmconn.sample import Sample
from shmconn.subscription import Subscription


async def aget(subscription: Subscription, handle: Any, timeout: float | None = None) -> Sample:
    """``subscription.get``, awaited. Any number of tasks may wait at once.

    Args:
        subscription: one that this process has opened.
        handle: a reply's ``kv_transfer_params``, or the handle in it.
        timeout: seconds; None = until it comes or cannot come any more.

    Raises:
        OptionError, SampleLost, SampleGone, NotReady, ProducerDied, Closed: as ``get``.
    """
    wanted = Handle.parse(handle)
    if wanted.ring != subscription.name:
        raise OptionError(
            f"the handle is of ring {wanted.ring!r}, this subscription reads {subscription.name!r}"
        )
    sample = await _wait(subscription, _Wish(wanted, timeout))
    if sample is None:
        raise NotReady(f"sample {wanted.number} of ring {wanted.ring!r} did not come")
    return sample


async def anext(subscription: Subscription, timeout: float | None = None) -> Sample | None:
    """``subscription.next``, awaited: None when the timeout is over or the stream has ended.

    Raises:
        OptionError, ProducerDied, RingMissing, Closed: as ``next``.
    """
    if subscription.by_handle:
        raise OptionError(f"group {subscription.group!r} is by handle: use aget, not iteration")
    return await _wait(subscription, _Wish(None, timeout))


def aiter(subscription: Subscription) -> AsyncIterator[Sample]:
    """The group's samples, for ``async for``; several tasks may share them.

    It ends, or raises ProducerDied, as iteration over the subscription does.
    """
    return _Samples(subscription)


class _Samples:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __aiter__(self) -> AsyncIterator[Sample]:
        return self

    async def __anext__(self) -> Sample:
        sample = await anext(self._subscription)
        if sample is None:
            raise StopAsyncIteration
        return sample


class _Parcel:
    """A sample on its way from the thread to its task.

    Whoever drops it unopened gives the sample back: a loop that was stopped and never runs again
    drops its callbacks, its futures and its tasks without a word.
    """

    def __init__(self, subscription: Subscription, sample: Sample) -> None:
        self._unopened = weakref.finalize(self, subscription.give_back, sample)
        # A process that ends gives back all that it holds.
        self._unopened.atexit = False

    def open(self) -> Sample | None:
        """The sample, once: it is the task's from now on."""
        kept = self._unopened.detach()
        return None if kept is None else kept[2][0]

    def give_back(self) -> None:
        """Makes the sample the group's again."""
        self._unopened()


class _Wish:
    """What one task waits for: the sample of a handle, or the next one."""

    def __init__(self, handle: Handle | None, timeout: float | None) -> None:
        self.handle = handle
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_Parcel | None] = self.loop.create_future()

    def look(self, subscription: Subscription) -> bool:
        """One look; whether it is settled, one way or the other."""
        sample: Sample | None = None
        error: Exception | None = None
        try:
            # Not next() and get(): each clears the doorbell, which others here wait for, too.
            subscription._check_open()
            if self.handle is None:
                sample, held = subscription._try_next(), ""
            else:
                sample, held = subscription._find(self.handle)
            over = self.deadline is not None and time.monotonic() >= self.deadline
            if sample is None and over and self.handle is not None:
                error = NotReady(
                    f"sample {self.handle.number} of ring {self.handle.ring!r} did not come within "
                    f"{self.timeout:g} s{held}"
                )
            if sample is None and not over and not (self.handle is None and subscription.ended):
                return False
        except Exception as caught:
            error = caught
        parcel = None if sample is None else _Parcel(subscription, sample)
        del sample
        # A loop that was closed has ended its tasks: then the parcel is dropped.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle, parcel, error)
        return True

    def _settle(self, parcel: _Parcel | None, error: Exception | None) -> None:
        """In the loop of the task, which may have been cancelled: then the parcel is dropped."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(parcel)


async def _wait(subscription: Subscription, wish: _Wish) -> Sample | None:
    waiter = _waiters.get(subscription)
    if waiter is None:
        waiter = _waiters.setdefault(subscription, _Waiter())
    waiter.add(subscription, wish)
    try:
        parcel = await wish.future
    except asyncio.CancelledError:
        future = wish.future
        if future.done() and not future.cancelled() and future.exception() is None:
            # It came just before the task was cancelled, whose traceback may live long.
            late = future.result()
            if late is not None:
                late.give_back()
        raise
    return None if parcel is None else parcel.open()


class _Waiter:
    """The thread that looks for all wishes of one subscription, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wishes: list[_Wish] = []
        self._thread: threading.Thread | None = None

    def add(self, subscription: Subscription, wish: _Wish) -> None:
        """Takes a wish on; it is looked for at once."""
        with self._lock:
            self._wishes.append(wish)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(subscription,), name="shmconn-aio", daemon=True
                )
                self._thread.start()
                return
        # Ends the sleep of the thread, or of another member, which then looks in vain.
        subscription._bell.post()

    def _run(self, subscription: Subscription) -> None:
        while wishes := self._open_wishes():
            subscription._bell.clear()
            settled = {wish for wish in wishes if wish.look(subscription)}
            with self._lock:
                self._wishes = [wish for wish in self._wishes if wish not in settled]
            if not settled:
                now = time.monotonic()
                left = [wish.deadline - now for wish in wishes if wish.deadline is not None]
                subscription._bell.wait(max(0.0, min([INTERVAL_S, *left])))

    def _open_wishes(self) -> list[_Wish]:
        with self._lock:
            self._wishes = [wish for wish in self._wishes if not wish.future.done()]
            if not self._wishes:
                self._thread = None
            return list(self._wishes)


_waiters: "weakref.WeakKeyDictionary[Subscription, _Waiter]" = weakref.WeakKeyDictionary()
