"""memserver.registrant and memserver.registration_thread: what a server makes of the coordinator's answers."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock, call

import grpc
import pytest

from memserver import registration_thread
from memserver.registrant import Identity, Registrant, Turn
from memserver.registration_thread import Registration
from memserver.stamps import ServerStamp, Stamps
from smb.rpc import control_pb2 as pb
from smb.rpc.trailers import ANSWERED, STANDBY
from tests.support.daemons import wait_for

IDENTITY = Identity("a", 1, "127.0.0.1:1", "127.0.0.1:2", "", "", 1)


def registrant(segments: Any) -> Registrant:
    return Registrant("127.0.0.1:3", IDENTITY, segments, pb.ServerLoad, Mock(), Mock(), draw=lambda: 0.0)


def answered(turn: Turn, reply: pb.RegisterServerReply) -> float:
    """Give a turn that asks once its answer; return the pause."""
    assert next(turn).method == "RegisterServer"
    with pytest.raises(StopIteration) as ended:
        turn.send(reply)
    return float(ended.value.value)


def empty() -> Mock:
    """A server's segments: there are none."""
    segments = Mock()
    segments.list_for_coordinator.return_value = ({}, [])
    segments.held.return_value, segments.ids.return_value, segments.inventory.return_value = {}, [], {}
    segments.used_bytes.return_value = 0
    return segments


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_engine_hears_whether_it_was_told_of_every_ended_session(forgotten: bool) -> None:
    """After those that were named have ended: where the coordinator has forgotten others, it does not know all."""
    segments = empty()
    ours = registrant(segments)
    ended = pb.EndedSessions(incarnation=1, last_number=3, session_ids=[7], forgotten=forgotten)
    assert answered(ours.turn(), pb.RegisterServerReply(lease_ms=6000, ended_sessions=ended)) == 2.0
    assert segments.mock_calls[-2:] == [call.sessions.end([7]), call.sessions.know_all(not forgotten)]
    renewal = next(ours.turn()).request
    assert renewal.sessions_seen == pb.SessionsSeen(incarnation=1, last_number=3)


def test_a_fault_does_not_end_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its thread ended at a file that was being replaced, and the server was lost to everybody."""
    credentials, reply = Mock(), pb.RegisterServerReply(lease_ms=3000)
    looks = chain([FileNotFoundError("key.pem")], repeat(credentials))
    monkeypatch.setattr(registration_thread, "Current", Mock(return_value=Mock(now=Mock(side_effect=looks))))
    monkeypatch.setattr(registration_thread, "channel", Mock())
    monkeypatch.setattr(
        registration_thread, "CoordinatorStub", Mock(return_value=Mock(RegisterServer=Mock(return_value=reply)))
    )
    ours = Registration(registrant(empty()), credentials)
    wait_for(ours.connected, "registration")
    ours.close()
    assert "key.pem" in caplog.text


@pytest.mark.parametrize("same_run", [False, True])
def test_what_was_dropped_may_be_made_again_for_another_run(same_run: bool) -> None:
    """A coordinator whose records were restored may have it again; one that had it dropped has not."""
    kept = Mock(read=Mock(return_value=(ServerStamp(1, 5, 10),)))
    segments, stamps = empty(), Stamps(kept)
    ours = Registrant("127.0.0.1:3", IDENTITY, segments, pb.ServerLoad, Mock(), Mock(), stamps=stamps)
    answered(ours.turn(), pb.RegisterServerReply(lease_ms=3000, stamp=pb.StoreStamp(cluster=1, term=5, sequence=2)))
    term = 5 if same_run else 6
    stamps.learn(ServerStamp(1, term, 3))  # of a creation, which may come before the registration
    failed(ours.turn(), grpc.StatusCode.NOT_FOUND)
    answered(ours.turn(), pb.RegisterServerReply(lease_ms=3000, stamp=pb.StoreStamp(cluster=1, term=term, sequence=4)))
    assert segments.registered.call_args_list == [call(5), call(term)]


class Unanswered(grpc.RpcError):
    """A call that failed with this code, and with these trailers if a coordinator has answered it."""

    def __init__(self, code: grpc.StatusCode, *trailers: tuple[str, str]) -> None:
        self.code = lambda: code
        self.details = lambda: "none"
        self.trailing_metadata = lambda: trailers


def failed(turn: Turn, code: grpc.StatusCode, *trailers: tuple[str, str]) -> float:
    """Let a turn's call fail; return the pause."""
    next(turn)
    with pytest.raises(StopIteration) as ended:
        turn.throw(Unanswered(code, *trailers))
    return float(ended.value.value)


def renewed(turn: Turn, port: int) -> None:
    assert next(turn).method == "RenewServer"
    with pytest.raises(StopIteration):
        turn.send(pb.RenewServerReply(lease_ms=6000, servers_port=port))


def test_renewals_go_to_the_port_for_memory_servers() -> None:
    """It is kept while it is only slow. If it is gone, the port for all has its turn at once and names the next one."""
    ours = registrant(empty())
    assert ours.coordinator == "127.0.0.1:3"
    answered(ours.turn(), pb.RegisterServerReply(lease_ms=6000, servers_port=4))
    assert ours.coordinator == "127.0.0.1:4"
    renewed(ours.turn(), 4)
    failed(ours.turn(), grpc.StatusCode.DEADLINE_EXCEEDED)
    assert ours.coordinator == "127.0.0.1:4"
    assert failed(ours.turn(), grpc.StatusCode.UNAVAILABLE) == 0.0
    assert ours.coordinator == "127.0.0.1:3"
    renewed(ours.turn(), 5)
    assert ours.coordinator == "127.0.0.1:5"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_port_out_of_reach_is_tried_once(code: grpc.StatusCode, caplog: pytest.LogCaptureFixture) -> None:
    """A firewall may close it: the log says what to do, and renewals stay at the port for all. A coordinator without
    such a port names none."""
    ours = registrant(empty())
    answered(ours.turn(), pb.RegisterServerReply(lease_ms=6000, servers_port=4))
    assert failed(ours.turn(), code) == 0.0
    assert "smb coordinator --servers" in caplog.text
    assert "127.0.0.1:4" in caplog.text
    for port in (4, 0, 4):
        renewed(ours.turn(), port)
        assert ours.coordinator == "127.0.0.1:3"


def test_a_leader_that_puts_it_off_is_asked_again() -> None:
    """One that stands by would keep the call until its patience ends. A server has to ask the next coordinator only if
    this one does not answer, or does not lead.
    """
    ours = Registrant("127.0.0.1:3,127.0.0.1:4", IDENTITY, empty(), pb.ServerLoad, Mock(), Mock(), draw=lambda: 0.5)
    put_off = grpc.StatusCode.UNAVAILABLE
    assert failed(ours.turn(), put_off, (ANSWERED, "1"), (STANDBY, "7")) == 0.0
    assert ours.coordinator == "127.0.0.1:4"
    for _ in range(3):
        assert failed(ours.turn(), put_off, (ANSWERED, "1")) > 0.0
        assert ours.coordinator == "127.0.0.1:4"
    turn = ours.turn()
    assert next(turn).options["metadata"] == ()
    turn.close()
    assert failed(ours.turn(), put_off) == 0.0
    assert ours.coordinator == "127.0.0.1:3"
