# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a drain, of its rings and of all their groups.

Values are looked up when a scraper asks, so that nothing runs between scrapes.
"""

from collections.abc import Iterator
from typing import Any

from reader.metrics_server import MetricsServer
from reader.progress import Snapshot
from shmconn.directory import groups as groups_of
from shmconn.directory import rings as rings_of
from shmconn.errors import OptionError, RingMissing

_OUTPUT = {
    "samples": ("counter", "Samples stored, or found there."),
    "bytes": ("counter", "Bytes written."),
    "lost": ("counter", "Samples lost while joined."),
    "unread": ("gauge", "Samples that the output's group has not claimed."),
    "held": ("gauge", "Samples that wait for the disk."),
}


class Metrics:
    """Serves ``/metrics`` until it is closed.

    Args:
        ring: whose rings and groups are shown.
        host: address to listen on.
        port: to listen on; 0 takes a free one.

    Raises:
        OptionError: prometheus-client is not installed, or the port cannot be had.
    """

    def __init__(self, ring: str | None, host: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise OptionError(
                "--metrics-port needs prometheus-client: pip install 'shmconn[metrics]'"
            ) from None
        self.ring = ring
        self._snapshots: list[Snapshot] = []
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = MetricsServer(host, port, make_wsgi_app(registry))
        except OSError as error:
            raise OptionError(
                f"cannot listen on {host}:{port} (--metrics-port): {error.strerror or error}"
            ) from None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    def observe(self, snapshots: list[Snapshot]) -> None:
        """Take note of where each output is."""
        self._snapshots = snapshots

    def close(self) -> None:
        """Stop to listen."""
        self._server.stop()

    def describe(self) -> list[Any]:
        """Nothing can be said before a ring is there; called at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics, for one scrape."""
        yield from self._outputs()
        rings = [ring for ring in rings_of(self.ring) if ring.problem is None]
        per_ring = [
            ("published_samples", "counter", "Samples published.", "published"),
            ("published_bytes", "counter", "Bytes of samples published.", "published_bytes"),
            ("accepted_requests", "counter", "Requests taken in.", "accepted"),
            ("settled_requests", "counter", "Requests published or lost.", "settled"),
            ("pages", "gauge", "Pages of the ring.", "pages"),
            ("free_pages", "gauge", "Pages not in use.", "free_pages"),
            ("free_slots", "gauge", "Slots not in use.", "free_slots"),
            ("size_bytes", "gauge", "Bytes of shared memory.", "size"),
        ]
        for name, kind, text, field in per_ring:
            family = _family(f"shmconn_ring_{name}", kind, text, ["ring", "generation"])
            for ring in rings:
                family.add_metric([ring.name, ring.generation], getattr(ring, field))
            yield family
        live = _family(
            "shmconn_ring_live", "gauge", "1 = its producer lives.", ["ring", "generation"]
        )
        held = _family(
            "shmconn_ring_held", "gauge", "1 = requests wait for room.", ["ring", "generation"]
        )
        lost = _family(
            "shmconn_ring_lost_requests",
            "counter",
            "Requests that yielded no sample.",
            ["ring", "generation", "reason"],
        )
        for ring in rings:
            live.add_metric([ring.name, ring.generation], ring.live)
            held.add_metric([ring.name, ring.generation], bool(ring.held_since_ns))
            for reason, count in ring.lost_by_reason.items():
                lost.add_metric([ring.name, ring.generation, reason], count)
        yield from (live, held, lost)
        yield from _groups(sorted({ring.name for ring in rings}))

    def _outputs(self) -> Iterator[Any]:
        for field, (kind, text) in _OUTPUT.items():
            family = _family(f"shmconn_drain_{field}", kind, text, ["output"])
            for snapshot in self._snapshots:
                family.add_metric([snapshot.output], getattr(snapshot, field))
            yield family


def _groups(names: list[str]) -> Iterator[Any]:
    labels = ["ring", "group"]
    unread = _family("shmconn_group_unread_samples", "gauge", "Samples not claimed.", labels)
    leased = _family("shmconn_group_leased_samples", "gauge", "Samples being read.", labels)
    oldest = _family(
        "shmconn_group_oldest_timestamp_seconds",
        "gauge",
        "When the oldest sample that the group needs was published; 0 = it needs none.",
        labels,
    )
    alive = _family("shmconn_group_live_members", "gauge", "Members that live.", labels)
    for name in names:
        try:
            groups = groups_of(name)
        except RingMissing:
            continue
        for group in groups:
            values = [name, group.name]
            count = sum(group.unread.values())
            unread.add_metric(values, count)
            leased.add_metric(values, sum(group.needed.values()) - count)
            oldest.add_metric(values, group.oldest_ns / 1e9)
            alive.add_metric(values, sum(member.alive for member in group.members))
    yield from (unread, leased, oldest, alive)


def _family(name: str, kind: str, text: str, labels: list[str]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    return made(name, text, labels=labels)
