"""The port for renewals of sessions: when a client asks there, and when at the port for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from smb.rpc import control_pb2 as pb
from smb.rpc import sessions_port
from smb.rpc.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from smb.rpc.coordinator_client import Coordinator, SessionEndedError
from smb.rpc.trailers import ANSWERED, BUSY, STANDBY

TIMEOUT_S = 60.0


class _Port(CoordinatorServicer):
    """Counts renewals. `refuses`: a code, and the metadata with which it refuses all."""

    def __init__(self, sessions_port: int = 0) -> None:
        self.sessions_port, self.renewals, self.opens = sessions_port, 0, 0
        self.refuses: tuple[grpc.StatusCode, str] | None = None

    def OpenSession(self, request: Any, context: Any) -> pb.OpenSessionReply:  # noqa: N802
        return pb.OpenSessionReply(session_id=7, lease_ms=30_000, sessions_port=self.sessions_port)

    def RenewSession(self, request: Any, context: Any) -> pb.RenewSessionReply:  # noqa: N802
        self.renewals += 1
        if self.refuses is not None:
            context.set_trailing_metadata(((ANSWERED, "1"), (self.refuses[1], "1")))
            context.abort(self.refuses[0], "refused")
        return pb.RenewSessionReply(lease_ms=30_000, sessions_port=self.sessions_port)

    def OpenBuffer(self, request: Any, context: Any) -> pb.Buffer:  # noqa: N802
        self.opens += 1
        return pb.Buffer(id=request.id, name=request.name)


@contextmanager
def _serving(service: _Port, at: int = 0) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port(f"127.0.0.1:{at}")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def _renew(client: Coordinator, service: _Port) -> int:
    before = service.renewals
    client.renew_session(7, "test", TIMEOUT_S)
    return service.renewals - before


def test_sessions_and_tokens_are_renewed_at_the_port_for_sessions() -> None:
    """An open by name, or one that waits, is asked of the port for all. What the leader refuses is refused."""
    own = _Port()
    with _serving(own) as port, _serving(_Port(port)) as at:
        client = Coordinator(f"127.0.0.1:{at}")
        try:
            client.open_session("test", TIMEOUT_S)
            assert _renew(client, own) == 1
            client.open_buffer("w", 0.0, TIMEOUT_S, 5)
            assert own.opens == 1
            client.open_buffer("w", 0.0, TIMEOUT_S)
            client.open_buffer("w", 1.0, TIMEOUT_S, 5)
            assert own.opens == 1
            own.refuses = (grpc.StatusCode.FAILED_PRECONDITION, "smb-test")
            with pytest.raises(SessionEndedError):
                client.renew_session(7, "test", TIMEOUT_S)
        finally:
            client.close()


def test_without_that_port_the_port_for_all_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy port is asked again the next time. One of a coordinator that stands by, or that nobody reaches, is left
    alone until an answer names one again, and one that never answered only after a minute.
    """
    now = [1000.0]
    monkeypatch.setattr(sessions_port.time, "monotonic", lambda: now[0])
    own = _Port()
    with _serving(own) as port:
        for_all = _Port(port)
        with _serving(for_all) as at:
            client = Coordinator(f"127.0.0.1:{at}")
            try:
                client.open_session("test", TIMEOUT_S)
                for refusal in (BUSY, STANDBY):
                    own.refuses = (grpc.StatusCode.UNAVAILABLE, refusal)
                    before = own.renewals
                    assert _renew(client, for_all) == 1
                    assert own.renewals == before + 1
                    own.refuses = None
                    assert _renew(client, own) == 1
                with _serving(_Port()) as gone:
                    pass
                for_all.sessions_port = gone
                own.refuses = (grpc.StatusCode.UNAVAILABLE, STANDBY)
                assert _renew(client, for_all) == 1  # which names the port that nobody reaches
                own.refuses = None
                assert _renew(client, for_all) == 1  # that port did not answer
                there = _Port()
                with _serving(there, gone):
                    assert _renew(client, there) == 0
                    now[0] += 61
                    assert _renew(client, for_all) == 1  # which names it again
                    assert _renew(client, there) == 1
            finally:
                client.close()


class Silent(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def trailing_metadata(self) -> tuple[()]:
        return ()


class OnePeer:
    """In place of the connection to a port: `answer` says what it answers, by its address."""

    now = None
    answer: Callable[[str], str]

    def __init__(self, addresses: list[str], _: object) -> None:
        self.address = addresses[0]

    def take_new_certificate(self) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, *_: object) -> str:
        return OnePeer.answer(self.address)


def test_an_answer_of_a_former_port_does_not_count_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread learns of the next port while this one is answered. If the next one is shut off, it is left alone
    after its first silence; it was kept as if it had answered, and held up every renewal.
    """
    asked: list[str] = []

    def answer(address: str) -> str:
        asked.append(address)
        if address == "h:2":
            raise Silent
        port.learn("h:9", 2)
        return "renewed"

    monkeypatch.setattr(sessions_port, "Peers", OnePeer)
    monkeypatch.setattr(OnePeer, "answer", staticmethod(answer), raising=False)
    port = sessions_port.SessionsPort(None)
    port.learn("h:9", 1)
    assert [port.ask("RenewSession", None, 1.0, ()) for _ in range(3)] == ["renewed", None, None]
    assert asked == ["h:1", "h:2"]


def test_a_port_that_a_firewall_closes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been silent three times and the port for all has answered, for a minute: it had answered before, and
    was asked first for ever, which took half of each renewal's time. A port that is slow twice is kept.
    """
    now, asked, silent = [1000.0], [0], [False]

    def answer(_: str) -> str:
        asked[0] += 1
        if silent[0]:
            raise Silent
        return "renewed"

    def renew() -> bool:
        """Whether that port was asked. The port for all answers, if that one does not."""
        before = asked[0]
        if port.ask("RenewSession", None, 1.0, ()) is None:
            port.learn("h:9", 1)
        return asked[0] > before

    monkeypatch.setattr(sessions_port.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions_port, "Peers", OnePeer)
    monkeypatch.setattr(OnePeer, "answer", staticmethod(answer), raising=False)
    port = sessions_port.SessionsPort(None)
    port.learn("h:9", 1)
    for silent[0] in (False, True, True, False, True, True, True):
        assert renew()
    assert not renew()
    now[0] += 61
    silent[0] = False
    assert not renew()  # the port for all names it again
    assert renew()
