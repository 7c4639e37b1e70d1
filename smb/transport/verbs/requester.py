"""The client's end of an RDMA connection: takes requests by reference from the engine and lets the card do them.

Plain reads and writes are one-sided, and adjacent ones are combined. A read looks at the states of its chunks before
and after the data. Each step begins when the one before it is complete, since a card's reads may overtake each other on
their way to memory. A work's fence flag would do the same, but soft RoCE of Linux 6.1 sometimes stops after a fenced
work. Chunks that changed in the meantime are read again, and after a few failures through the server. A write is one
RDMA WRITE. All other requests, and ranges that the segment's keys do not cover, go through the server's gate: the
payload is written into a slot at the server, and a message with the record follows; data of the answer is read from the
slot. Requests leave in the order in which the engine gave them. So if the server has a later message of the lane,
earlier writes have arrived.

The engine's socket is closed after the queue pair, when the card has released all memory (csrc/smb/client.h).
"""

from __future__ import annotations

import ctypes
import functools
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from smb.engine import HELLO, Opcode
from smb.transport.verbs.descriptors import NO_SLOT, RECORD, RECORD_BYTES, RETRY, Records, answers, runs
from smb.transport.verbs.queue_pair import FRAME_BYTES, MESSAGE_BYTES, MESSAGES, BlockPool, QueuePair, Work
from smb.transport.verbs.registration import ClientMemory

RUN_BYTES = 4 << 20  # limit of one RDMA READ or WRITE
_JOB_BYTES = 8 << 20  # between two looks at the chunks' states: half a window, so that the other half can be in flight
_STATE_BYTES = 64
_RUN_CHUNKS = 64
_LOOKS = 32  # reads in progress
_ATTEMPTS = 4
_ROOM = 256  # works reserved for what is in progress: data and second looks of reads, data of answers
_IN_BYTES = 64 * RECORD_BYTES
_UNANSWERED_MAX = MESSAGES - 16  # each takes at most one message, and the server has posted MESSAGES receives
_GATE, _READ, _WRITE = 0, 1, 2
_ANSWER = struct.Struct("<3xB20xQ20xI8x")  # opcode, sequence, payload


@dataclass(frozen=True, slots=True)
class Right:
    """One-sided access to a segment: the rights, and the segment's address at its server."""

    epoch: int
    dtype: int
    nbytes: int
    address: int
    key: int
    writable: bool
    chunk_bytes: int
    states_address: int
    states_key: int
    sequence_at: int


class RemoteSlot(NamedTuple):
    """One slot: memory at the server."""

    address: int
    key: int
    nbytes: int


class _Run(NamedTuple):
    records: Records
    right: Right
    address: int  # for the card: the caller's memory, or a staging block
    local_key: int
    staged: bool
    attempts: int

    @property
    def nbytes(self) -> int:
        return int(self.records["length"].sum())

    @property
    def offset(self) -> int:
        return int(self.records["offset"][0])


class _Item(NamedTuple):
    records: Records
    kind: int
    attempts: int


class _Pending(NamedTuple):
    slot: int
    sink: int
    sink_bytes: int
    block: int  # the staging block, 0 for none


class Carrier:
    """The RelayTask of one connection."""

    def __init__(
        self, queue: QueuePair, slots: Sequence[RemoteSlot], rights: dict[int, Right], memory: ClientMemory
    ) -> None:
        """`rights`, by segment, may be extended while the carrier runs. Raises TransportError."""
        self.closed = False
        self.why = ""
        self.one_sided_bytes = 0  # read and written without the server's help
        self._queue = queue
        self._slots = slots
        self._rights = rights
        self._memory = memory
        self._free = deque(range(len(slots)))
        self._looks = BlockPool(memory.domain, 2 * _RUN_CHUNKS * _STATE_BYTES, _LOOKS)
        ours, self.engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._socket = ours
        self._greeted = False
        self._in = bytearray()
        self._items: deque[_Item] = deque()
        self._pending: dict[int, _Pending] = {}
        self._outgoing = bytearray()  # records to be sent in the next message
        self._answers = bytearray()
        self._unanswered = 0
        self._short = False
        queue.on_message = self._take_message

    # ---- RelayTask

    def queue_fd(self) -> int:
        return self._queue.fd

    def socket_fd(self) -> int:
        return self._socket.fileno()

    def hang_up(self) -> None:
        """See RelayTask: the engine wants its memory back."""
        self.close()

    def wants_socket(self) -> bool:
        return len(self._items) < 2 * MESSAGES

    def arm(self) -> None:
        self._queue.arm()

    def take_event(self) -> None:
        self._queue.take_event()

    def short(self) -> bool:
        """See RelayTask. The shared resource is the blocks, which all carriers of a client share."""
        return self._short

    def awaits(self) -> bool:
        return self._unanswered > 0

    def probe(self) -> None:
        self._queue.probe()

    def turn(self) -> bool:
        if self.closed:
            return False
        moved = self._queue.poll() > 0
        if self._queue.failed:
            self.why = self._queue.failed
            self.close()
            return False
        moved |= self._receive()
        if self.closed:
            return False
        self._short = False
        self._start()
        self._send()
        self._answer()
        return moved

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._queue.close()
        self._looks.close()
        self._memory.give_back(self)
        self._socket.close()

    # ---- from the engine

    def _receive(self) -> bool:
        if not self.wants_socket():
            return False
        try:
            data = self._socket.recv(_IN_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return True
        self._in += data
        if not self._greeted and len(self._in) >= FRAME_BYTES:  # HELLO is a frame without a record
            self._greeted = True
            self._queue.send(self._in[:FRAME_BYTES])
            del self._in[:FRAME_BYTES]
        whole = len(self._in) // RECORD_BYTES * RECORD_BYTES
        if self._greeted and whole:
            self._sort(np.frombuffer(bytes(self._in[:whole]), RECORD))
            del self._in[:whole]
        return True

    def _sort(self, records: Records) -> None:
        """Group the engine's records into items that are done in one step."""
        plain = (records["flags"] & ~np.uint16(RETRY)) == 0
        opcodes = records["opcode"]
        reads, writes = plain & (opcodes == Opcode.READ) & (records["sink"] != 0), plain & (opcodes == Opcode.WRITE)
        kinds = np.where(reads, _READ, np.where(writes, _WRITE, _GATE))
        for first, end in runs(records, RUN_BYTES, kinds):
            self._items.append(_Item(records[first:end], int(kinds[first]), 0))

    # ---- to the card

    def _start(self) -> None:
        """Begin the items that can be begun, in order."""
        while self._items:
            kind = self._items[0].kind
            if kind != _GATE and self._right(self._items[0]) is None:
                self._items[0] = self._items[0]._replace(kind=_GATE)
                kind = _GATE
            begun = (self._start_gated, self._start_reads, self._start_writes)[kind]()
            if not begun:
                return

    def _right(self, item: _Item) -> Right | None:
        records = item.records
        right = self._rights.get(int(records["segment"][0]))
        if right is None or (item.kind == _WRITE and not right.writable) or item.attempts >= _ATTEMPTS:
            return None
        end = int(records["offset"][-1]) + int(records["length"][-1])
        fits = (
            end <= right.nbytes and (records["epoch"] == right.epoch).all() and (records["dtype"] == right.dtype).all()
        )
        return right if fits else None

    def _take_runs(self, kind: int, most_bytes: int, room: Callable[[int], bool]) -> list[_Run]:
        """Take runs of that kind off the queue, as far as there is memory to stage them, and room."""
        taken: list[_Run] = []
        nbytes = 0
        while self._items and nbytes < most_bytes and room(len(taken) + 1):
            item = self._items[0]
            right = self._right(item) if item.kind == kind else None
            if right is None:
                break
            run = self._with_memory(item, right)
            if run is None:
                break
            taken.append(run)
            nbytes += run.nbytes
        return taken

    def _with_memory(self, item: _Item, right: Right) -> _Run | None:
        """Return the first item of the queue, or a part of it, with memory that the card can use; None if no memory is
        free.
        """
        records = item.records
        here = int(records["sink" if item.kind == _READ else "source"][0])
        most = min(len(records), _RUN_CHUNKS) if item.kind == _READ else len(records)  # a record never leaves its chunk
        nbytes = int(records["length"][:most].sum())
        key = self._memory.key_of(here, nbytes)
        staged = key is None
        if staged:
            block = self._take_block()
            if block is None:
                return None
            length, fits = 0, 0
            for each in records["length"][:most].tolist():
                if length + each > self._memory.block_bytes:
                    break
                length, fits = length + each, fits + 1
            most, here, key = fits, block, self._memory.block_key
        if most < len(records):
            self._items[0] = item._replace(records=records[most:])
        else:
            self._items.popleft()
        assert key is not None
        return _Run(records[:most], right, here, key, staged, item.attempts)

    def _take_block(self) -> int | None:
        block = self._memory.take_block(self)
        self._short |= block is None
        return block

    def _start_reads(self) -> bool:
        taken = self._take_runs(_READ, _JOB_BYTES, lambda count: count <= len(self._looks))
        if not taken:
            return False
        looks = [self._looks.take() for _ in taken]
        half = _RUN_CHUNKS * _STATE_BYTES
        before = [self._look(run, at) for run, at in zip(taken, looks, strict=True)]
        data = [
            Work(False, run.address, run.local_key, run.nbytes, run.right.address + run.offset, run.right.key)
            for run in taken
        ]
        after = [self._look(run, at + half) for run, at in zip(taken, looks, strict=True)]

        def read() -> None:
            self._queue.post(data, look_again)

        def look_again() -> None:
            self._queue.post(after, lambda: self._finish_reads(taken, looks))

        self._queue.post(before, read)
        return True

    def _look(self, run: _Run, address: int) -> Work:
        first, end = self._chunks(run)
        at = run.right.states_address + first * _STATE_BYTES
        nbytes = (end - first) * _STATE_BYTES
        return Work(False, address, self._looks.region.local_key, nbytes, at, run.right.states_key)

    def _chunks(self, run: _Run) -> tuple[int, int]:
        chunk = run.right.chunk_bytes
        return run.offset // chunk, (run.offset + run.nbytes - 1) // chunk + 1

    def _finish_reads(self, taken: list[_Run], looks: list[int]) -> None:
        again: list[_Item] = []
        for run, look in zip(taken, looks, strict=True):
            first, end = self._chunks(run)
            states = ctypes.string_at(look, self._looks.block_bytes)
            words = np.frombuffer(states, "<u4").reshape(2, _RUN_CHUNKS, _STATE_BYTES // 4)
            before, after = words[:, : end - first, run.right.sequence_at // 4]
            still = (before == after) & (before % 2 == 0)
            good = still[(run.records["offset"] // run.right.chunk_bytes).astype(np.int64) - first]
            self._looks.give(look)
            if run.staged:
                ctypes.memmove(int(run.records["sink"][0]), run.address, run.nbytes)
                self._memory.give_block(self, run.address)
            if good.all():
                self._answers += answers(run.records)
            else:
                self._answers += answers(run.records[good])
                lost = run.records[~good]
                again += [_Item(lost[i : i + 1], _READ, run.attempts + 1) for i in range(len(lost))]
            self.one_sided_bytes += run.nbytes
        self._items.extendleft(reversed(again))

    def _start_writes(self) -> bool:
        taken = self._take_runs(_WRITE, _JOB_BYTES, lambda count: count + _ROOM <= self._queue.room())
        if not taken:
            return False
        for run in taken:
            if run.staged:
                ctypes.memmove(run.address, int(run.records["source"][0]), run.nbytes)
        works = [
            Work(True, run.address, run.local_key, run.nbytes, run.right.address + run.offset, run.right.key)
            for run in taken
        ]
        self._queue.post(works, lambda: self._finish_writes(taken))
        return True

    def _finish_writes(self, taken: list[_Run]) -> None:
        for run in taken:
            if run.staged:
                self._memory.give_block(self, run.address)
            self._answers += answers(run.records)
            self.one_sided_bytes += run.nbytes

    # ---- through the server's gate

    def _start_gated(self) -> bool:
        item = self._items[0]
        record = item.records[:1].copy()
        opcode = int(record["opcode"][0])
        needs_slot = opcode in (Opcode.READ, Opcode.WRITE, Opcode.ACCUMULATE)
        if self._unanswered >= _UNANSWERED_MAX or (needs_slot and not self._free) or self._queue.room() < _ROOM:
            return False
        source, source_bytes = int(record["source"][0]), int(record["source_bytes"][0])
        sink, sink_bytes = int(record["sink"][0]), int(record["sink_bytes"][0])
        block = 0
        if source_bytes or sink_bytes:
            source_key = self._memory.key_of(source, source_bytes) if source_bytes else 0
            sink_key = self._memory.key_of(sink, sink_bytes) if sink_bytes else 0
            if source_key is None or sink_key is None:
                taken = self._take_block()
                if taken is None:
                    return False
                block = taken
        slot = self._free.popleft() if needs_slot else -1
        if source_bytes and needs_slot:
            key = self._memory.key_of(source, source_bytes)
            if key is None:
                ctypes.memmove(block, source, source_bytes)
                source, key = block, self._memory.block_key
            remote = self._slots[slot]
            self._queue.post((Work(True, source, key, source_bytes, remote.address, remote.key),))
        record["source"] = slot if needs_slot else NO_SLOT
        record["sink"] = 0
        self._pending[int(record["sequence"][0])] = _Pending(slot, sink, sink_bytes, block)
        self._unanswered += 1
        self._outgoing += record.tobytes()
        if len(item.records) > 1:
            self._items[0] = item._replace(records=item.records[1:])
        else:
            self._items.popleft()
        return True

    def _send(self) -> None:
        while self._outgoing and self._queue.may_send():
            message = self._outgoing[: MESSAGE_BYTES // RECORD_BYTES * RECORD_BYTES]
            self._queue.send(message)
            del self._outgoing[: len(message)]

    def _take_message(self, message: bytes) -> None:
        for at in range(0, len(message) - FRAME_BYTES + 1, FRAME_BYTES):
            frame = message[at : at + FRAME_BYTES]
            opcode, sequence, payload = _ANSWER.unpack(frame)
            pending = self._pending.get(sequence) if opcode != HELLO else None
            if pending is None:
                self._answers += frame
            elif payload and pending.sink and payload <= pending.sink_bytes:
                key = self._memory.key_of(pending.sink, payload)
                to, key = (pending.block, self._memory.block_key) if key is None else (pending.sink, key)
                remote = self._slots[pending.slot]
                work = Work(False, to, key, payload, remote.address, remote.key)
                finished = functools.partial(self._finish_fetch, sequence, frame, pending, payload, to != pending.sink)
                self._queue.post((work,), finished)
            else:
                self._land(sequence, frame)

    def _finish_fetch(self, sequence: int, frame: bytes, pending: _Pending, payload: int, staged: bool) -> None:
        if staged:
            ctypes.memmove(pending.sink, pending.block, payload)
        self._land(sequence, frame)

    def _land(self, sequence: int, frame: bytes) -> None:
        pending = self._pending.pop(sequence)
        if pending.slot >= 0:
            self._free.append(pending.slot)
        if pending.block:
            self._memory.give_block(self, pending.block)
        self._unanswered -= 1
        self._answers += frame

    def _answer(self) -> None:
        while self._answers:
            try:
                sent = self._socket.send(self._answers)
            except BlockingIOError:
                return  # the engine is busy with its own sends, and will read soon
            except OSError:
                self.close()
                return
            del self._answers[:sent]
