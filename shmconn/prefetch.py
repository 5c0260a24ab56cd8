# SPDX-License-Identifier: Apache-2.0
"""The next batches on the device while the step runs.

    collator = Collator(8192, device="cuda")
    with SampleDataset("qwen", collator=collator, pin=True) as dataset:
        with CudaPrefetcher(dataset, "cuda") as batches:
            for batch in batches:
                ...

A thread makes the batches, on a stream of its own. With a collator for the device and a pinned
ring each sample goes there by one DMA out of the ring; batches in host memory are copied over.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from shmconn.dataset import SampleDataset
from shmconn.errors import OptionError

_log = logging.getLogger("shmconn")
_LOOK_S = 0.2
_LOADER_S = 1.0


class CudaPrefetcher:
    """Iterates ``source`` ahead in a thread; its batches come on ``device``.

    A batch is whole when it is handed over, and its memory is not used again before the work that
    you put on the current stream. Iterating again goes on.

    Args:
        source: a SampleDataset, or batches: dicts with tensors. A dataset's ``state_dict`` counts
            what came out of here, not what is still ahead.
        device: a CUDA device; or the CPU, for the thread alone.
        depth: batches that are ready ahead.

    Raises:
        OptionError: an argument is wrong.
    """

    def __init__(
        self, source: Iterable[Any], device: "torch.device | str" = "cuda", depth: int = 2
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cuda", "cpu"):
            raise OptionError(f"device {str(device)!r} must be a CUDA device or the CPU")
        if (
            self.device.type == "cuda"
            and isinstance(source, SampleDataset)
            and source.collator is None
        ):
            raise OptionError(
                "a dataset without a collator gives samples, which stay in the ring: "
                "SampleDataset(..., collator=Collator(max_len, device='cuda'))"
            )
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"device {str(device)!r}: there is no CUDA device here")
        if depth < 1:
            raise OptionError(f"depth {depth} must be 1 or more batches")
        self._source = source
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._end: list[BaseException | None] = []
        self._ahead: list[Any] = []  # made ready, and not taken any more
        self._thread = threading.Thread(target=self._run, name="shmconn-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            Exception: what the source raised, after all that it had given.
        """
        while True:
            if self._stop.is_set():
                raise StopIteration
            try:
                batch = self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._end and self._ready.empty():
                    if self._end[0] is not None:
                        raise self._end[0] from None
                    raise StopIteration from None
                continue
            self._take(batch)
            return batch

    def _take(self, batch: Any) -> None:
        if isinstance(self._source, SampleDataset):
            self._source.record(batch)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for tensor in _tensors_of(batch):
                tensor.record_stream(stream)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            source = self._source
            if isinstance(source, SampleDataset):
                items = source.unrecorded(self._stop)
            else:
                items = iter(source)
            with self._stream() as stream:
                for item in items:
                    moved = self._move(item)
                    del item
                    if stream is not None:
                        # So the consumer's stream has nothing to wait for, and leases end early.
                        stream.synchronize()
                    if not self._put(moved):
                        self._ahead.append(moved)
                        break
                    del moved
        except BaseException as caught:
            error = caught
        self._end.append(error)

    @contextlib.contextmanager
    def _stream(self) -> Iterator["torch.cuda.Stream | None"]:
        if self.device.type == "cpu":
            yield None
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream

    def _move(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(self.device, non_blocking=True)
        if isinstance(item, Mapping):
            return {key: self._move(value) for key, value in item.items()}
        if isinstance(item, list | tuple) and any(isinstance(v, torch.Tensor) for v in item):
            return type(item)(self._move(value) for value in item)
        return item

    def _put(self, batch: Any) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(batch, timeout=_LOOK_S)
                return True
        return False

    def close(self) -> None:
        """Ends the thread and drops what is ahead.

        A source of another kind may be waiting for its own next batch, a DataLoader for one of its
        workers: it is waited for 1 s, and the thread ends when that batch comes or its source does.

        Batches hold no lease: their samples do not come again, and a dataset's ``state_dict`` does
        not name them. The log and the dataset's ``dropped`` say how many they are: read to the end
        to use all. Samples that are ahead are the group's again. A batch that is not full yet stays
        with its dataset, for its next iteration or, when it is closed, for the group.
        """
        self._stop.set()
        self._thread.join(None if isinstance(self._source, SampleDataset) else _LOADER_S)
        while not self._ready.empty():
            self._ahead.append(self._ready.get_nowait())
        ahead, self._ahead = self._ahead, []
        if isinstance(self._source, SampleDataset):
            self._source.give_back(ahead)
        elif ahead:
            _log.warning(
                "%d batches were ready ahead of a CudaPrefetcher that was closed: they are not "
                "used. Read to the end to use all",
                len(ahead),
            )

    def __enter__(self) -> "CudaPrefetcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_of(value)
