"""How many copies may be under way in the whole cluster. Pure; time is passed in.

A lost server may have had thousands of small segments. Making all their copies at once takes processors and links on
which servers have to renew their leases; whoever misses one has its copies made again, too. So copies begin slowly, and
become few as soon as some server is late.
"""

from __future__ import annotations

FIRST = 4  # copies at once; the limit for each server comes on top of it (wanted_copies.py)
STRAINED = 1  # while some server is late: recovery goes on, and costs little
MOST = 4096
DOUBLES_S = 1.0  # while no server is late, this many seconds double the number


class CopyPace:
    """The number of copies that may be under way, from one look for missing copies to the next."""

    def __init__(self) -> None:
        self._most = FIRST
        self._changed_at: float | None = None

    def rest(self) -> None:
        """No copy is wanted: the next ones begin slowly again."""
        self._most, self._changed_at = FIRST, None

    def most(self, now: float, *, strained: bool) -> int:
        """Return the number at `now`, in seconds of a monotonic clock. `strained`: some server is late."""
        if strained:
            self._most, self._changed_at = STRAINED, now
        elif self._changed_at is None:
            self._changed_at = now
        elif now - self._changed_at >= DOUBLES_S:
            self._most, self._changed_at = min(2 * self._most, MOST), now
        return self._most
