"""A training's metrics for Prometheus. Any process with a client can read them; each scrape reads the table.

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
from smb.daemon.metric_names import COUNTER, METRICS, counter, gauge
from smb.errors import Error
from smb.train.status import GroupStatus, status
from smb.train.worker_status import WorkerStatus

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = logging.getLogger("smb")

_OF_WORKER: tuple[tuple[str, Callable[[WorkerStatus], float]], ...] = (
    ("smb_training_contributions_total", lambda worker: worker.contributions),
    ("smb_training_refused_contributions_total", lambda worker: worker.refused),
    ("smb_training_dropped_contributions_total", lambda worker: worker.dropped),
    ("smb_training_rejoins_total", lambda worker: worker.rejoins),
    ("smb_training_samples_total", lambda worker: worker.samples),
    ("smb_training_bytes_total", lambda worker: worker.bytes),
    ("smb_training_alive", lambda worker: worker.alive),
    ("smb_training_clock_count", lambda worker: worker.clock),
    ("smb_training_staleness_count", lambda worker: worker.staleness),
    ("smb_training_staleness_max_count", lambda worker: worker.staleness_max),
    ("smb_training_norm", lambda worker: worker.norm),
)


class Collector:
    """A Prometheus collector of one group's metrics, for REGISTRY.register. Their names begin with smb_training_; the
    labels are slot and host.

    ```python
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(smb.train.Collector(client, "run"))
    ```
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name

    def describe(self) -> list[Metric]:
        """Return no metrics, since the group need not exist yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Yields none if the group does not exist or can't be reached; that is logged."""
        try:
            found = status(self._client, self._name)
        except Error as error:
            _log.warning("no metrics of training %r: %s", self._name, error)
            return
        yield from _of(found)


def _of(found: GroupStatus) -> Iterator[Metric]:
    rounds = gauge("smb_training_round_count")
    rounds.add_metric([found.name, found.scheme], found.round)
    yield rounds
    for name, value in _OF_WORKER:
        family = counter(name) if METRICS[name].type == COUNTER else gauge(name)
        for worker in found.workers:
            family.add_metric([found.name, str(worker.slot), worker.host], value(worker))
        yield family
