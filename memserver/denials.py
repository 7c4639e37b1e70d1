"""Requests that this server refused, as clients had no right to them: lines in the log, bounded.

The engine counts them by session, segment and kind. Names come from the coordinator, with its answer to a renewal: what
is found at one renewal is logged at the next, when the names are there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memserver.engine import Denial

EVERY_S = 60.0  # a session's next line comes no sooner
LINES_MAX = 20  # in EVERY_S, of all sessions
KINDS_MAX = 4  # in a line

_log = logging.getLogger("access")


class DeniedRequests:
    """Says in the log who asked for what without a right to it. For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: dict[tuple[int, bool], list[Denial]] = {}  # by (session, proven), still to be logged
        self._left_out = 0  # requests of which no line will tell more
        self._logged: dict[tuple[int, bool], float] = {}
        self._logged_at = float("-inf")  # of what was left out

    def look(
        self, denials: list[Denial], left_out: int, clients: Mapping[int, str], buffers: Mapping[int, str]
    ) -> None:
        """Log what the last look found, and take what was found now. `clients` and `buffers` are names by id."""
        now = self._now()
        self._logged = {who: at for who, at in self._logged.items() if now - at < EVERY_S}
        for who, found in list(self._found.items()):
            if who in self._logged:
                continue
            del self._found[who]
            if len(self._logged) >= LINES_MAX:
                self._left_out += sum(each.count for each in found)
                continue
            self._logged[who] = now
            _log.warning("refused: %s had no right to %s", _who(who, clients), _what(found, buffers))
        self._left_out += left_out
        for each in denials:
            self._keep(each)
        if self._left_out and now - self._logged_at >= EVERY_S:
            _log.warning("refused: %d more requests, of which no line tells more", self._left_out)
            self._left_out, self._logged_at = 0, now

    def _keep(self, denial: Denial) -> None:
        who = (denial.session_id, denial.proven)
        if who not in self._found and len(self._found) >= LINES_MAX:
            self._left_out += denial.count
            return
        kept = self._found.setdefault(who, [])
        for index, each in enumerate(kept):
            if (each.segment_id, each.kind) == (denial.segment_id, denial.kind):
                kept[index] = replace(each, count=each.count + denial.count)
                return
        if len(kept) < KINDS_MAX:
            kept.append(denial)
        else:
            self._left_out += denial.count


def _who(who: tuple[int, bool], clients: Mapping[int, str]) -> str:
    session_id, proven = who
    name = clients.get(session_id, f"a client that is not known here (session {session_id:x})")
    return name if proven else f"somebody without a valid token, who says to be {name},"


def _what(found: list[Denial], buffers: Mapping[int, str]) -> str:
    return ", ".join(
        f"{each.count} {each.kind} of {buffers.get(each.segment_id, f'segment {each.segment_id:x}')}" for each in found
    )
