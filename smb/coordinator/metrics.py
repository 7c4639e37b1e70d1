"""The coordinator's metrics: every name and help text. Gauges are read from the state when scraped, so they cannot go
stale.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smb.coordinator.events import Instant
from smb.coordinator.records import Kind
from smb.coordinator.state import State

# From an open of a known buffer to a create over many servers, or a waiting open.
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class CallMetrics:
    """Counts and times gRPC calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "smb_coordinator_rpcs", "Calls answered, by method and gRPC code.", ["method", "code"], registry=registry
        )
        self._seconds = Histogram(
            "smb_coordinator_rpc_duration_seconds",
            "Time to the answer by method; an OpenBuffer that waits is counted with its wait.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )

    def count(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Take note of one answered call."""
        self._calls.labels(method, code.name).inc()
        self._seconds.labels(method).observe(seconds)


class StateMetrics(Collector):
    """What the state says, read at each scrape: in the page's thread, which is safe as no state ever changes."""

    def __init__(self, look: Callable[[], tuple[State, Instant]]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        state, now = self._look()
        alive = [name for name in state.servers if state.alive(name, now)]
        buffers = state.listed()
        kinds = Counts(record.kind for record in state.buffers.values() if record.ready)
        pending = sum(not record.ready for record in state.buffers.values())
        free = sum(state.servers[name].capacity_bytes - state.allocation(name).nbytes for name in alive)
        yield GaugeMetricFamily("smb_coordinator_buffers", "Buffers that can be opened.", len(buffers))
        yield GaugeMetricFamily("smb_coordinator_pending_buffers", "Buffers, locks and barriers being made.", pending)
        yield GaugeMetricFamily("smb_coordinator_locks", "Named locks that have a place.", kinds[Kind.LOCK])
        yield GaugeMetricFamily("smb_coordinator_barriers", "Named barriers that have a place.", kinds[Kind.BARRIER])
        yield GaugeMetricFamily(
            "smb_coordinator_buffer_bytes", "Bytes of data in all buffers.", sum(record.nbytes for record in buffers)
        )
        yield GaugeMetricFamily(
            "smb_coordinator_allocated_bytes",
            "Bytes of the servers' capacity taken by segments, headers included, being created ones too.",
            sum(allocation.nbytes for allocation in state.allocated.values()),
        )
        yield GaugeMetricFamily("smb_coordinator_free_bytes", "Capacity of the live servers that is not taken.", free)
        yield GaugeMetricFamily("smb_coordinator_servers_known", "Memory servers known.", len(state.servers))
        yield GaugeMetricFamily("smb_coordinator_servers_alive", "Memory servers whose lease runs.", len(alive))
        yield GaugeMetricFamily("smb_coordinator_sessions", "Clients whose lease runs.", len(state.client_names))
        yield GaugeMetricFamily(
            "smb_coordinator_ended_sessions",
            "Sessions that ended and are still remembered, for servers that have not heard of it.",
            len(state.ended_sessions.numbers),
        )
