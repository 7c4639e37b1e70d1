"""Queue pairs and keys of RDMA where tokens are asked for: who gets them, for what, and until when. The control service
and the engine by themselves, with a stand-in for the device; over real ones tests/verbs/test_access.py.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

import memserver.rdma_target
from memserver.control import ControlServer
from memserver.engine import Engine, SegmentForm
from memserver.rdma_target import Opened, RdmaTarget, ReachableMemory
from smb.coordinator.token_issuer import GENERATION_S
from smb.coordinator.token_issuer import TokenIssuer as Maker
from smb.errors import NotFoundError, OutOfMemoryError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.client_tokens import ClientTokens
from smb.rpc.control_pb2_grpc import MemoryServerStub
from smb.transport.verbs.queue_pair import End
from tests.support.daemons import wait_for

SESSION, SEGMENT, OTHER, EPOCH, SERVER = 0x5E55, 0x1111, 0x2222, 3, "server-0"
NOW_S = 1_700_000_000.0
FLOAT32 = 2


@dataclass
class Asked:
    """Stands in for Rdma and Segments; remembers what it was asked."""

    instance_id: int = 9
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    bound: list[int] = field(default_factory=list)
    sessions: frozenset[int] = frozenset()  # that have ended

    def ids(self) -> set[int]:
        return {SEGMENT, OTHER}

    def bind(self, segment_id: int) -> bool:
        self.bound.append(segment_id)
        return True

    def connect(self, session_id: int, client: End) -> tuple[End, list[ReachableMemory]]:
        self.calls.append(("connect", session_id))
        return client, [ReachableMemory(4096, 7, 1 << 20)]

    def open_segment(self, session_id: int, segment_id: int, epoch: int, writable: bool, until: float) -> Opened:
        self.calls.append(("open", session_id, segment_id, epoch, writable, until))
        return Opened(ReachableMemory(4096, 1, 64), ReachableMemory(8192, 2, 64), 4, 4096, FLOAT32, writable)

    def close_connection(self, session_id: int) -> None:
        self.calls.append(("close", session_id))


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A guarded engine with two segments, which has not heard of the coordinator."""
    directory = Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    directory.mkdir()
    engine = Engine(9, 1, 1 << 24)
    engine.guard()
    for segment in (SEGMENT, OTHER):
        engine.create_segment(directory / f"{segment:x}", SegmentForm(segment, EPOCH, FLOAT32, 65536, 16384))
    yield engine
    engine.close()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def hear(engine: Engine, now_s: float = NOW_S) -> None:
    """Tell the engine what a coordinator with the root of these tests would."""
    keys = Maker(bytes(32), clock=lambda: now_s).keys(SERVER).keys
    engine.set_keys({key.generation: key.key for key in keys}, int(now_s * 1000))


def proof(
    segment_id: int = SEGMENT,
    session_id: int = SESSION,
    *,
    may_write: bool = True,
    lifetime_s: float = 600.0,
    certificate: bytes = b"",
) -> pb.TokenProof:
    """What a client that opened such a buffer shows: made by the coordinator's and the client's code."""
    buffer = pb.Buffer(name="w", id=5, layout=pb.Layout(epoch=EPOCH))
    buffer.layout.segments.add(id=segment_id, server=SERVER)
    Maker(bytes(32), lifetime_s, clock=lambda: NOW_S).add_to(buffer, session_id, may_write=may_write)
    tokens = ClientTokens(lambda *_asked: buffer)
    tokens.learn(buffer)
    made = tokens.proof(segment_id, session_id, certificate)
    assert made is not None
    assert tokens.proof(OTHER if segment_id == SEGMENT else SEGMENT, session_id, certificate) is None
    return made


class OneCopyEach:
    """In the place of Replication: no segment has two copies."""

    def has(self, _segment_id: int) -> bool:
        return False


@pytest.fixture
def asked() -> Asked:
    """What comes through."""
    return Asked()


@pytest.fixture
def stub(engine: Engine, asked: Asked) -> Iterator[Any]:
    """The control service; certificates are tests/security/test_rpcs.py's."""
    server = ControlServer("127.0.0.1", 0, asked, asked, OneCopyEach(), asked, None, engine.check_proof)  # type: ignore[arg-type]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        yield MemoryServerStub(opened)  # type: ignore[no-untyped-call]
    server.close()


def connect(stub: Any, token: pb.TokenProof | None, session_id: int = SESSION) -> Any:
    end = pb.VerbsEnd(number=5, gid=bytes(16), mtu=1024, reads=4)
    return stub.ConnectVerbs(pb.ConnectVerbsRequest(session_id=session_id, client=end, token=token), timeout=10)


def open_segment(stub: Any, token: pb.TokenProof | None, segment_id: int = SEGMENT) -> Any:
    return stub.OpenSegmentVerbs(
        pb.OpenSegmentVerbsRequest(
            session_id=SESSION, segment_id=segment_id, epoch=EPOCH, writable=True, token=token
        ),
        timeout=10,
    )  # fmt: skip


def close(stub: Any, token: pb.TokenProof | None) -> Any:
    return stub.CloseVerbs(pb.CloseVerbsRequest(session_id=SESSION, token=token), timeout=10)


def refused(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()  # type: ignore[no-any-return, attr-defined]


def test_no_proof_no_queue_pair_and_no_key(engine: Engine, stub: Any, asked: Asked, certificates: Path) -> None:
    """Without a proof, with another session's or segment's, a changed or an expired one nothing comes through, not even
    the end of another's connection; with a good one each call does."""
    assert refused(lambda: connect(stub, proof())) is grpc.StatusCode.FAILED_PRECONDITION
    hear(engine)
    wider, later = proof(may_write=False), proof()
    wider.rights |= 2
    later.expires_at_ms += 1
    denied = grpc.StatusCode.PERMISSION_DENIED
    for wrong in (None, proof(session_id=SESSION + 1), wider, later, pb.TokenProof(segment_id=SEGMENT, proof=b"x")):
        assert refused(lambda wrong=wrong: connect(stub, wrong)) is denied
        assert refused(lambda wrong=wrong: open_segment(stub, wrong)) is denied
        assert refused(lambda wrong=wrong: close(stub, wrong)) is denied
    assert refused(lambda: connect(stub, proof(), SESSION + 1)) is denied
    assert refused(lambda: open_segment(stub, proof(OTHER))) is denied
    assert refused(lambda: open_segment(stub, proof(), OTHER)) is denied
    assert asked.calls == asked.bound == []  # nor does it bind a segment to its server
    handed_on = proof(certificate=(certificates / "client" / "cert.pem").read_bytes())
    assert refused(lambda: connect(stub, handed_on)) is denied  # by one who does not show that certificate
    connect(stub, proof())
    connect(stub, proof(OTHER))
    assert open_segment(stub, proof()).writable
    close(stub, proof(OTHER))
    assert [call[:2] for call in asked.calls] == [(name, SESSION) for name in ("connect", "connect", "open", "close")]
    hear(engine, NOW_S + 601)
    assert refused(lambda: open_segment(stub, proof())) is denied


def test_keys_are_for_what_the_token_gives(engine: Engine, stub: Any, asked: Asked) -> None:
    """A reader's token gives a key for reading, however it asks; the key is for as long as the token."""
    hear(engine)
    assert not open_segment(stub, proof(may_write=False)).writable
    name, session, segment, epoch, writable, until = asked.calls[0]
    assert (name, session, segment, epoch, writable) == ("open", SESSION, SEGMENT, EPOCH, False)
    assert 590 < until - time.monotonic() <= 600
    assert GENERATION_S > 600


def test_without_credentials_no_proof_is_asked_for(asked: Asked) -> None:
    """As everywhere then."""
    server = ControlServer("127.0.0.1", 0, asked, asked, OneCopyEach(), asked)  # type: ignore[arg-type]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as opened:
        stub = MemoryServerStub(opened)  # type: ignore[no-untyped-call]
        connect(stub, None)
        assert open_segment(stub, None).writable
        close(stub, None)
    server.close()
    assert asked.calls[1][-1] == math.inf


class FakeRegion:
    local_key = remote_key = 1

    def __init__(self, domain: FakeDomain, address: int, nbytes: int, write: bool) -> None:
        self.domain, self.address, self.nbytes, self.write = domain, address, nbytes, write
        domain.live.append(self)

    def close(self) -> None:
        self.domain.live.remove(self)


class FakeDomain:
    """Registers nothing, and remembers it."""

    def __init__(self, _device: object) -> None:
        self.live: list[FakeRegion] = []

    def register(self, address: int, nbytes: int, *, read: bool = False, write: bool = False) -> FakeRegion:
        assert read
        return FakeRegion(self, address, nbytes, write)

    def close(self) -> None:
        assert not self.live


@pytest.fixture
def rdma(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[RdmaTarget]:
    """The daemon's part, on a device that is none; a session has a domain."""
    monkeypatch.setattr(memserver.rdma_target, "Domain", FakeDomain)
    rdma = RdmaTarget(engine, 9, None, connections_max=0)
    rdma._device = rdma  # type: ignore[assignment]
    rdma._session(SESSION)
    yield rdma
    rdma.close()


def regions(rdma: RdmaTarget) -> list[FakeRegion]:
    return rdma._sessions[SESSION].domain.live  # type: ignore[return-value]


def test_keys_end_when_their_token_does(rdma: RdmaTarget) -> None:
    """Keys that were asked for again with a later token stay, the same ones; others are gone at their time."""
    soon, late = time.monotonic() + 0.3, time.monotonic() + 60
    rdma.open_segment(SESSION, SEGMENT, EPOCH, True, soon)
    rdma.open_segment(SESSION, OTHER, EPOCH, True, soon)
    assert len(regions(rdma)) == 4
    kept = regions(rdma)[2:]
    rdma.open_segment(SESSION, OTHER, EPOCH, True, late)
    wait_for(lambda: regions(rdma) == kept, "end of the keys")
    assert time.monotonic() >= soon
    with pytest.raises(NotFoundError):
        rdma.open_segment(SESSION, 0x3333, EPOCH, True, late)


def test_a_narrower_token_narrows_the_keys(rdma: RdmaTarget) -> None:
    """Renewed as a reader, a session may write no longer, also while its old token would still be good."""
    late = time.monotonic() + 60
    assert rdma.open_segment(SESSION, SEGMENT, EPOCH, True, late).writable
    assert [region.write for region in regions(rdma)] == [True, False]
    assert not rdma.open_segment(SESSION, SEGMENT, EPOCH, False, late).writable
    assert [region.write for region in regions(rdma)] == [False, False]


def test_connections_have_a_limit(rdma: RdmaTarget) -> None:
    """Past the limit of connections, each of which pins memory for its slots, one hears so, and of TCP."""
    with pytest.raises(OutOfMemoryError, match=r"0 RDMA connections.* 8 MiB of locked memory; use TCP instead"):
        rdma.connect(SESSION, End(5, bytes(16), 0, 0, 1024, 4))
    rdma.close()
    with pytest.raises(UnavailableError):
        rdma.connect(SESSION, End(5, bytes(16), 0, 0, 1024, 4))
