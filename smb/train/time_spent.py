"""How a worker's time passes: in exchanges, and in waiting for other workers. For reports: nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Adds up the seconds of `with` blocks, which one thread at a time enters, not nested. Any thread may read."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._state: tuple[float, float | None] = (0.0, None)  # seconds of earlier blocks, and when this one began

    @property
    def runs(self) -> bool:
        """Whether a block is being executed."""
        return self._state[1] is not None

    @property
    def seconds(self) -> float:
        """The seconds so far, with those of the present block."""
        total, since = self._state  # one attribute, so that both are of one moment
        return total if since is None else total + self._now() - since

    def __enter__(self) -> None:
        self._state = (self._state[0], self._now())

    def __exit__(self, *_: object) -> None:
        self._state = (self.seconds, None)


class TimeSpent:
    """The times of one worker. `now` returns seconds of a clock that is never set."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self.blocked = Stopwatch(now)  # the thread that trains stands still for an exchange
        self.exchanging = Stopwatch(now)  # with waiting
        self.waiting = Stopwatch(now)  # for other workers, within an exchange

    @property
    def seconds(self) -> float:
        """Seconds since the worker joined."""
        return self._now() - self._began
