"""The room of metrics, in a coordinator: under the names of smb/daemon/metric_names.py. Gauges are read from the state
when scraped, so they cannot go stale.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from smb.coordinator.commit_log import Committed
from smb.coordinator.events import Event, HeldUp, Instant, Ticked
from smb.coordinator.health import Health
from smb.coordinator.records import Kind
from smb.coordinator.state import State
from smb.daemon.metric_names import CALL_EDGES, METRICS, NAMED_MAX, OTHER, gauge
from smb.rpc import control_pb2 as pb


def _described(name: str) -> tuple[str, str, tuple[str, ...]]:
    found = METRICS[name]
    return found.name, found.text, found.labels


class CallMetrics:
    """Counts and times gRPC calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(*_described("smb_coordinator_rpcs_total"), registry=registry)
        self._seconds = Histogram(
            *_described("smb_coordinator_rpc_duration_seconds"), buckets=CALL_EDGES, registry=registry
        )
        # Each series starts at 0: if a series began with 1, Prometheus would not see the first fault as an increase.
        for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods:
            self._calls.labels(method.name, grpc.StatusCode.INTERNAL.name)

    def count(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count one answered call."""
        self._calls.labels(method, code.name).inc()
        self._seconds.labels(method).observe(seconds)


class LeaseMetrics:
    """Counts leases that ran out. Pass `saw` to CommitLog.on_commit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lost = Counter(*_described("smb_coordinator_leases_lost_total"), registry=registry)
        for of in ("server", "client"):
            self._lost.labels(of)
        self._held_up_s = Counter(*_described("smb_coordinator_held_up_seconds_total"), registry=registry)

    def saw(self, event: Event, before: State, committed: Committed, now: Instant) -> None:
        """Count the leases that this event found to have run out, and the time in which none could be renewed."""
        if isinstance(event, HeldUp):
            self._held_up_s.inc(event.seconds)
        if isinstance(event, Ticked):
            ended = before.server_leases.ends.keys() - committed.state.server_leases.ends.keys()
            self._lost.labels("server").inc(len(ended))
            gone = before.session_leases.run_out(now.monotonic)[: event.ends_max]
            self._lost.labels("client").inc(len(gone))


class HealthMetrics(Collector):
    """Whether the event loop and the store work, as of each scrape."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        yield gauge("smb_coordinator_tick_age_seconds", self._health.tick_age_s)
        yield gauge("smb_coordinator_store_failing", int(bool(self._health.store_error)))
        yield gauge("smb_coordinator_leads", int(self._health.leadership == "leader"))
        free = self._health.state_free_bytes()
        if free is not None:
            yield gauge("smb_coordinator_state_free_bytes", free)
        silent_s = self._health.etcd_silent_s
        if silent_s is not None:
            yield gauge("smb_coordinator_etcd_silent_seconds", silent_s)


class StateMetrics(Collector):
    """Figures of the state, read at each scrape in the page's thread. This is safe because states are immutable.

    `recovery_s` is the time that reading the store took.
    """

    def __init__(self, look: Callable[[], tuple[State, Instant]], recovery_s: float) -> None:
        self._look = look
        self._recovery_s = recovery_s
        self._started_at = time.time()

    def collect(self) -> Iterator[Metric]:
        state, now = self._look()
        yield from _totals(state, now)
        yield from _by_server(state, now)
        yield _by_buffer(state)
        yield gauge("smb_coordinator_recovery_seconds", self._recovery_s)
        yield gauge("smb_coordinator_start_time_seconds", self._started_at)


def _totals(state: State, now: Instant) -> Iterator[Metric]:
    alive = [name for name in state.servers if state.heard(name, now)]
    buffers = state.listed()
    kinds = Counts(record.kind for record in state.buffers.values() if record.ready)
    open_to = [name for name in alive if not state.servers[name].draining]
    free = sum(state.servers[name].capacity_bytes - state.taken_bytes(name) for name in open_to)
    allocated = sum(allocation.nbytes for allocation in state.allocated.values())
    yield gauge("smb_coordinator_buffers", len(buffers))
    yield gauge("smb_coordinator_pending_buffers", sum(not record.ready for record in state.buffers.values()))
    yield gauge("smb_coordinator_locks", kinds[Kind.LOCK])
    yield gauge("smb_coordinator_barriers", kinds[Kind.BARRIER])
    yield gauge("smb_coordinator_buffer_bytes", sum(record.nbytes for record in buffers))
    yield gauge("smb_coordinator_allocated_bytes", allocated)
    yield gauge("smb_coordinator_free_bytes", free)
    lost = [segment for record in buffers if record.replicas > 1 for segment in record.segments if not segment.backup]
    yield gauge("smb_coordinator_degraded_segments", len(lost))
    yield gauge("smb_coordinator_copying_segments", sum(bool(segment.copying_to) for segment in lost))
    yield gauge("smb_coordinator_servers_known", len(state.servers))
    yield gauge("smb_coordinator_servers_alive", len(alive))
    granted = sum(state.alive(name, now) for name in state.servers)
    yield gauge("smb_coordinator_servers_unheard", granted - len(alive))
    yield gauge("smb_coordinator_servers_overdue", len(state.overdue))
    yield gauge("smb_coordinator_copies_held", int(state.copies_held(now)))
    yield gauge("smb_coordinator_lost_segments", len(state.lost_segments(now)))
    yield gauge("smb_coordinator_sessions", len(state.sessions))
    yield gauge("smb_coordinator_ended_sessions", len(state.ended_sessions.numbers))


def _by_server(state: State, now: Instant) -> Iterator[Metric]:
    alive = gauge("smb_coordinator_server_alive")
    capacity = gauge("smb_coordinator_server_capacity_bytes")
    allocated = gauge("smb_coordinator_server_allocated_bytes")
    draining = gauge("smb_coordinator_server_draining")
    quarantined = gauge("smb_coordinator_server_quarantined_bytes")
    for name, server in sorted(state.servers.items()):
        # Unknown, as to a leader that has just begun. With a 0, each change of the leader would look like a server that
        # goes and comes back.
        if state.heard(name, now) or not state.alive(name, now):
            alive.add_metric([name], int(state.heard(name, now)))
        quarantined.add_metric([name], sum(each.nbytes for each in state.unexplained.get(name, {}).values()))
        capacity.add_metric([name], server.capacity_bytes)
        allocated.add_metric([name], state.allocation(name).nbytes)
        draining.add_metric([name], int(server.draining))
    yield from (alive, capacity, allocated, draining, quarantined)


def _by_buffer(state: State) -> Metric:
    family = gauge("smb_coordinator_buffer_allocated_bytes")
    sizes = sorted(
        ((sum(segment.file_bytes for segment in record.copies), record.name) for record in state.listed()),
        reverse=True,
    )
    for nbytes, name in sizes[:NAMED_MAX]:
        family.add_metric([name], nbytes)
    if len(sizes) > NAMED_MAX:
        family.add_metric([OTHER], sum(nbytes for nbytes, _ in sizes[NAMED_MAX:]))
    return family
