"""The pause between two tries of the same thing."""

from __future__ import annotations

import random
from collections.abc import Callable

# A user's program may seed Python's own generator, and expects the same numbers from it in each run.
own_random = random.SystemRandom()


class Backoff:
    """Pauses that double from `first_s` to `most_s` seconds. Each is shortened by up to half at random, so that many
    who failed at the same moment do not all come back at the same moment. For one thread.
    """

    def __init__(self, first_s: float, most_s: float, draw: Callable[[], float] = own_random.random) -> None:
        """`draw` returns numbers from 0 to 1, 1 excluded."""
        assert 0 < first_s <= most_s
        self._pause_s, self._most_s, self._draw = first_s, most_s, draw

    def next_s(self) -> float:
        """Return the next pause in seconds. The caller sleeps, with whatever can end its sleep."""
        pause_s = self._pause_s * (1 - self._draw() / 2)
        self._pause_s = min(2 * self._pause_s, self._most_s)
        return pause_s
