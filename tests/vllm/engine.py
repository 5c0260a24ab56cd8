# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and our real connector around a model that is none.

The model writes for each token a row that follows from its id and its place, so every row of
every sample can be told; blocks that nobody owns hold poison. What a worker does in a step is
done in the worker's order: metadata is bound, results are asked for, and only then the rows of
the step are written. In a deferred step, as vLLM 0.34 takes it while sampling waits for the
grammar of a structured output, the ends of the step before come in between.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import time
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

with warnings.catch_warnings():
    # vLLM's imports warn of what torch will drop one day; ours do not.
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed import kv_transfer, parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionBackend
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

import shmconn
from shmconn import plugin

plugin.register()
LAYERS = [1, 2]
BLOCK = 16
POISON = float("nan")
HIDDEN_LAYER = "model.cache_only_layers.30"
# Whether a MultiConnector joins its children's replies; up to 0.22 only one of them may reply.
MERGES = "Only one connector" not in inspect.getsource(multi_connector)


@functools.cache
def _base_config(model: str) -> Any:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=BLOCK,
        speculative_config=speculative,
        kv_transfer_config=transfer_config({}),
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()


def transfer_config(extra: dict[str, Any], **changes: Any) -> Any:
    """The KV transfer configuration with these options of the connector."""
    return KVTransferConfig(
        **{
            "kv_connector": "ShmHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
            **changes,
        }
    )


def vllm_config(model: str, transfer: Any) -> Any:
    """A real configuration of vLLM; making one takes seconds, so all are copies of one."""
    config = copy.deepcopy(_base_config(model))
    config.kv_transfer_config = transfer
    return config


def row(token_id: int, place: int, hidden: int) -> torch.Tensor:
    """What the model computes for one token: ``[layers, hidden]``."""
    base = torch.arange(len(LAYERS) * hidden, dtype=torch.float32).view(len(LAYERS), hidden)
    return base + token_id * 7 + place * 100_003


def hidden_cache(blocks: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of hidden states as this vLLM shapes it, and ``[blocks, block, layers, hidden]``."""
    if "get_kv_cache_shape" in CacheOnlyAttentionBackend.__dict__:
        cache = torch.full((blocks, BLOCK, len(LAYERS), hidden), POISON)
        return cache, cache
    cache = torch.full((blocks, len(LAYERS), BLOCK, hidden), POISON)
    return cache, cache.transpose(1, 2)


class Engine:
    """One engine: scheduler and worker in this process.

    Args:
        deferred: a step asks for results only after the ends of the step before.
    """

    def __init__(
        self, config: Any, blocks: int = 40, ranks: int = 1, *, deferred: bool = False
    ) -> None:
        self._deferred = deferred
        self._to_abort: list[str] = []
        # What the workers made of the last deferred step.
        self._last: tuple[Any, Any] | None = None
        self.hidden = config.model_config.get_hidden_size()
        groups = [
            KVCacheGroupSpec(
                ["model.layers.0.attn", HIDDEN_LAYER],
                FullAttentionSpec(
                    block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32
                ),
            )
        ]
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        # Tensor-parallel ranks all hold the full hidden states.
        cache, self.rows = hidden_cache(blocks, self.hidden)
        self.workers: list[Any] = []
        for rank in range(ranks):
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
            with (
                patch.object(parallel_state, "get_tensor_model_parallel_rank", lambda: rank),  # noqa: B023
                patch.object(kv_transfer, "get_kv_transfer_group", lambda: worker),  # noqa: B023
            ):
                worker.register_kv_caches(
                    {"model.layers.0.attn": torch.empty(1), HIDDEN_LAYER: cache}
                )
            self.workers.append(worker)
        self.worker = self.workers[0]
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        handshakes = [worker.get_handshake_metadata() for worker in self.workers]
        words = {rank: one for rank, one in enumerate(handshakes) if one is not None}
        if hasattr(self.scheduler.connector, "set_xfer_handshake_metadata_pp_aware"):
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                {(0, rank): one for rank, one in words.items()}
            )
        else:
            self.scheduler.connector.set_xfer_handshake_metadata(words)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, ranks)
        self.sampled = itertools.count(30_000)
        self.requests: dict[str, Request] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.reported: list[str] = []
        self.outputs: list[EngineCoreOutputs] = []

    def add(
        self,
        request_id: str,
        ids: list[int],
        max_tokens: int = 1,
        stop: list[str] | None = None,
        resumable: bool = False,
        **params: Any,
    ) -> Request:
        """A request, or the next input of a session; further arguments are kv_transfer_params."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop=stop,
            extra_args={"kv_transfer_params": params},
        )
        sampling.update_from_generation_config({}, 0)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            resumable=resumable,
        )
        self.requests.setdefault(request_id, request)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """What the front end does when a client hangs up, or when it finds a stop string."""
        self._to_abort.append(request_id)
        if not self._deferred:
            self._abort()

    def _abort(self) -> None:
        for request_id in self._to_abort:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._to_abort.clear()

    def step(self) -> None:
        """One step of the engine."""
        output = self.scheduler.schedule()
        for worker in self.workers:
            worker.bind_connector_metadata(output.kv_connector_metadata)
        if self._deferred:
            self._abort()
            if self._last is not None:
                self._update(*self._last)
            self._last = output, self._results(output)
        else:
            self._update(output, self._results(output))

    def _results(self, output: Any) -> Any:
        results = []
        for worker in self.workers:
            sending, _ = worker.get_finished(output.finished_req_ids)
            stats = worker.get_kv_connector_stats()
            worker.clear_connector_metadata()
            results.append(KVConnectorOutput(finished_sending=sending, kv_connector_stats=stats))
        forward = self._forward(output)
        result = self.aggregator.aggregate(
            [dataclasses.replace(forward, kv_connector_output=one) for one in results]
        )
        return result

    def _update(self, output: Any, result: Any) -> None:
        assert result is not None and result.kv_connector_output is not None
        self.reported += sorted(result.kv_connector_output.finished_sending or ())
        outputs = self.scheduler.update_from_output(output, result)
        self.outputs += outputs.values()
        for group in outputs.values():
            for one in group.outputs:
                if one.kv_transfer_params is not None:
                    self.replies[one.request_id] = one.kv_transfer_params

    def _forward(self, output: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.requests[request_id]
            if request_id not in self.scheduler.requests:
                # Ended meanwhile: its blocks are somebody else's.
                sampled.append([])
                continue
            count = output.num_scheduled_tokens[request_id]
            # `schedule` has moved num_computed_tokens on already.
            end = request.num_computed_tokens
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for place in range(end - count, end):
                # Beyond the known tokens comes the draft's, which repeats the last one.
                token = request.all_token_ids[min(place, request.num_tokens - 1)]
                self.rows[blocks[place // BLOCK], place % BLOCK] = row(token, place, self.hidden)
            sampled.append([next(self.sampled)] if end >= request.num_tokens else [])
        output = {"req_ids": ids, "sampled_token_ids": sampled}
        if "req_id_to_index" in {one.name for one in dataclasses.fields(ModelRunnerOutput)}:
            # Before vLLM 0.34.
            output["req_id_to_index"] = {one: index for index, one in enumerate(ids)}
        return ModelRunnerOutput(**output)

    def run(self, timeout_s: float = 60.0) -> None:
        """Steps as the engine's loop does: as long as the scheduler says there is work."""
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests() or self._last_ran or self._to_abort:
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"still {len(self.scheduler.requests)} requests")
            if not self.scheduler.get_num_unfinished_requests():
                # Only held requests are left: leave the core to the copier and the reader.
                time.sleep(0.001)

    @property
    def _last_ran(self) -> bool:
        """Whether a deferred step has computed what no update has seen yet."""
        return self._last is not None and bool(self._last[0].num_scheduled_tokens)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks and had to start again."""
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def usage(self) -> float:
        """Share of KV blocks that somebody owns."""
        return float(self.scheduler.kv_cache_manager.usage)

    def expected(self, sample: shmconn.Sample) -> torch.Tensor:
        """The rows that a sample must hold."""
        return torch.stack(
            [
                row(token, place, self.hidden)
                for place, token in enumerate(sample.token_ids.tolist())
            ]
        )

    def close(self) -> None:
        """As a worker ends, and then its scheduler."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Another connector that holds every request for some steps, and waits for all ranks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.held: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        finished = request.status != RequestStatus.FINISHED_ABORTED
        return finished, {"other": 1} if finished and MERGES else None

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        done = {one for one, steps in self.held.items() if steps == 0}
        self.held = {one: steps - 1 for one, steps in self.held.items() if steps > 0}
        self.held |= {one: 2 for one in finished_req_ids if not one.startswith("abort")}
        return done or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def fake_config(**changes: Any) -> Any:
    """The few fields of vLLM's configuration that the connector reads."""
    hf = SimpleNamespace(eagle_aux_hidden_state_layer_ids=LAYERS)
    fields: dict[str, Any] = {
        "speculative_config": SimpleNamespace(
            method="extract_hidden_states", draft_model_config=SimpleNamespace(hf_config=hf)
        ),
        "kv_transfer_config": SimpleNamespace(
            kv_role="kv_producer", engine_id="e", kv_connector_extra_config={}
        ),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "model_config": SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=4),
            get_hidden_size=lambda: 8,
            max_model_len=64,
        ),
    }
    return SimpleNamespace(**(fields | changes))
