"""A proof that is handed on is refused: by somebody who stands between a client and its server, and passes on what each
of them says, from one kind of connection to another, or to another of the same kind.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memserver.engine import Engine, SegmentForm
from smb.engine import EngineClient, EngineError, Lane, Link, Status, Tls
from smb.engine import Token as Shown
from smb.security.credentials import Credentials, load_directory, server_name
from tests.security.test_tokens import EPOCH, GENERATION, KEY, NOW_MS, SEGMENT, Token
from tests.support.raw import HAS_IDS, HEADER, UNIX_SOCKET, Dtype, Frame, Opcode, RawClient, bond_of_channel
from tests.support.raw import Status as Answer

ROOT = Path(__file__).resolve().parents[2]
Open = Callable[[], socket.socket]
Change = Callable[[Frame], Frame]
KINDS = ("tls", "tcp", "unix")

# Of a process of its own: between processes of one user the socket tells them apart.
RELAY = """
import sys
from pathlib import Path
from tests.security.test_relayed_proofs import LIES, listen_unix, open_unix, pass_on
listener = listen_unix(Path(sys.argv[1]))
print("ready", flush=True)
peer, _ = listener.accept()
pass_on(peer, open_unix(Path(sys.argv[2])), *LIES[sys.argv[3]])
"""


def unchanged(frame: Frame) -> Frame:
    return frame


def elsewhere(frame: Frame) -> Frame:
    """A HELLO whose client is in other namespaces."""
    return replace(frame, argument=frame.argument ^ 1) if frame.opcode == Opcode.HELLO else frame


def without_ids(frame: Frame) -> Frame:
    """The answer of a server that has found its client elsewhere."""
    return replace(frame, length=frame.length & ~HAS_IDS) if frame.opcode == Opcode.HELLO else frame


def of_before(frame: Frame) -> Frame:
    """The answer of a server from before proofs were bound."""
    return replace(frame, length=frame.length & 7) if frame.opcode == Opcode.HELLO else frame


# What is said of requests, and of answers.
LIES: dict[str, tuple[Change, Change]] = {
    "as it is": (unchanged, unchanged),
    "the client is elsewhere": (elsewhere, unchanged),
    "both are elsewhere": (elsewhere, without_ids),
    "no ids": (unchanged, without_ids),
}


def listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def open_unix(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(20)
    opened.connect(str(path))
    return opened


def pass_on(front: socket.socket, back: socket.socket, ask: Change = unchanged, answer: Change = unchanged) -> None:
    """Pass requests on, and answers back, until one end closes."""

    def take(from_: socket.socket, change: Change) -> bytes:
        header = b""
        while len(header) < HEADER.size:
            part = from_.recv(HEADER.size - len(header))
            if not part:
                raise ConnectionError
            header += part
        frame, body = Frame.unpack(header), b""
        while len(body) < frame.payload:
            body += from_.recv(frame.payload - len(body))
        return change(frame).pack() + body

    with front, back, contextlib.suppress(OSError):
        while True:
            back.sendall(take(front, ask))
            front.sendall(take(back, answer))


class Relay:
    """One that listens, and for the one who comes opens a connection to the server."""

    def __init__(self, listener: socket.socket, wrap: ssl.SSLContext | None, back: Open, answer: Change) -> None:
        self._listener, self._wrap, self._back, self._answer = listener, wrap, back, answer
        self._front: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            peer.settimeout(20)
            front = self._wrap.wrap_socket(peer, server_side=True) if self._wrap is not None else peer
            self._front = front
            pass_on(front, self._back(), answer=self._answer)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._front is not None:  # the client's link may be there still
            with contextlib.suppress(OSError):
                self._front.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()
        assert not self._thread.is_alive()


class Places:
    """The memory server server-0, where its data is inside TLS and where it is not, and who may stand before it."""

    def __init__(self, place: Path, certificates: Path) -> None:
        self.place, self.certificates = place, certificates
        self.engines, self.ports = [], {}
        for kind in ("tls", "tcp"):
            engine = Engine(7, 1, 1 << 22)
            engine.guard()
            engine.set_keys({GENERATION: KEY}, NOW_MS)
            engine.create_segment(place / kind, SegmentForm(SEGMENT, EPOCH, Dtype.FLOAT32, 65536, 16384))
            if kind == "tls":
                engine.use_tls(tls_of(self.credentials("server-0")))
            self.ports[kind] = engine.listen_tcp("127.0.0.1", 0)
            self.engines.append(engine)
        self.unix = place / "server.sock"
        self.engines[0].listen_unix(self.unix)

    def credentials(self, who: str) -> Credentials:
        return load_directory(self.certificates / who)

    def open(self, kind: str) -> socket.socket:
        """A connection of the relay's to the server."""
        if kind == "unix":
            return open_unix(self.unix)
        plain = socket.create_connection(("127.0.0.1", self.ports[kind]), 20)
        if kind == "tcp":
            return plain
        context = ssl.create_default_context(cafile=self.certificates / "client" / "ca.pem")
        context.load_cert_chain(self.certificates / "client" / "cert.pem", self.certificates / "client" / "key.pem")
        return context.wrap_socket(plain, server_hostname=server_name("server-0"))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def tls_of(credentials: Credentials) -> Tls:
    return Tls(credentials.ca, credentials.certificate, credentials.key)


@pytest.fixture(scope="module")
def places(certificates: Path) -> Iterator[Places]:
    """Both, for the whole module."""
    place = Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    place.mkdir(mode=0o700)
    made = Places(place, certificates)
    yield made
    made.close()
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


@contextlib.contextmanager
def connected(places: Places, kind: str, where: int | Path) -> Iterator[tuple[Link, int]]:
    """A client that wants proof, with a link to whoever listens there, and its session."""
    session = secrets.randbits(63)
    client = EngineClient(session, proofs=True)
    try:
        if isinstance(where, Path):
            link, _ = client.connect_unix(str(where), Lane.UNIX_DATA, 20_000)
        elif kind == "tls":
            tls = tls_of(places.credentials("operator"))
            link, _ = client.connect_tls("127.0.0.1", where, tls, server_name("server-0"), Lane.TCP_DATA, 20_000)
        else:
            link, _ = client.connect_tcp("127.0.0.1", where, Lane.TCP_DATA, 20_000)
        yield link, session
    finally:
        client.close()


def prove(link: Link, session: int) -> None:
    """Show a good token. EngineError."""
    made = Token(session)
    shown = Shown(SEGMENT, EPOCH, made.rights, made.generation, made.expires_ms, made.secret())
    link.authorize(shown, timeout_ms=20_000)


@contextlib.contextmanager
def relayed(
    places: Places, front: str, back: str, who: str = "server-0", answer: Change = unchanged
) -> Iterator[int | Path]:
    """Somebody between; where he listens."""
    context = None
    where: int | Path
    if front == "unix":
        where = places.place / f"relay-{secrets.token_hex(4)}"
        listener = listen_unix(where)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        where = listener.getsockname()[1]
    if front == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(places.certificates / who / "cert.pem", places.certificates / who / "key.pem")
    with Relay(listener, context, lambda: places.open(back), answer):
        yield where


@pytest.mark.parametrize("kind", ["tls", "tcp", "unix"])
def test_nobody_between(places: Places, kind: str) -> None:
    """The same client, straight: its token is taken."""
    where = places.unix if kind == "unix" else places.ports[kind]
    with connected(places, kind, where) as (link, session):
        prove(link, session)


@pytest.mark.parametrize(
    ("front", "back"),
    # Two Unix sockets of one process have the same ends: test_between_processes.
    [(front, back) for front in KINDS for back in KINDS if front == "tls" or front != back],
)
def test_a_proof_that_is_handed_on(places: Places, front: str, back: str) -> None:
    """By one who has the server's own certificate, and for the server that of a client: he passes every handshake."""
    with relayed(places, front, back) as where, connected(places, front, where) as (link, session):
        with pytest.raises(EngineError, match="the proof was forwarded") as refused:
            prove(link, session)
        assert refused.value.status is Status.DENIED


def test_in_the_clear_there_is_nothing_to_cover(places: Places) -> None:
    """With --data-tls off it goes through: the threat model says so."""
    with relayed(places, "tcp", "tcp") as where, connected(places, "tcp", where) as (link, session):
        prove(link, session)


@pytest.mark.parametrize("who", ["client", "server-1", "coordinator", "operator"])
def test_another_certificate_of_the_authority(places: Places, who: str) -> None:
    """It gets no HELLO."""
    with relayed(places, "tls", "tls", who) as where:
        with (
            pytest.raises(EngineError, match=r"shows the certificate|not good") as refused,
            connected(places, "tls", where),
        ):
            pass
        assert refused.value.status is Status.UNTRUSTED


@pytest.mark.parametrize("front", ["tls", "unix", "tcp"])
def test_a_server_of_before_is_told_no_proof(places: Places, front: str) -> None:
    """Nor one whom somebody between has made look so."""
    with relayed(places, front, "tcp", answer=of_before) as where:
        with pytest.raises(EngineError) as refused, connected(places, front, where):
            pass
        assert refused.value.status is Status.VERSION


@pytest.mark.parametrize("lies", LIES)
def test_between_processes(places: Places, lies: str) -> None:
    """A process of the same user stands between two Unix sockets, and says of HELLO what it likes."""
    where = places.place / f"relay-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", RELAY, str(where), str(places.unix), lies]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        with connected(places, "unix", where) as (link, session):
            with pytest.raises(EngineError, match="the proof was forwarded") as refused:
                prove(link, session)
            assert refused.value.status is Status.DENIED
        relay.terminate()


def test_a_client_in_other_namespaces(places: Places) -> None:
    """Its ids mean something else to the server, so the proof covers none, and is taken; with those it is not."""
    for with_ids in (False, True):
        with RawClient(places.unix) as client:
            client.session = secrets.randbits(63)
            words = client.namespaces() ^ (1 << 40)
            hello, _ = client.ask(Frame(Opcode.HELLO, argument=words))
            assert not hello.length & HAS_IDS
            bond = client.bond(replace(hello, length=HAS_IDS)) if with_ids else None
            bond = bond or bond_of_channel(UNIX_SOCKET, words.to_bytes(8, "little"))
            payload = Token(client.session).payload(hello.offset, instance=7, bond=bond)
            reply, _ = client.ask(Frame(Opcode.AUTHORIZE, segment=SEGMENT, epoch=EPOCH), payload)
            assert reply.status == (Answer.DENIED if with_ids else Answer.OK)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_client_of_before_is_told(places: Places, kind: str) -> None:
    """Its proof, which covers no connection, is no proof; the answer says that the version is the matter."""
    with RawClient(places.unix if kind == "unix" else places.ports["tcp"]) as client:
        client.session = secrets.randbits(63)
        hello, _ = client.ask(Frame(Opcode.HELLO))
        payload = Token(client.session).payload(hello.offset, instance=7, bond=b"", label=b"smb proof 1")
        reply, _ = client.ask(Frame(Opcode.AUTHORIZE, segment=SEGMENT, epoch=EPOCH), payload)
        assert reply.status == Answer.VERSION
        read = Frame(Opcode.READ, Dtype.FLOAT32, epoch=EPOCH, segment=SEGMENT, length=8)
        assert client.ask(read)[0].status == Answer.DENIED
