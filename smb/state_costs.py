"""What publishing or reading a state costs a process: its counters, and what may make it cheaper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MUCH = 0.2  # share of a process's time from which on publishing or reading is worth a sentence
_MANY = 4  # readers of one state's servers from which on mirrors may help


class StateCosts:
    """The counters of one Publisher or Follower. It counts in one thread at a time; any thread may look.

    `times`: publications or reads that succeeded. `bytes`: sent or received by them, without frames. `copied_bytes`:
    copied between two arrays of this process, outside of calls. `seconds`: spent in them.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.times = 0
        self.bytes = 0
        self.copied_bytes = 0
        self.seconds = 0.0
        self.transports: tuple[str, ...] = ()
        self._now = now
        self._began = now()

    @property
    def age(self) -> float:
        """Seconds since the Publisher or Follower was made."""
        return max(1e-9, self._now() - self._began)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block."""
        began = self._now()
        try:
            yield
        finally:
            self.seconds += self._now() - began

    def count(self, nbytes: int) -> None:
        """Count a publication, or a read, of so many bytes."""
        self.times += 1
        self.bytes += nbytes


@dataclass(frozen=True, slots=True)
class StateUse:
    """One process's part in a published state. `share` is the share of its time, 0 to 1, that publishing or reading
    took. `whole` is True if each generation travels whole, `mirrored` if the reader has a mirror.
    """

    publishes: bool
    transports: tuple[str, ...]
    share: float
    whole: bool
    readers: int
    mirrored: bool = False


def advice(use: StateUse) -> Iterator[str]:
    """Yield sentences; none if nothing is known to help."""
    if use.share < _MUCH:
        return
    if use.publishes:
        yield "publishing takes much of the publisher's time: publish_async() sends while it goes on"
    if use.whole and use.transports != ("shm",):
        yield "each generation travels whole: deltas=16 sends what changed, if a step changes few bits (bfloat16)"
    if not use.publishes and not use.mirrored and use.readers >= _MANY and use.transports != ("shm",):
        yield "many readers read from the state's own servers: smb relay NAME --auto makes mirrors near them"
