"""Requests without a right in a memory server's log: who asked for what, in a bounded number of lines."""

from __future__ import annotations

import pytest

from memserver import denials
from memserver.denials import DeniedRequests
from memserver.engine_figures import Denial


class Log:
    """Looks with a clock of its own; returns the lines of each look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self._caplog = caplog
        self._denied = DeniedRequests(lambda: self.now)

    def look(self, *found: Denial, left_out: int = 0) -> list[str]:
        self._caplog.clear()
        self._denied.look(list(found), left_out, {1: "vm:7 (bob)"}, {2: "team/w"})
        return [record.getMessage() for record in self._caplog.records]


def test_a_line_says_who_asked_for_what(caplog: pytest.LogCaptureFixture) -> None:
    """Names stand in it where they are known; a session that nobody has proven is not taken for its client's."""
    log = Log(caplog)
    assert log.look(Denial(1, 2, "write", 3, True), Denial(1, 9, "lock", 1, True), Denial(1, 2, "read", 1, False)) == []
    assert log.look() == [
        "refused: vm:7 (bob) had no right to these requests: write of team/w (3 times), lock of segment 9 (1 time)",
        "refused: a client without a valid token, which claims to be vm:7 (bob), had no right to these requests: "
        "read of team/w (1 time)",
    ]
    assert log.look() == []


def test_a_session_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Meanwhile its requests are added up, and the next line has their sum."""
    log = Log(caplog)
    log.look(Denial(1, 2, "write", 1, True))
    assert len(log.look(Denial(1, 2, "write", 5, True))) == 1
    for _ in range(denials.EVERY_S.__trunc__() // 2 - 1):
        log.now += 2
        assert log.look(Denial(1, 2, "write", 1, True)) == []
    log.now += 2
    assert log.look() == ["refused: vm:7 (bob) had no right to these requests: write of team/w (34 times)"]


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of a thousand sessions a bounded number has a line, and one line counts the rest."""
    log = Log(caplog)
    lines = log.look(*(Denial(session, 2, "read", 1, False) for session in range(1000)), left_out=10)
    lines += log.look(*(Denial(session, 2, "read", 1, False) for session in range(1000)))
    lines += log.look()
    assert len(lines) == denials.LINES_MAX + 1
    assert sum("more requests" in line for line in lines) == 1
