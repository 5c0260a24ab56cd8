# SPDX-License-Identifier: Apache-2.0
"""The connectors that the benchmark measures ours beside; loaded inside vLLM, by module path.

ThrowAway     extraction runs, every request's blocks are given back at once: the ceiling
StockOnHost   vLLM's own example on a machine without CUDA, to rehearse with
Probe         what the benchmark asks a worker
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


@dataclass
class _Finished(KVConnectorMetadata):  # type: ignore[misc]
    ids: list[str] = field(default_factory=list)


class ThrowAway(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Holds the blocks of a finished request until the next step, and copies nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._ids: list[str] = []

    def get_finished_count(self) -> int:
        """One rank reports."""
        return 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Loads nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Loads nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> _Finished:
        """What finished since the last step."""
        ids, self._ids = self._ids, []
        return _Finished(ids)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Holds the blocks."""
        self._ids.append(request.request_id)
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Holds the blocks."""
        return self.request_finished(request, block_ids)

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, None]:
        """Gives them back."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        ids = set(metadata.ids) if isinstance(metadata, _Finished) else set()
        return ids or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, metadata: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""


class _Done:
    """An event that has happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True


class StockOnHost(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's example, with its copy done at once in host memory."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds the cache without the check of its block axis, which is not axis 1 everywhere."""
        (self._kv_cache,) = (one for name, one in kv_caches.items() if "cache_only_layers" in name)

    def _submit_async_write(self, pending: Any) -> None:
        cache = self._kv_cache
        if cache.shape[1] == self.num_hidden_states:
            cache = cache.transpose(1, 2)
        rows = cache[torch.tensor(pending.block_ids)].flatten(0, 1)
        tokens = pending.token_ids.shape[0]
        tensors = {
            "hidden_states": rows[:tokens].contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        lock = self._lock_fds.pop(pending.req_id, None)
        self._req_copy_events[pending.req_id] = _Done()
        self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)


class Probe:
    """Methods of the worker that the benchmark calls by name."""

    def bench_reset(self) -> None:
        """Forgets the peaks so far."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()

    def bench_memory(self) -> dict[str, int]:
        """Bytes of this process: device memory of torch, pinned memory of torch."""
        if not torch.cuda.is_available():
            return {}
        torch.cuda.synchronize()
        host = torch.cuda.host_memory_stats()
        pinned = {
            f"pinned_{key}": int(value)
            for key, value in host.items()
            if key.startswith("allocated_bytes") and key.endswith(("current", "peak"))
        }
        return {
            "device_peak": torch.cuda.max_memory_allocated(),
            "device_reserved": torch.cuda.memory_reserved(),
            **pinned,
        }
