# SPDX-License-Identifier: Apache-2.0
"""A drain in the background of the process that generates: to memory within a bound, or to files.

``LLM.generate(many prompts)`` returns when all are done, and only then the script reads. A ring
that is smaller than the data would stop the engine for ever; so a thread empties it meanwhile.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shmconn.checksum import KEY, checksum
from shmconn.errors import Closed, NotReady, OptionError, ProducerDied, SampleGone, ShmConnError
from shmconn.handle import Handle, format_size, parse_size
from shmconn.subscription import Subscription, subscribe

if TYPE_CHECKING:
    import torch

    from shmconn.sample import Sample

_log = logging.getLogger("shmconn")

GROUP = "offline"
DEFAULT_MEMORY = "4GiB"
_LOOK_S = 0.1


class DrainFull(ShmConnError):
    """A background drain has reached its bound, or its disk is full; samples were given up."""


class BackgroundDrain:
    """Reads a ring in a thread, so that an engine in this process never waits for its own reader.

    Samples lie here until they are dropped. At the bound the drain goes on reading, so that nothing
    hangs, but gives up what it reads; ``check``, ``get`` and ``wait_for`` then raise DrainFull.

    Args:
        ring: name of the ring.
        memory: how much may lie in memory, bytes or text like ``"4GiB"``; with ``folder`` no use.
        folder: write each sample to a safetensors file there instead.
        group: whom it reads for; name it in the connector's ``groups`` too, and nothing is missed.
        wait_s: seconds to wait for the ring.

    A second drain of a ring ends the first one of this process, and has what it kept.

    Raises:
        OptionError: an argument is wrong.
        RingMissing: as ``subscribe``.
    """

    def __init__(
        self,
        ring: str,
        *,
        memory: "int | str" = DEFAULT_MEMORY,
        folder: "str | os.PathLike[str] | None" = None,
        group: str = GROUP,
        wait_s: float = 0.0,
    ) -> None:
        self.ring = ring
        self.memory = parse_size(memory, "memory")
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OptionError(f"folder {str(folder)!r}: {error.strerror}") from error
        self._kept: dict[Handle, dict[str, torch.Tensor] | Path] = {}
        self._held = 0
        self._given_up: dict[Handle, str] = {}
        self._why = ""
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._died: ProducerDied | None = None
        self._subscription: Subscription = subscribe(
            ring, group, background=True, wait_s=wait_s, follow=False
        )
        self._replace(active.get(ring))
        self._thread = threading.Thread(target=self._run, name="shmconn-drain", daemon=True)
        self._thread.start()
        active[ring] = self
        atexit.register(self.close)

    def _replace(self, before: "BackgroundDrain | None") -> None:
        """Takes an earlier drain's place, and what it kept: two would share out the samples."""
        if before is not None:
            before.close()
            self._kept, self._held = dict(before._kept), before._held
            self._given_up = dict(before._given_up)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                sample = self._subscription.next(timeout=_LOOK_S)
                if sample is not None:
                    self._keep(sample)
                    del sample
                elif self._subscription.ended:
                    break
        except ProducerDied as error:
            self._died = error
        except BaseException as error:
            self._give_up(f"the background drain of ring {self.ring!r} failed: {error!r}", None)
            _log.exception("the background drain of ring %r failed", self.ring)
        # Left by whoever reads last: an engine that still runs is held up no longer.
        self._subscription.close()
        with self._changed:
            self._changed.notify_all()

    def _keep(self, sample: "Sample") -> None:
        if self._why:
            self._give_up(self._why, sample.handle)
            return
        try:
            kept = self._to_file(sample) if self.folder is not None else self._to_memory(sample)
        except OSError as error:
            self._give_up(f"folder {str(self.folder)!r} takes no more: {error}", sample.handle)
            return
        if kept is not None:
            with self._changed:
                self._kept[sample.handle] = kept
                self._changed.notify_all()

    def _to_memory(self, sample: "Sample") -> "dict[str, torch.Tensor] | None":
        size = sample.nbytes + 8 * sample.tokens
        with self._changed:
            fits = self._held + size <= self.memory
            self._held += size if fits else 0
        if not fits:
            self._give_up(
                f"{len(self._kept)} samples of ring {self.ring!r} lie in memory, "
                f"{format_size(self._held)}, and the next one of {format_size(size)} is over the "
                f"bound of {format_size(self.memory)}. Generate fewer prompts at once and call "
                "cleanup_hidden_states, raise the bound (memory, hidden_states_memory), or give a "
                "folder (shared_storage_path)",
                sample.handle,
            )
            return None
        return tensors_of(sample)

    def _to_file(self, sample: "Sample") -> Path:
        from safetensors.torch import save_file

        path = self.path_of(sample.handle)
        making = path.with_suffix(f".{os.getpid()}.tmp")
        tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
        try:
            # Renamed when whole: a file of that name is never half written.
            save_file(tensors, making, _texts(sample))
            making.rename(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                making.unlink()
            if isinstance(error, Exception) and not isinstance(error, OSError):
                # safetensors has its own error for a full disk.
                raise OSError(str(error)) from error
            raise
        return path

    def _give_up(self, why: str, handle: Handle | None) -> None:
        with self._changed:
            if not self._why:
                self._why = why
                _log.error("%s", why)
            if handle is not None:
                self._given_up[handle] = why
            self._changed.notify_all()

    # --- for the script -------------------------------------------------------------------------

    def path_of(self, handle: Handle) -> Path:
        """The file of a sample."""
        if self.folder is None:
            raise OptionError(f"the drain of ring {self.ring!r} keeps samples in memory")
        return self.folder / f"{handle.generation[:12]}-{handle.number}.safetensors"

    @property
    def held(self) -> int:
        """Bytes that lie in memory."""
        return self._held

    def check(self) -> None:
        """Raises DrainFull as soon as a sample had to be given up."""
        if self._why:
            raise DrainFull(self._why)

    def try_again(self) -> None:
        """Keeps samples again after it was full; what was given up stays so."""
        with self._changed:
            if not self._subscription_closed():
                self._why = ""

    def wait_for(self, handle: Handle, timeout: float) -> "dict[str, torch.Tensor] | Path":
        """What was kept of a sample: its tensors, or its file.

        Raises:
            DrainFull: it was given up.
            SampleLost, SampleGone, NotReady, ProducerDied: it did not come; see the classes.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if handle in self._kept:
                    return self._kept[handle]
                why = self._given_up.get(handle) or (self._subscription_closed() and self._why)
                if why:
                    raise DrainFull(why)
                if not self._subscription_closed():
                    self._changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
                if handle in self._kept or handle in self._given_up:
                    continue
            self._ask(handle, deadline)

    def _subscription_closed(self) -> bool:
        return not self._thread.is_alive()

    def _ask(self, handle: Handle, deadline: float) -> None:
        """Raises if the sample can never come, or the time is over."""
        try:
            self._keep(self._subscription.get(handle, timeout=0))
        except NotReady as error:
            if time.monotonic() >= deadline:
                raise NotReady(
                    f"sample {handle.number} of ring {self.ring!r} did not come in time"
                ) from error
        except (SampleGone, Closed) as error:
            # The thread may have got it just now.
            with self._changed:
                if handle in self._kept or handle in self._given_up:
                    return
            if isinstance(error, Closed):
                raise self._died or SampleGone(
                    f"sample {handle.number} of ring {self.ring!r} was not among those that were "
                    "read before the ring ended, or was dropped"
                ) from None
            raise

    def drop(self, handle: Handle, *, keep_file: bool = False) -> None:
        """Forgets a sample; a file is removed unless ``keep_file``. Idempotent."""
        with self._changed:
            kept = self._kept.pop(handle, None)
            if isinstance(kept, dict):
                self._held -= sum(tensor.nbytes for tensor in kept.values())
        if isinstance(kept, Path) and not keep_file:
            kept.unlink(missing_ok=True)

    def forget_file(self, path: Path) -> None:
        """Forgets the sample of a file that its owner removes."""
        with self._changed:
            self._kept = {handle: kept for handle, kept in self._kept.items() if kept != path}

    def close(self) -> None:
        """Ends the thread and leaves the group. What was kept stays."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "BackgroundDrain":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _texts(sample: "Sample") -> dict[str, str]:
    """What a file says of its sample, so that another's, or a damaged one, is seen."""
    texts = {"handle": str(sample.handle)}
    return texts | {KEY: checksum(texts, sample.token_ids_bytes, sample.states_bytes)}


def tensors_of(sample: "Sample") -> "dict[str, torch.Tensor]":
    """A sample's tensors in memory of their own, as vLLM's ``load_hidden_states`` gives them."""
    return {
        "hidden_states": sample.hidden_states.clone(),
        "token_ids": sample.token_ids.clone(),
    }


# The drains of this process, by ring; a later one takes an earlier one's place.
active: dict[str, BackgroundDrain] = {}
