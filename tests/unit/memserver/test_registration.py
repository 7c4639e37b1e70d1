"""memserver.registration: what a server makes of the coordinator's answers."""

from __future__ import annotations

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
