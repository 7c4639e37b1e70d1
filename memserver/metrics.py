"""The memory server's metrics: every name and help text. All are read from the engine when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memserver.engine import Counters


class EngineMetrics(Collector):
    """The engine's counters, what it may hold, and whether the coordinator knows of it."""

    def __init__(self, read: Callable[[], Counters], capacity_bytes: int, connected: Callable[[], bool]) -> None:
        self._read = read
        self._capacity_bytes = capacity_bytes
        self._connected = connected

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        counters = self._read()
        yield _by_transport_and_kind(
            "smb_server_operations_total",
            "Operations done, by kind and by the way they came; shm: by local clients on their own mapping.",
            counters.operations,
        )
        yield _by_transport_and_kind(
            "smb_server_transferred_bytes_total",
            "Bytes of data read, written or accumulated, by kind and by the way they came.",
            counters.transferred_bytes,
        )
        yield _by_label(
            "smb_server_errors_total",
            "Requests refused and connections closed, by reason.",
            "class",
            counters.errors,
        )
        yield _by_label(
            "smb_server_connections_opened_total",
            "Connections accepted since the start.",
            "transport",
            {name: opened for name, opened in counters.connections_opened.items() if name != "shm"},
        )
        now = GaugeMetricFamily("smb_server_connections", "Connections open now.", labels=["transport"])
        for name, open_now in counters.connections.items():
            if name != "shm":  # a mapping is no connection
                now.add_metric([name], open_now)
        yield now
        yield GaugeMetricFamily("smb_server_segments", "Segments held.", counters.segments)
        yield GaugeMetricFamily(
            "smb_server_segment_bytes", "Bytes of capacity taken by segments, headers included.", counters.segment_bytes
        )
        yield GaugeMetricFamily("smb_server_capacity_bytes", "Bytes that segments may take.", self._capacity_bytes)
        yield GaugeMetricFamily(
            "smb_server_parked_requests", "Requests that wait for a chunk's lock now.", counters.parked
        )
        yield CounterMetricFamily(
            "smb_server_parked_requests_total", "Requests that had to wait for a chunk's lock.", counters.parked_total
        )
        yield GaugeMetricFamily(
            "smb_server_waiting_requests", "Requests that wait for a lock, a barrier or a version now.", counters.waits
        )
        yield CounterMetricFamily(
            "smb_server_replayed_requests_total",
            "Changes sent again after a lost connection that had been made, and were not made twice.",
            counters.replayed_total,
        )
        yield CounterMetricFamily(
            "smb_server_recovered_locks_total", "Chunk locks found held by a dead process.", counters.recovered_locks
        )
        yield GaugeMetricFamily(
            "smb_server_coordinator_connected",
            "1 while the coordinator answers this server's renewals.",
            int(self._connected()),
        )


def _by_transport_and_kind(name: str, text: str, values: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["transport", "kind"])
    for (transport, kind), value in values.items():
        family.add_metric([transport, kind], value)
    return family


def _by_label(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value_of_label, value in values.items():
        family.add_metric([value_of_label], value)
    return family
