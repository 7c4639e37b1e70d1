"""TLS on the TCP data plane: nobody reads what travels, both ends are whom they should be, and all works as without."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from memserver.tls import LOOK_S
from smb.config.parse import parse_address
from smb.engine import EngineClient, EngineError, Lane, Status, Tls
from smb.security.credentials import load_directory, server_name
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from smb.transport.tls import ClientTls
from tests.support.daemons import wait_for
from tests.support.raw import Frame, Opcode


@pytest.fixture(scope="module")
def secured(certificates: Path) -> Iterator[smb.LocalCluster]:
    """Two memory servers that speak TLS on TCP."""
    with smb.LocalCluster(servers=2, capacity="32MiB", credentials=certificates) as running:
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
    """A client that wants server-0 says nothing to server-1 at its address; the error names both. It hears why where
    its own certificate is not taken.
    """
    host, port = parse_address(secured.servers[1].address)
    engine = EngineClient(7)

    def connect(who: str, server: str) -> None:
        files = load_directory(certificates / who)
        tls = Tls(load_directory(certificates / "client").ca, files.certificate, files.key)
        engine.connect_tls(host, port, tls, server_name(server), Lane.TCP_DATA, 5000)

    connect("client", "server-1")
    connect("server-0", "server-1")  # its relay: without a token it reads nothing (test_mirrors.py)
    for who, server, why in (
        ("client", "server-0", 'it shows the certificate of role "server", name "server-1"'),
        ("client", "SERVER", 'it shows the certificate of role "server", name "server-1"'),
        ("expired", "server-1", "it does not accept us .*expired"),
        ("other/operator", "server-1", "it does not accept us .*unknown ca"),
        ("coordinator", "server-1", "it does not accept us"),
    ):
        with pytest.raises(EngineError, match=why) as refused:
            connect(who, server)
        assert refused.value.status is Status.UNTRUSTED
    for who, ours in (("other/operator", "unable to get local issuer"), ("expired", "unsuitable certificate purpose")):
        with Pretender(certificates / who) as pretender:
            host, port = "127.0.0.1", pretender.port
            with pytest.raises(EngineError, match=f"is not good: .*{ours}"):
                connect("client", "server-1")
            assert pretender.heard == b""


class Pretender:
    """Listens with somebody's certificate, and keeps what it hears."""

    def __init__(self, credentials: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(credentials / "cert.pem", credentials / "key.pem")
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        peer, _ = self._socket.accept()
        with peer, contextlib.suppress(OSError), self._context.wrap_socket(peer, server_side=True) as spoken:
            self.heard += spoken.recv(4096)

    def __enter__(self) -> Pretender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._socket.close()


def test_new_certificates_count_without_a_restart(tmp_path: Path) -> None:
    """Both ends take their files anew: a server's new authority is asked of who connects, and the client that has not
    got it yet is refused; files that do not belong together change nothing.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    holders = [Holder(Role.COORDINATOR, ""), Holder(Role.CLIENT, ""), Holder(Role.SERVER, "server-0")]
    make_set(old, holders)
    make_set(new, holders)
    files = [load_directory(place / "client") for place in (old, new)]
    with smb.LocalCluster(servers=1, capacity="16MiB", credentials=old) as cluster:
        host, port = parse_address(cluster.servers[0].address)
        engine, secrets_of = EngineClient(7), ClientTls(files[0])

        def connects() -> bool:
            try:
                tls = secrets_of.now("server-0")
                engine.connect_tls(host, port, tls, server_name("server-0"), Lane.TCP_DATA, 5000)
            except EngineError as error:
                return error.status is not Status.UNTRUSTED
            return True

        assert connects()
        shutil.copy(new / "server-0/cert.pem", old / "server-0/cert.pem")  # without its key: not taken
        time.sleep(2 * LOOK_S)
        assert connects()
        for name in ("key.pem", "ca.pem"):
            shutil.copy(new / "server-0" / name, old / "server-0" / name)
        wait_for(lambda: not connects(), "the server's new files")
        for name in ("cert.pem", "key.pem", "ca.pem"):
            shutil.copy(new / "client" / name, old / "client" / name)
        assert connects()
        for name in ("cert.pem", "key.pem", "ca.pem"):
            shutil.copy(new / "coordinator" / name, old / "coordinator" / name)

        def works() -> bool:
            """Over both control ports, with all four who have new files."""
            try:
                with smb.connect(cluster.address, transport="tcp", credentials=old / "client", timeout=2) as client:
                    buffer = client.create("new", (4,))
                    buffer.write(np.ones(4, "float32"))
                    client.delete("new")
            except smb.Error:
                return False
            return True

        wait_for(works, "a cluster of the new authority")


def test_tls_needs_credentials() -> None:
    """--data-tls on without credentials is refused: there would be no certificate to show."""
    with pytest.raises(smb.Error, match="--data-tls on needs credentials"):
        smb.LocalCluster(servers=1, capacity="16MiB", data_tls="on").start()


def test_what_travels_is_encrypted(certificates: Path) -> None:
    """Of a pattern that is written through a listener in the middle nothing is seen there; without TLS it is."""
    pattern = np.frombuffer(b"a secret pattern" * 4, dtype="float32")
    for flag, visible in (({}, False), ({"data_tls": "off"}, True)):
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
