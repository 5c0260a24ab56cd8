# SPDX-License-Identifier: Apache-2.0
"""The connector's figures in vLLM's own metrics: on ``/metrics`` and in its periodic log line.

A worker's `Tally` travels with a step's output as plain data; vLLM adds up the intervals and
shows them per engine.
"""

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from shmconn.layout import REASONS
from shmconn.tally import MAX_OBSERVED

logger = logging.getLogger("vllm.shmconn")

_SUMS = ("samples", "bytes")
_LISTS = ("copy_s", "hold_s")
_GAUGES = ("held", "oldest_held_s", "ring_fill")
_COPY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_HOLD_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class ShmStats(KVConnectorStats):  # type: ignore[misc]
    """What one ring did in an interval: ``data`` is what `Tally.drain` gives, or empty."""

    data: dict[str, Any]

    def __getitem__(self, key: str) -> dict[str, Any]:
        """``["data"]``: a MultiConnector of vLLM up to 0.28 asks for it as of the plain data that
        it would find between processes, also where there is one only, and ends the engine if it
        gets none."""
        return {"data": self.data}[key]

    def reset(self) -> None:
        """Forgets the interval."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ShmStats":
        """Adds a later interval; what is a state, and no sum, is the later one's."""
        if other.data and not self.data:
            self.data = dict(other.data)
        elif other.data:
            for key in _SUMS:
                self.data[key] += other.data[key]
            for key in _LISTS:
                self.data[key] = (self.data[key] + other.data[key])[:MAX_OBSERVED]
            for key in _GAUGES:
                self.data[key] = other.data[key]
            lost = dict(self.data["lost"])
            for reason, count in other.data["lost"].items():
                lost[reason] = lost.get(reason, 0) + count
            self.data["lost"] = lost
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in one line of the log."""
        if not self.data:
            return {}
        copy_s = sorted(self.data["copy_s"])
        line: dict[str, int | float] = {
            "Samples published": self.data["samples"],
            "MB published": round(self.data["bytes"] / 1e6, 1),
            "Copy time p50 (ms)": round(copy_s[len(copy_s) // 2] * 1e3, 2) if copy_s else 0,
            "Held now": self.data["held"],
            "Oldest held (s)": round(self.data["oldest_held_s"], 1),
            "Ring full (%)": round(self.data["ring_fill"] * 100, 1),
        }
        for reason, count in self.data["lost"].items():
            line[f"Lost ({reason})"] = count
        return line


class ShmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus metrics, one series per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = self._counter_cls, self._gauge_cls, self._histogram_cls
        made = {
            "samples": counter(
                name="vllm:shmconn_samples_published",
                documentation="Samples of hidden states put into the shared-memory ring.",
                labelnames=labelnames,
            ),
            "bytes": counter(
                name="vllm:shmconn_bytes_published",
                documentation="Bytes of hidden states put into the shared-memory ring.",
                labelnames=labelnames,
            ),
            "copy_s": histogram(
                name="vllm:shmconn_copy_time_seconds",
                documentation="Time to copy one sample into the ring, in seconds.",
                buckets=_COPY_BUCKETS,
                labelnames=labelnames,
            ),
            "hold_s": histogram(
                name="vllm:shmconn_hold_time_seconds",
                documentation="Time that a finished request waited for room in the ring, "
                "in seconds; those that found room at once are not counted.",
                buckets=_HOLD_BUCKETS,
                labelnames=labelnames,
            ),
            "held": gauge(
                name="vllm:shmconn_requests_held",
                documentation="Finished requests that wait for room in the ring and keep their "
                "KV blocks.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            ),
            "oldest_held_s": gauge(
                name="vllm:shmconn_oldest_held_seconds",
                documentation="How long the oldest of them has waited, in seconds.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            ),
            "ring_fill": gauge(
                name="vllm:shmconn_ring_usage_perc",
                documentation="Share of the ring's pages in use. 1 means 100 percent usage.",
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            ),
        }
        lost = counter(
            name="vllm:shmconn_samples_lost",
            documentation="Requests that yielded no sample, or whose sample nobody claimed in "
            "time, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._engines: dict[int, dict[str, Any]] = {}
        self._lost: dict[int, dict[str, Any]] = {}
        for engine, values in per_engine_labelvalues.items():
            self._engines[engine] = {key: one.labels(*values) for key, one in made.items()}
            self._lost[engine] = {reason: lost.labels(*values, reason) for reason in REASONS}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes one interval in; a fault is logged and goes no further."""
        try:
            self._observe(transfer_stats_data, self._engines[engine_idx], self._lost[engine_idx])
        except Exception:
            logger.exception("shmconn: an interval is missing from the metrics")

    def _observe(self, data: dict[str, Any], one: dict[str, Any], lost: dict[str, Any]) -> None:
        if not data:
            return
        for key in _SUMS:
            one[key].inc(data[key])
        for key in _LISTS:
            for value in data[key]:
                one[key].observe(value)
        for key in _GAUGES:
            one[key].set(data[key])
        for reason, count in data["lost"].items():
            lost[reason].inc(count)
