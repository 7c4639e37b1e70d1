"""A training's metrics for Prometheus, read from its table at each scrape: by any process that has a client.

>>> from prometheus_client import REGISTRY, start_http_server
>>> REGISTRY.register(smb.train.Collector(client, "run"))
>>> start_http_server(9480)

prometheus_client is imported only when a Collector is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smb.client import Client
from smb.errors import Error
from smb.train.status import GroupStatus, WorkerStatus, status

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = logging.getLogger("smb")

# name without _total, help, of a worker
_COUNTERS: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("smb_training_contributions", "Contributions that counted.", lambda worker: worker.contributions),
    ("smb_training_refused_contributions", "Contributions that a guard refused.", lambda worker: worker.refused),
    ("smb_training_dropped_contributions", "Contributions that came too late.", lambda worker: worker.dropped),
    ("smb_training_rejoins", "Times that a worker lost its lease and joined again.", lambda worker: worker.rejoins),
    ("smb_training_samples", "Samples trained.", lambda worker: worker.samples),
    ("smb_training_bytes", "Sent and received as contributions and models.", lambda worker: worker.bytes),
)
_GAUGES: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("smb_training_alive", "1 while the worker holds its slot.", lambda worker: worker.alive),
    ("smb_training_clock_count", "How far the worker has come, as the scheme counts.", lambda worker: worker.clock),
    ("smb_training_staleness_count", "Staleness of its last contribution.", lambda worker: worker.staleness),
    ("smb_training_staleness_max_count", "The largest one so far.", lambda worker: worker.staleness_max),
    ("smb_training_norm", "Euclidean norm of its last contribution.", lambda worker: worker.norm),
)


class Collector:
    """What REGISTRY.register takes: smb_training_... of one group, by worker (its slot and host)."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    def describe(self) -> list[Metric]:
        """Nothing beforehand: the group need not be there yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none where the group is not there, or not reached (which is logged)."""
        try:
            found = status(self._client, self._name)
        except Error as error:
            _log.warning("no metrics of group %r: %s", self._name, error)
            return
        yield from _of(found)


def _of(found: GroupStatus) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    rounds = GaugeMetricFamily("smb_training_round_count", "The open round.", labels=["group", "scheme"])
    rounds.add_metric([found.name, found.scheme], found.round)
    yield rounds
    names = ["group", "worker", "host"]
    for families, make in ((_COUNTERS, CounterMetricFamily), (_GAUGES, GaugeMetricFamily)):
        for name, text, value in families:
            family = make(name, text, labels=names)
            for worker in found.workers:
                family.add_metric([found.name, str(worker.slot), worker.host], value(worker))
            yield family
