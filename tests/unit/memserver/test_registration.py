"""memserver.registration: what a server makes of the coordinator's answers."""

from __future__ import annotations

import threading
from unittest.mock import Mock, call

import pytest

from memserver.registration import Registration
from smb.rpc import control_pb2 as pb


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_engine_hears_whether_it_was_told_of_every_ended_session(forgotten: bool) -> None:
    """After those that were named have ended: where the coordinator has forgotten others, it does not know all."""
    ours = Registration.__new__(Registration)
    segments = Mock()
    ours._segments = segments
    ours._end(pb.EndedSessions(incarnation=1, last_number=3, session_ids=[7], forgotten=forgotten))
    assert segments.mock_calls == [call.end_sessions([7]), call.know_ended(not forgotten)]
    assert ours._sessions_seen == pb.SessionsSeen(incarnation=1, last_number=3)


def test_a_fault_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its thread ended at a file that was being replaced, and the server was lost to everybody."""
    ours = Registration.__new__(Registration)
    ours._stop, ours._hurry = threading.Event(), threading.Event()
    ours._hurry.set()  # waits for nothing
    looks = iter([FileNotFoundError("key.pem"), None])

    def take_new_certificate() -> None:
        if (fault := next(looks)) is not None:
            raise fault

    def register() -> int:
        ours._stop.set()
        return 1000

    ours._take_new_certificate, ours._register = take_new_certificate, register  # type: ignore[method-assign]
    ours._succeeded = succeeded = Mock()  # type: ignore[method-assign]
    ours._run()
    succeeded.assert_called_once()
    assert "key.pem" in caplog.text
