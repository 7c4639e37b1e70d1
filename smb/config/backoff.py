"""The pause between two tries of the same thing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

# A user's program may seed Python's own generator, and expects the same numbers from it in each run.
own_random = random.SystemRandom()


def _endless() -> float:
    return math.inf


class Backoff:
    """Pauses that double from `first_s` to `most_s` seconds. Each is shortened by up to half at random, so that many
    who failed at the same moment do not all come back at the same moment. For one thread.
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        left: Callable[[], float] = _endless,
        draw: Callable[[], float] = own_random.random,
    ) -> None:
        """`left` returns the seconds until the deadline of all tries, `draw` numbers from 0 to 1, 1 excluded."""
        assert 0 < first_s <= most_s
        self._pause_s, self._most_s, self._left, self._draw = first_s, most_s, left, draw
        self._next_s = self._drawn()

    def over(self) -> bool:
        """Return whether the deadline comes before the end of the next pause."""
        return self._left() <= self._next_s

    def next_s(self) -> float:
        """Return the next pause in seconds, which ends at the deadline at the latest. The caller sleeps, with whatever
        can end its sleep.
        """
        pause_s = min(self._next_s, max(0.0, self._left()))
        self._pause_s = min(2 * self._pause_s, self._most_s)
        self._next_s = self._drawn()
        return pause_s

    def _drawn(self) -> float:
        return self._pause_s * (1 - self._draw() / 2)
