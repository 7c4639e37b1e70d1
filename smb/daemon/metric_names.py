"""Every metric: its name, type, labels and meaning. docs/metrics.md is made from this file (`make metrics-page`), and
exporters take a metric's description from here.

Labels are bounded. `kind` is one of the engine's opcodes, `transport` one of shm, tcp, unix, verbs; `class` an engine
status, `method` and `code` gRPC's; `server` at most 1024 of a cluster. Of buffers and clients a memory server tells
apart the first NAMED_MAX that it sees; all later ones are together in "other", until a deleted or departed one makes
room for a new one. The coordinator tells apart the NAMED_MAX largest buffers.

prometheus_client is imported only if a metric is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

NAMED_MAX = 64  # buffers, and clients, with a name of their own in a server's metrics: some thousand series at most
OTHER = "other"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# Seconds: what took at most 1.024 us, twice that, ... 34 s. The engine's buckets: struct smb_latency.
LATENCY_EDGES: tuple[float, ...] = tuple(2.0 ** (10 + i) / 1e9 for i in range(26))
CALL_EDGES: tuple[float, ...] = (  # from an open of a known buffer to a create over many servers, or a waiting open
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
OUTAGE_EDGES: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Description:
    """One metric. The name is as scraped, with its unit and, of a counter, _total."""

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
        "Operations done, by kind and transport; shm: by local clients on their own mapping.",
        "transport",
        "kind",
    ),
    _counter(
        "smb_server_transferred_bytes_total",
        "Bytes of data read, written or accumulated, by kind and transport.",
        "transport",
        "kind",
    ),
    _histogram(
        "smb_server_request_duration_seconds",
        "From when a request was taken up until its answer was ready; of what waits (lock, await_barrier, "
        "await_version) until it was answered, the wait included. Not shm, which no server sees.",
        "transport",
        "kind",
    ),
    _counter("smb_server_buffer_operations_total", "Operations done on a buffer.", "buffer", "transport", "kind"),
    _counter(
        "smb_server_buffer_transferred_bytes_total",
        "Bytes of data read, written or accumulated of a buffer.",
        "buffer",
        "transport",
        "kind",
    ),
    _gauge("smb_server_buffer_capacity_bytes", "Bytes of capacity that a buffer's segments take here.", "buffer"),
    _counter(
        "smb_server_client_operations_total",
        'Operations done for a client ("host:pid"). Not shm: what a client does on its own mapping no server can tell '
        "from others'.",
        "client",
        "transport",
        "kind",
    ),
    _counter(
        "smb_server_client_transferred_bytes_total",
        "Bytes of data read, written or accumulated by a client. Not shm.",
        "client",
        "transport",
        "kind",
    ),
    _counter("smb_server_errors_total", "Requests refused and connections closed, by reason.", "class"),
    _counter("smb_server_connections_opened_total", "Connections accepted since the start.", "transport"),
    _gauge("smb_server_connections", "Connections open now.", "transport"),
    _counter(
        "smb_server_connections_turned_away_total",
        "Connections closed at once, as the daemon had no file descriptor left for them.",
    ),
    _gauge("smb_server_strangers", "Connections over TCP that have not shown yet who they are."),
    _counter(
        "smb_server_strangers_evicted_total",
        "Of them closed before their time, as too many others came: the oldest of the address that had the most.",
    ),
    _gauge("smb_server_segments", "Segments held."),
    _gauge("smb_server_segment_bytes", "Bytes of capacity taken by segments, headers included."),
    _gauge("smb_server_capacity_bytes", "Bytes that segments may take."),
    _gauge("smb_server_deferred_requests", "Requests that wait for a chunk's lock now."),
    _counter("smb_server_chunk_waits_total", "Requests that had to wait for a chunk's lock."),
    _gauge(
        "smb_server_waiting_requests",
        "Requests that wait now for a lock, a publication's turn, a barrier or a version.",
        "kind",
    ),
    _gauge("smb_server_held_locks", "Locks and publications that are held now.", "kind"),
    _counter("smb_server_locks_granted_total", "Locks and publications granted."),
    _counter("smb_server_lock_waits_total", "Requests for a lock or publication that had to wait."),
    _counter("smb_server_lock_timeouts_total", "Requests for a lock or publication that gave up."),
    _counter(
        "smb_server_locks_lost_total",
        "Locks and publications whose holder lost them: expired, as it did not renew; session_ended.",
        "reason",
    ),
    _counter("smb_server_broken_barriers_total", "Rounds of barriers that were broken: a party died or gave up."),
    _counter("smb_server_repeated_requests_total", "Requests that a client sent again, after a connection was lost."),
    _counter(
        "smb_server_replayed_requests_total",
        "Changes sent again after a lost connection that had been made, and were not made twice.",
    ),
    _gauge("smb_server_send_backlog_bytes", "Bytes of answers that wait for their peers to read, now."),
    _counter("smb_server_send_backlogs_total", "Times that an answer had to wait for its peer to read."),
    _gauge("smb_server_journal_slots", "Journal slots taken: one for each connection that ever changed something."),
    _gauge("smb_server_journal_slots_max", "Journal slots that there are."),
    _counter("smb_server_recovered_locks_total", "Chunk locks found held by a dead process."),
    _gauge("smb_server_recovery_seconds", "How long this run took to take over what the one before had left."),
    _gauge("smb_server_recovered_segments", "Segments that this run took over."),
    _gauge("smb_server_recovered_changes", "Changes that an earlier run was making, and this one finished."),
    _gauge("smb_server_torn_chunks", "Chunks that an earlier run was changing, and whose journal is gone."),
    _gauge("smb_server_mirror_version", "Version that a mirror here has, whole.", "buffer"),
    _gauge("smb_server_mirror_lag_versions", "Versions that its source is ahead of it.", "buffer"),
    _gauge(
        "smb_server_mirror_feed_bytes_per_second",
        "Rate at which bytes come to a mirror here from its source or another mirror.",
        "buffer",
        "source",
    ),
    _gauge("smb_server_coordinator_connected", "1 while the coordinator answers this server's renewals."),
    _counter(
        "smb_server_leases_lost_total",
        "Times that the coordinator did not know this server any more: it registered again.",
    ),
    _gauge("smb_server_start_time_seconds", "When this run began, in seconds since 1970."),
)

COORDINATOR: tuple[Description, ...] = (
    _counter("smb_coordinator_rpcs_total", "Calls answered, by method and gRPC code.", "method", "code"),
    _histogram(
        "smb_coordinator_rpc_duration_seconds",
        "Time to the answer by method; an OpenBuffer that waits is counted with its wait.",
        "method",
    ),
    _gauge("smb_coordinator_buffers", "Buffers that can be opened."),
    _gauge("smb_coordinator_pending_buffers", "Buffers, locks and barriers being made."),
    _gauge("smb_coordinator_locks", "Named locks that have a place."),
    _gauge("smb_coordinator_barriers", "Named barriers that have a place."),
    _gauge("smb_coordinator_buffer_bytes", "Bytes of data in all buffers."),
    _gauge("smb_coordinator_buffer_allocated_bytes", "Bytes of the servers' capacity that a buffer takes.", "buffer"),
    _gauge(
        "smb_coordinator_allocated_bytes",
        "Bytes of the servers' capacity taken by segments, headers included, being created ones too.",
    ),
    _gauge(
        "smb_coordinator_free_bytes", "Capacity of the live servers that is not taken, without those being drained."
    ),
    _gauge(
        "smb_coordinator_degraded_segments", "Segments of buffers of two copies that have one; being copied or not."
    ),
    _gauge("smb_coordinator_copying_segments", "Of them, those of which a copy is being made anew."),
    _gauge("smb_coordinator_servers_known", "Memory servers known."),
    _gauge("smb_coordinator_servers_alive", "Memory servers that this leader has heard of and whose lease runs."),
    _gauge(
        "smb_coordinator_servers_unheard", "Memory servers that may live but that this leader has not heard of yet."
    ),
    _gauge("smb_coordinator_lost_segments", "Segments whose memory is gone: the buffers that have them are unusable."),
    _gauge("smb_coordinator_server_alive", "1 while the server's lease runs, once this leader heard of it.", "server"),
    _gauge("smb_coordinator_server_capacity_bytes", "Bytes that the memory server offers.", "server"),
    _gauge("smb_coordinator_server_allocated_bytes", "Bytes of it that buffers take.", "server"),
    _gauge(
        "smb_coordinator_server_quarantined_bytes",
        "Memory that the server keeps though no record accounts for it: smb status lists it.",
        "server",
    ),
    _gauge("smb_coordinator_server_draining", "1 while the memory server is being drained.", "server"),
    _gauge("smb_coordinator_sessions", "Clients whose lease runs."),
    _gauge(
        "smb_coordinator_ended_sessions",
        "Sessions that ended and are still remembered, for servers that have not heard of it.",
    ),
    _counter(
        "smb_coordinator_leases_lost_total",
        "Leases that ran out: of a server, or of a client, that did not renew.",
        "of",
    ),
    _gauge(
        "smb_coordinator_tick_age_seconds",
        "Since its event loop last went round, which it does twice a second: more than 10 means that it hangs.",
    ),
    _gauge("smb_coordinator_store_failing", "1 while what it decides cannot be stored."),
    _gauge("smb_coordinator_leads", "1 for the coordinator that leads, 0 for one that stands by or cannot know."),
    _gauge("smb_coordinator_state_free_bytes", "Bytes that the disk of its --state has left, beside its reserve."),
    _gauge("smb_coordinator_recovery_seconds", "How long this run took to read what it knows from its store."),
    _gauge("smb_coordinator_start_time_seconds", "When this run began, in seconds since 1970."),
)

SECURED: tuple[Description, ...] = (
    _gauge(
        "smb_certificate_expiry_timestamp_seconds",
        "When the daemon's own certificate, and that of its authority, ends, in seconds since 1970.",
        "certificate",
    ),
)

CLIENT: tuple[Description, ...] = (
    _counter(
        "smb_client_operations_total",
        "Calls done, by kind and transport; one that took several servers, or several transports, counts once, "
        "for the network.",
        "client",
        "transport",
        "kind",
    ),
    _counter(
        "smb_client_transferred_bytes_total",
        "Bytes of the buffers' ranges that calls read or changed.",
        "client",
        "transport",
        "kind",
    ),
    _histogram(
        "smb_client_call_duration_seconds",
        "Time of whole calls. Of those that shared memory does at once one in 64 is timed, and stands for 64.",
        "client",
        "transport",
        "kind",
    ),
    _counter("smb_client_failed_calls_total", "Calls that failed in the engine, by its status.", "client", "class"),
    _counter("smb_client_repeated_frames_total", "Frames sent again after a lost connection.", "client"),
    _counter("smb_client_spoilt_answers_total", "Answers whose checksum was wrong.", "client"),
    _counter("smb_client_outages_total", "Connections to memory servers that broke while they were needed.", "client"),
    _histogram(
        "smb_client_outage_duration_seconds",
        "From when a broken connection was noticed until there was another.",
        "client",
    ),
    _counter("smb_client_locks_lost_total", "Locks that were lost before they were released.", "client"),
    _gauge("smb_client_held_locks", "Locks held now.", "client"),
    _gauge("smb_client_async_calls", "Calls given to *_async that have not ended.", "client"),
    _gauge("smb_client_session_alive", "1 until the coordinator says that the session has ended.", "client"),
    _gauge(
        "smb_client_generation_count",
        "The generation of a published state (smb.torch) that this client published, or read, last; 0 before the "
        "first. The publisher's number minus a reader's is how far that reader is behind.",
        "client",
        "state",
        "role",
    ),
)

TRAINING: tuple[Description, ...] = (
    _gauge("smb_training_round_count", "The open round.", "group", "scheme"),
    *(
        _counter(f"smb_training_{name}_total", text, "group", "worker", "host")
        for name, text in (
            ("contributions", "Contributions that counted."),
            ("refused_contributions", "Contributions that a guard refused."),
            ("dropped_contributions", "Contributions that are in no round, or of which nobody knows."),
            ("rejoins", "Times that a worker lost its lease and joined again."),
            ("samples", "Samples trained."),
            ("bytes", "Sent and received as contributions and models."),
        )
    ),
    *(
        _gauge(f"smb_training_{name}", text, "group", "worker", "host")
        for name, text in (
            ("alive", "1 while the worker holds its slot."),
            ("clock_count", "How far the worker has come, as the scheme counts."),
            ("staleness_count", "Staleness of its last contribution."),
            ("staleness_max_count", "The largest one so far."),
            ("norm", "Euclidean norm of its last contribution."),
        )
    ),
)

METRICS: Mapping[str, Description] = {
    found.name: found for group in (SERVER, COORDINATOR, SECURED, CLIENT, TRAINING) for found in group
}


def counter(name: str) -> CounterMetricFamily:
    """Return an empty counter of that name, to add values to."""
    from prometheus_client.core import CounterMetricFamily

    found = _of_type(name, COUNTER)
    return CounterMetricFamily(name, found.text, labels=found.labels)


def gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    """Return a gauge of that name with the value; without one, empty, to add values to."""
    from prometheus_client.core import GaugeMetricFamily

    found = _of_type(name, GAUGE)
    if value is not None:
        return GaugeMetricFamily(name, found.text, value)
    return GaugeMetricFamily(name, found.text, labels=found.labels)


def histogram(name: str) -> HistogramMetricFamily:
    """Return an empty histogram of that name, to add values to with `cumulative`."""
    from prometheus_client.core import HistogramMetricFamily

    found = _of_type(name, HISTOGRAM)
    return HistogramMetricFamily(name, found.text, labels=found.labels)


def cumulative(edges: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram's buckets from counts between the edges, the last one of what is past them all."""
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
