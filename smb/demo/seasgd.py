"""Asynchronous elastic averaging (SEASGD): the one exchange between a worker's model and the shared one.

Every tau batches, with moving rate alpha (Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD, 2015):

    d = alpha * (W_local - W_global);  W_local -= d;  W_global += d

The last step is an accumulate where the memory is, so nobody's addition is lost however the workers interleave. Between
the read and the accumulate others may have moved W_global: that is the staleness which the scheme tolerates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from smb import Buffer


@dataclass
class ExchangeCounters:
    """What the exchanges so far have cost: bytes read plus accumulated, and the seconds that this took."""

    exchanges: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0


class ElasticAveraging:
    """One worker's side of SEASGD over a shared float32 buffer of the parameters' size."""

    def __init__(self, shared: Buffer, alpha: float) -> None:
        self.counters = ExchangeCounters()
        self._shared = shared
        self._alpha = alpha
        self._difference = np.empty(shared.size, dtype=np.float32)

    def start_from_shared(self, local: NDArray[np.float32]) -> None:
        """Overwrite local, shape (size,), with the shared model: how one joins, at the start or late. Blocks."""
        self._shared.read(out=local)

    def exchange(self, local: NDArray[np.float32]) -> None:
        """Draw local, shape (size,), and the shared model towards each other. Blocks: one read and one accumulate."""
        difference = self._difference
        started = time.perf_counter()
        self._shared.read(out=difference)
        read = time.perf_counter()
        np.subtract(local, difference, out=difference)
        difference *= np.float32(self._alpha)
        local -= difference
        computed = time.perf_counter()
        self._shared.accumulate(difference)
        self.counters.seconds += (read - started) + (time.perf_counter() - computed)
        self.counters.exchanges += 1
        self.counters.bytes_moved += 2 * difference.nbytes
