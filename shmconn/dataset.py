# SPDX-License-Identifier: Apache-2.0
"""The samples of a ring as a torch dataset.

    with SampleDataset("qwen", group="trainer", collator=Collator(8192)) as dataset:
        for batch in DataLoader(dataset, batch_size=None):
            ...

Every process that iterates is a member of the group: the one that you are in, each DataLoader
worker, each DDP rank. Together they get every sample once. A lease cannot leave its process, so
what a worker hands over is a copy: a batch, made in shared memory, or a sample, copied into shared
memory when it is sent.

The ``with`` block belongs to the process that made the dataset. Left normally, the group ends with
it; left by an exception, it counts as a death: place and unread samples of the group are kept.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from shmconn.collate import Collator, Packing
from shmconn.errors import Closed, OptionError, ProducerDied, RingMissing, SampleLost
from shmconn.handed_out import HandedOut, handles_of
from shmconn.handle import check_name
from shmconn.sample import Sample
from shmconn.subscription import Subscription, check_wait, subscribe
from shmconn.trainer_words import TrainerWords

_log = logging.getLogger("shmconn")

# How long a read waits before it looks whether it should end.
_LOOK_S = 0.2
# With no sample for so long, and a ring that is short of room, the leases of a half-filled batch
# end: they may be what fills it.
_PATIENCE_S = 1.0
_DEATHS = ("raise", "end")
_LOSSES = ("raise", "warn", "ignore")


class SampleDataset(IterableDataset[Any]):
    """A ring's samples, or batches of them, each once.

    It may be pickled and forked at any time; what is iterated opens a subscription of its own.
    In one process, iterating again goes on where the last iteration was left.

    Args:
        name: the ring; may be left out when there is one on this host.
        group: whom you read for; all ranks and workers of one training name the same.
        collator: yield batches instead of samples; a DataLoader then needs ``batch_size=None``.
        wait_s: seconds to wait for a ring that is not there yet.
        on_death: what to do when all is read and the producer had been killed: ``raise``
            ProducerDied, or ``end`` with a line in the log. With workers it is raised where the
            ``with`` block ends, so that what other workers have read is not lost.
        on_loss: what to do when a request yields no sample, aborted ones apart: ``raise``
            SampleLost, ``warn`` in the log, or ``ignore``.
        options: further options of ``subscribe``: follow, durable, pin.

    Raises:
        OptionError: an argument is wrong.
    """

    def __init__(
        self,
        name: str | None = None,
        group: str = "trainer",
        *,
        collator: Collator | None = None,
        wait_s: float = 0.0,
        on_death: str = "raise",
        on_loss: str = "warn",
        **options: Any,
    ) -> None:
        check_name(group, "group")
        if name is not None:
            check_name(name)
        check_wait(wait_s)
        _check_choice("on_death", on_death, _DEATHS)
        _check_choice("on_loss", on_loss, _LOSSES)
        unknown = sorted(set(options) - {"follow", "durable", "pin"})
        if unknown:
            raise OptionError(f"a dataset takes no option {unknown[0]!r}: follow, durable or pin")
        self.name = name
        self.group = group
        self.collator = collator
        self.on_death = on_death
        self.on_loss = on_loss
        self._options = {"wait_s": wait_s, **options}
        self._handed_out = HandedOut()
        self._recorded = 0
        self._dropped = 0
        self._words = TrainerWords()
        self._begin()

    def _begin(self) -> None:
        self._subscription: Subscription | None = None
        self._packing: Packing | None = None
        # What of the subscription's losses was told.
        self._told = Counter[str]()
        # A thread that closes the dataset finds the subscription of one that opens it.
        self._opening = threading.Lock()
        self._died: ProducerDied | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_subscription", "_packing", "_told", "_opening", "_died")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- reading --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Samples, or batches; see the class.

        Raises:
            RingMissing: there is no such ring.
            ProducerDied, SampleLost: as ``on_death`` and ``on_loss`` say.
            Standstill: samples that were not let go of fill the ring, for good.
            Closed: the dataset was closed.
        """
        if get_worker_info() is not None:
            yield from self._in_worker()
            return
        for item in self.unrecorded():
            self.record(item)
            held = [item]
            # Nothing here may keep what the caller drops.
            del item
            yield held.pop()

    def unrecorded(self, stop: threading.Event | None = None) -> Iterator[Any]:
        """Iterates in this process, and leaves it to the caller to ``record`` what it used.

        Args:
            stop: once it is set the iteration ends; a later one goes on from there.
        """
        subscription = self._open()
        yield from self._items(subscription, stop=stop)
        if not subscription.ended:
            return
        self._leave(clean=True)
        if self._died is not None and self.on_death == "raise":
            raise self._died

    def _in_worker(self) -> Iterator[Any]:
        self._words.enter_worker()
        trainer = os.getppid()
        if self._words.stopped:
            raise Closed(f"the dataset of group {self.group!r} was closed")
        self._begin()
        try:
            self._subscription = subscribe(self.name, self.group, **self._options)
        except RingMissing:
            if self._words.joined:
                # The others have read all of it before this worker was up.
                return
            raise
        self._words.note_joined()
        # A worker that ends does not always end this generator first.
        leave = Finalize(None, self._leave_worker, (trainer,), exitpriority=1)
        try:
            for item in self._items(self._subscription, trainer=trainer):
                self._words.count_handed_over(sum(1 for _ in handles_of(item)))
                held = [item]
                del item
                yield held.pop()
        finally:
            leave()
        if self._died is not None:
            self._words.note_death(self._died)

    def _leave_worker(self, trainer: int) -> None:
        self._wait_until_sent()
        # A trainer that was killed has not left: its group's place is kept.
        self._leave(clean=os.getppid() == trainer)

    def _wait_until_sent(self) -> None:
        """Waits for torch's thread that copies samples out of this process: they hold leases."""
        half_filled = len(self._packing.samples) if self._packing else 0
        deadline = time.monotonic() + _PATIENCE_S
        while self._subscription is not None and self._subscription.leases > half_filled:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)

    def _items(
        self,
        subscription: Subscription,
        *,
        trainer: int = 0,
        stop: threading.Event | None = None,
    ) -> Iterator[Any]:
        samples = self._samples(subscription, trainer, stop)
        if self.collator is not None:
            yield from self._batches(samples, self.collator)
            return
        for sample in samples:
            if sample is not None:
                held = [sample]
                del sample
                yield held.pop()

    def _samples(
        self, subscription: Subscription, trainer: int, stop: threading.Event | None
    ) -> Iterator[Sample | None]:
        """Samples that were not handed out before; None after each wait in vain."""
        while not (self._words.stopped or (stop is not None and stop.is_set())):
            if trainer and os.getppid() != trainer:
                return
            try:
                sample = subscription.next(timeout=_LOOK_S)
            except ProducerDied as error:
                self._died, sample = error, None
                if self.on_death == "end":
                    _log.warning("%s", error)
            lost = Counter(subscription.lost_by_reason)
            fresh, self._told = lost - self._told, lost
            try:
                self._tell_of_loss(subscription.name, fresh)
            except SampleLost:
                if sample is not None:
                    subscription.give_back(sample)
                raise
            if sample is None and subscription.ended:
                return
            if sample is None and stop is None and self.collator is None:
                subscription.check_standstill()
            if sample is not None and sample.handle in self._handed_out:
                sample.release()
                self._words.count_skipped()
                continue
            held = [sample]
            del sample
            yield held.pop()

    def _batches(self, samples: Iterator[Sample | None], collator: Collator) -> Iterator[Any]:
        since = time.monotonic()
        for sample in samples:
            now = time.monotonic()
            if sample is None:
                if now - since >= _PATIENCE_S:
                    self._make_room()
                continue
            since = now
            packing, full = self._packing, None
            if packing is not None and not packing.fits(sample):
                packing, full = None, packing
            try:
                if packing is None:
                    collator.warn_of_room(self._subscription, sample)
                    packing = collator.start(sample)
                packing.add(sample)
            except BaseException:
                # What is full stays as it was, and whoever comes next meets this sample again.
                if self._subscription is not None:
                    self._subscription.give_back(sample)
                raise
            self._packing = packing
            del sample
            if full is not None:
                batch, full = [full.finish()], None
                yield batch.pop()
        packing = self._packing
        if packing is not None and self._subscription is not None and self._subscription.ended:
            self._packing = None
            yield packing.finish()

    def _make_room(self) -> None:
        """Ends the leases of a half-filled batch if they may be what its next sample waits for."""
        packing, subscription = self._packing, self._subscription
        if packing is not None and subscription is not None and subscription.short_of_room():
            packing.release()

    def _tell_of_loss(self, ring: str, lost: "Counter[str]") -> None:
        lost = Counter({why: count for why, count in lost.items() if why != "aborted"})
        if not lost or self.on_loss == "ignore":
            return
        what = ", ".join(f"{count} ({why})" for why, count in lost.items())
        text = f"requests of ring {ring!r} that yielded no sample: {what}"
        if self.on_loss == "raise":
            reason = lost.most_common(1)[0][0]
            raise SampleLost(text, reason=reason, retry=reason != "oversized")
        _log.warning("%s", text)

    # --- what was handed out --------------------------------------------------------------------

    def record(self, item: Any) -> None:
        """Takes note of what came to be used, for ``state_dict``.

        Iterating in this process does it by itself. What came out of DataLoader workers has to be
        recorded here: they read ahead, and only the trainer knows what it has used.

        Args:
            item: a sample, a batch, a handle, or several of them in a list.
        """
        for handle in handles_of(item):
            self._handed_out.add(handle)
            self._recorded += 1

    def give_back(self, item: Any) -> None:
        """Takes back what was read and will not be used.

        A sample whose lease is still held is the group's again. What a batch has copied holds no
        lease: it does not come again, which is said and counted (``dropped``).

        Args:
            item: as for ``record``.
        """
        items = item if isinstance(item, list | tuple) else [item]
        samples = [one for one in items if isinstance(one, Sample)]
        subscription = self._subscription
        back = [one for one in samples if subscription is not None and subscription.give_back(one)]
        self._drop(sum(1 for _ in handles_of(items)) - len(back))

    def _drop(self, samples: int) -> None:
        if samples <= 0:
            return
        self._dropped += samples
        _log.warning(
            "%d samples were read ahead for group %r and are not used: they are gone from the "
            "ring, are not in state_dict, and do not come again. Read to the end to use all",
            samples,
            self.group,
        )

    @property
    def dropped(self) -> int:
        """Samples that were read ahead and never used; they do not come again."""
        return self._dropped

    @property
    def handed_out(self) -> int:
        """Samples that were recorded, those of loaded states with them."""
        return len(self._handed_out)

    @property
    def skipped(self) -> int:
        """Samples that came again although they had been handed out, and were released."""
        return self._words.skipped

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, in plain values, for a checkpoint."""
        return self._handed_out.state_dict()

    def load_state_dict(self, state: Any, *others: Any) -> None:
        """Skips what these states say was handed out; to be called before iterating.

        Args:
            state, others: of this rank, and of the others: after a restart, any of them may be
                given what another had.

        Raises:
            OptionError: not what ``state_dict`` gives.
        """
        for one in (state, *others):
            self._handed_out.merge(one)

    @property
    def died(self) -> ProducerDied | None:
        """Whether the producer was killed, here or where a worker read it to the end."""
        return self._died or self._words.death(self.name)

    # --- joining and leaving --------------------------------------------------------------------

    def _open(self) -> Subscription:
        if self._words.inherited():
            # A worker shares them with its trainer; a rank has its own.
            self._words = TrainerWords()
            self._begin()
        with self._opening:
            if self._words.stopped:
                raise Closed(f"the dataset of group {self.group!r} was closed")
            if self._subscription is None:
                self._died = None
                self._told.clear()
                self._subscription = subscribe(self.name, self.group, **self._options)
                self._words.note_joined()
            return self._subscription

    def close(self) -> None:
        """Leaves the group, and has workers that wait for a sample leave it.

        To be called before you break off a loop over a DataLoader with workers: else torch waits
        5 s for each of them and kills it.
        """
        self._end(clean=True)

    def abandon(self) -> None:
        """Ends like a death: the group's place and its unread samples are kept."""
        self._end(clean=False)

    def _end(self, *, clean: bool) -> None:
        if self._words.inherited():
            return
        with self._opening:
            stopped = self._words.stopped
            self._words.stop()
        if self._recorded and not stopped:
            # Batches that lie in a loader's queues; a trainer that records nothing is not judged.
            self._drop(self._words.handed_over - self._recorded)
        name = self.name or (self._subscription.name if self._subscription else None)
        self._leave(clean=clean)
        if clean and name is not None:
            self._words.leave_for_killed_workers(name, self.group)

    def _leave(self, *, clean: bool) -> None:
        subscription, self._subscription = self._subscription, None
        packing, self._packing = self._packing, None
        if subscription is None:
            return
        if packing is not None:
            # A batch that was never handed out: its samples are the group's again.
            for sample in packing.samples:
                subscription.give_back(sample)
        if clean:
            subscription.close()
        else:
            subscription.abandon()

    def __enter__(self) -> "SampleDataset":
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The death may be of another dataset's ring: then this group's place is kept.
        over = kind is not None and issubclass(kind, ProducerDied) and self.died is not None
        self._end(clean=kind is None or over)
        if kind is None and self.on_death == "raise":
            death = self._words.death(self.name)
            if death is not None:
                raise death


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{what} {value!r} must be one of {', '.join(allowed)}")
