"""No token, no byte: every way to come by a segment without its token is refused, over TCP and the Unix socket, and
what has one works. The engine by itself, spoken to by hand; tokens are made here from the page of the protocol.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memserver.engine import Engine, SegmentForm
from smb._engine import ffi, lib
from smb.coordinator.token_issuer import GENERATION_S, TokenIssuer
from smb.engine import EngineClient, EngineError, Lane
from smb.engine import Token as Shown
from smb.errors import InvalidArgumentError, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from tests.support.daemons import wait_for
from tests.support.raw import IN_THE_CLEAR, Dtype, Flag, Frame, Opcode, RawClient, Status, bond_of_channel

READ, WRITE = 1, 2
EPOCH, SEGMENT, OTHER, STATE, SECOND_STATE = 7, 0x1111, 0x2222, 0x3333, 0x4444
SEGMENTS = (SEGMENT, OTHER, STATE, SECOND_STATE)
INSTANCE, KEY, GENERATION, NOW_MS = 0xABCD, bytes(range(32)), 5, 1_700_000_000_000
MINUTE_MS = 60_000


@dataclass
class Place:
    """A guarded engine, and where it listens."""

    engine: Engine
    port: int
    unix: Path

    def connect(self, transport: str) -> RawClient:
        return RawClient(self.port if transport == "tcp" else self.unix)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Four segments; the key of one generation is known."""
    directory = Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    directory.mkdir()
    engine = Engine(INSTANCE, 2, 1 << 24)
    engine.guard()
    engine.set_keys({GENERATION: KEY}, NOW_MS)
    for segment in SEGMENTS:
        engine.create_segment(directory / f"{segment:x}", SegmentForm(segment, EPOCH, Dtype.FLOAT32, 65536, 16384))
    unix = tmp_path_factory.mktemp("socket") / "s"
    engine.listen_unix(unix)
    yield Place(engine, engine.listen_tcp("127.0.0.1", 0), unix)
    engine.close()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


@pytest.fixture(params=["tcp", "unix"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each way to the engine."""
    return str(request.param)


@dataclass(frozen=True)
class Token:
    """What the page of the protocol says of one."""

    session: int
    segment: int = SEGMENT
    epoch: int = EPOCH
    rights: int = READ | WRITE
    generation: int = GENERATION
    expires_ms: int = NOW_MS + 10 * MINUTE_MS
    key: bytes = KEY

    def secret(self) -> bytes:
        words = (self.session, self.segment, self.epoch, self.rights, self.generation, self.expires_ms)
        return hmac.digest(self.key, struct.pack("<16sQQIIQQ", b"smb token 1", *words), "sha256")

    def payload(
        self,
        nonce: int,
        *,
        instance: int = INSTANCE,
        session: int | None = None,
        lane: int = 0,
        bond: bytes,
        label: bytes = b"smb proof 2",
    ) -> bytes:
        words = (nonce, instance, self.session if session is None else session, lane)
        proof = hmac.digest(self.secret(), struct.pack("<16sQQQQ", label, *words) + bond, "sha256")
        return struct.pack("<IIQ", self.rights, self.generation, self.expires_ms) + proof


class Peer:
    """A connection that has said HELLO."""

    def __init__(self, client: RawClient, session: int | None, lane: int) -> None:
        self.client = client
        self.lane = lane
        self.client.session = secrets.randbits(63) if session is None else session
        reply, _ = self.client.ask(Frame(Opcode.HELLO, lane=lane, argument=self.client.namespaces()))
        self.bond = self.client.bond(reply)
        assert (reply.status, reply.segment) == (Status.OK, INSTANCE)
        self.nonce = reply.offset
        assert self.nonce

    def token(self, **fields: int) -> Token:
        """One of ours; fields say what is different."""
        return Token(self.client.session, **fields)  # type: ignore[arg-type]

    def show(self, payload: bytes, segment: int = SEGMENT, epoch: int = EPOCH) -> int:
        frame = Frame(Opcode.AUTHORIZE, segment=segment, epoch=epoch, lane=self.lane)
        return self.client.ask(frame, payload)[0].status

    def authorize(self, **fields: int) -> None:
        """Show a good one."""
        token = self.token(**fields)
        assert (
            self.show(token.payload(self.nonce, bond=self.bond, lane=self.lane), token.segment, token.epoch)
            == Status.OK
        )

    def ask(self, frame: Frame, payload: bytes = b"") -> int:
        return self.client.ask(replace(frame, lane=self.lane), payload)[0].status

    def shut_out(self) -> None:
        """Check that it got nowhere."""
        for name, (frame, payload) in REQUESTS.items():
            assert self.ask(frame, payload) == Status.DENIED, name
        self.client.socket.close()


@pytest.fixture
def leaving() -> Iterator[contextlib.ExitStack]:
    """Closes what was entered."""
    with contextlib.ExitStack() as stack:
        yield stack


Meet = Callable[..., Peer]


@pytest.fixture
def meet(place: Place, leaving: contextlib.ExitStack) -> Meet:
    """Makes connections that have said HELLO; they are closed at the end."""

    def make(transport: str, session: int | None = None, lane: int = 0) -> Peer:
        return Peer(leaving.enter_context(place.connect(transport)), session, lane)

    return make


def data(opcode: Opcode, **fields: int) -> Frame:
    return Frame(opcode, dtype=Dtype.FLOAT32, epoch=EPOCH, **{"segment": SEGMENT, "length": 16, **fields})


STEP = struct.pack("<QQQ9d", OTHER, STATE, SECOND_STATE, 0.1, 1, 0, 0, 0.9, 0.99, 1e-8, 1, 0)
HOME = Frame(Opcode.LOCK, epoch=EPOCH, segment=SEGMENT)
WORDS = struct.pack("<4Q", 1000, 0, 0, 0)
# One good request of every opcode that is about a segment.
REQUESTS: dict[str, tuple[Frame, bytes]] = {
    "attach": (Frame(Opcode.ATTACH, epoch=EPOCH, segment=SEGMENT), b""),
    "read": (data(Opcode.READ), b""),
    "write": (data(Opcode.WRITE), bytes(16)),
    "accumulate": (data(Opcode.ACCUMULATE, op=1, argument=0x3FF0000000000000), bytes(16)),
    "fill": (data(Opcode.FILL), b""),
    "accumulate_from": (
        data(Opcode.ACCUMULATE_FROM, op=1, argument=0x3FF0000000000000), struct.pack("<QQ", OTHER, 0)
    ),
    "apply": (data(Opcode.APPLY, op=4), STEP),
    "replicate": (Frame(Opcode.REPLICATE, epoch=EPOCH, segment=SEGMENT), b""),
    "refused": (Frame(Opcode.REFUSED, epoch=EPOCH, segment=SEGMENT), b""),
    "copy": (Frame(Opcode.COPY, epoch=EPOCH, segment=SEGMENT, op=2), b""),
    "watermark": (Frame(Opcode.WATERMARK, epoch=EPOCH, segment=SEGMENT), b""),
    **{
        opcode.name.lower(): (replace(HOME, opcode=opcode), WORDS)
        for opcode in Opcode
        if Opcode.LOCK <= opcode <= Opcode.UNPIN
    },
}  # fmt: skip
READERS = {"read", "watermark", "await_version", "pin", "unpin"}


def test_every_opcode_is_asked() -> None:
    """A new opcode that is about a segment is tried here too; the two that are left out need a buffer of int64."""
    known = {Opcode.HELLO, Opcode.AUTHORIZE, Opcode.FETCH_ADD, Opcode.COMPARE_SWAP}
    assert {frame.opcode for frame, _ in REQUESTS.values()} == set(Opcode) - known


def test_a_token_opens_its_segment(meet: Meet, transport: str) -> None:
    """With it what is written is read; attach gives the memory itself, over the Unix socket alone."""
    peer = meet(transport)
    peer.authorize()
    values = struct.pack("<4f", 1, 2, 3, 4)
    assert peer.ask(data(Opcode.WRITE), values) == Status.OK
    assert peer.client.ask(data(Opcode.READ))[1] == values
    if transport == "tcp":
        assert peer.ask(*REQUESTS["attach"]) == Status.DENIED
    else:
        peer.client.send(REQUESTS["attach"][0])
        reply, descriptor = peer.client.receive_with_descriptor()
        assert reply.status == Status.OK
        assert descriptor >= 0
        os.close(descriptor)


def test_without_a_token(meet: Meet, transport: str) -> None:
    """Nothing is served; nor is it told whether there is such a segment at all."""
    peer = meet(transport)
    assert peer.ask(data(Opcode.READ, segment=0x9999)) == Status.DENIED
    peer.shut_out()


def test_a_forged_token(meet: Meet, transport: str) -> None:
    """A bit changed in any byte of it, or in what it is shown for, and it opens nothing."""
    peer = meet(transport)
    good = peer.token().payload(peer.nonce, bond=peer.bond)
    for at in range(len(good)):
        spoilt = bytearray(good)
        spoilt[at] ^= 1 << at % 8
        assert peer.show(bytes(spoilt)) == Status.DENIED, at
    assert peer.show(good, segment=OTHER) == Status.DENIED
    assert peer.show(good, epoch=EPOCH + 1) == Status.DENIED
    assert peer.show(bytes(48)) == Status.DENIED
    assert peer.show(peer.token(key=bytes(32)).payload(peer.nonce, bond=peer.bond)) == Status.DENIED  # type: ignore[arg-type]
    peer.shut_out()


@pytest.mark.parametrize("length", [0, 1, 16, 47, 49, 64])
def test_a_truncated_token(meet: Meet, transport: str, length: int) -> None:
    """One of another length is no frame: the connection is closed."""
    peer = meet(transport)
    good = (peer.token().payload(peer.nonce, bond=peer.bond) + bytes(64))[:length]
    peer.client.send(Frame(Opcode.AUTHORIZE, segment=SEGMENT, epoch=EPOCH), good)
    assert peer.client.closed()


def test_an_expired_token(place: Place, meet: Meet, transport: str) -> None:
    """By the coordinator's clock, which the server was told; at the very moment, and while it is in use."""
    peer = meet(transport)
    for expires_ms in (0, NOW_MS - MINUTE_MS, NOW_MS):
        assert peer.show(peer.token(expires_ms=expires_ms).payload(peer.nonce, bond=peer.bond)) == Status.DENIED
    place.engine.set_keys({GENERATION: KEY}, NOW_MS)
    peer.authorize(expires_ms=NOW_MS + 300)
    assert peer.ask(*REQUESTS["read"]) == Status.OK
    wait_for(lambda: peer.ask(*REQUESTS["read"]) == Status.DENIED, "end of the token", 5)
    peer.authorize(expires_ms=NOW_MS + MINUTE_MS)  # renewed
    assert peer.ask(*REQUESTS["read"]) == Status.OK


def test_another_buffers_token(meet: Meet, transport: str) -> None:
    """What opens one segment opens no other, also as the source of a change or as state that it changes."""
    peer = meet(transport)
    peer.authorize(segment=OTHER)
    peer.shut_out()
    peer = meet(transport)
    peer.authorize()
    for name in ("accumulate_from", "apply"):
        assert peer.ask(*REQUESTS[name]) == Status.DENIED, name
    assert peer.ask(data(Opcode.READ, segment=OTHER)) == Status.DENIED
    peer.authorize(segment=OTHER, rights=READ)
    assert peer.ask(*REQUESTS["accumulate_from"]) == Status.OK
    peer.authorize(segment=STATE)
    peer.authorize(segment=SECOND_STATE, rights=READ)
    assert peer.ask(*REQUESTS["apply"]) == Status.DENIED
    peer.authorize(segment=SECOND_STATE)
    assert peer.ask(*REQUESTS["apply"]) == Status.OK


def test_a_token_of_the_warden(meet: Meet, transport: str) -> None:
    """A change that another segment's lock fences needs the right to write there, too: who may take that lock."""
    peer = meet(transport)
    peer.authorize()
    fenced = Flag.FENCED | Flag.WARDEN
    write = data(Opcode.WRITE, flags=fenced), struct.pack("<Q16x", STATE)
    step = data(Opcode.APPLY, op=1, flags=fenced, argument=STATE), struct.pack("<3Q9d", OTHER, 0, 0, *[0.5] * 9)
    peer.authorize(segment=OTHER, rights=READ)
    for rights in (0, READ):
        if rights:
            peer.authorize(segment=STATE, rights=rights)
        for frame, payload in (write, step):
            assert peer.ask(frame, struct.pack("<Q", 2) + payload) == Status.DENIED, (rights, frame.opcode)
    peer.authorize(segment=STATE)
    reply, _ = peer.client.ask(replace(HOME, segment=STATE), WORDS)
    assert reply.status == Status.OK
    for frame, payload in (write, step):
        assert peer.ask(frame, struct.pack("<Q", reply.argument) + payload) == Status.OK, frame.opcode
        assert peer.ask(frame, struct.pack("<Q", reply.argument + 2) + payload) == Status.LOCK_LOST
    unlock = replace(HOME, opcode=Opcode.UNLOCK, segment=STATE)
    assert peer.ask(unlock, struct.pack("<4Q", reply.argument, 0, 0, 0)) == Status.OK


def test_a_readers_token(meet: Meet, transport: str) -> None:
    """It reads, and waits for versions; it changes nothing, takes no lock, and is not given the memory."""
    peer = meet(transport)
    peer.authorize(rights=READ)
    for name, (frame, payload) in REQUESTS.items():
        status = peer.ask(frame, payload)
        assert (status != Status.DENIED) == (name in READERS), (name, status)
    nobody = meet(transport)
    nobody.authorize(rights=0)
    nobody.shut_out()


def test_another_sessions_token(meet: Meet, transport: str) -> None:
    """A token is its session's, whatever the HELLO before it or its own header says."""
    mine, other = meet(transport), secrets.randbits(63)
    for proved in (mine.client.session, other):
        assert mine.show(Token(other).payload(mine.nonce, bond=mine.bond, session=proved)) == Status.DENIED
    mine.shut_out()
    thief = meet(transport)
    frame = Frame(Opcode.AUTHORIZE, segment=SEGMENT, epoch=EPOCH, session=other, sequence=9, payload=48)
    thief.client.socket.sendall(frame.pack() + Token(other).payload(thief.nonce, bond=thief.bond, session=other))
    assert thief.client.closed()


def test_a_replayed_token(meet: Meet, transport: str) -> None:
    """What was seen on one connection is good on no other: of the same session, of another lane, on another run."""
    first = meet(transport)
    recorded = first.token().payload(first.nonce, bond=first.bond)
    assert first.show(recorded) == Status.OK
    again = meet(transport, first.client.session, lane=1)
    assert again.nonce != first.nonce
    assert again.show(recorded) == Status.DENIED
    assert (
        again.show(first.token().payload(again.nonce, bond=again.bond, instance=INSTANCE + 1, lane=1)) == Status.DENIED
    )
    assert again.show(first.token().payload(again.nonce, bond=again.bond, lane=0)) == Status.DENIED
    again.shut_out()
    assert first.ask(*REQUESTS["read"]) == Status.OK


def test_nobody_is_shut_out_by_a_name(meet: Meet, transport: str) -> None:
    """Who knows a session's id and says HELLO with it ends none of its connections, and is closed when he proves
    nothing. The session itself takes its lane over as ever."""
    mine = meet(transport)
    mine.authorize()
    thief = meet(transport, mine.client.session)
    assert thief.show(bytes(48)) == Status.DENIED
    assert mine.ask(*REQUESTS["read"]) == Status.OK
    mine_again = meet(transport, mine.client.session)
    assert mine.ask(*REQUESTS["read"]) == Status.OK
    mine_again.authorize()
    assert mine.client.closed()
    assert mine_again.ask(*REQUESTS["read"]) == Status.OK
    assert transport == "unix" or thief.client.closed()  # after as long as a silent stranger has, 5 s


def test_who_is_refused_leaves_no_trace(meet: Meet) -> None:
    """Refused changes of a stranger are not noted in the segment's records, where they would push others' out."""
    peer = meet("tcp")
    for _ in range(3):
        assert peer.ask(*REQUESTS["write"]) == Status.DENIED
    peer.authorize(rights=READ)
    reply, _ = peer.client.ask(REQUESTS["watermark"][0])
    assert (reply.status, reply.argument, reply.offset) == (Status.OK, 0, 0)


def test_checksums_go_with_tokens(place: Place, leaving: contextlib.ExitStack) -> None:
    """On a connection with checksums the token has one too, and a wrong one closes the connection."""
    for right in (True, False):
        client = leaving.enter_context(place.connect("tcp"))
        client.session = secrets.randbits(63)

        def sealed(frame: Frame, payload: bytes, sequence: int, session: int = client.session) -> bytes:
            head = replace(frame, flags=Flag.CHECKSUM, session=session, sequence=sequence, payload=len(payload) + 4)
            whole = head.pack() + payload
            return whole + struct.pack("<I", lib.smb_crc32c(0, whole, len(whole)))

        client.socket.sendall(sealed(Frame(Opcode.HELLO), b"", 1))
        hello, _ = client.receive()
        token = Token(client.session).payload(hello.offset, bond=bond_of_channel(IN_THE_CLEAR))
        frame = sealed(Frame(Opcode.AUTHORIZE, segment=SEGMENT, epoch=EPOCH), token, 2)
        client.socket.sendall(frame if right else frame[:-1] + bytes([frame[-1] ^ 1]))
        if right:
            assert client.receive()[0].status == Status.OK
        else:
            assert client.closed()


def test_keys_are_a_set_of_three_generations(place: Place, meet: Meet) -> None:
    """Each of them is good; a set takes the place of the one before as a whole, be its numbers higher or lower: where
    the coordinator's clock was days ahead and was put right, its tokens count from then on."""
    for first in (GENERATION + 1, GENERATION + 30, GENERATION + 2):
        keys = {generation: secrets.token_bytes(32) for generation in range(first, first + 3)}
        place.engine.set_keys(keys, NOW_MS)
        assert meet("tcp").show(b"x" * 48) == Status.DENIED
        peer = meet("tcp")
        for generation, key in keys.items():
            peer.authorize(generation=generation, key=key)  # type: ignore[arg-type]
        assert peer.show(peer.token().payload(peer.nonce, bond=peer.bond)) == Status.DENIED
        assert peer.show(peer.token(generation=first - 1).payload(peer.nonce, bond=peer.bond)) == Status.DENIED
    place.engine.set_keys({GENERATION: KEY}, NOW_MS)  # for the tests after this one
    for wrong in ({GENERATION: KEY[:31]}, {}, dict.fromkeys(range(4), KEY)):
        with pytest.raises(InvalidArgumentError):
            place.engine.set_keys(wrong, NOW_MS)


def test_a_refusal_says_why(place: Place) -> None:
    """A client is told whether the key is not known, the token has expired, or proves nothing; a good one is taken."""
    session = secrets.randbits(63)
    client = EngineClient(session)
    link, _ = client.connect_tcp("127.0.0.1", place.port, Lane.TCP_DATA, 5000)

    def show(**fields: int) -> None:
        made = Token(**{"session": session, **fields})  # type: ignore[arg-type]
        link.authorize(
            Shown(SEGMENT, EPOCH, made.rights, made.generation, made.expires_ms, made.secret()), timeout_ms=5000
        )

    show()
    for fields, why in (
        ({"generation": GENERATION + 30}, "does not know the key of this token: the coordinator's clock was changed"),
        ({"expires_ms": NOW_MS}, "has expired by the coordinator's clock"),
        ({"session": session + 1}, "does not prove that its coordinator made it for this session"),
    ):
        with pytest.raises(EngineError, match=why) as refused:
            show(**fields)
        assert refused.value.status == Status.DENIED
    client.close()


def test_the_coordinators_tokens_are_these(place: Place, meet: Meet) -> None:
    """What the coordinator makes, with the keys that it gives, opens the segment, also over a change of generations."""
    now = [GENERATION_S * 1000.0 - 1.0]
    tokens = TokenIssuer(secrets.token_bytes(32), 600, lambda: now[0])
    for ahead_s in (0.0, 2.0):
        now[0] += ahead_s
        access = tokens.keys("server-0")
        assert len(access.keys) == 3
        assert access.keys != tokens.keys("server-1").keys
        peer = meet("tcp")
        buffer = pb.Buffer(layout=pb.Layout(epoch=EPOCH, segments=[pb.Segment(id=SEGMENT, server="server-0")]))
        tokens.add_to(buffer, peer.client.session, may_write=True)
        token = buffer.layout.segments[0].token
        if ahead_s == 0:  # the keys of before the change know the next generation
            place.engine.set_keys({each.generation: each.key for each in access.keys}, access.now_ms)
        made = peer.token(rights=token.rights, generation=token.generation, expires_ms=token.expires_at_ms)
        object.__setattr__(made, "key", next(k.key for k in access.keys if k.generation == token.generation))
        assert made.secret() == token.secret
        assert peer.show(made.payload(peer.nonce, bond=peer.bond)) == Status.OK
    place.engine.set_keys({GENERATION: KEY}, NOW_MS)


def test_a_sessions_secret() -> None:
    """It is the session's, follows from the root alone, and no other passes."""
    tokens = TokenIssuer(bytes(32))
    tokens.check_session(7, tokens.session_secret(7))
    tokens.check_session(7, TokenIssuer(bytes(32)).session_secret(7))
    for secret in (b"", bytes(32), tokens.session_secret(8), TokenIssuer(b"1" * 32).session_secret(7)):
        with pytest.raises(PermissionDeniedError):
            tokens.check_session(7, secret)


def test_sha256_of_the_engine() -> None:
    """HMAC-SHA-256 in C gives what RFC 4231 says, and what hashlib does for every length around its blocks."""

    def mac(key: bytes, text: bytes) -> bytes:
        made = ffi.new("uint8_t[32]")
        lib.smb_hmac_sha256(key, len(key), text, len(text), made)
        return bytes(made)

    vectors = [
        (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
        (
            b"\xaa" * 131,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
        (
            b"\xaa" * 131,
            b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be"
            b" hashed before being used by the HMAC algorithm.",
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
        ),
    ]
    for key, text, expected in vectors:
        assert mac(key, text).hex() == expected
    for length in range(200):
        key, text = secrets.token_bytes(length), secrets.token_bytes(length * 3 % 211)
        assert mac(key, text) == hmac.digest(key, text, "sha256"), length


def test_expiry_needs_no_common_clock(meet: Meet) -> None:
    """The server's own clock has no say: the coordinator's may be years away from it."""
    assert abs(time.time() * 1000 - NOW_MS) > MINUTE_MS
    peer = meet("tcp")
    peer.authorize(expires_ms=NOW_MS + MINUTE_MS)
    assert peer.ask(*REQUESTS["read"]) == Status.OK
