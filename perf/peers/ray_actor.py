"""Ray: an actor that holds the array, called by drivers on the same host. Arrays travel through its object store.

That store is shared memory: a write puts the array there and the actor copies it, a read is the actor's array put there
and mapped by the caller. Each case has its own cluster (seconds to start).
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import numpy as np

from perf.clients import Array, zeros
from perf.contender import SHM, Case, Sample
from perf.peers import processes

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
NAMESPACE = "perf"


class Holder:
    """The actor's class."""

    def __init__(self, nbytes: int) -> None:
        self._array = zeros(nbytes // 4)
        self._counter = 0

    def write(self, source: Array) -> None:
        np.copyto(self._array, source)

    def read(self) -> Array:
        return self._array

    def accumulate(self, contribution: Array) -> None:
        self._array += contribution

    def fetch_add(self, value: int) -> int:
        before = self._counter
        self._counter = before + value
        return before


class Client:
    def __init__(self, address: str, _case: Case, client: int) -> None:
        import ray

        self._ray: Any = ray
        if client != processes.NOBODY:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self._actor = ray.get_actor("holder", NAMESPACE)

    def write(self, source: Array) -> None:
        self._ray.get(self._actor.write.remote(source))

    def read(self, _into: Array) -> Array:
        return self._ray.get(self._actor.read.remote())

    def accumulate(self, contribution: Array) -> None:
        self._ray.get(self._actor.accumulate.remote(contribution))

    def fetch_add(self, value: int) -> int:
        return self._ray.get(self._actor.fetch_add.remote(value))

    def close(self) -> None:
        pass


def _measure(case: Case) -> Sample:
    os.environ.update(QUIET)  # of this process and of those it starts
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        context = ray.init(
            num_cpus=case.clients + 2,
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=max(512 << 20, 6 * case.clients * case.nbytes),
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
        )
        try:
            holder = ray.remote(Holder).options(name="holder").remote(case.nbytes)
            ray.get(holder.fetch_add.remote(0))
            return processes.measure(case, functools.partial(Client, context.address_info["gcs_address"]))
        finally:
            ray.shutdown()


class Ray(processes.Peer):
    name = "Ray, actor"

    def missing(self) -> str | None:
        return processes.missing_modules("ray")

    def takes(self, case: Case) -> bool:
        return case.transport == SHM

    def measure(self, case: Case) -> Sample:
        return processes.apart(_measure, case)


CONTENDERS = [Ray()]
