"""A client process of an experiment: takes a request a line on stdin, {"do": NAME, ARGUMENT: ...} as JSON, and answers
each by a line on stdout.

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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import smb

TIMEOUT_S = 120.0


class Worker:
    """The clients of this process."""

    def __init__(self) -> None:
        self._clients: list[smb.Client] = []
        self._buffers: list[smb.Buffer] = []

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
        for opened in self._buffers:
            opened.read(offset=0, count=1)
        return {}

    def fill(self, value: float) -> dict[str, Any]:
        self._buffers[0].fill(value)
        return {}

    def check(self, value: float, nbytes: int) -> dict[str, Any]:
        return {"wrong": int(np.count_nonzero(self._buffers[0].read(0, nbytes // 4) != value))}

    def run(self, operation: str, nbytes: int, start: float, seconds: float) -> dict[str, Any]:
        reads = operation == "read"
        # All clients may write from one array; each reads into an array of its own.
        common = np.ones(nbytes // 4, np.float32)
        arrays = [np.zeros_like(common) if reads else common for _ in self._buffers]
        calls = [_call(buffer, operation, array) for buffer, array in zip(self._buffers, arrays, strict=True)]
        cpu = time.process_time()
        if len(calls) == 1:
            times = [_repeat(calls[0], start, seconds)]
        else:
            with ThreadPoolExecutor(len(calls)) as threads:
                times = list(threads.map(lambda call: _repeat(call, start, seconds), calls))
        cpu = time.process_time() - cpu
        wrong = sum(int(np.count_nonzero(array != arrays[0][0])) for array in arrays) if reads else 0
        return {"calls": times, "cpu": cpu, "wrong": wrong, "first": float(arrays[0][0])}


def _call(buffer: smb.Buffer, operation: str, array: np.ndarray[Any, Any]) -> Callable[[], object]:
    if operation == "write":
        return lambda: buffer.write(array)
    if operation == "read":
        return lambda: buffer.read(0, array.size, out=array)
    return lambda: buffer.accumulate(array)


def _repeat(call: Callable[[], object], start: float, seconds: float) -> list[tuple[float, float]]:
    """Call for about `seconds` from `start` on, once at least; return start and end of each call."""
    time.sleep(max(0.0, start - time.monotonic()))
    times: list[tuple[float, float]] = []
    now = time.monotonic()
    while now < start + seconds or not times:
        before = now
        call()
        now = time.monotonic()
        times.append((before, now))
    return times


def answer_requests(worker: object) -> None:
    """Call the method that each line of stdin names, and print what it returns, until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        do = getattr(worker, request.pop("do"))
        print(json.dumps(do(**request)), flush=True)


if __name__ == "__main__":
    answer_requests(Worker())
