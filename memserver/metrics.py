"""The room of metrics, in a memory server: read from the engine when scraped. The daemon makes them. Their
names are in smb/daemon/metric_names.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memserver.engine import Engine
from memserver.engine_figures import Counters, Share
from memserver.life import Life
from memserver.segments import Segments
from memserver.usage_by_client import NamedShares, Names
from smb.daemon.metric_names import LATENCY_EDGES, counter, cumulative, gauge, histogram
from smb.engine import KINDS, TRANSPORTS

WAITS_MAX = 4096  # locks and waits that one scrape counts


class EngineMetrics(Collector):
    """The engine's counters, shares by buffer and client, capacity and memory, and what recovery found."""

    def __init__(
        self,
        engine: Engine,
        segments: Segments,
        capacity_bytes: int,
        life: Callable[[], Life],
        buffers: Names,
        clients: Names,
    ) -> None:
        self._engine = engine
        self._segments = segments
        self._capacity_bytes = capacity_bytes
        self._life = life
        self._names = {"buffer": buffers, "client": clients}
        self._lock = threading.Lock()  # scrapes may come at once, and the shares are running sums
        self._shares = {"buffer": NamedShares(), "client": NamedShares()}

    def describe(self) -> list[Metric]:
        """Return no names, because registering must not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        counters = self._engine.figures.counters()
        yield from _traffic(counters)
        yield self._durations()
        with self._lock:
            yield from self._of("buffer", self._engine.figures.segment_shares())
            yield from self._of("client", self._engine.figures.session_shares())
            yield self._buffer_capacity()
        yield from self._waits(counters)
        yield from _books(counters, self._capacity_bytes)
        yield from _life(self._life())

    def _durations(self) -> HistogramMetricFamily:
        family = histogram("smb_server_request_duration_seconds")
        for labels, found in self._engine.figures.latencies().items():
            family.add_metric(labels, cumulative(LATENCY_EDGES, found.counts), found.sum_s)
        return family

    def _of(self, label: str, shares: Mapping[int, Share]) -> Iterator[Metric]:
        sums = self._shares[label].update(shares, self._names[label].known())
        for index, what in enumerate(("operations", "transferred_bytes")):
            family = counter(f"smb_server_{label}_{what}_total")
            for name, cells in sums.items():
                for (transport, kind), values in sorted(cells.items()):
                    family.add_metric([name, TRANSPORTS[transport], KINDS[kind]], values[index])
            yield family

    def _buffer_capacity(self) -> Metric:
        """Use the labels that the shares were just given."""
        names, taken = self._names["buffer"].known(), Counter[str]()
        for segment_id, nbytes in self._segments.file_bytes().items():
            if segment_id in names:
                taken[self._shares["buffer"].label(names[segment_id])] += nbytes
        family = gauge("smb_server_buffer_capacity_bytes")
        for name, nbytes in taken.items():
            family.add_metric([name], nbytes)
        return family

    def _waits(self, counters: Counters) -> Iterator[Metric]:
        waits, _ = self._engine.figures.waits(WAITS_MAX)
        waiting, held = gauge("smb_server_waiting_requests"), gauge("smb_server_held_locks")
        for kind in ("lock", "publication", "barrier", "version"):
            kinds = ("lock", "shared") if kind == "lock" else (kind,)
            waiting.add_metric([kind], sum(wait.waiting for wait in waits if wait.kind in kinds))
        for kind in ("lock", "shared", "publication"):
            held.add_metric([kind], sum(wait.session != 0 for wait in waits if wait.kind == kind))
        yield waiting
        yield held
        yield _total("smb_server_locks_granted_total", counters.locks_granted)
        yield _total("smb_server_lock_waits_total", counters.lock_waits)
        yield _total("smb_server_lock_timeouts_total", counters.lock_timeouts)
        lost = counter("smb_server_locks_lost_total")
        lost.add_metric(["expired"], counters.locks_expired)
        lost.add_metric(["session_ended"], counters.locks_revoked)
        yield lost
        yield _total("smb_server_broken_barriers_total", counters.barriers_broken)


def _traffic(counters: Counters) -> Iterator[Metric]:
    for name, cells in (
        ("smb_server_operations_total", counters.operations),
        ("smb_server_transferred_bytes_total", counters.transferred_bytes),
    ):
        family = counter(name)
        for labels, value in cells.items():
            family.add_metric(labels, value)
        yield family
    errors = counter("smb_server_errors_total")
    for reason, value in counters.errors.items():
        errors.add_metric([reason], value)
    yield errors
    opened, now = counter("smb_server_connections_opened_total"), gauge("smb_server_connections")
    for transport in counters.connections:
        if transport != "shm":  # a mapping is not a connection
            opened.add_metric([transport], counters.connections_opened[transport])
            now.add_metric([transport], counters.connections[transport])
    yield opened
    yield now
    yield _total("smb_server_connections_turned_away_total", counters.turned_away_total)
    yield gauge("smb_server_strangers", counters.strangers)
    yield _total("smb_server_strangers_evicted_total", counters.strangers_evicted_total)


def _books(counters: Counters, capacity_bytes: int) -> Iterator[Metric]:
    yield gauge("smb_server_segments", counters.segments)
    yield gauge("smb_server_segment_bytes", counters.segment_bytes)
    yield gauge("smb_server_capacity_bytes", capacity_bytes)
    yield gauge("smb_server_deferred_requests", counters.deferred)
    yield _total("smb_server_chunk_waits_total", counters.deferred_total)
    yield _total("smb_server_repeated_requests_total", counters.repeated_total)
    yield _total("smb_server_replayed_requests_total", counters.replayed_total)
    yield gauge("smb_server_send_backlog_bytes", counters.backlog_bytes)
    yield _total("smb_server_send_backlogs_total", counters.backlog_total)
    yield gauge("smb_server_journal_slots", counters.journal_slots)
    yield gauge("smb_server_journal_slots_max", counters.journal_slots_max)
    yield _total("smb_server_recovered_locks_total", counters.recovered_locks)


def _life(life: Life) -> Iterator[Metric]:
    yield gauge("smb_server_recovery_seconds", life.recovery_s)
    yield gauge("smb_server_recovered_segments", life.recovered_segments)
    yield gauge("smb_server_recovered_changes", life.recovered_changes)
    yield gauge("smb_server_torn_chunks", life.torn_chunks)
    yield gauge("smb_server_coordinator_connected", int(life.connected))
    yield _total("smb_server_leases_lost_total", life.leases_lost)
    yield gauge("smb_server_start_time_seconds", life.started_at)


def _total(name: str, value: float) -> Metric:
    family = counter(name)
    family.add_metric([], value)
    return family
