"""The sessions that have ended, numbered in the order in which they did. Pure.

A memory server says how far it has heard, and gets the rest. A server that has missed more than are remembered was away
for long. All that a session can hold at that server has run out by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

ENDED_MAX = 65_536


@dataclass(frozen=True, slots=True)
class EndedSessions:
    """Numbers by session id, lowest first. `incarnation` marks the coordinator's run: the numbers of another one say
    nothing, as the last of them may have been lost with the host.
    """

    incarnation: int = 0
    last_number: int = 0
    numbers: Mapping[int, int] = field(default_factory=dict)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self.numbers

    def end(self, session_ids: Iterable[int]) -> tuple[EndedSessions, tuple[int, ...]]:
        """Return what there is with these, none of them in it yet, and the ids that are forgotten for it."""
        numbers = dict(self.numbers)
        last = self.last_number
        for session_id in session_ids:
            last += 1
            numbers[session_id] = last
        forgotten = tuple(islice(numbers, max(0, len(numbers) - ENDED_MAX)))
        for session_id in forgotten:
            del numbers[session_id]
        return EndedSessions(self.incarnation, last, numbers), forgotten

    def after(self, incarnation: int, number: int) -> tuple[int, ...]:
        """Return, in order, what one has not heard of who knows all up to this number of that incarnation."""
        if incarnation != self.incarnation:
            return tuple(self.numbers)
        newest_first = takewhile(lambda session_id: self.numbers[session_id] > number, reversed(self.numbers))
        return tuple(newest_first)[::-1]
