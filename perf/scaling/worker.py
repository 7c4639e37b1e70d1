"""A client process of an experiment: takes a request a line (JSON) on stdin and answers each by a line on stdout.

{"do": "connect", "coordinator": "HOST:PORT", "count": 1}        that many clients, each with its own connections
{"do": "create", "buffer": "NAME", "nbytes": N, ...}             options of Client.create -> servers, stripe_bytes
{"do": "open", "buffer": "NAME"}                                 by all of them, and the first call done
{"do": "run", "operation": "write", "nbytes": N, "start": T, "seconds": S}
    from time.monotonic() T on, calls of N bytes for about S seconds, by each client in turn -> starts, ends, cpu
{"do": "check", "nbytes": N, "value": V}                         -> wrong: how many of the elements are not V
{"do": "fill", "value": V}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import smb

TIMEOUT_S = 120.0


class Worker:
    """The clients of this process."""

    def __init__(self) -> None:
        self._clients: list[smb.Client] = []
        self._buffers: list[smb.Buffer] = []
        self._array = np.zeros(0, np.float32)

    def connect(self, coordinator: str, count: int = 1, transport: str = "tcp") -> dict[str, Any]:
        for _ in range(count):
            self._clients.append(smb.connect(coordinator, transport=transport, timeout=TIMEOUT_S))
        return {}

    def create(self, buffer: str, nbytes: int, **options: Any) -> dict[str, Any]:
        made = self._clients[0].create(buffer, nbytes // 4, "float32", **options)
        segments = [segment.server for segment in made.layout.segments]
        return {"servers": segments, "stripe_bytes": made.layout.stripe_bytes}

    def delete(self, buffer: str) -> dict[str, Any]:
        self._clients[0].delete(buffer)
        return {}

    def open(self, buffer: str) -> dict[str, Any]:
        self._buffers = [client.open(buffer) for client in self._clients]
        if self._array.size != self._buffers[0].size:
            self._array = np.ones(self._buffers[0].size, np.float32)
        for opened in self._buffers:
            opened.read(offset=0, count=1)
        return {}

    def run(self, operation: str, nbytes: int, start: float, seconds: float) -> dict[str, Any]:
        calls = [self._call(buffer, operation, self._array[: nbytes // 4]) for buffer in self._buffers]
        while (left := start - time.monotonic()) > 0:
            time.sleep(left)
        starts, ends = [], []
        cpu = time.process_time()
        now = time.monotonic()
        while now < start + seconds or not ends:
            starts.append(now)
            calls[len(ends) % len(calls)]()
            now = time.monotonic()
            ends.append(now)
        return {"starts": starts, "ends": ends, "cpu": time.process_time() - cpu}

    def fill(self, value: float) -> dict[str, Any]:
        self._buffers[0].fill(value)
        return {}

    def check(self, value: float, nbytes: int) -> dict[str, Any]:
        found = self._buffers[0].read(offset=0, count=nbytes // 4)
        return {"wrong": int(np.count_nonzero(found != value))}

    def _call(self, buffer: smb.Buffer, operation: str, array: np.ndarray[Any, Any]) -> Callable[[], object]:
        if operation == "write":
            return lambda: buffer.write(array)
        if operation == "read":
            return lambda: buffer.read(0, array.size, out=array)
        return lambda: buffer.accumulate(array)


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        do = getattr(worker, request.pop("do"))
        print(json.dumps(do(**request)), flush=True)


if __name__ == "__main__":
    main()
