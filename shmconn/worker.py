# SPDX-License-Identifier: Apache-2.0
"""The worker's side: the ring, the capture and the copier of one rank, from start to end."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shmconn import directory
from shmconn.capture import Capture, Place, find_cache, make_capture
from shmconn.config import ConnectorConfig, auto_ring_name, default_ring_size
from shmconn.copier import Copier
from shmconn.errors import OptionError
from shmconn.handle import format_size
from shmconn.hold import Hold
from shmconn.intake import RingIdentity, Work
from shmconn.layout import DTYPES, MAX_SLOTS, RingShape
from shmconn.ring import Producer
from shmconn.seen import Seen
from shmconn.tally import Tally

logger = logging.getLogger("vllm.shmconn")

METHOD = "extract_hidden_states"

# Writers of this process, by their ring's generation, once they have taken part in a step: where
# scheduler and worker share a process and its main thread, finished requests need not wait for the
# next step's metadata. A generation is random: another engine's ring is never taken for it.
_here: "dict[str, Writer]" = {}


@dataclass(frozen=True)
class Target:
    """What is captured, as vLLM's configuration has it.

    Attributes:
        layer_ids: ascending, as vLLM's cache holds them whatever order they are listed in.
        max_tokens: longest request that the model takes.
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    max_tokens: int

    @classmethod
    def of(cls, vllm_config: Any) -> "Target":
        """Reads and checks vLLM's configuration.

        Raises:
            OptionError: hidden states cannot be captured with it; says what to change.
        """
        speculative = vllm_config.speculative_config
        method = getattr(speculative, "method", None)
        if method != METHOD:
            raise OptionError(
                f"ShmHiddenStatesConnector needs the speculative method {METHOD!r}, but "
                f"speculative_config {'is not set' if method is None else f'has {method!r}'}: "
                "`shmconn serve MODEL --print` shows the whole command"
            )
        role = vllm_config.kv_transfer_config.kv_role
        if role == "kv_consumer":
            raise OptionError(f"kv_role is {role!r}: the connector produces, use 'kv_producer'")
        parallel = vllm_config.parallel_config
        backend = getattr(parallel, "distributed_executor_backend", None)
        ranks = getattr(parallel, "tensor_parallel_size", 1)
        if backend == "external_launcher" and ranks > 1:
            raise OptionError(
                f"tensor_parallel_size is {ranks} with distributed_executor_backend {backend!r}: "
                "each rank then schedules by itself, and they would free blocks at different "
                "steps; use the backend 'mp'"
            )
        for option in (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(parallel, option, 1) > 1:
                raise OptionError(
                    f"{option} is {getattr(parallel, option)}: no single worker then holds the "
                    "hidden states of a request; use tensor or data parallelism"
                )
        ids = getattr(
            speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None
        )
        if not ids or len(set(ids)) != len(ids):
            raise OptionError(
                f"eagle_aux_hidden_state_layer_ids is {ids!r}: give it layer numbers, each once"
            )
        model = vllm_config.model_config
        count = getattr(getattr(model, "hf_text_config", None), "num_hidden_layers", None)
        wrong = [one for one in ids if one < 0 or (count is not None and one > count)]
        if wrong:
            raise OptionError(
                f"eagle_aux_hidden_state_layer_ids names {wrong}, but the model has layers 0 "
                f"(the embeddings) to {count}"
            )
        return cls(tuple(sorted(ids)), int(model.get_hidden_size()), int(model.max_model_len))


class Bystander:
    """A rank that copies nothing.

    Args:
        reports: whether vLLM waits for this rank's word, too, before it frees a request.
    """

    identity: RingIdentity | None = None

    def __init__(self, *, reports: bool) -> None:
        self._reports = reports
        self._taken = Seen()
        self._done: set[str] = set()

    def step(self, work: Iterable[Work]) -> None:
        """A step begins, with this work in its metadata."""
        self.submit(work)

    def submit(self, work: Iterable[Work]) -> None:
        """Has nothing to do for these requests."""
        fresh = [one for one in work if self._reports and self._taken.add(one.number)]
        self._done.update(one.request_id for one in fresh if one.report)

    def take_done(self) -> set[str]:
        """Ids that this rank has no more use for; each is given once."""
        done, self._done = self._done, set()
        return done

    def drain_stats(self) -> dict[str, Any] | None:
        """Nothing happens here."""
        return None

    def close(self) -> None:
        """Nothing is open."""


class Writer:
    """The rank that has the ring."""

    def __init__(
        self, producer: Producer, capture: Capture, copier: Copier, tally: Tally, grace_s: float
    ) -> None:
        self.identity: RingIdentity | None = RingIdentity(
            producer.name,
            producer.generation,
            producer.layer_ids,
            producer.hidden_size,
            producer.dtype,
        )
        self.submit = copier.submit
        self.take_done = copier.take_done
        self.drain_stats = tally.drain
        self._producer = producer
        self._capture = capture
        self._copier = copier
        self._grace_s = grace_s
        self._generation = producer.generation
        self._closed = False

    def step(self, work: Iterable[Work]) -> None:
        """A step begins, with this work in its metadata.

        Called in the engine's main thread with the step's own stream current.
        """
        self._capture.at_step()
        if not self._closed:
            _here[self._generation] = self
        if work:
            self.submit(work)

    def close(self) -> None:
        """Settles what is held, or buries it when the grace is over; then ends the ring."""
        self._closed = True
        _here.pop(self._generation, None)
        try:
            self._copier.close(self._grace_s)
        finally:
            try:
                self._capture.close()
            finally:
                self._producer.close()


def writer_here(generation: str) -> Writer | None:
    """The writer of a ring, if it is in this process and takes part in steps."""
    return _here.get(generation)


def open_writer(
    kv_caches: Mapping[str, torch.Tensor],
    target: Target,
    config: ConnectorConfig,
    ring: str,
    engine_id: str,
    place: Place,
) -> Writer:
    """Makes the ring and starts the copier; says so in one line.

    Raises:
        OptionError: the cache of hidden states is not what the configuration says, or the ring's
            options do not go together.
        NoSpace: /dev/shm is too small; nothing is left behind.
    """
    cache = find_cache(
        kv_caches,
        place,
        layers=len(target.layer_ids),
        hidden_size=target.hidden_size,
        token_major=_token_major(),
    )
    dtype = str(cache.states.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise OptionError(f"the hidden states are {dtype}; a ring takes {', '.join(DTYPES)}")
    others = [other for other in directory.rings(ring) if other.live]
    producer = Producer.create(
        ring,
        size=default_ring_size() if config.ring_size is None else config.ring_size,
        layer_ids=target.layer_ids,
        hidden_size=target.hidden_size,
        dtype=dtype,
        page_size=config.page_size,
        slots=config.slots,
        groups=config.groups_for_ring(),
        mode=config.mode,
        engine_id=engine_id,
        unclaimed_ttl_s=config.unclaimed_ttl_s,
    )
    try:
        capture = make_capture(cache, producer.data_area)
    except BaseException:
        producer.close()
        raise
    hold = Hold(producer, on_full=config.on_full, no_reader_timeout_s=config.no_reader_timeout_s)
    tally = Tally()
    copier = Copier(producer, capture, hold, tally)
    _announce(producer, target)
    mine = auto_ring_name(engine_id)
    if any(auto_ring_name(other.engine_id) != mine for other in others):
        logger.warning(
            "shmconn: another engine (pid %s) has a live ring %r too; a reader of that name gets "
            "the samples of both",
            ", ".join(str(other.pid) for other in others),
            ring,
        )
    return Writer(producer, capture, copier, tally, config.shutdown_grace_s)


def _announce(producer: Producer, target: Target) -> None:
    shape = producer.shape
    logger.info(
        "shmconn: ring %r of %s holds %d tokens of layers %s, %s a token in %s; read it with "
        "`shmconn drain %s --to DIR`",
        producer.name,
        format_size(shape.size),
        producer.tokens_capacity,
        ",".join(map(str, producer.layer_ids)),
        format_size(producer.bytes_per_token),
        producer.dtype,
        producer.name,
    )
    if not producer.fits(target.max_tokens):
        logger.warning(
            "shmconn: a request of max_model_len %d tokens does not fit a third of ring %r and "
            "would be lost; a ring_size of %s takes it",
            target.max_tokens,
            producer.name,
            _size_for(target.max_tokens, producer),
        )
    sizes = {info.file: info.size for info in directory.rings(producer.name)}
    for left in producer.leftovers:
        logger.warning(
            "shmconn: the dead ring %s of %s stays for a group that has not read it: start that "
            "group, or give its samples up with `shmconn groups rm %s GROUP`",
            left,
            format_size(sizes.get(left, 0)),
            producer.name,
        )


def _size_for(tokens: int, producer: Producer) -> str:
    """The ring_size, as an option takes it, of which a third holds so many tokens."""
    sample = tokens * (producer.bytes_per_token + 8) + 8192
    pages = 3 * -(-sample // producer.shape.page_size)
    slots = max(producer.shape.slots, min(pages, MAX_SLOTS))
    return f"{-(-RingShape(producer.shape.page_size, pages, slots).size // (1 << 20))}MiB"


def _token_major() -> bool:
    """Whether vLLM's cache of hidden states has the shape [blocks, block, layers, hidden]."""
    try:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
    except ImportError as error:
        raise OptionError(
            f"this vLLM has no {METHOD}: use 0.22 or later on CUDA, 0.22, 0.25 or later on a CPU"
        ) from error
    # The backend states its own shape only where heads do not come first in all caches.
    return "get_kv_cache_shape" in CacheOnlyAttentionBackend.__dict__
