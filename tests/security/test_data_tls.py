"""TLS on the TCP data plane: nobody reads what travels, both ends are whom they should be, and all works as without."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.credentials import load_directory, server_name
from smb.errors import UnavailableError
from smb.transport import tls
from tests.support.daemons import wait_for
from tests.support.raw import Frame, Opcode


@pytest.fixture(scope="module")
def secured(certificates: Path) -> Iterator[smb.LocalCluster]:
    """Two memory servers that speak TLS on TCP."""
    with smb.LocalCluster(servers=2, capacity="32MiB", credentials=certificates, data_tls="") as running:
        yield running


@pytest.fixture
def client(secured: smb.LocalCluster, certificates: Path) -> Iterator[smb.Client]:
    """A client over TCP."""
    with smb.connect(secured.address, transport="tcp", credentials=certificates / "client") as made:
        yield made
        for buffer in made.list():
            made.delete(buffer.name)


def test_calls_over_tls(client: smb.Client) -> None:
    """Small and large calls, both directions at once, by several threads: what is written is read, additions count."""
    buffer = client.create("large", (1_000_000,), servers=2)
    values = np.arange(1_000_000, dtype="float32")
    buffer.write(values)
    assert np.array_equal(buffer.read(), values)
    total = client.create("total", (300_000,), dtype="int64", servers=2)
    counter = client.create("counter", (1,), dtype="int64")
    ones = np.ones(300_000, dtype="int64")

    def add() -> None:
        for _ in range(5):
            assert total.accumulate(ones, fetch=True) is not None
            counter.fetch_add(0, 1)
            total.read()

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (total.read() == 15).all()
    assert counter.fetch_add(0, 0) == 15
    with client.lock("l"):
        pass


# Where a connection is reset between our look at it and ssl's own, CPython's ssl leaves its socket to the collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_a_restarted_server_is_found_again(secured: smb.LocalCluster, client: smb.Client) -> None:
    """A connection that breaks is made again with TLS, and what was under way counts once."""
    counter = client.create("counter", (1,), dtype="int64", servers=["server-1"])
    done, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counter.fetch_add(0, 1)
            done[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    wait_for(lambda: done[0] > 20, "first calls")
    secured.servers[1].kill()
    secured.servers[1].start()
    goal = done[0] + 20
    wait_for(lambda: done[0] > goal, "calls after the restart")
    stop.set()
    thread.join()
    assert counter.fetch_add(0, 0) == done[0]


def test_who_is_no_member_is_let_nowhere(secured: smb.LocalCluster, certificates: Path) -> None:
    """Without TLS, without a certificate, with another authority's or an expired one the port gives nothing."""
    host, port = secured.servers[0].address.rsplit(":", 1)
    hello = Frame(Opcode.HELLO, session=7, sequence=1).pack()

    def answer(side: socket.socket) -> bytes:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # of TLS 1.3 the refusal comes with the first answer
            side.sendall(hello)
            return side.recv(64)
        return b""

    with socket.create_connection((host, int(port)), 10) as plain:
        assert not answer(plain).startswith(hello[:2])
    for kind in ("client", None, "other/operator", "expired"):
        context = ssl.create_default_context(cafile=certificates / "client" / "ca.pem")
        if kind is not None:
            context.load_cert_chain(certificates / kind / "cert.pem", certificates / kind / "key.pem")
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=server_name("server-0")) as spoken,
        ):
            assert answer(spoken).startswith(hello[:2]) == (kind == "client"), kind


def test_another_server_is_not_taken_for_it(secured: smb.LocalCluster, certificates: Path) -> None:
    """A client that wants server-0 does not speak to server-1 at its address, nor without credentials."""
    credentials = load_directory(certificates / "client")
    address = secured.servers[1].address
    with pytest.raises(UnavailableError, match="not whom it should be"):
        tls.connect(credentials, "server-0", address, 5)
    with pytest.raises(UnavailableError, match="no credentials"):
        tls.connect(None, "server-1", address, 5)
    socket.socket(fileno=tls.connect(credentials, "server-1", address, 5)).close()


def test_tls_needs_credentials() -> None:
    """--data-tls without credentials is refused: there would be no certificate to show."""
    with pytest.raises(smb.Error, match="--data-tls needs credentials"):
        smb.LocalCluster(servers=1, capacity="16MiB", data_tls="").start()


def test_what_travels_is_encrypted(certificates: Path) -> None:
    """Of a pattern that is written through a listener in the middle nothing is seen there; without TLS it is."""
    pattern = np.frombuffer(b"a secret pattern" * 4, dtype="float32")
    for flag, visible in (({"data_tls": ""}, False), ({}, True)):
        seen = bytearray()
        with smb.LocalCluster(servers=1, capacity="16MiB", credentials=certificates, **flag) as cluster:
            host, port = cluster.servers[0].address.rsplit(":", 1)
            with Overheard((host, int(port)), seen) as middle:
                options = cluster.servers[0]._options
                options["advertise"] = f"127.0.0.1:{middle.port}"
                cluster.servers[0].kill()
                cluster.servers[0].start()
                who = {"transport": "tcp", "credentials": certificates / "client"}
                with smb.connect(cluster.address, **who) as client:  # type: ignore[arg-type]
                    buffer = client.create("b", (pattern.size,))
                    buffer.write(pattern)
                    assert buffer.read().tobytes() == pattern.tobytes()
        assert len(seen) > 200
        assert (b"a secret pattern" in seen) is visible


class Overheard:
    """Passes bytes on to a server, and keeps them."""

    def __init__(self, server: tuple[str, int], seen: bytearray) -> None:
        self._server = server
        self._seen = seen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Overheard:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [peer, server]
            for pair in ((peer, server), (server, peer)):
                self._threads.append(threading.Thread(target=self._carry, args=pair))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                self._seen += piece
                sink.sendall(piece)
        except OSError:
            pass
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
