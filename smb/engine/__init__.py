"""The engine as typed Python: the only file of `smb` that touches cffi's `lib`. See csrc/smb.h for what each call does.

Every call here releases the GIL while it runs (a `direct` method's only if it takes longer than handing the GIL over).
Objects free their C side when they are collected; a buffer handle keeps the client, links and segments that it uses
alive.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar, cast

import numpy as np

from smb._direct import Method, forked, look_address, set_up
from smb._direct import Place as Place
from smb._direct import Switch as Switch
from smb._direct import take_interrupt as take_interrupt
from smb._engine import ffi, lib
from smb.errors import Error, InvalidArgumentError

DEFAULT_CHUNK_BYTES: int = lib.SMB_CHUNK_BYTES_DEFAULT
PAGE_BYTES: int = lib.SMB_CHUNK_BYTES_MIN
SEGMENTS_MAX: int = lib.SMB_SEGMENTS_PER_BUFFER_MAX
RECORD_BYTES: int = lib.SMB_RECORD_BYTES  # of a request by reference
HELLO: int = lib.SMB_HELLO  # its opcode


def isa_names() -> list[str]:
    """Return the instruction sets that the kernels can use on this processor, narrowest first."""
    return [ffi.string(lib.smb_isa_name(isa)).decode() for isa in range(lib.smb_isa_count())]


def _check_isa() -> None:
    """Raise InvalidArgumentError if SMB_ISA names an instruction set that this processor or this build has not."""
    wanted, names = os.environ.get("SMB_ISA"), isa_names()
    if wanted and wanted not in names:
        raise InvalidArgumentError(
            f"SMB_ISA={wanted}: on this processor it is one of {', '.join(names)}; without SMB_ISA the fastest is taken"
        )


_check_isa()


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
    LOCK_LOST = lib.SMB_LOCK_LOST
    BROKEN = lib.SMB_BROKEN
    EVICTED = lib.SMB_EVICTED
    SESSION_ENDED = lib.SMB_SESSION_ENDED
    DISCONNECTED = lib.SMB_DISCONNECTED
    LINK_LOST = lib.SMB_LINK_LOST
    PROTOCOL = lib.SMB_PROTOCOL
    VERSION = lib.SMB_VERSION
    NAMESPACE = lib.SMB_NAMESPACE
    UNTRUSTED = lib.SMB_UNTRUSTED
    SYSTEM = lib.SMB_SYSTEM

    @classmethod
    def _missing_(cls, value: object) -> Status:  # noqa: ARG003 - whichever it is
        """Whatever else a server may answer: it does not speak our protocol."""
        return cls.PROTOCOL


class Opcode(IntEnum):
    """enum smb_opcode, as far as a buffer's calls use it."""

    READ = lib.SMB_READ
    WRITE = lib.SMB_WRITE
    ACCUMULATE = lib.SMB_ACCUMULATE
    FILL = lib.SMB_FILL
    ACCUMULATE_FROM = lib.SMB_ACCUMULATE_FROM
    FETCH_ADD = lib.SMB_FETCH_ADD
    COMPARE_SWAP = lib.SMB_COMPARE_SWAP
    APPLY = lib.SMB_APPLY


class AskOpcode(IntEnum):
    """enum smb_opcode, as far as it is asked of a segment's locks, barrier and version; csrc/memory/sync.h says what
    the words mean."""

    LOCK = lib.SMB_LOCK
    UNLOCK = lib.SMB_UNLOCK
    RENEW = lib.SMB_RENEW
    FENCE = lib.SMB_FENCE
    ARRIVE = lib.SMB_ARRIVE
    AWAIT_BARRIER = lib.SMB_AWAIT_BARRIER
    AWAIT_VERSION = lib.SMB_AWAIT_VERSION
    PUBLISH = lib.SMB_PUBLISH
    PIN = lib.SMB_PIN
    UNPIN = lib.SMB_UNPIN


# As people and metrics call them.
KINDS: dict[int, str] = {
    lib.SMB_HELLO: "hello",
    lib.SMB_ATTACH: "attach",
    lib.SMB_READ: "read",
    lib.SMB_WRITE: "write",
    lib.SMB_ACCUMULATE: "accumulate",
    lib.SMB_FILL: "fill",
    lib.SMB_ACCUMULATE_FROM: "accumulate_from",
    lib.SMB_FETCH_ADD: "fetch_add",
    lib.SMB_COMPARE_SWAP: "compare_swap",
    lib.SMB_WATERMARK: "watermark",
    lib.SMB_LOCK: "lock",
    lib.SMB_UNLOCK: "unlock",
    lib.SMB_RENEW: "renew",
    lib.SMB_FENCE: "fence",
    lib.SMB_ARRIVE: "arrive",
    lib.SMB_AWAIT_BARRIER: "await_barrier",
    lib.SMB_AWAIT_VERSION: "await_version",
    lib.SMB_PUBLISH: "publish",
    lib.SMB_PIN: "pin",
    lib.SMB_UNPIN: "unpin",
    lib.SMB_APPLY: "apply",
    lib.SMB_AUTHORIZE: "authorize",
}
TRANSPORTS: dict[int, str] = {
    lib.SMB_TRANSPORT_SHM: "shm",
    lib.SMB_TRANSPORT_TCP: "tcp",
    lib.SMB_TRANSPORT_UNIX: "unix",
    lib.SMB_TRANSPORT_VERBS: "verbs",
}


class Lane(IntEnum):
    """What each link to a server is for. Changes of a lane are made in order; what waits has a lane of its own, so that
    nothing waits behind it."""

    TCP_DATA = 0
    TCP_WAITS = 1
    UNIX_DATA = 2
    UNIX_WAITS = 3
    UNIX_ATTACH = 4
    VERBS_DATA = 6


@dataclass(frozen=True, slots=True)
class Latency:
    """How many took how long: counts between the edges of metric_names.LATENCY_EDGES, and the sum of all in seconds."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True)
class ClientCounters:
    """What a client has done since it was asked to count: by (transport, kind), failed calls by status."""

    operations: dict[tuple[str, str], int]
    transferred_bytes: dict[tuple[str, str], int]
    failed: dict[str, int]
    repeated_total: int
    spoilt_total: int
    latencies: dict[tuple[str, str], Latency]


def latencies_of(raw: Any, transports: Mapping[int, str], kinds: Mapping[int, str]) -> dict[tuple[str, str], Latency]:
    """Read a struct smb_latencies; what never happened is left out."""
    width = lib.SMB_LATENCY_BUCKETS + 1
    cells = np.frombuffer(ffi.buffer(raw), dtype=np.uint64).reshape(-1, lib.SMB_OPCODE_COUNT, width)
    found = {}
    for t, k in np.argwhere(cells[:, :, :-1].any(axis=2)):
        counts = tuple(int(count) for count in cells[t, k, :-1])
        found[transports[int(t)], kinds[int(k)]] = Latency(counts, int(cells[t, k, -1]) / 1e9)
    return found


def status_name(status: int) -> str:
    """Return the engine's word for the status, empty for a number that is none."""
    name = lib.smb_status_name(status)
    return ffi.string(name).decode() if name else ""


class DoubtState(IntEnum):
    """enum smb_doubt_state."""

    APPLIED = lib.SMB_DOUBT_APPLIED
    NOT_APPLIED = lib.SMB_DOUBT_NOT_APPLIED
    UNKNOWN = lib.SMB_DOUBT_UNKNOWN


class EngineError(Error):
    """An engine call did not succeed; `status` says how, `errno` of which system call's failure, 0 for none. Its
    callers turn it into an error that names what was asked."""

    def __init__(self, status: int, errno: int = 0, why: str = "") -> None:
        self.status = Status(status)
        self.errno = errno if self.status in (Status.SYSTEM, Status.DISCONNECTED) else 0
        reason = os.strerror(self.errno) if self.errno else ""
        super().__init__(why or reason or _WORDS.get(self.status, self.status.name.lower()))


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
    Status.UNTRUSTED: "whoever answers there could not prove that it is that server",
    Status.NAMESPACE: "this process is in another PID namespace than the server, where its locks do not hold",
    Status.SESSION_ENDED: "this client's session has ended there",
}

_DENIED = {
    lib.SMB_DENIED_GENERATION: "it does not know the key of this token: the coordinator's clock was put forward or "
    "back, of which it hears within 2 s, or it belongs to another coordinator",
    lib.SMB_DENIED_PROOF: "the token does not prove that its coordinator made it for this session and segment",
    lib.SMB_DENIED_EXPIRED: "the token has expired by the coordinator's clock",
}


def _check(status: int, why: Any = None) -> None:
    if status != Status.OK:
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        raise EngineError(status, ffi.errno, ffi.string(why).decode() if why is not None else "")


def op_accepts(dtype_number: int, op: int, scale: float) -> bool:
    """Whether the operation is defined for the dtype with this scale."""
    return bool(lib.smb_op_accepts(dtype_number, op, scale))


def crc32c(data: Any, crc: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes that follow those of which `crc` is it."""
    memory = memoryview(data)
    return int(lib.smb_crc32c(crc, ffi.from_buffer(memory), memory.nbytes))


def round_as_sent(wire: int, source: Any, count: int, offset: int, chunk_bytes: int, sink: Any) -> None:
    """Write what `count` float32 elements at byte `offset` of a buffer are when they arrive."""
    _check(lib.smb_kernel_round(wire, source, count, offset, chunk_bytes, sink))


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

    def shared(self) -> bool:
        """Whether its locks still hold for this process: not once its server runs in another PID namespace."""
        return bool(lib.smb_segment_is_shared(self.pointer))

    def version(self) -> tuple[int, int]:
        """(version published, version whose publication has begun, 0 for none ever)."""
        version, writing = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        lib.smb_segment_version(self.pointer, version, writing)
        return int(version[0]), int(writing[0])


@dataclass(frozen=True, slots=True)
class Token:
    """What a session may do with a segment until when; see csrc/access.h."""

    segment_id: int
    epoch: int
    rights: int
    generation: int
    expires_at_ms: int
    secret: bytes = field(repr=False)


class Tls:
    """What a connection inside TLS takes: an authority, a certificate of it and its key, as PEM."""

    def __init__(self, ca: bytes, certificate: bytes, key: bytes) -> None:
        """Raises InvalidArgumentError where they do not belong together."""
        made, why = ffi.new("struct smb_tls **"), ffi.new("char[]", lib.SMB_WHY_BYTES)
        status = lib.smb_tls_create(ca, certificate, key, made, why)
        if status == Status.INVALID:
            raise InvalidArgumentError(f"credentials: they do not belong together ({ffi.string(why).decode()})")
        _check(status)
        self.pointer = ffi.gc(made[0], lib.smb_tls_release)


class EngineClient:
    """The links and calls of one session."""

    def __init__(self, session_id: int, *, checksums: bool = False, proofs: bool = False) -> None:
        """proofs: servers must prove that they know the key of a token before they get anything else."""
        made = ffi.new("struct smb_client **")
        _check(lib.smb_client_create(session_id, made))
        self.pointer = ffi.gc(made[0], lib.smb_client_destroy)
        self.checksums = checksums
        if checksums:
            lib.smb_client_use_checksums(self.pointer)
        if proofs:
            lib.smb_client_want_proof(self.pointer)

    def spoilt(self) -> int:
        """How many answers have arrived that were not what was sent; only checksums tell."""
        return int(lib.smb_client_spoilt(self.pointer))

    def count(self) -> None:
        """Count what is done from here on: unasked it is not done, as it costs calls in shared memory nanoseconds."""
        lib.smb_client_count(self.pointer)

    def counters(self) -> ClientCounters:
        """Return what was counted."""
        raw = ffi.new("struct smb_client_counters *")
        lib.smb_client_counters(self.pointer, raw)
        cells = [(t, transport, k, kind) for t, transport in TRANSPORTS.items() for k, kind in KINDS.items()]
        return ClientCounters(
            operations={(way, kind): int(raw.operations[t][k]) for t, way, k, kind in cells if raw.operations[t][k]},
            transferred_bytes={(way, kind): int(raw.bytes[t][k]) for t, way, k, kind in cells if raw.operations[t][k]},
            failed={status_name(s): int(raw.failed[s]) for s in range(lib.SMB_STATUS_COUNT) if raw.failed[s]},
            repeated_total=int(raw.repeated_total),
            spoilt_total=int(raw.spoilt_total),
            latencies=latencies_of(ffi.addressof(raw, "latencies"), TRANSPORTS, KINDS),
        )

    def close(self) -> None:
        """Fail every call in progress over a link, and every later one. Local segments go on working."""
        lib.smb_client_close(self.pointer)

    def connect_tcp(self, host: str, port: int, lane: Lane, timeout_ms: int) -> tuple[Link, int]:
        """Return a link to a numeric address and the server's instance id. Blocks up to timeout_ms. EngineError."""
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        _check(lib.smb_client_connect_tcp(self.pointer, host.encode(), port, lane, timeout_ms, made, instance))
        return Link(self, made[0]), int(instance[0])

    def connect_unix(self, path: str, lane: Lane, timeout_ms: int) -> tuple[Link, int]:
        """As connect_tcp, over a server's Unix socket."""
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        _check(lib.smb_client_connect_unix(self.pointer, os.fsencode(path), lane, timeout_ms, made, instance))
        return Link(self, made[0]), int(instance[0])

    def connect_tls(
        self, host: str, port: int, tls: Tls, expected: str, lane: Lane, timeout_ms: int
    ) -> tuple[Link, int]:
        """As connect_tcp, inside TLS, to the server whose certificate is for the name `expected`. EngineError UNTRUSTED
        says who answers instead, or why it refuses us.
        """
        made, instance, why = ffi.new("struct smb_link **"), ffi.new("uint64_t *"), ffi.new("char[]", lib.SMB_WHY_BYTES)
        status = lib.smb_client_connect_tls(
            self.pointer, host.encode(), port, tls.pointer, expected.encode(), lane, timeout_ms, made, instance, why
        )
        _check(status, why)
        return Link(self, made[0]), int(instance[0])

    def connect_reference(self, fd: int, lane: Lane, timeout_ms: int) -> tuple[Link, int]:
        """As connect_tcp, on a connected stream socket, which is the engine's from here on, also where this fails;
        requests travel by reference: whoever has the other end moves what they name.
        """
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        _check(lib.smb_client_connect_reference(self.pointer, fd, lane, timeout_ms, made, instance))
        return Link(self, made[0]), int(instance[0])

    def wait_down(self, timeout_ms: int) -> int | None:
        """Return the id of a link that has calls but no connection, None if there is none in time. EngineError once
        closed.

        Whoever is told resumes it or lets it go.
        """
        link_id = ffi.new("uint64_t *")
        status = lib.smb_client_wait_down(self.pointer, timeout_ms, link_id)
        if status == Status.TIMEOUT:
            return None
        _check(status)
        return int(link_id[0])

    def settle(self, doubt: Doubt, timeout_ms: int) -> list[tuple[int, int, DoubtState]]:
        """Wait until it is known what became of each part of a call: (offset, length, state), in bytes. EngineError
        TIMEOUT.
        """
        status = lib.smb_doubt_settle(self.pointer, doubt.pointer, timeout_ms)
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        _check(status)
        offset, length, state = ffi.new("uint64_t *"), ffi.new("uint32_t *"), ffi.new("int *")
        parts: list[tuple[int, int, DoubtState]] = []
        while lib.smb_doubt_part(doubt.pointer, len(parts), offset, length, state):
            parts.append((int(offset[0]), int(length[0]), DoubtState(state[0])))
        return parts


class Doubt:
    """Parts of a call that failed before all of it was confirmed."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = ffi.gc(pointer, lib.smb_doubt_release)


class Link:
    """A lane to a server, over one connection after the other."""

    def __init__(self, client: EngineClient, pointer: Any) -> None:
        self._client = client  # the C side points to the client's
        self.pointer = ffi.gc(pointer, functools.partial(_close_link, os.getpid()))
        self.id = int(lib.smb_link_id(pointer))

    def alive(self) -> bool:
        """Whether it may be used: it was not closed. It need not have a connection now."""
        return bool(lib.smb_link_alive(self.pointer))

    def connected(self) -> bool:
        """Whether it has a connection, as far as is known."""
        return bool(lib.smb_link_connected(self.pointer))

    def wanted(self) -> bool:
        """Whether calls wait for it to have a connection."""
        return bool(lib.smb_link_wanted(self.pointer))

    def resume_tcp(self, host: str, port: int, accept_instance: int, timeout_ms: int) -> int:
        """Connect it again, to the same server or to the run `accept_instance` of it; return the run. EngineError."""
        instance = ffi.new("uint64_t *")
        _check(lib.smb_link_resume_tcp(self.pointer, host.encode(), port, accept_instance, timeout_ms, instance))
        return int(instance[0])

    def resume_unix(self, path: str, accept_instance: int, timeout_ms: int) -> int:
        """As resume_tcp, over the server's Unix socket."""
        instance = ffi.new("uint64_t *")
        _check(lib.smb_link_resume_unix(self.pointer, os.fsencode(path), accept_instance, timeout_ms, instance))
        return int(instance[0])

    def resume_tls(self, host: str, port: int, tls: Tls, expected: str, accept_instance: int, timeout_ms: int) -> int:
        """As resume_tcp, inside TLS; see connect_tls."""
        instance, why = ffi.new("uint64_t *"), ffi.new("char[]", lib.SMB_WHY_BYTES)
        status = lib.smb_link_resume_tls(
            self.pointer,
            host.encode(),
            port,
            tls.pointer,
            expected.encode(),
            accept_instance,
            timeout_ms,
            instance,
            why,
        )
        _check(status, why)
        return int(instance[0])

    def resume_reference(self, fd: int, accept_instance: int, timeout_ms: int) -> int:
        """As resume_tcp, on a socket such as connect_reference takes."""
        instance = ffi.new("uint64_t *")
        _check(lib.smb_link_resume_reference(self.pointer, fd, accept_instance, timeout_ms, instance))
        return int(instance[0])

    def let_go(self) -> None:
        """Stop trying to connect it."""
        lib.smb_link_let_go(self.pointer)

    def authorize(self, token: Token, timeout_ms: int) -> None:
        """Show a token, on the connection of now and on every later one. Blocks up to timeout_ms. EngineError DENIED
        where the server does not take it, with the reason.
        """
        shown, why = ffi.new("struct smb_token *"), ffi.new("uint64_t *")
        shown.segment, shown.epoch, shown.rights = token.segment_id, token.epoch, token.rights
        shown.generation, shown.expires_ms = token.generation, token.expires_at_ms
        ffi.memmove(shown.secret, token.secret, len(token.secret))
        status = lib.smb_link_authorize(self.pointer, shown, timeout_ms, why)
        if status == Status.DENIED:
            raise EngineError(status, why=_DENIED.get(why[0], ""))
        if status == Status.UNTRUSTED:
            raise EngineError(status)
        _check(status)

    def attach(self, segment_id: int, epoch: int, timeout_ms: int) -> Segment:
        """Map a segment of the server behind this Unix link. One caller at a time. EngineError."""
        made = ffi.new("struct smb_segment **")
        _check(lib.smb_link_attach(self.pointer, segment_id, epoch, timeout_ms, made))
        return Segment(made[0])

    def ask(self, opcode: AskOpcode, segment_id: int, epoch: int, argument: int, *words: int) -> Asking:
        """Send one request of those that may wait; the lane is one for waits."""
        return Asking(self, opcode, segment_id, epoch, argument, words)


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to an Asking. `sent`: the request may have reached the server."""

    status: Status
    sent: bool
    a: int
    b: int


class Asking:
    """One request that may wait for long. `end` it."""

    def __init__(
        self, link: Link, opcode: AskOpcode, segment_id: int, epoch: int, argument: int, words: tuple[int, ...]
    ) -> None:
        ask, made = ffi.new("struct smb_ask *"), ffi.new("struct smb_asking **")
        ask.opcode, ask.segment, ask.epoch, ask.argument = opcode, segment_id, epoch, argument
        for index, word in enumerate(words):
            ask.words[index] = word
        _check(lib.smb_ask_start(link.pointer, ask, made))
        self.link = link
        self._told = ffi.new("struct smb_told *")
        self._pointer: Any = made[0]

    def wait(self, timeout_ms: int) -> Told | None:
        """Return the answer, None if there is none in time. May be called again."""
        status = lib.smb_ask_wait(self._pointer, timeout_ms, self._told)
        if status == Status.BUSY:
            return None
        return Told(Status(status), bool(self._told.sent), int(self._told.a), int(self._told.b))

    def end(self) -> None:
        """Forget it. A request without an answer is given up."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.smb_ask_end(pointer)


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
    doubt: Doubt | None = None


NOWHERE: Any = ffi.NULL


def memory_of(array: Any) -> Any:
    """Return where the bytes of a contiguous array lie, for `transfer`; keeps the array alive. TypeError, ValueError or
    BufferError where it has no buffer protocol."""
    return ffi.from_buffer(array)


def address_of(memory: Any) -> int:
    """Return the address of what memory_of or memory_at gave."""
    return int(ffi.cast("uintptr_t", memory))


def memory_at(address: int) -> Any:
    """Return an address for `transfer`."""
    return ffi.cast("void *", address)


set_up(
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "smb_transfer"))),
    int(ffi.cast("uintptr_t", ffi.addressof(lib, "smb_transfer_at_once"))),
    np.ndarray,
)
lib.smb_set_look(ffi.cast("int (*)(void)", look_address()))
os.register_at_fork(after_in_child=forked)

Function = TypeVar("Function", bound=Callable[..., object])


def direct(opcode: Opcode) -> Callable[[Function], Function]:
    """Put the short way (csrc/python/direct.c) in front of a method of a Place.

    READ: (offset, count, *, out); WRITE: (array, offset); ACCUMULATE: (array, offset, *, scale); FETCH_ADD: (index,
    value); COMPARE_SWAP: (index, expected, new). With others, or where these are not the usual ones, the method itself
    is called.
    """

    def put_in_front(function: Function) -> Function:
        return cast(Function, Method(opcode, function))

    return put_in_front


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
        source: Any = NOWHERE,
        sink: Any = NOWHERE,
        op: int = 0,
        scale: float = 1.0,
        argument: int = 0,
        expected: int = 0,
    ) -> Outcome | int:
        """Do one call; source and sink are of memory_of or memory_at, sizes are bytes. Blocks up to timeout_ms.

        Returns the old value of FETCH_ADD and COMPARE_SWAP (unsigned; else 0), or the Outcome of a call that failed.
        """
        outcome = ffi.new("struct smb_outcome *")
        status = lib.smb_call(
            self.pointer, opcode, offset, nbytes, source, sink, op, scale, argument, expected, timeout_ms, outcome
        )
        return int(outcome.result) if status == 0 else _outcome(outcome)

    def transfer_gated(
        self,
        opcode: int,
        offset: int,
        nbytes: int,
        timeout_ms: int,
        *,
        source: Any = NOWHERE,
        sink: Any = NOWHERE,
        op: int = 0,
        scale: float = 1.0,
        argument: int = 0,
        others: Sequence[BufferHandle] = (),
        hyper: Mapping[str, float] | None = None,
        token: int = 0,
        wire: int = 0,
        indices: Any = NOWHERE,
        entries: int = 0,
    ) -> Outcome | int:
        """As transfer, with another buffer as the source, under a lock's token, rounded on the way, or of `entries`
        elements whose indices (int64) are given; of APPLY, `op` is the rule, `others` the gradient and the state.

        With a token the change is refused once the lock that it is of is another's; every segment is reached over a
        link then.
        """
        request, outcome = ffi.new("struct smb_request *"), ffi.new("struct smb_outcome *")
        request.opcode, request.op, request.scale = opcode, op, scale
        request.offset, request.bytes = offset, nbytes
        request.source, request.sink = source, sink
        request.wire = wire
        request.indices, request.count = ffi.cast("int64_t *", indices), entries
        request.argument = argument
        if others:
            request.other = others[0].pointer
            for index, state in enumerate(others[1:]):
                request.states[index] = state.pointer
        for name, value in (hyper or {}).items():
            setattr(request.hyper, name, value)
        request.token, request.fenced = token, token != 0
        request.timeout_ms = timeout_ms
        return 0 if lib.smb_transfer(self.pointer, request, outcome) == 0 else _outcome(outcome)

    def arm(
        self, place: Place, client: Switch, quiet: Switch, size: int, itemsize: int, code: str, timeout_ms: int
    ) -> None:
        """Let the place's `direct` methods come here: `size` elements of the buffer protocol's format `code`."""
        place._arm(self, client, quiet, int(ffi.cast("uintptr_t", self.pointer)), size, itemsize, code, timeout_ms)

    def map(self) -> tuple[int, int]:
        """Map the whole buffer contiguously: (address, bytes). EngineError INVALID where a segment is not local."""
        address, nbytes = ffi.new("void **"), ffi.new("uint64_t *")
        _check(lib.smb_buffer_map(self.pointer, address, nbytes))
        return int(ffi.cast("uintptr_t", address[0])), int(nbytes[0])


def outcome_of(status: int, segment: int, bytes_applied: int, sent: int, doubt: int) -> Outcome:
    """Return the outcome that a `direct` method hands over; `doubt` is its address, now the result's."""
    pointer = Doubt(ffi.cast("struct smb_doubt *", doubt)) if doubt else None
    return Outcome(Status(status), segment, bytes_applied, bool(sent), pointer)


def _outcome(outcome: Any) -> Outcome:
    doubt = Doubt(outcome.doubt) if outcome.doubt else None
    return Outcome(Status(outcome.status), outcome.segment, outcome.bytes_applied, bool(outcome.sent), doubt)


def unmap(address: int, nbytes: int) -> None:
    """Undo BufferHandle.map."""
    lib.smb_buffer_unmap(ffi.cast("void *", address), nbytes)
