"""A process that updates a shared buffer in several ways: takes a request a line on stdin, as perf/training/worker.py.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1}
{"do": "join", "number": I, "elements": N}         the shared buffer, and a staging buffer of worker I
{"do": "update", "way": "fused", "steps": K, "start": T}    from time.monotonic() T on -> start, end
{"do": "total"}                                    -> total: the sum over the shared buffer, in float64
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from perf.scaling.worker import answer_requests
from perf.training.worker import TIMEOUT_S, TrainingProcess

STAGED, APART, FUSED = WAYS = ("write, add under a lock, read", "add, read", "one call")


class StagingProcess(TrainingProcess):
    """Adds ones."""

    def join(self, number: int, elements: int) -> dict[str, Any]:
        self._shared = self._client.create("shared", elements, exist_ok=True)
        self._staging = self._client.create(f"staging{number}", like=self._shared)
        self._lock = self._shared.lock(ttl=TIMEOUT_S, timeout=TIMEOUT_S)
        self._difference, self._values = np.ones(elements, np.float32), self._client.empty(elements)
        return {}

    def update(self, way: str, steps: int, start: float) -> dict[str, Any]:
        time.sleep(max(0.0, start - time.monotonic()))
        for _ in range(steps):
            if way == STAGED:
                with self._lock as fence:
                    self._staging.write(self._difference)
                    self._shared.accumulate_from(self._staging, fence=fence)
                self._shared.read(out=self._values)
            elif way == APART:
                self._shared.accumulate(self._difference)
                self._shared.read(out=self._values)
            else:
                self._shared.accumulate(self._difference, fetch=True, out=self._values)
        return {"start": start, "end": time.monotonic()}

    def total(self) -> dict[str, Any]:
        return {"total": float(self._shared.read().sum(dtype=np.float64))}


if __name__ == "__main__":
    answer_requests(StagingProcess())
