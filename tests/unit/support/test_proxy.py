"""The proxy that breaks frames does what it counts, and nothing else, before anything is proved with it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.daemons import wait_for
from tests.support.proxy import REPLY_FAULTS, REQUEST_FAULTS, Fault, Plan, Proxy, RandomPlan
from tests.support.raw import HEADER, Flag, Frame, Opcode, RawClient

PAYLOAD = bytes(range(16))
REQUEST_BYTES = HEADER.size + len(PAYLOAD)
WRITE = Frame(Opcode.WRITE, length=len(PAYLOAD))


class Echo:
    """A server that answers every frame with its own payload, and keeps all bytes that came, by connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.received: list[bytearray] = []
        self.ended: list[bool] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.received.append(bytearray())
                self.ended.append(False)
                threading.Thread(target=self._serve, args=(connection, len(self.ended) - 1), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        unread = bytearray()
        with connection, contextlib.suppress(OSError):
            while part := connection.recv(4096):
                self.received[number] += part
                unread += part
                while len(unread) >= HEADER.size and unread[:2] == b"SM":
                    frame = Frame.unpack(bytes(unread[: HEADER.size]))
                    whole = HEADER.size + frame.payload
                    if len(unread) < whole:
                        break
                    connection.sendall(answer_to(bytes(unread[:whole])))
                    del unread[:whole]
        self.ended[number] = True


def answer_to(request: bytes) -> bytes:
    """Return the request with the flag of a reply."""
    return request[:6] + bytes([request[6] | Flag.REPLY]) + request[7:]


@contextlib.contextmanager
def between(plan: Plan) -> Iterator[tuple[RawClient, Proxy, Echo]]:
    """A client on one side of the proxy and an echo on the other."""
    echo = Echo()
    proxy = Proxy(echo.port, plan)
    try:
        with RawClient(proxy.port) as client:
            yield client, proxy, echo
    finally:
        proxy.close()
        echo.close()


def at_frame(number: int, fault: Fault) -> Plan:
    """Return a plan that hits that frame of its direction, the first being 0."""
    seen = {False: 0, True: 0}
    aimed_at_reply = fault.name in REPLY_FAULTS

    def plan(reply: bool, header: bytes) -> Fault | None:
        seen[reply] += 1
        return fault if reply is aimed_at_reply and seen[reply] == number + 1 else None

    return plan


def read_to_end(client: RawClient) -> bytes:
    """Return everything until the stream ends, in order or by a reset."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := client.socket.recv(4096):
            received += part
    return bytes(received)


def test_without_a_fault_every_byte_passes() -> None:
    with between(lambda reply, header: None) as (client, proxy, echo):
        requests = [client.form(WRITE, PAYLOAD * turn) for turn in range(5)]
        client.socket.sendall(b"".join(requests))
        answers = b"".join(map(answer_to, requests))
        assert client.receive_bytes(len(answers)) == answers
        assert echo.received == [b"".join(requests)]
        assert not proxy.fired


@pytest.mark.parametrize("at", [0, 1, 3, 63, 64, 65, REQUEST_BYTES - 1, REQUEST_BYTES + 9])
def test_cuts_fall_at_their_byte(at: int) -> None:
    """That many bytes arrive and not one more, never the whole frame; then both sides see the end."""
    arrives = min(at, REQUEST_BYTES - 1)
    with between(at_frame(1, Fault("cut request", at))) as (client, proxy, echo):
        client.ask(WRITE, PAYLOAD)
        client.send(WRITE, PAYLOAD)
        assert read_to_end(client) == b""
        wait_for(lambda: echo.ended[0], "end")
        assert len(echo.received[0]) == REQUEST_BYTES + arrives
        assert proxy.fired == {"cut request": 1}
    with between(at_frame(1, Fault("cut reply", at))) as (client, proxy, echo):
        client.ask(WRITE, PAYLOAD)
        request = client.form(WRITE, PAYLOAD)
        client.socket.sendall(request)
        assert read_to_end(client) == answer_to(request)[:arrives]
        wait_for(lambda: echo.ended[0], "end")
        assert len(echo.received[0]) == 2 * REQUEST_BYTES, "the request was to arrive whole"
        assert proxy.fired == {"cut reply": 1}


def test_a_swallowed_request_never_arrives() -> None:
    with between(at_frame(0, Fault("drop request"))) as (client, proxy, echo):
        client.send(WRITE, PAYLOAD)
        assert read_to_end(client) == b""
        wait_for(lambda: echo.ended and echo.ended[0], "end")
        assert echo.received == [b""]
        assert proxy.fired == {"drop request": 1}


def test_a_spoilt_request_has_no_magic_number() -> None:
    with between(at_frame(0, Fault("spoil request"))) as (client, proxy, echo):
        request = client.form(WRITE, PAYLOAD)
        client.socket.sendall(request)
        assert read_to_end(client) == b""
        wait_for(lambda: echo.ended and echo.ended[0], "end")
        assert echo.received == [b"XX" + request[2:]]
        assert proxy.fired == {"spoil request": 1}


def test_a_doubled_request_arrives_twice_and_is_answered_once() -> None:
    """The second answer is swallowed: the next request gets its own."""
    with between(at_frame(1, Fault("double request"))) as (client, proxy, echo):
        for turn in range(4):
            _, payload = client.ask(WRITE, PAYLOAD * turn)
            assert payload == PAYLOAD * turn
        frames = [HEADER.size + len(PAYLOAD) * turn for turn in (0, 1, 1, 2, 3)]
        assert len(echo.received[0]) == sum(frames)
        assert proxy.fired == {"double request": 1}


@pytest.mark.parametrize("name", ["hold request", "hold reply"])
def test_what_is_held_back_arrives(name: str) -> None:
    with between(at_frame(0, Fault(name))) as (client, proxy, _):
        for turn in range(2):
            assert client.ask(WRITE, PAYLOAD * turn)[1] == PAYLOAD * turn
        assert proxy.fired == {name: 1}


def test_a_fault_ends_one_connection_and_not_the_next() -> None:
    with between(at_frame(0, Fault("drop request"))) as (client, proxy, _):
        client.send(WRITE, PAYLOAD)
        assert read_to_end(client) == b""
        with RawClient(proxy.port) as second:
            assert second.ask(WRITE, PAYLOAD)[1] == PAYLOAD


def test_a_closed_proxy_is_gone() -> None:
    """Its connections end, and nobody gets a new one."""
    with between(lambda reply, header: None) as (client, proxy, _):
        client.ask(WRITE, PAYLOAD)
        proxy.close()
        assert read_to_end(client) == b""
        with pytest.raises(ConnectionError):
            RawClient(proxy.port)


def test_a_server_that_is_not_there_is_a_closed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    proxy = Proxy(port, lambda reply, header: None)
    try:
        with RawClient(proxy.port) as client:
            assert read_to_end(client) == b""
    finally:
        proxy.close()


def faults_of(plan: RandomPlan, count: int) -> list[Fault | None]:
    header = Frame(Opcode.ACCUMULATE).pack()
    return [plan(bool(turn % 2), header) for turn in range(count)]


def test_a_seed_is_a_plan() -> None:
    assert faults_of(RandomPlan(7, 5), 400) == faults_of(RandomPlan(7, 5), 400)
    assert faults_of(RandomPlan(7, 5), 400) != faults_of(RandomPlan(8, 5), 400)


def test_a_random_plan_uses_every_fault_at_its_rate_and_place() -> None:
    """One for every five operations, each of which is a request and a reply."""
    found = faults_of(RandomPlan(1, 5), 20_000)
    fired = [fault for fault in found if fault is not None]
    assert {fault.name for fault in fired} == {*REQUEST_FAULTS, *REPLY_FAULTS}
    assert 0.9 < len(fired) / (10_000 / 5) < 1.1
    assert {fault.at for fault in fired} == set(range(HEADER.size + 1))
    assert all(fault is None or fault.name in REPLY_FAULTS for fault in found[1::2])
    assert all(fault is None or fault.name in REQUEST_FAULTS for fault in found[::2])


def test_a_quiet_plan_and_hello_have_no_faults() -> None:
    plan = RandomPlan(1, 0.5)
    assert all(faults_of(plan, 20)), "every frame"
    assert all(plan(False, Frame(Opcode.HELLO).pack()) is None for _ in range(20))
    plan.quiet = True
    assert not any(faults_of(plan, 20))
