"""A process without key or certificate that took the port of a memory server that had died was taken for it: it
answered reads, and what clients wrote there was acknowledged. With credentials, and TLS for data or not, such a process
gets no write and nobody believes a word of it; the server that comes back is found again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.config.parse import parse_address
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from tests.support.raw import MAGIC, Flag, Frame, Opcode, RawClient, Status

TIMEOUT_S = 0.8


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab of one server."""
    place = tmp_path_factory.mktemp("credentials")
    make_set(place, [Holder(Role.COORDINATOR, ""), Holder(Role.CLIENT, ""), Holder(Role.SERVER, "server-0")])
    return place


class Impostor:
    """Listens at a dead server's port and answers each frame as a memory server would, but for what takes its key.

    `identity`: what the real one had said in its HELLO. `says`: its status for tokens.
    """

    def __init__(self, port: int, identity: Frame, *, says: Status) -> None:
        self._identity = identity
        self._says = says
        self.heard: list[Opcode] = []
        self._socket = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError):
            while header := peer.recv(64, socket.MSG_WAITALL):
                frame = Frame.unpack(header)
                if frame.magic != MAGIC:
                    return  # a client that speaks TLS, which takes a certificate
                peer.recv(frame.payload, socket.MSG_WAITALL)
                self.heard.append(Opcode(frame.opcode))
                told = {"segment": frame.segment, "length": 0, "payload": 0, "offset": 0, "argument": 0, "status": 0}
                body = b""
                if frame.opcode == Opcode.HELLO:
                    told |= {"segment": self._identity.segment, "argument": self._identity.argument, "offset": 7}
                    told["length"] = self._identity.length
                elif frame.opcode == Opcode.AUTHORIZE:
                    told["status"] = self._says
                elif frame.opcode == Opcode.READ:
                    body = np.full(frame.length // 4, 666, "float32").tobytes()
                    told |= {"length": frame.length, "payload": len(body)}
                reply = {"flags": Flag.REPLY, "lane": frame.lane, "epoch": frame.epoch, "dtype": frame.dtype, **told}
                answer = Frame(Opcode(frame.opcode), session=frame.session, sequence=frame.sequence, **reply)
                peer.sendall(answer.pack() + body)

    def __enter__(self) -> Impostor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


_FORMS = {
    "tls": ("auto", Status.OK),
    "plain": ("off", Status.OK),
    "plain-denying": ("off", Status.DENIED),
    "plain-ending": ("off", Status.SESSION_ENDED),  # as if the client's session had ended: its link was closed for good
}


@pytest.fixture(params=_FORMS.values(), ids=_FORMS)
def kept(request: pytest.FixtureRequest, certificates: Path) -> Iterator[tuple[smb.LocalCluster, bool, Status]]:
    """A cluster with credentials; whether its data is without TLS; and what the impostor says to tokens."""
    choice, says = request.param
    with smb.LocalCluster(servers=1, capacity="16MiB", credentials=certificates, data_tls=choice) as cluster:
        yield cluster, choice == "off", says


def test_an_impostor_gets_and_gives_nothing(kept: tuple[smb.LocalCluster, bool, Status], certificates: Path) -> None:
    """A client that knew the server, and one that comes anew: both hear an error, the bytes are as they were."""
    cluster, plain, says = kept
    server = cluster.servers[0]
    _, port = parse_address(server.address)
    values = np.arange(16, dtype="float32")
    identity = Frame(Opcode.HELLO, segment=0x1234, argument=0x5678, length=15)
    with contextlib.suppress(EOFError, OSError), RawClient(port) as stranger:  # plain: anybody may ask for it
        identity, _ = stranger.ask(Frame(Opcode.HELLO, session=99, lane=1))

    def connect(timeout: float) -> smb.Client:
        return smb.connect(cluster.address, transport="tcp", credentials=certificates / "client", timeout=timeout)

    with connect(TIMEOUT_S) as client, connect(TIMEOUT_S) as late:
        buffer = client.create("weights", (16,))
        buffer.write(values)
        server.kill()
        with Impostor(port, identity, says=says) as impostor:
            for call in (buffer.read, lambda: buffer.write(values + 1)):
                with pytest.raises(smb.Error) as refused:
                    call()
                if plain and says is Status.OK:
                    assert "could not prove that it is that server" in str(refused.value)
            for call in (lambda b: b.read(), lambda b: b.write(values + 2)):
                with pytest.raises(smb.Error):
                    call(late.open("weights"))
            assert set(impostor.heard) == ({Opcode.HELLO, Opcode.AUTHORIZE} if plain else set())
        server.start()
        with connect(20) as after:
            assert np.array_equal(after.open("weights").read(), values)
        client._session.timeout = 20.0
        assert np.array_equal(client.open("weights").read(), values)
        client.open("weights").write(values + 3)
        assert np.array_equal(buffer.read(), values + 3)
