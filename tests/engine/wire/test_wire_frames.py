"""The protocol as its page describes it, spoken by hand: every request, its answer, and what refuses it."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from dataclasses import replace

import numpy as np
import pytest

from smb._engine import lib
from tests.support.engine_server import (
    CHUNK_BYTES,
    EPOCH,
    FLOATS,
    INSTANCE,
    PATTERN,
    SCRATCH,
    SEGMENT_BYTES,
    WITNESS,
    EngineServer,
    whole,
)
from tests.support.raw import HEADER, Dtype, Flag, Frame, Op, Opcode, RawClient, Status, scale_bits


def int64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def read_int64s(client: RawClient, offset: int, count: int) -> list[int]:
    _, data = client.ask(whole(Opcode.READ, SCRATCH, offset, 8 * count))
    return list(struct.unpack(f"<{count}q", data))


def test_hello_names_this_run_of_the_server(server: EngineServer) -> None:
    """The answer to HELLO repeats session and lane and carries the instance in the segment field."""
    with server.connect() as client:
        client.session = 0xABCDEF
        reply, data = client.ask(Frame(Opcode.HELLO, lane=7))
        assert (reply.status, reply.segment, reply.lane, data) == (Status.OK, INSTANCE, 7, b"")


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_every_request(server: EngineServer, unix: bool) -> None:
    """Each opcode does what the page says, over both sockets."""
    with server.hello_unix() if unix else server.hello() as client:
        at = CHUNK_BYTES + 64
        three = whole(0, SCRATCH, at, 24)
        assert client.ask(replace(three, opcode=Opcode.FILL, argument=5))[0].status == Status.OK
        assert read_int64s(client, at, 3) == [5, 5, 5]
        assert client.ask(replace(three, opcode=Opcode.WRITE), int64s(1, -2, 3))[0].status == Status.OK
        add = replace(three, opcode=Opcode.ACCUMULATE, op=Op.SUM, argument=scale_bits(2.0))
        reply, data = client.ask(add, int64s(10, 20, 30))
        assert (reply.status, data) == (Status.OK, b"")
        reply, data = client.ask(replace(add, flags=Flag.FETCH), int64s(1, 1, 1))
        assert (reply.status, reply.length, data) == (Status.OK, 24, int64s(23, 40, 65))
        maximum = replace(three, opcode=Opcode.ACCUMULATE_FROM, op=Op.MAX, argument=scale_bits(1.0))
        assert client.ask(maximum, struct.pack("<QQ", WITNESS, 0))[0].status == Status.OK
        first = struct.unpack_from("<3q", PATTERN)
        assert read_int64s(client, at, 3) == [max(a, b) for a, b in zip((23, 40, 65), first, strict=True)]
        word = whole(Opcode.WRITE, SCRATCH, at + 8, 8)
        client.ask(word, int64s(100))
        assert client.ask(replace(word, opcode=Opcode.FETCH_ADD, argument=7))[0].argument == 100
        swap = replace(word, opcode=Opcode.COMPARE_SWAP, argument=1)
        assert client.ask(swap, int64s(100))[0].argument == 107
        assert client.ask(swap, int64s(107))[0].argument == 107
        assert read_int64s(client, at + 8, 1) == [1]


def test_answers_leave_in_the_order_of_requests(server: EngineServer) -> None:
    """Hundreds of requests in one burst, reads among them, are each answered under their own sequence number."""
    with server.hello() as client:
        burst = b""
        for i in range(300):
            burst += client.form(whole(Opcode.WRITE, SCRATCH, 0, 8), int64s(i))
            burst += client.form(whole(Opcode.READ, SCRATCH, 0, 8))
        first = client.sequence - 599
        client.socket.sendall(burst)
        for i in range(300):
            for kind in (Opcode.WRITE, Opcode.READ):
                reply, data = client.receive()
                assert (reply.opcode, reply.sequence, reply.status) == (kind, first, Status.OK)
                assert kind == Opcode.WRITE or data == int64s(i)
                first += 1


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_reads_in_a_burst(server: EngineServer, unix: bool) -> None:
    """Reads that arrive together are answered together: each once, in order, with its own bytes, whatever stands
    between them, and however little of it the socket takes at a time."""
    chunk = 65536
    asked = [
        whole(Opcode.READ, WITNESS, 0, chunk),
        whole(Opcode.READ, WITNESS, chunk, chunk),
        whole(Opcode.READ, WITNESS, chunk, chunk),  # whose lock the answer holds already
        whole(Opcode.READ, WITNESS, 2 * chunk, 8),
        whole(Opcode.READ, WITNESS, 2 * chunk + 8, chunk - 16),
        replace(whole(Opcode.READ, WITNESS, 0, chunk), epoch=EPOCH + 1),
        whole(Opcode.READ, WITNESS, 0, chunk - 8),
        whole(Opcode.READ, 77, 0, chunk),
        whole(Opcode.READ, WITNESS, chunk + 8, chunk - 8),
        whole(Opcode.FETCH_ADD, SCRATCH, 0, 8),
    ]
    bad = {5: Status.STALE_EPOCH, 7: Status.NOT_FOUND}
    rounds = 60
    with server.hello_unix() if unix else server.hello() as client:
        sender = threading.Thread(
            target=lambda: [client.socket.sendall(b"".join(map(client.form, asked))) for _ in range(rounds)]
        )
        sequence = client.sequence
        sender.start()  # it does not wait for answers
        for _ in range(rounds):
            for index, frame in enumerate(asked):
                reply, data = client.receive()
                sequence += 1
                assert reply.sequence == sequence
                assert (reply.opcode, reply.status) == (frame.opcode, bad.get(index, Status.OK))
                if frame.opcode == Opcode.READ and index not in bad:
                    assert data == PATTERN[frame.offset : frame.offset + frame.length]
        sender.join(10)


def test_bytes_may_arrive_in_any_pieces(server: EngineServer) -> None:
    """A request cut into single bytes is the same request."""
    with server.hello() as client:
        for byte in client.form(whole(Opcode.WRITE, SCRATCH, 8, 16), int64s(77, 78)):
            client.socket.sendall(bytes([byte]))
        assert client.receive()[0].status == Status.OK
        assert read_int64s(client, 8, 2) == [77, 78]


REFUSED = {
    "unknown segment": (replace(whole(Opcode.READ, SCRATCH, 0, 8), segment=99), Status.NOT_FOUND),
    "older epoch": (replace(whole(Opcode.READ, SCRATCH, 0, 8), epoch=EPOCH - 1), Status.STALE_EPOCH),
    "newer epoch": (replace(whole(Opcode.READ, SCRATCH, 0, 8), epoch=EPOCH + 1), Status.STALE_EPOCH),
    "other dtype": (replace(whole(Opcode.READ, SCRATCH, 0, 8), dtype=Dtype.FLOAT64), Status.INVALID),
    "past the end": (whole(Opcode.READ, SCRATCH, SEGMENT_BYTES, 8), Status.INVALID),
    "over the end": (whole(Opcode.READ, SCRATCH, SEGMENT_BYTES - 8, 16), Status.INVALID),
    "far past the end": (whole(Opcode.READ, SCRATCH, (1 << 64) - 16, 8), Status.INVALID),
    "across chunks": (whole(Opcode.READ, SCRATCH, CHUNK_BYTES - 8, 16), Status.INVALID),
    "longer than a chunk": (whole(Opcode.READ, SCRATCH, 0, CHUNK_BYTES + 8), Status.INVALID),
    "fill past the end": (whole(Opcode.FILL, SCRATCH, SEGMENT_BYTES, 8), Status.INVALID),
    "fetch_add past the end": (whole(Opcode.FETCH_ADD, SCRATCH, SEGMENT_BYTES, 8), Status.INVALID),
    "attach over TCP": (Frame(Opcode.ATTACH, segment=SCRATCH, epoch=EPOCH), Status.DENIED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_the_segment_is_answered(server: EngineServer, case: str) -> None:
    """A sound frame that this segment can't serve gets its status, is counted, and the connection goes on."""
    frame, status = REFUSED[case]
    errors = server.counters()["errors"]
    with server.hello() as client:
        reply, data = client.ask(frame)
        assert (reply.status, reply.length, data) == (status, 0, b"")
        assert read_int64s(client, 0, 1)
    name = status.name.lower()
    assert server.counters()["errors"][name] == errors[name] + 1


def test_refused_payloads_are_taken_off_the_stream(server: EngineServer) -> None:
    """Data that comes with a refused request is dropped, not mistaken for the next frame, and changes nothing."""
    before = server.read_segment(SCRATCH)
    with server.hello() as client:
        for offset, status in ((SEGMENT_BYTES, Status.INVALID), (SEGMENT_BYTES - 8, Status.INVALID)):
            data = bytes(CHUNK_BYTES)
            assert client.ask(whole(Opcode.WRITE, SCRATCH, offset, len(data)), data)[0].status == status
        stale = replace(whole(Opcode.ACCUMULATE, SCRATCH, 0, 8), epoch=1, op=Op.SUM, argument=scale_bits(1.0))
        assert client.ask(stale, int64s(1))[0].status == Status.STALE_EPOCH
        for source, offset, status in ((99, 0, Status.NOT_FOUND), (WITNESS, SEGMENT_BYTES, Status.INVALID),
                                       (WITNESS, 4, Status.INVALID), (WITNESS, (1 << 64) - 8, Status.INVALID),
                                       (WITNESS, CHUNK_BYTES - 8, Status.INVALID)):  # fmt: skip
            copy = replace(whole(Opcode.ACCUMULATE_FROM, SCRATCH, 0, 16), op=Op.REPLACE, argument=scale_bits(1.0))
            assert client.ask(copy, struct.pack("<QQ", source, offset))[0].status == status
    assert server.read_segment(SCRATCH) == before


def test_attach_hands_out_the_file(server: EngineServer) -> None:
    """Over the Unix socket the descriptor comes with the answer, and the file is as the page says."""
    with server.hello_unix() as client:
        client.send(Frame(Opcode.ATTACH, segment=WITNESS, epoch=EPOCH))
        reply, descriptor = client.receive_with_descriptor()
        assert reply.status == Status.OK
        size = os.fstat(descriptor).st_size
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as file:
            os.close(descriptor)
            fields = struct.unpack_from("<QIIQIIQQQQQII", file)
            (
                magic,
                version,
                _,
                segment,
                epoch,
                dtype,
                data_bytes,
                file_bytes,
                chunks,
                records,
                data,
                chunk_bytes,
                count,
            ) = fields
            assert (magic, version) == (int.from_bytes(b"MSEGMENT", "little"), 3)
            assert (segment, epoch, dtype, data_bytes) == (WITNESS, EPOCH, Dtype.INT64, SEGMENT_BYTES)
            assert (file_bytes, chunks, data % 4096, chunk_bytes) == (size, 4096, 0, CHUNK_BYTES)
            assert chunks < records < data
            assert (data - records) // 128 >= count > 0
            assert file[data : data + SEGMENT_BYTES] == PATTERN
            sequence = struct.unpack_from("<I", file, chunks + 64 * 1 + 40)[0]
            assert sequence % 2 == 0
        client.send(Frame(Opcode.ATTACH, segment=99, epoch=EPOCH))
        reply, descriptor = client.receive_with_descriptor()
        assert (reply.status, descriptor) == (Status.NOT_FOUND, -1)


def test_attach_in_a_burst(server: EngineServer) -> None:
    """Pipelined requests for descriptors each get their own, as many as were asked for."""
    with server.hello_unix() as client:
        asked = [WITNESS, SCRATCH, WITNESS, 99, SCRATCH]
        client.socket.sendall(b"".join(client.form(Frame(Opcode.ATTACH, segment=s, epoch=EPOCH)) for s in asked))
        inodes = []
        for segment in asked:
            reply, descriptor = client.receive_with_descriptor()
            assert (descriptor >= 0) == (segment != 99) == (reply.status == Status.OK)
            if descriptor >= 0:
                inodes.append(os.fstat(descriptor).st_ino)
                os.close(descriptor)
        assert inodes[0] == inodes[2] != inodes[1] == inodes[3]


def test_elements_travel_as_they_lie(server: EngineServer) -> None:
    """Payload is the elements' little-endian memory: what numpy writes numpy reads."""
    values = np.arange(512, dtype=np.int64) * 3 - 700
    with server.hello() as client:
        client.ask(whole(Opcode.WRITE, SCRATCH, 2 * CHUNK_BYTES, values.nbytes), values.tobytes())
        _, data = client.ask(whole(Opcode.READ, SCRATCH, 2 * CHUNK_BYTES, values.nbytes))
        assert (np.frombuffer(data, np.int64) == values).all()


def floats(opcode: Opcode, nbytes: int, flags: int = 0, argument: float = 0.0) -> Frame:
    return Frame(
        opcode, dtype=Dtype.FLOAT32, op=Op.SUM, epoch=EPOCH, segment=FLOATS, length=nbytes, flags=flags,
        argument=scale_bits(argument),
    )  # fmt: skip


def test_floats_in_fewer_bits(server: EngineServer) -> None:
    """Formed by hand as the page says: each encoding is added and read as it should be, FETCH's answer is exact."""
    bfloat16 = struct.pack("<3H", 0x3F80, 0xC000, 0x3FC0)  # 1, -2, 1.5
    float16 = struct.pack("<3H", 0x3C00, 0xC000, 0x3E00)
    int8 = struct.pack("<f3b", 0.5, 2, -4, 3)
    int4 = struct.pack("<fBB", 0.5, 2 | (16 - 4) << 4, 3)
    with server.hello() as client:
        client.ask(floats(Opcode.WRITE, 12), bytes(12))
        for turn, (flag, payload) in enumerate(
            ((Flag.BFLOAT16, bfloat16), (Flag.FLOAT16, float16), (Flag.INT8, int8), (Flag.INT4, int4)), 1
        ):
            reply, data = client.ask(floats(Opcode.ACCUMULATE, 12, flag | Flag.FETCH, 2.0), payload)
            assert (reply.status, reply.flags) == (Status.OK, flag | Flag.FETCH | Flag.REPLY)
            assert struct.unpack("<3f", data) == (2.0 * turn, -4.0 * turn, 3.0 * turn)
        for flag, payload in ((Flag.BFLOAT16, bfloat16), (Flag.FLOAT16, float16)):
            assert client.ask(floats(Opcode.WRITE, 12, flag), payload)[0].status == Status.OK
            assert client.ask(floats(Opcode.READ, 12, flag))[1] == payload
            assert struct.unpack("<3f", client.ask(floats(Opcode.READ, 12))[1]) == (1.0, -2.0, 1.5)
        client.ask(floats(Opcode.WRITE, 12, Flag.INT8), int8)
        reply, data = client.ask(floats(Opcode.READ, 12, Flag.INT8))
        assert (reply.length, data) == (12, struct.pack("<f3b", np.float32(2) / np.float32(127), 64, -127, 95))
        client.ask(floats(Opcode.WRITE, 12, Flag.INT4), int4)
        reply, data = client.ask(floats(Opcode.READ, 12, Flag.INT4))
        assert (reply.length, data) == (12, struct.pack("<fBB", np.float32(2) / np.float32(7), 3 | 9 << 4, 5))


def test_sparse_entries(server: EngineServer) -> None:
    """Those elements change; indices that do not ascend, or leave the range, are answered INVALID."""
    with server.hello() as client:
        client.ask(floats(Opcode.WRITE, 16), bytes(16))
        add = floats(Opcode.ACCUMULATE, 16, Flag.SPARSE, 1.0)
        assert client.ask(add, struct.pack("<IfIf", 0, 1.5, 3, -2.0))[0].status == Status.OK
        for bad in ((1, 1), (2, 1), (0, 4), (0xFFFFFFFF, 0), (0, 0xFFFFFFFF)):
            payload = struct.pack("<IfIf", bad[0], 9.0, bad[1], 9.0)
            assert client.ask(add, payload)[0].status == Status.INVALID
        assert struct.unpack("<4f", client.ask(floats(Opcode.READ, 16))[1]) == (1.5, 0.0, 0.0, -2.0)


def checked(client: RawClient, frame: Frame, payload: bytes = b"") -> bytes:
    """A request with its checksum."""
    whole_frame = client.form(replace(frame, flags=frame.flags | Flag.CHECKSUM), payload + bytes(4))[:-4]
    return whole_frame + struct.pack("<I", lib.smb_crc32c(0, whole_frame, len(whole_frame)))


def test_checksums(server: EngineServer) -> None:
    """Answers have one where requests have; a request with one bit changed, anywhere, closes and is not carried out."""
    with server.connect() as client:
        client.session = 777_000
        requests = (
            (Frame(Opcode.HELLO), b"", 0), (floats(Opcode.WRITE, 12), struct.pack("<3f", 1, 2, 3), 0),
            (floats(Opcode.READ, 12), b"", 12), (floats(Opcode.READ, 12, Flag.BFLOAT16), b"", 6),
            (floats(Opcode.ACCUMULATE, 12, Flag.FETCH, 1.0), struct.pack("<3f", 1, 2, 3), 12),
            (replace(floats(Opcode.READ, 12), segment=99), b"", 0),
        )  # fmt: skip
        for frame, payload, answer_bytes in requests:
            client.socket.sendall(checked(client, frame, payload))
            reply, data = client.receive()
            assert (reply.flags & Flag.CHECKSUM, len(data)) == (Flag.CHECKSUM, answer_bytes + 4)
            crc = lib.smb_crc32c(0, reply.pack() + data[:-4], HEADER.size + answer_bytes)
            assert data[-4:] == struct.pack("<I", crc)
        assert reply.status == Status.NOT_FOUND
    with server.hello() as witness:
        before = witness.ask(floats(Opcode.READ, 12))[1]
        for bit in range(0, 8 * 80, 7):
            with server.connect() as client:
                client.session = 778_000 + bit
                client.socket.sendall(checked(client, Frame(Opcode.HELLO)))
                client.receive()
                spoilt = bytearray(checked(client, floats(Opcode.WRITE, 12), bytes(12)))
                spoilt[bit // 8] ^= 1 << bit % 8
                client.socket.sendall(spoilt)
                assert client.ended()
        assert witness.ask(floats(Opcode.READ, 12))[1] == before
        errors = server.counters()["errors"]
        assert errors["checksum"] > 10
