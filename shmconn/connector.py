# SPDX-License-Identifier: Apache-2.0
"""The KV connector that vLLM loads: which hook does what. The work is done elsewhere.

    scheduler    request_finished        -> Intake: number, tokens, reason, reply; and the Copier at
                                            once, if the writing worker lives in this process
                 build_connector_meta    -> what finished goes to the workers with the next step
    worker       register_kv_caches      -> the ring (tensor-parallel rank 0 only)
                 bind_connector_metadata -> Copier: takes work in, before the step's forward pass
                 get_finished            -> ids of requests whose blocks may be freed

A step binds its metadata when all rows of earlier steps are queued on the device, and none of its
own: so a copy waits for no more than it must, and runs beside the step. `get_finished` may be
asked at any time in a step, and numbers come in any order. In one process there may be no next
step: ``LLM.generate`` takes none after the last answer.

vLLM calls every hook in its engine's main thread, and an exception in any of them ends the
engine. So each hook that does anything is wrapped: after start, a fault of ours is logged and
costs one sample.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from shmconn import directory
from shmconn.capture import find_place
from shmconn.config import ConnectorConfig, auto_ring_name
from shmconn.hold import Throttle
from shmconn.intake import Intake, RingIdentity, Work
from shmconn.stats import ShmPromMetrics, ShmStats
from shmconn.versions import check_vllm
from shmconn.worker import Bystander, Target, Writer, open_writer, writer_here

logger = logging.getLogger("vllm.shmconn")

F = TypeVar("F", bound=Callable[..., Any])
_throttle = Throttle()


def _never_raises(default: Callable[[], Any]) -> Callable[[F], F]:
    """A hook that logs what goes wrong in it and answers with what does the engine no harm."""

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                if _throttle.admit(hook.__name__) is not None:
                    logger.exception("shmconn: a fault in %s; vLLM goes on", hook.__name__)
                return default()

        return cast(F, guarded)

    return wrap


@dataclass
class ShmMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers in one step: the requests that finished before it."""

    work: list[Work] = field(default_factory=list)


@dataclass
class ShmHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the worker that made the ring tells the scheduler at start."""

    identity: RingIdentity


class ShmHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the hidden states of each finished request to a ring in shared memory.

    Works with the speculative method ``extract_hidden_states``. Options stand in
    ``kv_connector_extra_config``; see `shmconn.config.ConnectorConfig`. A request may carry
    ``include_output_tokens`` and ``tag`` in its ``kv_transfer_params``; see `shmconn.intake.Ask`.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        """Checks what can be checked before the ring is made.

        Raises:
            OptionError: an option is wrong, or this vLLM or its configuration cannot do it.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_vllm(vllm_config, tell=role == KVConnectorRole.SCHEDULER)
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.parse(transfer.kv_connector_extra_config or {})
        self._target = Target.of(vllm_config)
        self._engine_id = str(transfer.engine_id)
        self._ring = self._config.ring or auto_ring_name(self._engine_id)
        self._place = find_place(kv_cache_config)
        self._intake = Intake(block_size=self._place.block_size, ring=self._ring)
        self._worker: Writer | Bystander = Bystander(reports=False)

    # --- what vLLM asks of the class ------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: the copy follows whatever strides the cache has, and the model's own attention
        may prefer one layout over another."""
        return None

    def get_finished_count(self) -> int:
        """Only tensor-parallel rank 0 copies, so one report frees a request."""
        return 1

    # --- scheduler ------------------------------------------------------------------------------

    @_never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is ever loaded from the ring."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are looked at when a request has finished, never before."""

    @_never_raises(ShmMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> ShmMetadata:
        """What finished since the last step."""
        return ShmMetadata(self._intake.take())

    @_never_raises(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Takes a finished request in; its blocks stay until the copy is done."""
        answer = self._intake.finish(request, block_ids)
        self._hand_over()
        return answer

    @_never_raises(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where vLLM has several groups of KV caches."""
        group = self._place.group
        answer = self._intake.finish(request, block_ids[group] if group < len(block_ids) else ())
        self._hand_over()
        return answer

    @_never_raises(lambda: None)
    def _hand_over(self) -> None:
        """Spares a request the wait for the next step, if its worker is here.

        That step's metadata has it all the same, for other ranks; the writer takes it once.
        """
        identity = self._intake.identity
        writer = None if identity is None else writer_here(identity.generation)
        if writer is not None:
            writer.submit(self._intake.sure())

    @_never_raises(lambda: None)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Learns from the worker which ring it made.

        A MultiConnector forwards only its first child's word; then the ring is looked up.
        """
        for one in metadata.values():
            if isinstance(one, ShmHandshake):
                self._intake.identity = one.identity
                return
        self._intake.identity = self._look_up()

    def _look_up(self) -> RingIdentity | None:
        for ring in directory.rings(self._ring):
            if ring.live and not ring.problem and ring.engine_id == self._engine_id[:256]:
                return RingIdentity(
                    ring.name, ring.generation, ring.layer_ids, ring.hidden_size, ring.dtype
                )
        logger.warning(
            "shmconn: the scheduler finds no ring %r of engine %s: replies carry no handle",
            self._ring,
            self._engine_id,
        )
        return None

    # --- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes the ring, on the rank that writes it.

        Raises:
            OptionError: the cache of hidden states is not there or is not what is expected.
            NoSpace: /dev/shm is too small.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        # A vLLM that lays its caches out anew registers them again.
        self._worker.close()
        if get_tensor_model_parallel_rank() != 0:
            # Under a MultiConnector vLLM may wait for every rank's report.
            self._worker = Bystander(reports=get_kv_transfer_group().get_finished_count() != 1)
            return
        self._worker = open_writer(
            kv_caches, self._target, self._config, self._ring, self._engine_id, self._place
        )

    @_never_raises(lambda: None)
    def get_handshake_metadata(self) -> ShmHandshake | None:
        """The ring, for the scheduler; ``None`` on ranks that have none."""
        identity = self._worker.identity
        return None if identity is None else ShmHandshake(identity)

    @_never_raises(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes in what finished before this step; comes before the step's forward pass."""
        super().bind_connector_metadata(connector_metadata)
        ours = isinstance(connector_metadata, ShmMetadata)
        self._worker.step(connector_metadata.work if ours else ())

    @_never_raises(lambda: (None, None))
    def get_finished(
        self, finished_req_ids: Iterable[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Gives back whose blocks may be freed, each once."""
        metadata = self._connector_metadata
        if isinstance(metadata, ShmMetadata) and metadata.work:
            # Once more: what a fault kept from being taken in would be held for ever.
            self._worker.submit(metadata.work)
        return self._worker.take_done() or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded from the ring."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded from the ring."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is copied before a request has finished."""

    def wait_for_save(self) -> None:
        """Nothing: vLLM skips this hook in steps without a forward pass, up to 0.28."""

    @_never_raises(lambda: None)
    def shutdown(self) -> None:
        """Publishes what is held for a while, buries the rest, ends the ring. Idempotent."""
        self._worker.close()

    # --- metrics --------------------------------------------------------------------------------

    @_never_raises(lambda: None)
    def get_kv_connector_stats(self) -> ShmStats | None:
        """What happened since the last step, if anything did."""
        data = self._worker.drain_stats()
        return None if data is None else ShmStats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ShmStats:
        """An interval from the plain data that crossed a process."""
        return ShmStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ShmPromMetrics:
        """The Prometheus metrics of the connector."""
        return ShmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
