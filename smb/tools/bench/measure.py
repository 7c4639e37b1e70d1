"""Times several ways to do the same thing, interleaved, so that a drift of the machine affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Keeps sums exact: the patterns' values stay below 2^11, so 4000 accumulates of them stay below 2^24.
ROUNDS_MAX = 4000
ROUNDS_MIN = 5
WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """One line of the benchmark: an operation on `nbytes` bytes over one transport.

    `limit` names what the buffer is compared with, and limit_p50_seconds is that limit's median time; both are None if
    nothing is comparable. `ratio` is limit_p50_seconds / p50_seconds: 1 means as fast as the limit.
    """

    transport: str
    operation: str
    nbytes: int
    rounds: int
    p50_seconds: float
    p99_seconds: float
    limit: str | None = None
    limit_p50_seconds: float | None = None

    @property
    def bytes_per_second(self) -> float:
        """Speed at the median time."""
        return self.nbytes / self.p50_seconds

    @property
    def ratio(self) -> float | None:
        """The buffer's speed as a fraction of the limit's."""
        return None if self.limit_p50_seconds is None else self.limit_p50_seconds / self.p50_seconds

    def to_json(self) -> dict[str, Any]:
        """Return all fields and computed values."""
        return asdict(self) | {"bytes_per_second": self.bytes_per_second, "ratio": self.ratio}


def time_interleaved(contenders: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, NDArray[np.float64]]:
    """Call every contender once a round, in turns, for about `seconds`; return their times in seconds, shape (rounds,).

    At least ROUNDS_MIN and at most ROUNDS_MAX rounds, after WARM_UP_ROUNDS that do not count but are made too.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + seconds
    for round_number in range(ROUNDS_MAX):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - started)
        if round_number + 1 >= ROUNDS_MIN + WARM_UP_ROUNDS and time.perf_counter() >= deadline:
            break
    return {name: np.array(values[WARM_UP_ROUNDS:]) for name, values in times.items()}


def summarize(
    transport: str, operation: str, nbytes: int, times: Mapping[str, NDArray[np.float64]], ours: str
) -> Measurement:
    """Return the line for contender `ours`. The limit is the fastest of the other contenders, by median."""
    medians = {name: float(np.median(values)) for name, values in times.items()}
    own = times[ours]
    limit = min((name for name in times if name != ours), key=medians.__getitem__, default=None)
    return Measurement(
        transport=transport,
        operation=operation,
        nbytes=nbytes,
        rounds=len(own),
        p50_seconds=medians[ours],
        p99_seconds=float(np.quantile(own, 0.99, method="higher")),
        limit=limit,
        limit_p50_seconds=None if limit is None else medians[limit],
    )
