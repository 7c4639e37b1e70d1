"""The pause between two tries of the same operation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

# Not Python's own generator: a user's program may seed that, and expects the same numbers from it in each run.
own_random = random.SystemRandom()


def _endless() -> float:
    return math.inf


class Backoff:
    """Pauses that double from `first_s` to `most_s` seconds. Each is shortened at random by up to half, so that many
    clients that failed at the same moment do not all come back at the same moment. For one thread.
    """

    def __init__(
        self,
        first_s: float,
        most_s: float,
        left: Callable[[], float] = _endless,
        draw: Callable[[], float] = own_random.random,
    ) -> None:
        """`left` returns the seconds until the deadline of all tries; `draw` returns numbers from 0 up to, not
        including, 1."""
        assert 0 < first_s <= most_s
        self._pause_s, self._most_s, self._left, self._draw = first_s, most_s, left, draw
        self._next_s = self._drawn()

    def over(self) -> bool:
        """Return whether the deadline comes before the end of the next pause."""
        return self._left() <= self._next_s

    def next_s(self) -> float:
        """Return the next pause in seconds, which ends at the deadline at the latest. The caller sleeps, in a way that
        can be interrupted as the caller needs.
        """
        pause_s = min(self._next_s, max(0.0, self._left()))
        self._pause_s = min(2 * self._pause_s, self._most_s)
        self._next_s = self._drawn()
        return pause_s

    def _drawn(self) -> float:
        return self._pause_s * (1 - self._draw() / 2)
