"""The client of the coordinator, without one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from smb.config import cancellation
from smb.errors import NotFoundError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from smb.rpc.coordinator_client import Coordinator
from smb.rpc.trailers import ANSWERED, BUSY, OUTCOME, STANDBY


def test_a_create_that_is_made_again_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that must be the first has a number of its own: its answer may be lost, and the next run then has it."""
    asked: list[Any] = []

    def call(_method: str, request: Any, _timeout: float) -> pb.Buffer:
        asked.append(request)
        return pb.Buffer()

    coordinator = Coordinator("127.0.0.1:1")
    monkeypatch.setattr(coordinator, "_call", call)
    for exist_ok in (False, False, True):
        coordinator.create_buffer(pb.CreateBufferRequest(name="w", exist_ok=exist_ok), 1.0)
    coordinator.close()
    first, second, opens = (request.attempt_id for request in asked)
    assert first and second and first != second  # noqa: PT018 - one statement of all three
    assert opens == 0


@pytest.mark.parametrize("turn_s", [None, 0.2])
def test_what_did_not_appear_is_told_with_the_callers_time(
    monkeypatch: pytest.MonkeyPatch, turn_s: float | None
) -> None:
    """The coordinator names the time that was left when it was asked, a millisecond less on a busy machine."""

    def call(_method: str, request: Any, _timeout: float) -> pb.Buffer:
        raise NotFoundError(f'no buffer "w" appeared within {(request.timeout_ms - 1) / 1000:g} s; `smb ls` lists them')

    coordinator = Coordinator("127.0.0.1:1")
    monkeypatch.setattr(coordinator, "_call", call)
    monkeypatch.setattr(cancellation, "turn_s", lambda left: turn_s if turn_s and left > turn_s else None)
    with pytest.raises(NotFoundError, match=r'^no buffer "w" appeared within 0.7 s; `smb ls` lists them$'):
        coordinator.open_buffer("w", 0.7, 1.0)
    coordinator.close()


class _Busy(CoordinatorServicer):
    """Refuses the first calls, as a coordinator with too many calls in progress does, and answers the later ones."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals

    def RenameBuffer(self, request: Any, context: Any) -> pb.RenameBufferReply:  # noqa: N802
        if self.left > 0:
            self.left -= 1
            trailers = ((ANSWERED, "1"), (OUTCOME, "not applied"), (BUSY, "1"))
            context.set_trailing_metadata(trailers)
            context.abort(grpc.StatusCode.UNAVAILABLE, "RenameBuffer: 384 calls are in progress already")
        return pb.RenameBufferReply()


@pytest.mark.parametrize(("refusals", "timeout"), [(3, 60.0), (10**9, 1.0)])
def test_a_busy_coordinator_is_asked_again_until_the_timeout(refusals: int, timeout: float) -> None:
    """Also for a call that must not be carried out twice, since a refused call was not. The last error says why."""
    server = grpc.server(ThreadPoolExecutor(2))
    service = _Busy(refusals)
    add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    coordinator = Coordinator(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        begun = time.monotonic()
        if refusals == 3:
            coordinator.rename_buffer(pb.RenameBufferRequest(name="a", new_name="b"), timeout)
            assert service.left == 0
            return
        with pytest.raises(UnavailableError, match="in progress already") as refused:
            coordinator.rename_buffer(pb.RenameBufferRequest(name="a", new_name="b"), timeout)
        assert refused.value.outcome == "not applied"
        assert time.monotonic() - begun >= timeout
    finally:
        coordinator.close()
        server.stop(None)


class _Overloaded(CoordinatorServicer):
    """Cancels the first calls, as gRPC does for a server whose queue is full, and answers the later ones."""

    left = 3

    def OpenSession(self, request: Any, context: Any) -> pb.OpenSessionReply:  # noqa: N802
        if self.left > 0:
            self.left -= 1
            context.abort(grpc.StatusCode.CANCELLED, "")
        return pb.OpenSessionReply(session_id=1, lease_ms=1000)

    def RenameBuffer(self, request: Any, context: Any) -> pb.RenameBufferReply:  # noqa: N802
        context.abort(grpc.StatusCode.CANCELLED, "")
        return pb.RenameBufferReply()


class _Full(CoordinatorServicer):
    """A coordinator under a flood: its queue is full."""

    asked = 0

    def ListServers(self, request: Any, context: Any) -> pb.ListServersReply:  # noqa: N802
        self.asked += 1
        context.abort(grpc.StatusCode.CANCELLED, "")
        return pb.ListServersReply()


class _Standby(_Full):
    """One that stands by."""

    def ListServers(self, request: Any, context: Any) -> pb.ListServersReply:  # noqa: N802
        self.asked += 1
        context.set_trailing_metadata(((ANSWERED, "1"), (OUTCOME, "not applied"), (STANDBY, "3")))
        context.abort(grpc.StatusCode.UNAVAILABLE, "this one does not lead now")
        return pb.ListServersReply()


def test_a_flooded_leader_is_asked_more_often_than_those_that_stand_by() -> None:
    """And the error at the end says what each said, not only what the last one said, which may stand by."""
    services = [_Standby(), _Full()]
    servers = [grpc.server(ThreadPoolExecutor(2)) for _ in services]
    ports = []
    for service, server in zip(services, servers, strict=True):
        add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        server.start()
    standby, leader = (f"127.0.0.1:{port}" for port in ports)
    coordinator = Coordinator(f"{standby},{leader}")
    try:
        with pytest.raises(UnavailableError) as refused:
            coordinator.list_servers(5.0)
        assert f"{standby}: this one does not lead now" in str(refused.value)
        assert f"{leader}: the coordinator" in str(refused.value)
        assert "too many calls" in str(refused.value)
        assert services[1].asked > services[0].asked
    finally:
        coordinator.close()
        for server in servers:
            server.stop(None)


def test_a_first_call_that_finds_no_place_is_repeated() -> None:
    """The coordinator has not answered this client before. A call that may have been carried out is not repeated."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_CoordinatorServicer_to_server(_Overloaded(), server)  # type: ignore[no-untyped-call]
    coordinator = Coordinator(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        with pytest.raises(UnavailableError, match="too many calls") as refused:
            coordinator.rename_buffer(pb.RenameBufferRequest(name="a", new_name="b"), 60.0)
        assert refused.value.outcome == "unknown"
        assert coordinator.open_session("client", 60.0)[0] == 1
    finally:
        coordinator.close()
        server.stop(None)
