"""Peers that are no clients, or very slow ones, or too many of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import wait_for
from tests.support.engine_server import SCRATCH, EngineServer, engine_server, whole
from tests.support.raw import Frame, Opcode, RawClient, Status, next_session

READ = whole(Opcode.READ, SCRATCH, 0, 8)
HELLO_DEADLINE_S = 5.0  # csrc/server/connection.h
SLOW = 200


@pytest.fixture
def good(server: EngineServer) -> Iterator[RawClient]:
    """A well-behaved client that is there all the time and must not notice."""
    with server.hello() as client:
        yield client
        assert client.ask(READ)[0].status == Status.OK


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: browser/1.0 (of a user who mistook the port)\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),  # gRPC
        b"\x00" * 64,
        b"\xff" * 64,
    ],
    ids=["http", "tls", "grpc", "zeros", "ones"],
)
def test_another_protocol_is_closed(server: EngineServer, good: RawClient, greeting: bytes) -> None:
    """Whoever mistook the port is turned away at the first 64 bytes, without an answer."""
    before = server.counters()["errors"]["protocol"]
    with server.connect() as client:
        client.socket.sendall(greeting)
        with pytest.raises(ConnectionError):
            client.receive_bytes(1)
    assert server.counters()["errors"]["protocol"] == before + 1


def test_silent_peer_is_closed_at_the_deadline(server: EngineServer, good: RawClient) -> None:
    """Who has not greeted in time is closed and counted, also half-way through; who has may be silent."""
    before = server.counters()["errors"]["timeout"]
    start = time.monotonic()
    with server.connect() as silent, server.connect() as halfway, server.hello() as greeted:
        halfway.socket.sendall(Frame(Opcode.HELLO).pack()[:63])
        assert silent.closed()
        assert halfway.closed()
        assert time.monotonic() - start >= HELLO_DEADLINE_S - 0.1
        assert greeted.ask(READ)[0].status == Status.OK
    assert server.counters()["errors"]["timeout"] == before + 2


def test_two_hundred_peers_at_a_byte_a_time(server: EngineServer, good: RawClient) -> None:
    """Slow peers are served at their own speed, every one, while a good client goes on."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(SLOW)]
        requests = []
        for client in slow:
            client.session = next_session()
            requests.append(client.form(Frame(Opcode.HELLO)) + client.form(READ))
        for at in range(len(requests[0])):
            for client, request in zip(slow, requests, strict=True):
                client.socket.send(request[at : at + 1])
            assert good.ask(READ)[0].status == Status.OK
        for client in slow:
            for opcode in (Opcode.HELLO, Opcode.READ):
                reply, _ = client.receive()
                assert (reply.opcode, reply.status, reply.session) == (opcode, Status.OK, client.session)


def test_peer_that_reads_nothing_is_not_served_further(server: EngineServer, good: RawClient) -> None:
    """Answers that nobody takes stop the reading of requests: the server's memory does not grow with them."""
    with server.hello() as deaf:
        deaf.socket.settimeout(1.0)
        burst = deaf.form(whole(Opcode.READ, SCRATCH, 0, 65536)) * (1 << 18)
        with pytest.raises(TimeoutError):  # 16 MiB of requests: more than sockets hold, so they are not taken any more
            deaf.socket.sendall(burst)
        assert good.ask(READ)[0].status == Status.OK
    wait_for(lambda: server.counters()["connections"]["tcp"] <= 1, "end of the deaf connection")


def test_more_peers_than_descriptors(tmp_path: Path) -> None:
    """Out of descriptors the server turns peers away and counts them, serves who is in, and later lets others in."""
    with engine_server(tmp_path, descriptors=64) as server, server.hello() as good:
        before = server.counters()["errors"]["system"]
        crowd = [server.connect() for _ in range(120)]
        try:
            turned_away = [client for client in crowd if is_closed(client)]
            assert turned_away
            assert good.ask(READ)[0].status == Status.OK
            wait_for(lambda: server.counters()["errors"]["system"] >= before + len(turned_away), "count of refusals")
            served = [client for client in crowd if client not in turned_away]
            assert len(served) > 20
            served[0].hello()
        finally:
            for client in crowd:
                client.socket.close()
        wait_for(lambda: server.counters()["connections"]["tcp"] == 1, "end of the crowd")
        with server.hello() as late:
            assert late.ask(READ)[0].status == Status.OK


def is_closed(client: RawClient) -> bool:
    """Whether it is turned away; one that is in stays silent."""
    client.socket.settimeout(0.05)
    try:
        return client.socket.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    finally:
        client.socket.settimeout(20)


def test_reset_connections_leave_nothing(server: EngineServer, good: RawClient) -> None:
    """Peers that reset instead of closing, in the middle of answers, are forgotten as if they had never been."""
    for _ in range(50):
        client = server.hello()
        client.socket.sendall(b"".join(client.form(whole(Opcode.READ, SCRATCH, 0, 65536)) for _ in range(20)))
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.socket.close()
        assert good.ask(READ)[0].status == Status.OK
    wait_for(lambda: server.counters()["connections"]["tcp"] == 1, "end of all reset connections")
