"""All metrics: names, types, labels and meanings. docs/metrics.md is made from this file (`make metrics-page`), and
exporters take a metric's description from here.

Labels are bounded. `kind` is one of the engine's opcodes, `transport` one of shm, tcp, unix, verbs; `class` is an
engine status, `method` and `code` are gRPC's; `server` has at most 1024 values in a cluster. A memory server names the
first NAMED_MAX buffers and clients that it sees. All later ones count as "other", until a deleted buffer or a departed
client makes room. The coordinator names the NAMED_MAX largest buffers.

prometheus_client is imported only when a metric is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

NAMED_MAX = 64  # buffers, and clients, with their own name in a server's metrics: at most some thousand series
OTHER = "other"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# Upper edges in seconds: 1.024 us, twice that, ... 34 s. They are the engine's buckets (struct smb_latency).
LATENCY_EDGES: tuple[float, ...] = tuple(2.0 ** (10 + i) / 1e9 for i in range(26))
CALL_EDGES: tuple[float, ...] = (  # from an open of a known buffer to a create on many servers, or an open that waits
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
OUTAGE_EDGES: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Description:
    """One metric. The name is as scraped, with its unit and, for a counter, _total."""

    name: str
    type: str
    text: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Description:
    return Description(name, COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Description:
    return Description(name, GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Description:
    return Description(name, HISTOGRAM, text, labels)


SERVER: tuple[Description, ...] = (
    _counter(
        "smb_server_operations_total",
        "Operations done. Transport shm counts those of local clients in mapped memory.",
        "transport",
        "kind",
    ),
    _counter(
        "smb_server_transferred_bytes_total",
        "Bytes read, written or accumulated.",
        "transport",
        "kind",
    ),
    _histogram(
        "smb_server_request_duration_seconds",
        "Time from a request's start until its answer was ready; includes the wait of lock, await_barrier and "
        "await_version. Without shm, which no server sees.",
        "transport",
        "kind",
    ),
    _counter("smb_server_buffer_operations_total", "Operations done on a buffer.", "buffer", "transport", "kind"),
    _counter(
        "smb_server_buffer_transferred_bytes_total",
        "Bytes of a buffer that were read, written or accumulated.",
        "buffer",
        "transport",
        "kind",
    ),
    _gauge("smb_server_buffer_capacity_bytes", "Capacity that a buffer's segments take on this server.", "buffer"),
    _counter(
        "smb_server_client_operations_total",
        'Operations done for a client ("host:pid"). Without shm, where no server sees the client.',
        "client",
        "transport",
        "kind",
    ),
    _counter(
        "smb_server_client_transferred_bytes_total",
        "Bytes read, written or accumulated for a client. Without shm.",
        "client",
        "transport",
        "kind",
    ),
    _counter("smb_server_errors_total", "Refused requests and closed connections, by the engine's status.", "class"),
    _counter("smb_server_connections_opened_total", "Connections accepted since the start.", "transport"),
    _gauge("smb_server_connections", "Connections open now.", "transport"),
    _counter(
        "smb_server_connections_turned_away_total",
        "Connections closed at once for lack of file descriptors.",
    ),
    _gauge("smb_server_strangers", "TCP connections that have not identified themselves yet."),
    _counter(
        "smb_server_strangers_evicted_total",
        "Unidentified connections closed to make room: the oldest of the address that had the most.",
    ),
    _gauge("smb_server_segments", "Segments on this server."),
    _gauge("smb_server_segment_bytes", "Capacity taken by segments, headers included."),
    _gauge("smb_server_capacity_bytes", "Capacity: bytes that segments may take."),
    _gauge("smb_server_deferred_requests", "Requests now waiting for a chunk's lock."),
    _counter("smb_server_chunk_waits_total", "Requests that had to wait for a chunk's lock."),
    _gauge(
        "smb_server_waiting_requests",
        "Requests now waiting for a lock, a turn to publish, a barrier or a version.",
        "kind",
    ),
    _gauge("smb_server_held_locks", "Locks, shared holdings of locks, and turns to publish that are held now.", "kind"),
    _counter("smb_server_locks_granted_total", "Locks and turns to publish granted."),
    _counter("smb_server_lock_waits_total", "Requests for a lock or a turn to publish that had to wait."),
    _counter("smb_server_lock_timeouts_total", "Requests for a lock or a turn to publish that timed out."),
    _counter(
        "smb_server_locks_lost_total",
        "Locks and turns that their holder lost: expired (not renewed in time) or session_ended.",
        "reason",
    ),
    _counter("smb_server_broken_barriers_total", "Broken barriers: a party died or gave up."),
    _counter("smb_server_repeated_requests_total", "Requests sent again after a lost connection."),
    _counter(
        "smb_server_replayed_requests_total",
        "Repeated changes that had been applied before, and were not applied twice.",
    ),
    _gauge("smb_server_send_backlog_bytes", "Bytes of answers that clients have not read yet."),
    _counter("smb_server_send_backlogs_total", "Times that an answer had to wait for its client to read."),
    _gauge("smb_server_journal_slots", "Journal slots taken: one for each open connection that has changed data."),
    _gauge("smb_server_journal_slots_max", "Journal slots in all."),
    _counter("smb_server_recovered_locks_total", "Chunk locks taken over from dead processes."),
    _gauge("smb_server_recovery_seconds", "Seconds that this start took to recover segments of the run before."),
    _gauge("smb_server_recovered_segments", "Segments recovered at this start."),
    _gauge("smb_server_recovered_changes", "Changes of the run before that this start finished."),
    _gauge("smb_server_torn_chunks", "Chunks with a half-made change of an earlier run whose journal is gone."),
    _gauge("smb_server_mirror_version", "Newest complete version of a mirror on this server.", "buffer"),
    _gauge("smb_server_mirror_lag_versions", "Versions that a mirror is behind its source.", "buffer"),
    _gauge(
        "smb_server_mirror_feed_bytes_per_second",
        "Rate at which a mirror is filled from its source or another mirror.",
        "buffer",
        "source",
    ),
    _gauge("smb_server_coordinator_connected", "1 while the coordinator answers this server."),
    _counter(
        "smb_server_leases_lost_total",
        "Times that this server's lease had run out and it registered again.",
    ),
    _gauge("smb_server_start_time_seconds", "Start of this process, in seconds since 1970."),
)

COORDINATOR: tuple[Description, ...] = (
    _counter("smb_coordinator_rpcs_total", "Calls answered, by method and gRPC code.", "method", "code"),
    _histogram(
        "smb_coordinator_rpc_duration_seconds",
        "Time to the answer, by method. OpenBuffer includes the wait for the buffer.",
        "method",
    ),
    _gauge("smb_coordinator_buffers", "Buffers that can be opened."),
    _gauge("smb_coordinator_pending_buffers", "Buffers, locks and barriers being created."),
    _gauge("smb_coordinator_locks", "Named locks in memory."),
    _gauge("smb_coordinator_barriers", "Named barriers in memory."),
    _gauge("smb_coordinator_buffer_bytes", "Bytes of data in all buffers."),
    _gauge("smb_coordinator_buffer_allocated_bytes", "Capacity that a buffer takes on all servers.", "buffer"),
    _gauge(
        "smb_coordinator_allocated_bytes",
        "Capacity taken by segments on all servers, headers and segments being created included.",
    ),
    _gauge("smb_coordinator_free_bytes", "Free capacity of the live servers that are not being drained."),
    _gauge(
        "smb_coordinator_degraded_segments",
        "Segments with one copy where the buffer should have two, being copied or not.",
    ),
    _gauge("smb_coordinator_copying_segments", "Degraded segments whose second copy is being made."),
    _gauge("smb_coordinator_servers_known", "Memory servers in the records."),
    _gauge("smb_coordinator_servers_alive", "Memory servers whose lease runs, since this coordinator heard from them."),
    _gauge(
        "smb_coordinator_servers_unheard", "Memory servers that this coordinator has not heard from since its start."
    ),
    _gauge("smb_coordinator_copies_held", "1 while lost copies are not made anew, for smb maintenance."),
    _gauge(
        "smb_coordinator_servers_overdue",
        "Memory servers that are late, and whose lease runs anew: most servers were late at once, or the coordinator "
        "was held up.",
    ),
    _gauge("smb_coordinator_lost_segments", "Segments whose memory is gone. Their buffers are unusable."),
    _gauge(
        "smb_coordinator_server_alive",
        "1 while the server's lease runs; no sample while a new leader has not heard of it yet.",
        "server",
    ),
    _gauge("smb_coordinator_server_capacity_bytes", "Capacity of the memory server.", "server"),
    _gauge("smb_coordinator_server_allocated_bytes", "Capacity of the memory server that buffers take.", "server"),
    _gauge(
        "smb_coordinator_server_quarantined_bytes",
        "Memory in quarantine on the server: no record accounts for it. smb status lists it.",
        "server",
    ),
    _gauge("smb_coordinator_server_draining", "1 while the memory server is being drained.", "server"),
    _gauge("smb_coordinator_sessions", "Clients whose lease runs."),
    _gauge(
        "smb_coordinator_ended_sessions",
        "Ended sessions that some server has not been told of yet.",
    ),
    _counter(
        "smb_coordinator_leases_lost_total",
        "Leases that ran out, of a server or a client.",
        "of",
    ),
    _counter(
        "smb_coordinator_held_up_seconds_total",
        "Seconds in which the coordinator took no renewals: it got no processor, or its store did not answer.",
    ),
    _gauge(
        "smb_coordinator_tick_age_seconds",
        "Seconds since the event loop last ran, which it does twice a second. More than 10: it hangs.",
    ),
    _gauge("smb_coordinator_store_failing", "1 while changes cannot be stored."),
    _gauge("smb_coordinator_leads", "1 if this coordinator leads, 0 if it stands by or cannot reach etcd."),
    _gauge("smb_coordinator_state_free_bytes", "Bytes left on the disk of --state, without the reserve."),
    _gauge("smb_coordinator_recovery_seconds", "Seconds that this start took to read the records."),
    _gauge("smb_coordinator_start_time_seconds", "Start of this process, in seconds since 1970."),
)

ON_ETCD: tuple[Description, ...] = (
    _gauge(
        "smb_coordinator_etcd_silent_seconds",
        "Seconds since etcd last answered this coordinator, which asks at least every 5 s.",
    ),
)

SECURED: tuple[Description, ...] = (
    _gauge(
        "smb_certificate_expiry_timestamp_seconds",
        "When the daemon's certificate (own) and its authority's (authority) end, in seconds since 1970.",
        "certificate",
    ),
)

CLIENT: tuple[Description, ...] = (
    _counter(
        "smb_client_operations_total",
        "Calls done. A call over several servers or transports counts once, for the network.",
        "client",
        "transport",
        "kind",
    ),
    _counter(
        "smb_client_transferred_bytes_total",
        "Bytes that calls read or changed.",
        "client",
        "transport",
        "kind",
    ),
    _histogram(
        "smb_client_call_duration_seconds",
        "Time of whole calls. One in 64 calls in shared memory is timed, and counts for 64.",
        "client",
        "transport",
        "kind",
    ),
    _counter("smb_client_failed_calls_total", "Calls that failed, by the engine's status.", "client", "class"),
    _counter("smb_client_repeated_frames_total", "Frames sent again after a lost connection.", "client"),
    _counter("smb_client_spoilt_answers_total", "Answers with a wrong checksum.", "client"),
    _counter("smb_client_outages_total", "Connections to memory servers that broke while in use.", "client"),
    _histogram(
        "smb_client_outage_duration_seconds",
        "Time from noticing a broken connection until it was replaced.",
        "client",
    ),
    _counter("smb_client_locks_lost_total", "Locks lost before they were released.", "client"),
    _gauge("smb_client_held_locks", "Locks held now.", "client"),
    _gauge("smb_client_async_calls", "*_async calls that have not finished.", "client"),
    _gauge("smb_client_session_alive", "1 until the session has ended.", "client"),
    _gauge(
        "smb_client_generation_count",
        "Last generation of a published state (smb.torch) that this client published or read; 0 before the first. "
        "Publisher minus reader is how far the reader is behind.",
        "client",
        "state",
        "role",
    ),
)

TRAINING: tuple[Description, ...] = (
    _gauge("smb_training_round_count", "Number of the open round.", "group", "scheme"),
    *(
        _counter(f"smb_training_{name}_total", text, "group", "worker", "host")
        for name, text in (
            ("contributions", "Contributions that counted."),
            ("refused_contributions", "Contributions refused by a guard."),
            ("dropped_contributions", "Contributions that count in no round, or whose outcome is unknown."),
            ("rejoins", "Times that a worker lost its lease and joined again."),
            ("samples", "Samples trained on."),
            ("bytes", "Bytes of contributions and models, sent and received."),
        )
    ),
    *(
        _gauge(f"smb_training_{name}", text, "group", "worker", "host")
        for name, text in (
            ("alive", "1 while the worker is a member."),
            ("clock_count", "Progress of the worker in the scheme's steps."),
            ("staleness_count", "Staleness of the last contribution, in contributions of others."),
            ("staleness_max_count", "Largest staleness so far."),
            ("norm", "Euclidean norm of the last contribution."),
        )
    ),
)

METRICS: Mapping[str, Description] = {
    found.name: found for table in (SERVER, COORDINATOR, ON_ETCD, SECURED, CLIENT, TRAINING) for found in table
}


def counter(name: str) -> CounterMetricFamily:
    """Return an empty counter of that name, to which values can be added."""
    from prometheus_client.core import CounterMetricFamily

    found = _of_type(name, COUNTER)
    return CounterMetricFamily(name, found.text, labels=found.labels)


def gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    """Return a gauge of that name with the value; without a value, an empty one to which values can be added."""
    from prometheus_client.core import GaugeMetricFamily

    found = _of_type(name, GAUGE)
    if value is not None:
        return GaugeMetricFamily(name, found.text, value)
    return GaugeMetricFamily(name, found.text, labels=found.labels)


def histogram(name: str) -> HistogramMetricFamily:
    """Return an empty histogram of that name, to which values can be added with `cumulative`."""
    from prometheus_client.core import HistogramMetricFamily

    found = _of_type(name, HISTOGRAM)
    return HistogramMetricFamily(name, found.text, labels=found.labels)


def cumulative(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram's buckets from the counts between the edges; the last count is of values past all edges."""
    total, buckets = 0, []
    for edge, count in zip((*edges, float("inf")), counts, strict=True):
        total += count
        buckets.append((f"{edge:.10g}" if edge != float("inf") else "+Inf", float(total)))
    return buckets


def _of_type(name: str, kind: str) -> Description:
    found = METRICS[name]
    if found.type != kind:
        raise TypeError(f"{name} is a {found.type}, not a {kind}")
    return found
