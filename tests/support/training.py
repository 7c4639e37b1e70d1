<<<<<<< HEAD
<<<<<<< HEAD
<<<<<<< HEAD
"""Judges and references for training schemes: what workers saw of each other's updates, and what a model must become.

A worker whose k-th update adds 1 to element `worker` of the model makes every later read of the model a record of whose
updates it contains: `seen[w]` of worker w's. Nothing is taken from what a scheme says of itself. Pure, as
tests/support/checkers.py; tests/unit/test_training_checkers.py tries them on planted bad histories first.
=======
=======
>>>>>>> wt-elastic
=======
>>>>>>> wt-async
"""Workers of smb.train in threads and processes, and what their rounds must come to, in plain numpy.

What each worker does locally is made up, and depends on its values, the worker and the step: any error in who counts,
with which weight, from which weights, changes the result.
<<<<<<< HEAD
<<<<<<< HEAD
>>>>>>> wt-rounds
=======
>>>>>>> wt-elastic
=======
>>>>>>> wt-async
"""

from __future__ import annotations

<<<<<<< HEAD
<<<<<<< HEAD
<<<<<<< HEAD
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.checkers import BadHistoryError, VoidRunError

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Seen:
    """A read of the model by `worker` after its `clock`-th update: how many updates of each worker it contains."""

    worker: int
    clock: int
    seen: tuple[int, ...]


def seen_in(values: Values, worker: int, clock: int, workers: int) -> Seen:
    """Return the record of a read. The model is the pattern 0, 1, ..., workers - 1 repeated, so every part of it tells:
    a read that contains only a part of an update is found.
    """
    rows = values[: values.size // workers * workers].reshape(-1, workers)
    torn = (rows != rows[0]).any(axis=0)
    if torn.any():
        raise BadHistoryError(f"worker {worker} at clock {clock} saw a part of an update of worker {np.argmax(torn)}")
    return Seen(worker, clock, tuple(int(count) for count in rows[0]))


def mark_of(worker: int, size: int, workers: int) -> Values:
    """Return what each update of the worker adds to a model of `size` values, so that seen_in can tell."""
    return (np.arange(size) % workers == worker).astype(np.float32)


def check_own(history: Sequence[Seen]) -> None:
    """Every worker sees all of its own updates, once, and never fewer of another's than before."""
    last: dict[int, Seen] = {}
    for read in history:
        if read.seen[read.worker] != read.clock:
            raise BadHistoryError(f"worker {read.worker} saw {read.seen[read.worker]} of its own {read.clock} updates")
        before = last.get(read.worker)
        if before and any(now < then for now, then in zip(read.seen, before.seen, strict=True)):
            raise BadHistoryError(f"worker {read.worker} saw {before.seen}, then {read.seen}: updates were lost")
        last[read.worker] = read


def check_bound(history: Sequence[Seen], bound: int) -> None:
    """Stale synchronous: a read at clock c contains every update up to clock c - bound, of every worker."""
    if not history:
        raise VoidRunError("nothing was read")
    check_own(history)
    for read in history:
        behind = [worker for worker, count in enumerate(read.seen) if count < read.clock - bound]
        if behind:
            raise BadHistoryError(
                f"worker {read.worker} at clock {read.clock} saw only {read.seen[behind[0]]} updates of worker "
                f"{behind[0]}: the bound is {bound}"
            )


def check_rotation(history: Sequence[Seen], workers: int, staleness: int | None = None) -> None:
    """Round robin: between two reads of a worker every worker updated exactly once, in the same order each time; the
    staleness of each update is exactly `workers` - 1. Each worker's reads are in order.
    """
    staleness = workers - 1 if staleness is None else staleness
    check_own(history)
    last: dict[int, Seen] = {}
    compared = 0
    for read in history:
        before = last.get(read.worker)
        last[read.worker] = read
        if before is None:
            continue
        compared += 1
        others = sum(read.seen) - sum(before.seen) - (read.clock - before.clock)
        if others != staleness:
            raise BadHistoryError(
                f"worker {read.worker}: {others} updates of others between its reads at clocks {before.clock} and "
                f"{read.clock}; in rotation they are {staleness}"
            )
    if not compared:
        raise VoidRunError("no worker updated twice")
    # The number of updates in a read is its update's place in the one order of all.
    order = [read.worker for read in sorted(history, key=lambda read: sum(read.seen))]
    sums = [sum(read.seen) for read in history]
    if len(set(sums)) != len(sums):
        raise BadHistoryError("two updates have the same place: one did not see the other")
    for at, (worker, later) in enumerate(zip(order, order[workers:], strict=False)):
        if worker != later:
            raise BadHistoryError(f"the turns {order[at : at + workers + 1]} are no rotation of {workers}")


def staleness_of(history: Sequence[Seen]) -> list[int]:
    """For each update but each worker's first: the others' updates between the read that it builds on and itself."""
    found = []
    for worker in {read.worker for read in history}:
        reads = sorted((read for read in history if read.worker == worker), key=lambda read: read.clock)
        for before, after in itertools.pairwise(reads):
            found.append(sum(after.seen) - sum(before.seen) - 1)
    return found


# ---- references


Step = Callable[[int, Values], None]  # (worker, values): one local optimizer step, in place


def reference(order: Sequence[int], workers: int, start: Values, step: Step) -> tuple[Values, list[Values]]:
    """Return (shared model, each worker's values) after the workers' steps in that order: each steps on the model as it
    was after its own last update, and adds what its step did.
    """
    shared = start.copy()
    values = [start.copy() for _ in range(workers)]
    for worker in order:
        base = values[worker].copy()
        step(worker, values[worker])
        shared += values[worker] - base
        values[worker][:] = shared
    return shared, values


class Quadratic:
    """A local optimizer on worker w's own loss |A_w x - b_w|^2 / 2, with momentum: deterministic, rounds as float32."""

    def __init__(self, size: int, seed: int, lr: float = 0.05, momentum: float = 0.5) -> None:
        self._size, self._lr, self._momentum = size, np.float32(lr), np.float32(momentum)
        self._of: dict[int, tuple[Any, Any, Any]] = {}
        self._seed = seed

    def start(self) -> Values:
        """Return the model at the start."""
        return np.random.default_rng([self._seed, 999]).standard_normal(self._size).astype(np.float32)

    def __call__(self, worker: int, values: Values) -> None:
        """Take one step on the worker's loss, in place."""
        if worker not in self._of:
            random = np.random.default_rng([self._seed, worker])
            scale = random.uniform(0.5, 1.5, self._size).astype(np.float32)
            target = random.standard_normal(self._size).astype(np.float32)
            self._of[worker] = scale, target, np.zeros(self._size, np.float32)
        scale, target, velocity = self._of[worker]
        velocity *= self._momentum
        velocity += scale * (scale * values - target)
        values -= self._lr * velocity
=======
=======
>>>>>>> wt-elastic
=======
>>>>>>> wt-async
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
from smb.train import rounds
from smb.train.scheme import Values

COUNT = 70_000  # elements: more than one chunk, on more than one server
DEADLINE_S = 60.0
LEASE_S = 1.2  # a busy machine must not cost those who live their slots


def start(count: int = COUNT) -> Values:
    """The first values."""
    return np.random.default_rng(5).standard_normal(count).astype(np.float32)


def local_step(values: Values, worker: int, step: int) -> None:
    """What a worker does between two calls of step; in place."""
    goal = np.random.default_rng([worker, step]).standard_normal(values.size).astype(np.float32)
    values -= np.float32(0.1) * (values - goal)


def delta_of(weights: Values, worker: int, steps: Sequence[int]) -> Values:
    """What a worker contributes that starts from these weights and does these steps."""
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
    gradient = np.float32(-deltas[0][1] / total) * deltas[0][0]
    for delta, weight in deltas[1:]:
        gradient += np.float32(-weight / total) * delta
    momentum = np.float32(mu) * momentum + gradient
    return weights - np.float32(lr) * (gradient + np.float32(mu) * momentum), momentum


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
    """Have this process send itself a signal when it gets to a place in rounds.py for the count-th time."""
    left = count
    lock = threading.Lock()

    def reach(name: str) -> None:
        nonlocal left
        with lock:
            left -= name == point
            now = name == point and left == 0
        if now:
            os.kill(os.getpid(), how)

    rounds.failpoint = reach  # type: ignore[assignment]


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
<<<<<<< HEAD
<<<<<<< HEAD
>>>>>>> wt-rounds
=======
>>>>>>> wt-elastic
=======
>>>>>>> wt-async
