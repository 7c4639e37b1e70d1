"""The engine as typed Python: the only file of `smb` that touches cffi's `lib`. See csrc/smb.h for what each call does.

Every call here releases the GIL while it runs. Objects free their C side when they are collected; a buffer handle
keeps the client, links and segments that it uses alive.
"""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from smb._engine import ffi, lib
from smb.errors import Error, InvalidArgumentError

DEFAULT_CHUNK_BYTES: int = lib.SMB_CHUNK_BYTES_DEFAULT
PAGE_BYTES: int = lib.SMB_CHUNK_BYTES_MIN
SEGMENTS_MAX: int = lib.SMB_SEGMENTS_PER_BUFFER_MAX


class Status(IntEnum):
    """enum smb_status."""

    OK = lib.SMB_OK
    NOT_FOUND = lib.SMB_NOT_FOUND
    INVALID = lib.SMB_INVALID
    STALE_EPOCH = lib.SMB_STALE_EPOCH
    DENIED = lib.SMB_DENIED
    OUT_OF_MEMORY = lib.SMB_OUT_OF_MEMORY
    EXISTS = lib.SMB_EXISTS
    TIMEOUT = lib.SMB_TIMEOUT
    BUSY = lib.SMB_BUSY
    DISCONNECTED = lib.SMB_DISCONNECTED
    LINK_LOST = lib.SMB_LINK_LOST
    PROTOCOL = lib.SMB_PROTOCOL
    VERSION = lib.SMB_VERSION
    SYSTEM = lib.SMB_SYSTEM


class Opcode(IntEnum):
    """enum smb_opcode, as far as a buffer's calls use it."""

    READ = lib.SMB_READ
    WRITE = lib.SMB_WRITE
    ACCUMULATE = lib.SMB_ACCUMULATE
    FILL = lib.SMB_FILL
    ACCUMULATE_FROM = lib.SMB_ACCUMULATE_FROM
    FETCH_ADD = lib.SMB_FETCH_ADD
    COMPARE_SWAP = lib.SMB_COMPARE_SWAP


class EngineError(Error):
    """An engine call did not succeed; `status` says how, `errno` of which system call's failure, 0 for none. Its
    callers turn it into an error that names what was asked."""

    def __init__(self, status: int, errno: int) -> None:
        self.status = Status(status)
        self.errno = errno if self.status in (Status.SYSTEM, Status.DISCONNECTED) else 0
        reason = os.strerror(self.errno) if self.errno else ""
        super().__init__(reason or _WORDS.get(self.status, self.status.name.lower()))


_WORDS = {
    Status.NOT_FOUND: "no such segment there",
    Status.INVALID: "refused as invalid",
    Status.STALE_EPOCH: "the layout has changed",
    Status.DENIED: "refused",
    Status.OUT_OF_MEMORY: "out of memory",
    Status.TIMEOUT: "no answer in time",
    Status.DISCONNECTED: "the connection was closed",
    Status.LINK_LOST: "the connection broke",
    Status.PROTOCOL: "it answers, but not as a memory server does",
    Status.VERSION: "it speaks another version of the protocol",
}


def _check(status: int) -> None:
    if status != Status.OK:
        raise EngineError(status, ffi.errno)


def op_accepts(dtype_number: int, op: int, scale: float) -> bool:
    """Whether the operation is defined for the dtype with this scale."""
    return bool(lib.smb_op_accepts(dtype_number, op, scale))


def segment_file_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Memory that a segment of `nbytes` of data takes on its server, in bytes: what counts against the capacity."""
    return int(lib.smb_segment_file_bytes(nbytes, chunk_bytes))


def segment_bytes(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, index: int) -> int:
    """Bytes of a buffer of `nbytes` that live on segment `index`."""
    return int(lib.smb_layout_segment_bytes(_layout(nbytes, stripe_bytes, chunk_bytes, segment_count), index))


def layout_piece(
    nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, offset: int, bytes_max: int
) -> tuple[int, int, int]:
    """(segment index, offset in the segment, length) of the piece that starts at a byte offset of the buffer."""
    piece = ffi.new("struct smb_piece *")
    layout = _layout(nbytes, stripe_bytes, chunk_bytes, segment_count)
    _check(lib.smb_layout_piece(layout, offset, bytes_max, piece))
    return int(piece.segment), int(piece.segment_offset), int(piece.bytes)


def _layout(nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int) -> Any:
    layout = ffi.new("struct smb_layout *", (nbytes, stripe_bytes, chunk_bytes, segment_count))
    if lib.smb_layout_check(layout) != Status.OK:
        raise InvalidArgumentError(
            f"no layout has {nbytes} bytes in stripes of {stripe_bytes} and chunks of {chunk_bytes} "
            f"on {segment_count} segments"
        )
    return layout


class Segment:
    """A local mapping of a segment."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = ffi.gc(pointer, lib.smb_segment_release)


class EngineClient:
    """The links and calls of one session."""

    def __init__(self, session_id: int) -> None:
        made = ffi.new("struct smb_client **")
        _check(lib.smb_client_create(session_id, made))
        self.pointer = ffi.gc(made[0], lib.smb_client_destroy)

    def close(self) -> None:
        """Fail every call in progress over a link, and every later one. Local segments go on working."""
        lib.smb_client_close(self.pointer)

    def connect_tcp(self, host: str, port: int, timeout_ms: int) -> tuple[Link, int]:
        """Return a link to a numeric address and the server's instance id. Blocks up to timeout_ms. EngineError."""
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        _check(lib.smb_client_connect_tcp(self.pointer, host.encode(), port, 0, timeout_ms, made, instance))
        return Link(self, made[0]), int(instance[0])

    def connect_unix(self, path: str, timeout_ms: int) -> tuple[Link, int]:
        """As connect_tcp, over a server's Unix socket."""
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        _check(lib.smb_client_connect_unix(self.pointer, os.fsencode(path), 0, timeout_ms, made, instance))
        return Link(self, made[0]), int(instance[0])


class Link:
    """One connection to a server."""

    def __init__(self, client: EngineClient, pointer: Any) -> None:
        self._client = client  # the C side points to the client's
        self.pointer = ffi.gc(pointer, functools.partial(_close_link, os.getpid()))

    def alive(self) -> bool:
        """Whether it has not broken so far."""
        return bool(lib.smb_link_alive(self.pointer))

    def attach(self, segment_id: int, epoch: int, timeout_ms: int) -> Segment:
        """Map a segment of the server behind this Unix link. One caller at a time. EngineError."""
        made = ffi.new("struct smb_segment **")
        _check(lib.smb_link_attach(self.pointer, segment_id, epoch, timeout_ms, made))
        return Segment(made[0])


def _close_link(made_by_pid: int, pointer: Any) -> None:
    # A child of fork shares the connection: shutting it down there would end it under its parent's calls.
    if os.getpid() == made_by_pid:
        lib.smb_link_close(pointer)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer that failed ended. `segment` is the index of the first that failed."""

    status: Status
    segment: int
    bytes_applied: int
    sent: bool


class _Pairs(threading.local):
    """This thread's requests and outcomes, kept because a small operation would spend its time making them.

    A list and not one pair: a signal handler, or a finalizer, may make a call in the middle of another one.
    """

    def __init__(self) -> None:
        self.free: list[tuple[Any, Any]] = []


_pairs = _Pairs()


class BufferHandle:
    """A buffer's segments as reached by one client. Complete once every segment is set; then any thread may call it."""

    def __init__(
        self, client: EngineClient, nbytes: int, stripe_bytes: int, chunk_bytes: int, segment_count: int, dtype: int
    ) -> None:
        made = ffi.new("struct smb_buffer **")
        layout = _layout(nbytes, stripe_bytes, chunk_bytes, segment_count)
        _check(lib.smb_buffer_create(client.pointer, layout, dtype, made))
        self._client = client
        self.pointer = ffi.gc(made[0], lib.smb_buffer_destroy)

    def set_link(self, index: int, segment_id: int, epoch: int, link: Link) -> None:
        """Reach segment `index` over a link."""
        _check(lib.smb_buffer_set_link(self.pointer, index, segment_id, epoch, link.pointer))

    def set_local(self, index: int, segment: Segment) -> None:
        """Reach segment `index` through its mapping."""
        _check(lib.smb_buffer_set_local(self.pointer, index, segment.pointer))

    def transfer(
        self,
        opcode: int,
        offset: int,
        nbytes: int,
        timeout_ms: int,
        *,
        source: int = 0,
        sink: int = 0,
        op: int = 0,
        scale: float = 1.0,
        argument: int = 0,
        expected: int = 0,
        other: BufferHandle | None = None,
    ) -> Outcome | int:
        """Do one call; source and sink are addresses, sizes are bytes. Blocks up to timeout_ms.

        Returns the old value of FETCH_ADD and COMPARE_SWAP (unsigned; else 0), or the Outcome of a call that failed.
        """
        free = _pairs.free
        request, outcome = pair = (
            free.pop() if free else (ffi.new("struct smb_request *"), ffi.new("struct smb_outcome *"))
        )
        request.opcode = opcode
        request.op = op
        request.scale = scale
        request.offset = offset
        request.bytes = nbytes
        request.source = ffi.cast("void *", source)
        request.sink = ffi.cast("void *", sink)
        request.argument = argument
        request.expected = expected
        request.other = other.pointer if other is not None else ffi.NULL
        request.timeout_ms = timeout_ms
        result: Outcome | int
        if lib.smb_transfer(self.pointer, request, outcome) == 0:
            result = int(outcome.result)
        else:
            result = Outcome(Status(outcome.status), outcome.segment, outcome.bytes_applied, bool(outcome.sent))
        free.append(pair)
        return result

    def map(self) -> tuple[int, int]:
        """Map the whole buffer contiguously: (address, bytes). EngineError INVALID where a segment is not local."""
        address, nbytes = ffi.new("void **"), ffi.new("uint64_t *")
        _check(lib.smb_buffer_map(self.pointer, address, nbytes))
        return int(ffi.cast("uintptr_t", address[0])), int(nbytes[0])


def unmap(address: int, nbytes: int) -> None:
    """Undo BufferHandle.map."""
    lib.smb_buffer_unmap(ffi.cast("void *", address), nbytes)
