"""Frames that are none close their own connection, are counted, and harm nobody and nothing else."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.engine_server import CHUNK_BYTES, EPOCH, SCRATCH, SEGMENT_BYTES, WITNESS, EngineServer, whole
from tests.support.raw import CHUNK_BYTES_MAX, HEADER, Dtype, Flag, Frame, Op, Opcode, RawClient, Status, scale_bits

READ = whole(Opcode.READ, SCRATCH, 0, 8)
WRITE = whole(Opcode.WRITE, SCRATCH, 0, 8)
ADD = replace(whole(Opcode.ACCUMULATE, SCRATCH, 0, 8), op=Op.SUM, argument=scale_bits(1.0))
SEED = 20260305
RANDOM_FRAMES = 10_000
FRAMES_PER_CONNECTION = 2


@pytest.fixture
def good(server: EngineServer) -> Iterator[RawClient]:
    """A well-behaved client that is there all the time and must not notice."""
    with server.hello() as client:
        yield client
        reply, _ = client.ask(READ)
        assert reply.status == Status.OK


def protocol_errors(server: EngineServer) -> int:
    return int(server.counters()["errors"]["protocol"])


# What the table says of each opcode: test_protocol_table.py.
MALFORMED = {
    "a lane that is not its connection's": replace(READ, lane=1),
    "wrong magic": replace(READ, magic=0x4D54),
    "opcode 0": replace(READ, opcode=0),
    "opcode too large": replace(READ, opcode=max(Opcode) + 1),
    "opcode 255": replace(READ, opcode=255),
    "unknown flag": replace(READ, flags=16),
    "high flag": replace(READ, flags=0x8000),
    "unknown dtype": replace(READ, dtype=max(Dtype) + 1),
    "half an element": replace(READ, length=12),
    "offset inside an element": replace(READ, offset=4),
    "range past 64 bits": replace(READ, offset=(1 << 64) - 8),
    "length over the limit": replace(READ, length=CHUNK_BYTES_MAX + 8),
    "absurd length": replace(READ, length=0xFFFFFFF8),
    "write with less payload than length": replace(WRITE, length=16, payload=8),
    "write with absurd payload": replace(WRITE, payload=0xFFFFFFFF),
    "write of absurd size": replace(WRITE, length=0xFFFFFFF8, payload=0xFFFFFFF8),
    "accumulate with no op": replace(ADD, payload=8, op=0),
    "accumulate of integers by a half": replace(ADD, payload=8, argument=scale_bits(0.5)),
    "accumulate of integers by NaN": replace(ADD, payload=8, argument=scale_bits(float("nan"))),
    "apply with no rule": replace(READ, opcode=Opcode.APPLY, dtype=Dtype.FLOAT32, payload=96, op=0),
    "fetch_add of two words": replace(READ, opcode=Opcode.FETCH_ADD, length=16),
    "integers in fewer bits": replace(WRITE, payload=4, flags=Flag.BFLOAT16),
    "floats in fewer bits with all of them": replace(WRITE, dtype=Dtype.FLOAT32, payload=8, flags=Flag.BFLOAT16),
    "int8 without its scale": replace(WRITE, dtype=Dtype.FLOAT32, payload=2, flags=Flag.INT8),
    "int4 with a byte for each element": replace(WRITE, dtype=Dtype.FLOAT32, payload=6, flags=Flag.INT4),
    "an unknown wire": replace(WRITE, dtype=Dtype.FLOAT32, payload=8, flags=0x60),
    "sparse with no entry": replace(ADD, payload=0, flags=Flag.SPARSE),
    "sparse with half an entry": replace(ADD, payload=6, flags=Flag.SPARSE),
    "sparse with more entries than elements": replace(ADD, payload=24, flags=Flag.SPARSE),
    "sparse with fetch": replace(ADD, payload=12, flags=Flag.SPARSE | Flag.FETCH),
    "a checksum without room": replace(READ, flags=Flag.CHECKSUM),
    "a checksum that its hello did not announce": replace(READ, payload=4, flags=Flag.CHECKSUM),
    "second hello": Frame(Opcode.HELLO),
    "hello with a length": Frame(Opcode.HELLO, length=8),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_frame_closes(server: EngineServer, good: RawClient, case: str) -> None:
    """Each rule of the page, broken by one field: the connection is closed and one error counted."""
    before = protocol_errors(server)
    with server.hello() as client:
        assert client.ask(READ)[0].status == Status.OK
        client.socket.sendall(replace(MALFORMED[case], session=client.session).pack())
        assert client.closed()
    assert protocol_errors(server) == before + 1


def test_wrong_session_closes(server: EngineServer, good: RawClient) -> None:
    """A connection speaks for the session that it greeted with and for no other."""
    before = protocol_errors(server)
    with server.hello() as client:
        client.socket.sendall(replace(READ, session=client.session + 1).pack())
        assert client.closed()
    assert protocol_errors(server) == before + 1


@pytest.mark.parametrize("opcode", [opcode for opcode in Opcode if opcode != Opcode.HELLO])
def test_nothing_is_served_before_hello(server: EngineServer, good: RawClient, opcode: Opcode) -> None:
    """A sound request on a connection that has not greeted closes it."""
    before = protocol_errors(server)
    payload = {Opcode.WRITE: 8, Opcode.ACCUMULATE: 8, Opcode.ACCUMULATE_FROM: 16, Opcode.COMPARE_SWAP: 8}
    frame = replace(ADD, opcode=opcode, payload=payload.get(opcode, 0))
    if opcode == Opcode.ATTACH:
        frame = Frame(Opcode.ATTACH, segment=SCRATCH, epoch=EPOCH)
    with server.connect() as client:
        client.socket.sendall(frame.pack() + bytes(frame.payload))
        assert client.closed()
    assert protocol_errors(server) == before + 1


@pytest.mark.parametrize("version", [0, 2, 255])
@pytest.mark.parametrize("greeted", [False, True])
def test_another_version_is_told_so(server: EngineServer, good: RawClient, version: int, greeted: bool) -> None:
    """An unknown version gets one answer, with status VERSION in our own, and the end of the stream."""
    before = server.counters()["errors"]["version"]
    with server.connect() as client:
        if greeted:
            client.hello()
        client.socket.sendall(replace(Frame(Opcode.HELLO), version=version).pack())
        reply, data = client.receive()
        assert (reply.opcode, reply.flags, reply.status, data) == (Opcode.HELLO, Flag.REPLY, Status.VERSION, b"")
        assert client.closed()
    assert server.counters()["errors"]["version"] == before + 1


@pytest.mark.parametrize("base", [READ, WRITE, ADD], ids=["read", "write", "accumulate"])
def test_each_byte_of_the_header(server: EngineServer, good: RawClient, base: Frame) -> None:
    """Each of the 64 bytes set to each of a dozen values: an answer or the end of the stream, never silence."""
    payload = b"" if base.opcode == Opcode.READ else bytes(8)
    answered = closed = 0
    client = server.hello()
    for at in range(HEADER.size):
        original = client.form(base, payload)[at]
        for value in {0, 1, 2, 3, 7, 8, 9, 0x40, 0x7F, 0x80, 0xFE, 0xFF, original ^ 1, original ^ 0x80}:
            frame = bytearray(client.form(base, payload))
            frame[at] = value
            client.socket.sendall(frame)
            try:
                client.receive()
                answered += 1
                ended = at == 2 and value != original  # another version is answered, then closed
            except ConnectionError:
                closed += 1
                ended = True
            if ended:
                assert client.closed()
                client.socket.close()
                client = server.hello()
    client.socket.close()
    assert answered > 200
    assert closed > 200


def random_frame(dice: random.Random) -> bytes:
    """Return bytes of one of several kinds: noise, noise behind a good start, a good frame with a few bytes changed."""
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.randrange(1, 200))
    if kind == 1:
        return struct.pack("<HBB", 0x4D53, 1, dice.randrange(12)) + dice.randbytes(60 + dice.randrange(100))
    base = replace(dice.choice([READ, WRITE, ADD]), session=1, offset=dice.randrange(0, SEGMENT_BYTES, 8))
    length = dice.choice([8, 64, 4096, CHUNK_BYTES])
    payload = b"" if base.opcode == Opcode.READ else bytes(length)
    frame = bytearray(replace(base, length=length, payload=len(payload)).pack() + payload)
    for _ in range(dice.randrange(4)):
        frame[dice.randrange(HEADER.size)] = dice.randrange(256)
    if kind == 3:
        return bytes(frame[: dice.randrange(len(frame))])
    return bytes(frame)


def test_random_and_truncated_frames(server: EngineServer, good: RawClient) -> None:
    """Ten thousand of them on thousands of connections: the server lives, a good client works all the time, the
    witness segment keeps its bytes (checked at the server's end), and the errors are counted.
    """
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    before = server.counters()
    sent = 0
    while sent < RANDOM_FRAMES:
        with server.connect() as client:
            burst = [replace(Frame(Opcode.HELLO), session=1).pack()] if dice.randrange(8) else []
            for _ in range(FRAMES_PER_CONNECTION):
                burst.append(random_frame(dice))
                sent += 1
            with contextlib.suppress(ConnectionError):  # closed at an earlier frame of the burst
                client.socket.sendall(b"".join(burst))
            if dice.randrange(8):  # the others leave without a word
                assert client.ended()
        if sent % 500 == 0:
            assert good.ask(READ)[0].status == Status.OK
    after = server.counters()
    assert after["errors"]["protocol"] > before["errors"]["protocol"] + 1000
    opened = after["connections_opened"]["tcp"] - before["connections_opened"]["tcp"]
    assert opened >= RANDOM_FRAMES // FRAMES_PER_CONNECTION


@pytest.mark.parametrize("cut", [*range(0, HEADER.size + 8, 3), HEADER.size, HEADER.size + 7])
def test_request_cut_short_changes_nothing(server: EngineServer, good: RawClient, cut: int) -> None:
    """A peer that goes away in the middle of a write has written nothing."""
    server.write_segment(SCRATCH, bytes(SEGMENT_BYTES))
    with server.hello() as client:
        client.socket.sendall(client.form(WRITE, b"\xff" * 8)[:cut])
        assert client.ended()
    assert server.read_segment(SCRATCH) == bytes(SEGMENT_BYTES)


def test_large_write_cut_short_changes_nothing(server: EngineServer, good: RawClient) -> None:
    """Neither has one whose chunk had nearly arrived."""
    server.write_segment(SCRATCH, bytes(SEGMENT_BYTES))
    for missing in (1, 64, CHUNK_BYTES // 2):
        with server.hello() as client:
            frame = client.form(whole(Opcode.WRITE, SCRATCH, CHUNK_BYTES, CHUNK_BYTES), b"\xff" * CHUNK_BYTES)
            client.socket.sendall(frame[:-missing])
            assert client.ended()
        assert server.read_segment(SCRATCH) == bytes(SEGMENT_BYTES)


def test_writes_of_chunks_land_whole(server: EngineServer) -> None:
    """Chunks that arrive at once and chunks that arrive in pieces are written alike, between other requests."""
    dice = random.Random(SEED)
    with server.hello() as client:
        for piece in (1 << 20, 50_000, 4096 + 17):
            content = dice.randbytes(CHUNK_BYTES)
            burst = client.form(READ) + client.form(whole(Opcode.WRITE, SCRATCH, 0, CHUNK_BYTES), content)
            burst += client.form(whole(Opcode.READ, SCRATCH, 0, CHUNK_BYTES))
            for at in range(0, len(burst), piece):
                client.socket.sendall(burst[at : at + piece])
            assert client.receive()[0].status == Status.OK
            assert client.receive()[0].status == Status.OK
            assert client.receive()[1] == content


def test_the_other_segment_is_reached_by_its_own_name_only(server: EngineServer, good: RawClient) -> None:
    """The witness is really served: it is not untouched because it can't be touched."""
    with server.hello() as client:
        assert client.ask(replace(READ, segment=WITNESS))[0].status == Status.OK
