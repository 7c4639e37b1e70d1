"""A training process of an experiment: takes a request a line on stdin, {"do": NAME, ARGUMENT: ...} as JSON, and
answers each by a line on stdout.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1, "transport": "tcp"}
{"do": "join", "name": "NAME", "elements": N, "scheme": "seasgd", "settings": {...}, ...}
    and options of smb.train.join -> servers, transports, seconds
{"do": "compute", "value": V}                    adds V to every parameter: a local step that can be added up afterwards
{"do": "train", "steps": K, "start": T, "compute_s": S}
    from time.monotonic() T on, K times: the scheme's step, then S seconds of sleep in place of computing; then flush
    -> start, end, spent: seconds of each step, and of the flush
{"do": "total", "of": "values" or "shared"}      -> total: the sum over all elements, in float64
{"do": "leave"}
{"do": "delete"}                                 the whole group
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import smb
import smb.train
from perf.scaling.worker import answer_requests

TIMEOUT_S = 120.0


class TrainingProcess:
    """One client and its worker; `join` is each kind's own."""

    _client: smb.Client
    _worker: smb.train.Worker
    _name: str

    def connect(self, coordinator: str, count: int = 1, transport: str = "tcp") -> dict[str, Any]:
        assert count == 1
        self._client = smb.connect(coordinator, transport=transport, timeout=TIMEOUT_S)
        return {}

    def leave(self) -> dict[str, Any]:
        self._worker.close()
        del self._worker
        return {}

    def delete(self) -> dict[str, Any]:
        smb.train.delete(self._client, self._name)
        return {}


class SleepingProcess(TrainingProcess):
    """Adds to its parameters, and sleeps in place of computing."""

    def join(self, name: str, elements: int, scheme: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        self._name = name
        self._values = np.zeros(elements, np.float32)
        began = time.monotonic()
        rule = smb.train.scheme_of(scheme, settings)
        self._worker = smb.train.join(self._client, name, self._values, rule, **options)
        shared = self._client.open(name)
        return {
            "servers": len({segment.server for segment in shared.layout.segments}),
            "transports": list(shared.transports),
            "seconds": time.monotonic() - began,
        }

    def compute(self, value: float) -> dict[str, Any]:
        self._values += np.float32(value)
        return {}

    def train(self, steps: int, start: float, compute_s: float) -> dict[str, Any]:
        spent = []
        time.sleep(max(0.0, start - time.monotonic()))
        for _ in range(steps):
            began = time.monotonic()
            self._worker.step(samples=1)
            spent.append(time.monotonic() - began)
            time.sleep(compute_s)
        began = time.monotonic()
        self._worker.flush()
        end = time.monotonic()
        return {"start": start, "end": end, "spent": [*spent, end - began]}

    def total(self, of: str) -> dict[str, Any]:
        array = self._values if of == "values" else self._client.open(self._name).read()
        return {"total": float(array.sum(dtype=np.float64))}

    def leave(self) -> dict[str, Any]:
        super().leave()
        del self._values
        return {}


if __name__ == "__main__":
    answer_requests(SleepingProcess())
