"""One call of a buffer: what is asked, how it ended, and the memory that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from smb._engine import ffi, lib
from smb.engine.enums import Opcode, Status

NOWHERE: Any = ffi.NULL
_NOT_ENDED = -1  # no status of the engine's


class Request(NamedTuple):
    """One request to the engine; csrc/smb/client.h: struct smb_request. Frozen. A tuple, as it is made for every call
    that is not direct: a frozen dataclass takes four times as long to make.

    Offsets and sizes are bytes of the buffer. Of APPLY, `op` is the rule, `hyper` its numbers.
    """

    opcode: Opcode
    offset: int
    nbytes: int
    source: Any = NOWHERE  # of memory_of or memory_at
    sink: Any = NOWHERE
    op: int = 0
    scale: float = 1.0
    argument: int = 0
    expected: int = 0
    wire: int = 0  # how elements travel
    token: int = 0  # of a lock: refused once the lock is another's; every segment is reached over a link then
    indices: Any = None  # int64 array of the elements, of a sparse accumulate
    hyper: Mapping[str, float] | None = None
    sources: tuple[tuple[float, int], ...] = ()  # scale and wire of each other buffer, if they are several to be summed


_RAW_REQUEST = ffi.typeof("struct smb_request *")


def raw_request(request: Request, timeout_ms: int) -> Any:
    """Return a struct smb_request of the fields that most calls have: opcode to token in one step, by position."""
    raw = ffi.new(_RAW_REQUEST, request[:11])
    raw.timeout_ms = timeout_ms
    return raw


class UnknownParts:
    """Parts of a call that failed before all of it was confirmed: their outcome is unknown."""

    def __init__(self, pointer: Any, owner: object = None) -> None:
        """`owner`: frees them at its end."""
        self.pointer = ffi.gc(pointer, lib.smb_unknown_release) if owner is None else pointer
        self._owner = owner


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call that failed ended. `segment` is the index of the first that failed."""

    status: Status
    segment: int
    bytes_applied: int
    sent: bool
    unknown: UnknownParts | None = None


def outcome_of(outcome: Any, owner: object = None) -> Outcome:
    """Return a struct smb_outcome as an Outcome, which owns its unknown parts, unless they have an `owner`."""
    unknown = UnknownParts(outcome.unknown, owner) if outcome.unknown else None
    return Outcome(Status(outcome.status), outcome.segment, outcome.bytes_applied, bool(outcome.sent), unknown)


class Attempt:
    """One attempt of a call at the engine. A signal's handler may raise at any place of Python's code, also between the
    engine's return and the place where its outcome is looked at: so it is here from the engine's return on.
    """

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw: Any = None

    def begin(self) -> Any:
        """Return where the engine is to put the outcome; a struct smb_outcome."""
        raw = ffi.new("struct smb_outcome *")
        raw.status = _NOT_ENDED
        self._raw = raw
        return raw

    @property
    def ended(self) -> Outcome | int | None:
        """How it ended: the engine's number, or the Outcome of an attempt that failed. None: it did not begin."""
        raw = self._raw
        if raw is None or raw.status == _NOT_ENDED:
            return None
        return int(raw.result) if raw.status == Status.OK else outcome_of(raw, self)

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)  # a handler may have raised before it was set
        if raw is not None and raw.unknown:
            lib.smb_unknown_release(raw.unknown)


def direct_call(request_address: int, outcome_address: int) -> tuple[Request, Outcome]:
    """Return what a `direct` method asked, and how it ended, from its structs' addresses."""
    asked = ffi.cast("struct smb_request *", request_address)
    request = Request(
        Opcode(asked.opcode), int(asked.offset), int(asked.bytes), asked.source, asked.sink, int(asked.op),
        float(asked.scale), int(asked.argument), int(asked.expected),
    )  # fmt: skip
    return request, outcome_of(ffi.cast("struct smb_outcome *", outcome_address))


def memory_of(array: Any) -> Any:
    """Return where the bytes of a contiguous array lie, for a Request; keeps the array alive. TypeError, ValueError or
    BufferError if it has no buffer protocol."""
    return ffi.from_buffer(array)


def address_of(memory: Any) -> int:
    """Return the address of what memory_of or memory_at gave."""
    return int(ffi.cast("uintptr_t", memory))


def memory_at(address: int) -> Any:
    """Return an address for a Request."""
    return ffi.cast("void *", address)
