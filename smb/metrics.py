"""The room of metrics, in a client: what this process does, and how long it takes, for Prometheus. A client imports it
when it is to serve them.

>>> import smb.metrics
>>> pages = smb.metrics.serve(client, "127.0.0.1:9480")  # GET /metrics, until pages.close()

or into a registry that is served already:

>>> prometheus_client.REGISTRY.register(smb.metrics.Collector(client))

or, with no change to the program, SMB_CLIENT_METRICS=HOST:PORT in its environment: smb.connect then serves. Names and
meanings: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from smb.config.settings import switch_of, text_of
from smb.daemon.metric_names import LATENCY_EDGES, OUTAGE_EDGES, counter, cumulative, gauge, histogram
from smb.spi import session_of

if TYPE_CHECKING:
    from prometheus_client import Metric

    from smb.client import Client
    from smb.daemon.process import Pages


class Collector:
    """A Prometheus collector of a client's metrics, for REGISTRY.register.

    The client counts its calls from then on, so that calls in shared memory become nanoseconds slower. `name` is the
    value of the label `client` (default: "host:pid"); two clients of one process in one registry need two names.
    """

    def __init__(self, client: Client, name: str | None = None) -> None:
        self._client = client
        self._name = name or client.name
        session_of(client).engine.count()

    def describe(self) -> list[Metric]:
        """Return nothing: a registration must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._calls()
        session, me = session_of(self._client), [self._name]
        outages = session.outages()
        seconds = histogram("smb_client_outage_duration_seconds")
        seconds.add_metric(me, cumulative(OUTAGE_EDGES, outages.counts), outages.sum_s)
        yield seconds
        for name, value in (
            ("smb_client_outages_total", outages.begun),
            ("smb_client_locks_lost_total", session.renewals.lost),
        ):
            family = counter(name)
            family.add_metric(me, value)
            yield family
        for name, now in (
            ("smb_client_held_locks", len(session.renewals.held())),
            ("smb_client_async_calls", session.calls.pending()),
            ("smb_client_session_alive", not session.session_ended),
        ):
            family_now = gauge(name)
            family_now.add_metric(me, now)
            yield family_now

        generations = gauge("smb_client_generation_count")
        for labels, generation in session.published.generations().items():
            generations.add_metric([self._name, *labels], generation)
        yield generations

    def _calls(self) -> Iterator[Metric]:
        counters = session_of(self._client).engine.counters()
        for name, cells in (
            ("smb_client_operations_total", counters.operations),
            ("smb_client_transferred_bytes_total", counters.transferred_bytes),
        ):
            family = counter(name)
            for labels, value in cells.items():
                family.add_metric([self._name, *labels], value)
            yield family
        seconds = histogram("smb_client_call_duration_seconds")
        for labels, found in counters.latencies.items():
            seconds.add_metric([self._name, *labels], cumulative(LATENCY_EDGES, found.counts), found.sum_s)
        yield seconds
        failed = counter("smb_client_failed_calls_total")
        for reason, value in counters.failed.items():
            failed.add_metric([self._name, reason], value)
        yield failed
        for name, value in (
            ("smb_client_repeated_frames_total", counters.repeated_total),
            ("smb_client_spoilt_answers_total", counters.spoilt_total),
        ):
            family = counter(name)
            family.add_metric([self._name], value)
            yield family


def serve(client: Client, address: str = "127.0.0.1:0", *collectors: object) -> Pages:
    """Serve the metrics of a client, and of other collectors (smb.train.Collector), at /metrics of "host:port".

    Port 0 picks a free port: see `.address` of the returned object, whose close() ends the service. Does not block. On
    an address beyond this machine, callers have to show the token of SMB_METRICS_TOKEN_FILE, unless SMB_INSECURE=1.
    Raises UnavailableError if the address cannot be used, InvalidArgumentError for a bad token file.
    """
    from prometheus_client import CollectorRegistry

    from smb.daemon.process import Pages
    from smb.security.page_access import admission

    registry = CollectorRegistry()
    for collector in (Collector(client), *collectors):
        registry.register(collector)  # type: ignore[arg-type]
    token_file, insecure = text_of("cluster.metrics_token_file"), bool(switch_of("cluster.insecure"))
    admit = admission(address, Path(token_file) if token_file else None, insecure=insecure)
    health = {"role": "client", "name": client.name}
    return Pages(address, registry, lambda: {"ok": not session_of(client).session_ended, **health}, admit=admit)
