"""A session's end gets from the coordinator to a real memory server, whichever way is open, and there it is final."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import smb
from smb.config.parse import parse_address
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator, SessionEndedError
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.memory_server import coordinator_stub
from tests.support.raw import Frame, Opcode, RawClient, Status

SESSION_ENDED = 12  # csrc/smb/types.h
LEASE = ("--session-lease", "1")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def let_in(server: Daemon, session: int) -> bool:
    """Whether the server shakes hands with the session, which fences any other connection of its first lane."""
    with RawClient(parse_address(server.address)[1]) as client:
        client.session = session
        status = client.ask(Frame(Opcode.HELLO))[0].status
    assert status in (Status.OK, SESSION_ENDED)
    return status == Status.OK


def test_a_closed_session_is_let_in_no_more(daemons: Daemons) -> None:
    """The server is told at once; a stranger's session, and one that lives, are let in as before."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    with coordinator_stub(coordinator.address) as stub:
        closed, living = (stub.OpenSession(pb.OpenSessionRequest(client_name="h")).session_id for _ in range(2))
        assert let_in(server, closed)
        stub.CloseSession(pb.CloseSessionRequest(session_id=closed))
        wait_for(lambda: not let_in(server, closed), "end of the session")
        assert let_in(server, living)


def test_a_server_that_was_away_hears_of_it_when_it_registers(daemons: Daemons) -> None:
    """The lease runs out while the server is down; its next run shuts the session out before it says that it serves."""
    coordinator = daemons.coordinator("127.0.0.1:0", None, *LEASE)
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with coordinator_stub(coordinator.address) as stub:
        server.kill()
        session = stub.OpenSession(pb.OpenSessionRequest(client_name="h")).session_id
        wait_for(lambda: coordinator.metric("smb_coordinator_ended_sessions") == 1, "end of the session")
        again = daemons.memory_server(coordinator.address, "a")
        assert not let_in(again, session)
    renewing = Coordinator(coordinator.address)
    try:
        with pytest.raises(SessionEndedError, match=r"its lease ran out.*connect again") as ended:
            renewing.renew_session(session, "h", 5.0)
        assert isinstance(ended.value, smb.UnavailableError)
    finally:
        renewing.close()


def test_an_end_outlives_the_coordinator(daemons: Daemons) -> None:
    """A client that died while the coordinator was down: the next run knows of its session, and ends it."""
    coordinator = daemons.coordinator("127.0.0.1:0", None, *LEASE)
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with coordinator_stub(coordinator.address) as stub:
        session = stub.OpenSession(pb.OpenSessionRequest(client_name="h")).session_id
        address = coordinator.address
        coordinator.kill()
        assert let_in(server, session)
        daemons.coordinator(address, None, *LEASE)
        wait_for(lambda: not let_in(server, session), "end of the session")
