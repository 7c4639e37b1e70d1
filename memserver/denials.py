"""Log lines about requests that this server refused because the client had no right to them. Their number is bounded.

The engine counts such requests by session, segment and kind. Names come from the coordinator, in its answer to a
renewal: requests found at one renewal are logged at the next, when the names are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memserver.engine_figures import Denial

EVERY_S = 60.0  # at least this time passes between two lines about one session
LINES_MAX = 20  # per EVERY_S, for all sessions together
KINDS_MAX = 4  # kinds of requests in one line

_log = logging.getLogger("access")


class DeniedRequests:
    """Logs which client asked for what without a right to it. For one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: dict[tuple[int, bool], list[Denial]] = {}  # by (session, proven), not logged yet
        self._left_out = 0  # requests that get no line of their own
        self._logged: dict[tuple[int, bool], float] = {}
        self._logged_at = float("-inf")  # when the requests left out were logged last

    def look(
        self, denials: list[Denial], left_out: int, clients: Mapping[int, str], buffers: Mapping[int, str]
    ) -> None:
        """Log the requests found at the last look, and keep these for the next. `clients`, `buffers`: names by id."""
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
            _log.warning("refused: %s had no right to these requests: %s", _who(who, clients), _what(found, buffers))
        self._left_out += left_out
        for each in denials:
            self._keep(each)
        if self._left_out and now - self._logged_at >= EVERY_S:
            _log.warning("refused: %d more requests, which are not listed one by one", self._left_out)
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
    name = clients.get(session_id, f"an unknown client (session {session_id:x})")
    return name if proven else f"a client without a valid token, which claims to be {name},"


def _what(found: list[Denial], buffers: Mapping[int, str]) -> str:
    return ", ".join(
        f"{each.kind} of {buffers.get(each.segment_id, f'segment {each.segment_id:x}')} "
        f"({each.count} {'time' if each.count == 1 else 'times'})"
        for each in found
    )
