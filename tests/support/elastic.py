"""Elastic averaging in one process, in numpy: what a trace of the schemes must equal, written as its authors write it.

Each worker is a generator that runs to its next `yield` when it is its turn, so an order of turns is one deterministic
interleaving. float32 throughout, and every operation rounds as the schemes' do: traces are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Step = Callable[[int, Values], None]  # (worker, values): one local step, in place


@dataclass
class Trace:
    """The shared model, and every worker's values, after each turn."""

    shared: list[Values] = field(default_factory=list)
    local: list[Values] = field(default_factory=list)


def easgd(order: Sequence[int], start: Values, step: Step, alpha: float, every: int) -> Trace:
    """Zhang, Choromanska, LeCun 2015, Algorithm 1 (and 2, where the step has Nesterov's momentum)."""
    shared = start.copy()

    def worker(number: int, x: Values) -> Generator[None]:
        clock = 0
        while True:
            d = np.zeros_like(x)
            if clock > 0 and clock % every == 0:
                d = np.float32(alpha) * (x - shared)
                shared[:] = shared + d
            yield
            step(number, x)
            x -= d
            clock += 1

    return _run(order, start, worker, shared)


def seasgd(order: Sequence[int], start: Values, step: Step, alpha: float, every: int) -> Trace:
    """Ahn and others 2018, with each addition there before the next turn."""
    shared = start.copy()

    def worker(number: int, w: Values) -> Generator[None]:
        clock = 0
        while True:
            yield
            step(number, w)
            clock += 1
            if clock % every == 0:
                d = np.float32(alpha) * (w - shared)
                w -= d
                shared[:] = shared + d

    return _run(order, start, worker, shared)


def _run(
    order: Sequence[int], start: Values, worker: Callable[[int, Values], Generator[None]], shared: Values
) -> Trace:
    local = {number: start.copy() for number in sorted(set(order))}
    workers = {number: worker(number, values) for number, values in local.items()}
    for each in workers.values():
        next(each)
    trace = Trace()
    for number in order:
        next(workers[number])
        trace.shared.append(shared.copy())
        trace.local.append(local[number].copy())
    return trace


def gradient(number: int, at: Values) -> Values:
    """The gradient of worker number's own loss, |a x - b|^2 / 2 with a and b of its own: deterministic, float32."""
    places = np.arange(at.size, dtype=np.float32)
    a = np.float32(0.5) + np.float32(0.125) * ((places + np.float32(number)) % 7)
    b = (places % 5) - np.float32(number)
    return (a * (a * at - b)).astype(np.float32)


def sgd(number: int, values: Values) -> None:
    """One step of plain SGD on it."""
    values -= np.float32(0.05) * gradient(number, values)
