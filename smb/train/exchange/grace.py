"""Grace: how long a round that has its quorum waits for the others. Pure: times are passed in.

With grace="auto" the grace follows this worker's measurements. It measures two times in each round: from the opening to
the quorum, and from the quorum until all contributions had arrived. The grace is a quantile of the second time. It is
at most the median of the first time, so waiting for slow workers never takes longer than the others' own work, and at
most the lease. A round that was closed without a member counts as if that member had needed twice the grace, so a grace
that is too short grows again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

AUTO = "auto"
_ROUNDS = 32  # number of latest rounds that are used
_ROUNDS_LEAST = 4  # with fewer rounds the grace is the bound
_QUANTILE = 0.9


class Grace:
    """The grace of a group's rounds, as one worker measures it. `setting`: seconds, or AUTO. Times are seconds of one
    monotonic clock.
    """

    def __init__(self, setting: float | str, lease: float) -> None:
        self._fixed = None if isinstance(setting, str) else setting
        self._lease = lease
        self._opened: float | None = None
        self._quorum: tuple[int, float] = (-1, 0.0)  # a round, and when it had its quorum
        self._used = 0.0  # the grace of that round
        self._quorums: deque[float] = deque(maxlen=_ROUNDS)
        self._others: deque[float] = deque(maxlen=_ROUNDS)

    def seconds(self) -> float:
        if self._fixed is not None:
            return self._fixed
        bound = min(self._lease, statistics.median(self._quorums)) if self._quorums else self._lease
        if len(self._others) < _ROUNDS_LEAST:
            return bound
        ordered = sorted(self._others)
        return min(bound, ordered[math.ceil(_QUANTILE * len(ordered)) - 1])

    def opened(self, now: float) -> None:
        """Note that a round has been opened, as far as this worker knows."""
        self._opened = now

    def quorum(self, number: int, now: float) -> None:
        """Note that round `number` has its quorum. A repeated call changes nothing."""
        if self._quorum[0] == number:
            return
        self._used = self.seconds()
        self._quorum = number, now
        if self._opened is not None:
            self._quorums.append(now - self._opened)
            self._opened = None

    def left(self, number: int, now: float) -> float:
        """Return the seconds until round `number` may be closed by its quorum; infinity while no quorum was seen."""
        seen, since = self._quorum
        return math.inf if seen != number else since + self._used - now

    def ended(self, number: int, now: float, *, whole: bool) -> None:
        """Note that round `number` was closed, with all of its members (`whole`) or without some. If its quorum was not
        noted before, it counts as reached now.
        """
        if self._fixed is not None:
            return
        self.quorum(number, now)
        self._others.append(now - self._quorum[1] if whole else 2 * self._used)
        self._quorum = -1, 0.0
