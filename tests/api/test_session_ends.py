"""A session's end gets from the coordinator to a real memory server, whichever way is open, and there it is final."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smb
from smb.config.parse import parse_address
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import Coordinator, SessionEndedError
from smb.spi import session_of
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.memory_server import coordinator_stub
from tests.support.raw import Frame, Opcode, RawClient, Status
from tests.support.transports import FAR

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


def test_a_lock_is_not_held_once_its_client_knows_that_its_session_has_ended(daemons: Daemons) -> None:
    """Its ttl would be over an hour later. A lock of a session that lives stays held."""
    coordinator = daemons.coordinator("127.0.0.1:0", None, "--session-lease", "6")
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with (
        smb.connect(coordinator.address, name="mine") as client,
        smb.connect(coordinator.address, name="theirs") as other,
    ):
        locks = [each.lock(name, ttl=3600).acquire() for each, name in ((client, "mine"), (other, "theirs"))]
        assert [lock.held for lock in locks] == [True, True]
        session_of(other).coordinator.kick_clients(session_of(client).name, 20.0)
        wait_for(lambda: not locks[0].held, "end that the client has heard of")
        assert locks[1].held


LEAVES = """
import smb, sys
print(smb.connect(sys.argv[1]).open("w").read().sum())
kept = smb.connect(sys.argv[1]).open("w")  # its client is gone, and its session is not
"""


def test_who_ends_in_order_is_not_counted_as_lost(daemons: Daemons) -> None:
    """A client without a variable is closed when nobody can use it any more, at the latest with the process."""
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with smb.connect(coordinator.address) as client:
        buffer = client.create("w", 10)
        subprocess.run([sys.executable, "-c", LEAVES, coordinator.address], check=True, timeout=60)
        assert coordinator.metric("smb_coordinator_sessions") == 1
        other = smb.connect(coordinator.address).open("w")
        assert coordinator.metric("smb_coordinator_sessions") == 2
        assert other.read().sum() == 0
        del other
        wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 1, "end of the session")
        assert buffer.read().sum() == 0


def test_a_session_that_has_ended_is_taken_up_again(daemons: Daemons) -> None:
    """As after a night's sleep: buffers go on, what was deleted does not, locks are free, and a second call does
    nothing.
    """
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with smb.connect(coordinator.address, transport=FAR) as client, smb.connect(coordinator.address) as other:
        kept, gone, moved = (client.create(name, 10) for name in ("kept", "gone", "moved"))
        versions = client.create("versions", 10, versions=2)
        lock, fence = client.lock("one", ttl=60).acquire(), kept.lock(ttl=60).acquire()
        kept.fill(1)
        client.reconnect()  # nothing has ended
        kept.accumulate(np.ones(10, np.float32), fence=fence)
        session = session_of(client)
        session.coordinator.close_session(session._session_id, 10.0)  # what its lease does after a while
        wait_for(lambda: not let_in(server, session._session_id), "end of the session")
        other.delete("gone")
        other.rename("moved", "elsewhere")
        with other.lock("one", timeout=10):
            pass
        with pytest.raises(smb.UnavailableError, match=r"session has ended.*call client\.reconnect\(\)"):
            kept.read()
        client.reconnect()
        assert kept.read().tolist() == [2] * 10
        assert kept.read_async().result().sum() == 20
        assert moved.name == "elsewhere"
        moved[:] = 3
        assert versions.publish(np.full(10, 4, np.float32)) == 1
        with pytest.raises(smb.NotFoundError, match="gone"):
            client.open("gone")
        with pytest.raises(smb.Error):
            gone.read()
        with pytest.raises(smb.Error):
            kept.accumulate(np.ones(10, np.float32), fence=fence)
        for lost in (lock.check, fence.check, gone.read):
            with pytest.raises(smb.UnavailableError, match=r"session in which .* has ended.*take it anew"):
                lost()
        with kept.lock(timeout=10) as again:
            kept.accumulate(np.ones(10, np.float32), fence=again)
        client.reconnect()
        assert kept.read().tolist() == [3] * 10
        session = session_of(client)
    with pytest.raises(smb.UnavailableError, match="closed"):
        client.reconnect()
    wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 0, "end of all sessions")


def test_a_reconnection_that_fails_is_repeated(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator goes away between two buffers: both still say that the session has ended, the session that was
    begun is closed, and the next call renews both.
    """
    coordinator = daemons.coordinator()
    server = daemons.memory_server(coordinator.address, "a")
    assert server.address
    with smb.connect(coordinator.address, transport=FAR) as client:
        buffers = [client.create(name, 10) for name in ("one", "two")]
        session = session_of(client)
        session.coordinator.close_session(session._session_id, 10.0)
        wait_for(lambda: not let_in(server, session._session_id), "end of the session")
        opened: list[str] = []

        def open_once(ours: Coordinator, name: str, *arguments: Any) -> pb.Buffer:
            if opened:
                raise smb.UnavailableError("away")
            opened.append(name)
            return open_buffer(ours, name, *arguments)

        with monkeypatch.context() as patch:
            open_buffer = Coordinator.open_buffer
            patch.setattr(Coordinator, "open_buffer", open_once)
            with pytest.raises(smb.UnavailableError, match="away"):
                client.reconnect()
        assert len(opened) == 1
        wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 0, "end of what was begun")
        for buffer in buffers:
            with pytest.raises(smb.UnavailableError, match=r"call client\.reconnect\(\)"):
                buffer.read()
        client.reconnect()
        for buffer in buffers:
            buffer.fill(2)
            assert buffer.read().sum() == 20
        assert coordinator.metric("smb_coordinator_sessions") == 1
    wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 0, "end of all sessions")


def test_a_client_that_is_closed_during_a_reconnection_stays_closed(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that the reconnection has begun is closed, too."""
    coordinator = daemons.coordinator()
    assert daemons.memory_server(coordinator.address, "a").address
    client = smb.connect(coordinator.address)
    buffer, session = client.create("one", 10), session_of(client)
    session.coordinator.close_session(session._session_id, 10.0)
    opening = Coordinator.open_buffer

    def close_first(*arguments: Any) -> pb.Buffer:
        client.close()
        return opening(*arguments)

    monkeypatch.setattr(Coordinator, "open_buffer", close_first)
    for call in (client.reconnect, client.reconnect, buffer.read):
        with pytest.raises(smb.UnavailableError, match="the client is closed"):
            call()
    wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 0, "end of all sessions")
