"""What was sent before is not done twice: sequence numbers, watermarks and what waits, spoken by hand."""

from __future__ import annotations

import contextlib
import itertools
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from memserver.refused_sessions import ENDED_MAX
from tests.support.engine_server import CHUNK_BYTES, EPOCH, FLOATS, SCRATCH, EngineServer, engine_server, whole
from tests.support.raw import Dtype, Flag, Frame, Op, Opcode, RawClient, Status, scale_bits

RECORDS = 128  # of a segment as small as these
FOREVER = 2**64 - 1
WAITS = 4096  # of one connection
_sessions = itertools.count(1 << 40)


def number(client: RawClient, offset: int = 0) -> int:
    _, data = client.ask(whole(Opcode.READ, SCRATCH, offset, 8))
    return int(struct.unpack("<q", data)[0])


def add(value: int, offset: int = 0) -> tuple[Frame, bytes]:
    frame = replace(whole(Opcode.ACCUMULATE, SCRATCH, offset, 8), op=Op.SUM, argument=scale_bits(1.0))
    return frame, struct.pack("<q", value)


def watermark(client: RawClient) -> Frame:
    return client.ask(Frame(Opcode.WATERMARK, segment=SCRATCH, epoch=EPOCH))[0]


def again(client: RawClient, sequence: int, frame: Frame, payload: bytes = b"") -> tuple[Frame, bytes]:
    """Send the request with that sequence number, as one that was sent before."""
    client.sequence = sequence - 1
    return client.ask(replace(frame, flags=frame.flags | Flag.RETRY), payload)


@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.FILL, Opcode.ACCUMULATE, Opcode.ACCUMULATE_FROM])
def test_a_change_is_made_once(server: EngineServer, opcode: Opcode) -> None:
    """Repeated on the same connection and on a new one it is answered OK and changes nothing; the next one counts."""
    session = next(_sessions)
    with server.connect().hello(session) as client:
        assert watermark(client).argument == 0
        client.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 16), argument=5))
        frame, payload = add(2)
        if opcode is Opcode.ACCUMULATE_FROM:
            payload = struct.pack("<QQ", SCRATCH, 8)
        elif opcode is Opcode.FILL:
            payload = b""
        frame = replace(frame, opcode=opcode, argument=7 if opcode is Opcode.FILL else frame.argument)
        client.ask(frame, payload)
        mine, found = client.sequence, number(client)
        assert watermark(client).argument == mine
        client.ask(*add(100))
        assert again(client, mine, frame, payload)[0].status == Status.OK
        assert number(client) == found + 100
    with server.connect().hello(session) as client:
        assert again(client, mine, frame, payload)[0].status == Status.OK
        assert number(client) == found + 100
        client.sequence = mine + 50
        client.ask(frame, payload)
        assert watermark(client).argument == mine + 51


def test_results_are_given_again(server: EngineServer) -> None:
    """A repeated fetch_add or compare_swap is told its first old value; a repeated fetch the values of now."""
    with server.connect().hello(next(_sessions)) as client, server.hello() as other:
        client.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 8), argument=10))
        fetch = replace(whole(Opcode.FETCH_ADD, SCRATCH, 0, 8), argument=3)
        swap = replace(whole(Opcode.COMPARE_SWAP, SCRATCH, 0, 8), argument=50)
        first, _ = client.ask(fetch)
        at = client.sequence
        second, _ = client.ask(swap, struct.pack("<q", 13))
        assert (first.argument, second.argument) == (10, 13)
        other.ask(*add(1000))
        assert again(client, at, fetch)[0].argument == 10
        assert again(client, at + 1, swap, struct.pack("<q", 13))[0].argument == 13
        assert number(client) == 1050
        frame, payload = add(1)
        client.ask(replace(frame, flags=Flag.FETCH), payload)
        at = client.sequence
        other.ask(*add(1))
        reply, data = again(client, at, replace(frame, flags=Flag.FETCH), payload)
        assert (reply.status, struct.unpack("<q", data)[0]) == (Status.OK, 1052)


def test_results_of_floats_are_given_again(server: EngineServer) -> None:
    """A repeated fetch_add of float32 is told the bits of its first old value, and adds nothing."""
    one = struct.unpack("<I", struct.pack("<f", 1.0))[0]
    with server.connect().hello(next(_sessions)) as client:
        client.ask(replace(whole(Opcode.FILL, FLOATS, 0, 4), dtype=Dtype.FLOAT32, argument=one))
        fetch = replace(whole(Opcode.FETCH_ADD, FLOATS, 0, 4), dtype=Dtype.FLOAT32, argument=one | 0xABCD << 32)
        assert client.ask(fetch)[0].argument == one
        at = client.sequence
        assert again(client, at, fetch)[0].argument == one
        swap = replace(fetch, opcode=Opcode.COMPARE_SWAP, argument=0)
        two = struct.pack("<fI", 2.0, 0xABCD)
        assert struct.pack("<Q", client.ask(swap, two)[0].argument) == struct.pack("<fI", 2.0, 0)
        assert client.ask(fetch)[0].argument == 0


def test_a_result_of_long_ago_is_not_invented(server: EngineServer) -> None:
    """Results are kept for the last few; an older one, asked for again, is called unknown and not applied."""
    with server.connect().hello(next(_sessions)) as client:
        client.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 8), argument=0))
        fetch = replace(whole(Opcode.FETCH_ADD, SCRATCH, 0, 8), argument=1)
        for _ in range(10):
            client.ask(fetch)
        last = client.sequence
        assert again(client, last - 9, fetch)[0].status == Status.EVICTED
        assert again(client, last - 3, fetch)[0].argument == 6
        assert number(client) == 10


def test_each_lane_has_its_own_watermark(server: EngineServer) -> None:
    """A low sequence number on another lane is no repetition."""
    session = next(_sessions)
    with server.connect() as one, server.connect() as two:
        for lane, client in enumerate((one, two)):
            client.session = session
            assert client.ask(Frame(Opcode.HELLO, lane=lane))[0].status == Status.OK
        one.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 8), argument=0))
        one.sequence = 1000
        one.ask(*add(1))
        frame, payload = add(10)
        reply, _ = two.ask(replace(frame, lane=1), payload)
        assert reply.status == Status.OK
        assert number(one) == 11
        assert two.ask(Frame(Opcode.WATERMARK, lane=1, segment=SCRATCH, epoch=EPOCH))[0].argument == two.sequence - 1


def test_an_older_connection_of_the_lane_is_shut_out(server: EngineServer) -> None:
    """Once the newer HELLO is answered nothing of the older connection is applied any more."""
    session = next(_sessions)
    with server.connect().hello(session) as older, server.connect() as newer:
        older.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 8), argument=0))
        frame, payload = add(1)
        older.socket.sendall(older.form(frame, payload)[:40])
        newer.hello(session)
        with contextlib.suppress(OSError):
            older.socket.sendall((older.form(frame, payload))[40:] * 2)
        newer.sequence = 100
        newer.ask(*add(10))
        assert number(newer) == 10
        assert older.ended()


def test_a_forgotten_record_is_called_so(server: EngineServer) -> None:
    """When the table is full the oldest record goes: its session's repetition is refused, its new requests are not."""
    with server.connect().hello(next(_sessions)) as client:
        client.ask(*add(1, CHUNK_BYTES))
        mine = client.sequence
        for _ in range(RECORDS + 20):
            with server.connect().hello(next(_sessions)) as passing:
                passing.ask(*add(1, CHUNK_BYTES))
        before = number(client, CHUNK_BYTES)
        assert watermark(client).status == Status.EVICTED
        assert again(client, mine, *add(1, CHUNK_BYTES))[0].status == Status.EVICTED
        assert number(client, CHUNK_BYTES) == before
        client.sequence = 1000
        assert client.ask(*add(1, CHUNK_BYTES))[0].status == Status.OK
        assert number(client, CHUNK_BYTES) == before + 1


def test_a_session_that_came_back_after_65536_others_had_ended_changes_nothing_twice(tmp_path: Path) -> None:
    """The server has forgotten that it ended, and lets it in: its repetition without a record is not taken for new."""
    session = next(_sessions)
    with engine_server(tmp_path) as server:
        with server.connect().hello(session) as client:
            client.ask(*add(1))
            mine = client.sequence
        for number_of_records in range(2, RECORDS + 2):  # at last one more than there is room for
            if number_of_records == RECORDS + 1:
                server.end_sessions(session, 1)  # its record goes first
            with server.connect().hello(next(_sessions)) as passing:
                passing.ask(*add(0))
        with server.connect().hello(next(_sessions)) as client:
            assert watermark(client).status == Status.OK  # nobody who may come back has lost one
            before = number(client)
        server.end_sessions(1 << 50, ENDED_MAX)
        with server.connect().hello(session) as client:
            assert watermark(client).status == Status.EVICTED
            assert again(client, mine, *add(1))[0].status == Status.EVICTED
            assert number(client) == before


def test_a_refused_change_does_not_look_applied(server: EngineServer) -> None:
    """A later change moves the watermark past one that was refused: the answer says so, and its repetition is made."""
    with server.connect().hello(next(_sessions)) as client:
        client.ask(replace(whole(Opcode.FILL, SCRATCH, 0, 8), argument=0))
        frame, payload = add(1)
        fenced = replace(frame, flags=Flag.FENCED)
        client.ask(*lock(Opcode.FENCE, 1 << 40))
        assert client.ask(fenced, struct.pack("<Q", 12345 * 2) + payload)[0].status == Status.LOCK_LOST
        refused = client.sequence
        client.ask(*add(10))
        reply = watermark(client)
        assert (reply.argument, reply.offset) == (refused + 1, refused)
        assert again(client, refused, frame, payload)[0].status == Status.OK
        assert number(client) == 11
        assert again(client, refused, frame, payload)[0].status == Status.OK
        assert again(client, refused + 1, frame, payload)[0].status == Status.OK
        assert number(client) == 11
        client.sequence = 1000
        for _ in range(200):
            client.ask(fenced, struct.pack("<Q", 12345 * 2) + payload)
        assert again(client, refused + 1, frame, payload)[0].status == Status.OK  # made, and not again
        assert number(client) == 11
        client.sequence = 1200
        client.ask(*add(100))
        assert again(client, 1001, frame, payload)[0].status == Status.EVICTED  # one of those that are forgotten
        assert number(client) == 111
        assert again(client, 1200, frame, payload)[0].status == Status.OK
        assert number(client) == 112


def words(*values: int) -> bytes:
    return struct.pack("<4Q", *values, *(0,) * (4 - len(values)))


def lock(opcode: Opcode, *values: int) -> tuple[Frame, bytes]:
    return Frame(opcode, segment=SCRATCH, epoch=EPOCH), words(*values)


def test_a_lock_by_hand(server: EngineServer) -> None:
    """Granted, repeated with the same token, waited for without holding up its connection, handed over."""
    with server.hello() as holder, server.hello() as waiter:
        reply, _ = holder.ask(*lock(Opcode.LOCK, 60_000, 0))
        token, at = reply.argument, holder.sequence
        assert (reply.status, token % 2) == (Status.OK, 0)
        assert again(holder, at, *lock(Opcode.LOCK, 60_000, 0))[0].argument == token
        assert waiter.ask(*lock(Opcode.LOCK, 60_000, 0))[0].status == Status.TIMEOUT
        waiter.send(*lock(Opcode.LOCK, 60_000, FOREVER))
        waiting = waiter.sequence
        assert number(waiter) == number(waiter)  # its other requests are answered meanwhile
        frame, payload = add(1)
        fenced = replace(frame, flags=Flag.FENCED)
        assert holder.ask(fenced, struct.pack("<Q", token) + payload)[0].status == Status.OK
        assert holder.ask(fenced, struct.pack("<Q", token + 2) + payload)[0].status == Status.LOCK_LOST
        fetched = replace(fenced, flags=Flag.FENCED | Flag.FETCH)
        assert holder.ask(fetched, struct.pack("<Q", token) + payload)[0].status == Status.OK
        made = holder.sequence
        before = number(waiter)
        holder.sequence += 100
        assert holder.ask(*lock(Opcode.UNLOCK, token))[0].status == Status.OK
        after = holder.sequence
        assert again(holder, made, fetched, struct.pack("<Q", token) + payload)[0].status == Status.OK  # it was made
        holder.sequence = after
        reply, _ = waiter.receive()
        assert (reply.opcode, reply.sequence, reply.status) == (Opcode.LOCK, waiting, Status.OK)
        assert reply.argument > token
        assert holder.ask(*lock(Opcode.UNLOCK, token))[0].status == Status.OK  # repeated
        assert holder.ask(*lock(Opcode.RENEW, token, 60_000))[0].status == Status.LOCK_LOST
        assert holder.ask(fenced, struct.pack("<Q", token) + payload)[0].status == Status.LOCK_LOST
        assert number(waiter) == before
        waiter.ask(*lock(Opcode.UNLOCK, reply.argument))


def test_a_repeated_pin_is_one_pin(server: EngineServer) -> None:
    """PIN sent again after a lost answer is the same pin; one UNPIN lets it go."""
    with server.hello() as client:
        first, _ = client.ask(*lock(Opcode.PIN))
        at = client.sequence
        second, _ = again(client, at, *lock(Opcode.PIN))
        assert (first.argument, first.offset) == (second.argument, second.offset)
        assert first.offset == at
        assert client.ask(*lock(Opcode.UNPIN, at))[0].status == Status.OK
        assert client.ask(*lock(Opcode.UNPIN, at))[0].status == Status.OK


def test_a_waiter_that_goes_leaves_the_line(server: EngineServer) -> None:
    """A connection that closes while it waits is not granted; the next one is."""
    with server.hello() as holder, server.hello() as next_one:
        token = holder.ask(*lock(Opcode.LOCK, 60_000, 0))[0].argument
        with server.hello() as leaving:
            leaving.send(*lock(Opcode.LOCK, 60_000, FOREVER))
            number(leaving)
        next_one.send(*lock(Opcode.LOCK, 60_000, FOREVER))
        number(next_one)
        holder.ask(*lock(Opcode.UNLOCK, token))
        reply, _ = next_one.receive()
        assert reply.status == Status.OK
        next_one.ask(*lock(Opcode.UNLOCK, reply.argument))


def test_a_connection_has_so_many_waits_and_no_more(server: EngineServer) -> None:
    """The 4097th is refused at once; one publication answers all others, each once, and then there is room again."""
    with server.hello() as client, server.hello() as other:
        frame, payload = lock(Opcode.LOCK, 60_000, 0)
        turn, _ = other.ask(replace(frame, argument=1), payload)  # the publisher's
        version = turn.offset
        frame, payload = lock(Opcode.AWAIT_VERSION, version, FOREVER)
        for _ in range(WAITS + 1):
            client.send(frame, payload)
        last = client.sequence
        refused, _ = client.receive()
        assert (refused.sequence, refused.status) == (last, Status.OUT_OF_MEMORY)
        other.ask(*lock(Opcode.PUBLISH, turn.argument, version))
        answered = [client.receive()[0] for _ in range(WAITS)]
        assert sorted(reply.sequence for reply in answered) == list(range(last - WAITS, last))
        assert all((reply.status, reply.argument) == (Status.OK, version) for reply in answered)
        assert client.ask(*lock(Opcode.AWAIT_VERSION, version, FOREVER))[0].status == Status.OK
