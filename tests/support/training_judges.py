"""Judges and references for training schemes: what workers saw of each other's updates, and what a model must become.

Each update of a worker adds 1 to element `worker` of the model. So every read of the model says whose updates it
contains: `seen[w]` of worker w's. Nothing is taken from what a scheme says of itself. Pure, as
tests/support/checkers.py; tests/unit/support/test_training_judges.py tries them on planted bad histories first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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


def seen_in(values: Values, worker: int, clock: int, workers: int, *, whole: bool = True) -> Seen:
    """Return the record of a read. The model is the pattern 0, 1, ..., workers - 1 repeated, so every part of it tells:
    with `whole` a read that contains a part of an update is refused; without, an update counts if all of it is there.
    """
    rows = values[: values.size // workers * workers].reshape(-1, workers)
    torn = (rows != rows[0]).any(axis=0)
    if whole and torn.any():
        raise BadHistoryError(f"worker {worker} at clock {clock} saw a part of an update of worker {np.argmax(torn)}")
    return Seen(worker, clock, tuple(int(count) for count in rows.min(axis=0)))


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


def check_bound(history: Sequence[Seen], bound: int, left: Mapping[int, int] | None = None) -> None:
    """Stale synchronous: a read at clock c contains every update up to clock c - bound, of every worker. `left` says
    who made no more than so many.
    """
    if not history:
        raise VoidRunError("nothing was read")
    check_own(history)
    for read in history:
        for worker, count in enumerate(read.seen):
            if count < min(read.clock - bound, (left or {}).get(worker, read.clock)):
                raise BadHistoryError(
                    f"worker {read.worker} at clock {read.clock} saw only {count} updates of worker {worker}: "
                    f"the bound is {bound}"
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
