"""The sessions that have ended, numbered in their order. Pure.

A memory server says up to which number it has heard, and gets the later ones. If it has missed more than are
remembered, it was away so long that all that these sessions could hold at that server has run out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile

ENDED_MAX = 65_536


@dataclass(frozen=True, slots=True)
class EndedSessions:
    """Numbers by session id, lowest first. `incarnation` identifies the coordinator's run. Numbers of another run mean
    nothing here, because the last of them may have been lost with the host.
    """

    incarnation: int = 0
    last_number: int = 0
    numbers: Mapping[int, int] = field(default_factory=dict)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self.numbers

    def end(self, session_ids: Iterable[int]) -> tuple[EndedSessions, tuple[int, ...]]:
        """Return the value with these new ids added, and the ids that it forgets to make room."""
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
        """Return, in order, the ids that a server has not heard of if it knows all up to that number of that run."""
        if incarnation != self.incarnation:
            return tuple(self.numbers)
        newest_first = takewhile(lambda session_id: self.numbers[session_id] > number, reversed(self.numbers))
        return tuple(newest_first)[::-1]
