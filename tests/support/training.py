"""Workers of smb.train in threads and processes, and what their rounds must come to, in plain numpy.

Each worker's local change is artificial, and depends on its values, the worker and the step. Any error about which
contributions count, with which weight, from which weights, changes the result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import smb
import smb.train
from smb.train import group
from smb.train.exchange import contribution, round_closing, rounds, streaming
from smb.train.scheme import Values

COUNT = 70_000  # elements: more than one chunk, on more than one server
DEADLINE_S = 60.0
LEASE_S = 2.0  # a busy machine must not cost those who live their slots


def start(count: int = COUNT) -> Values:
    """The first values."""
    return np.random.default_rng(5).standard_normal(count).astype(np.float32)


def local_step(values: Values, worker: int, step: int) -> None:
    """A worker's local change between two calls of step; in place."""
    goal = np.random.default_rng([worker, step]).standard_normal(values.size).astype(np.float32)
    values -= np.float32(0.1) * (values - goal)


def delta_of(weights: Values, worker: int, steps: Sequence[int]) -> Values:
    """The contribution of a worker that starts from these weights and does these steps."""
    values = weights.copy()
    for step in steps:
        local_step(values, worker, step)
    return values - weights


def mean_round(weights: Values, deltas: Sequence[tuple[Values, float]]) -> Values:
    """The weights after a round of mean."""
    total = sum(weight for _, weight in deltas)
    result = weights.copy()
    for delta, weight in deltas:
        result += np.float32(weight / total) * delta
    return result


def nesterov_round(
    weights: Values, momentum: Values, deltas: Sequence[tuple[Values, float]], lr: float, mu: float
) -> tuple[Values, Values]:
    """(weights, momentum) after a round of DiLoCo."""
    total = sum(weight for _, weight in deltas)
    moved, momentum = weights + np.float32(-lr * mu**2) * momentum, np.float32(mu) * momentum
    for delta, weight in deltas:
        momentum += np.float32(-weight / total) * delta
        moved += np.float32(lr * (1 + mu) * (weight / total)) * delta
    return moved, momentum


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in a thread of its own; return their results. Raises what one of them raised."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(DEADLINE_S) for future in [threads.submit(call) for call in calls]]


@contextlib.contextmanager
def waiting(call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run a call in a thread while the block runs; yields what returns its result."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(call)
        yield lambda: future.result(DEADLINE_S)
        future.result(DEADLINE_S)


class Crew:
    """Workers of one group, each with a client and values of its own."""

    def __init__(
        self, connect: Callable[..., smb.Client], count: int, scheme: smb.train.Scheme, **options: Any
    ) -> None:
        self.values = [start() if number == 0 else np.zeros(COUNT, np.float32) for number in range(count)]
        self.clients = [connect() for _ in range(count)]
        self.workers = [
            smb.train.join(client, "run", values, scheme, **options)
            for client, values in zip(self.clients, self.values, strict=True)
        ]
        self._steps = [0] * count

    def step(self, number: int, samples: int = 1) -> None:
        """One local step of a worker, and its part in the scheme."""
        local_step(self.values[number], number, self._steps[number])
        self._steps[number] += 1
        self.workers[number].step(samples)

    def step_all(self, samples: Sequence[int] | None = None) -> None:
        """One step of all, at the same time."""
        together(
            *(
                lambda number=number: self.step(number, samples[number] if samples else 1)
                for number in range(len(self.workers))
            )
        )

    def marked(self) -> set[int]:
        """The slots that have contributed to the open round, or are not waited for in it."""
        status = smb.train.status(self.clients[0], "run")
        return {worker.slot for worker in status.workers if worker.clock > status.round}

    def close(self) -> None:
        """Leave, all."""
        for worker in self.workers:
            worker.close()


def signal_at(point: str, count: int, how: signal.Signals) -> None:
    """Have this process send itself a signal when it gets to a place in closing a round for the count-th time."""
    left = count
    lock = threading.Lock()

    def reach(name: str) -> None:
        nonlocal left
        with lock:
            left -= name == point
            now = name == point and left == 0
        if now:
            os.kill(os.getpid(), how)

    for module in (rounds, contribution, round_closing, group, streaming):
        module.failpoint = reach  # type: ignore[attr-defined]


def take_part(
    messages: Any, address: str, number: int, steps: int, point: str = "", count: int = 1, how: int = signal.SIGKILL
) -> None:
    """Join, tell so; wait for the buffer "go"; do the steps, tell after each one (round, sum of the values)."""
    if point:
        signal_at(point, count, signal.Signals(how))
    with smb.connect(address) as client:
        values = np.zeros(COUNT, np.float32)
        worker = smb.train.join(client, "run", values)
        messages.put("joined")
        client.open("go", timeout=DEADLINE_S)
        for step in range(steps):
            local_step(values, number, step)
            worker.step()
            messages.put((worker.status.rejoins, values.copy()))
        worker.close()
        messages.put("left")
