"""One call of a buffer: the request, the outcome, and the memory that it transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from smb._engine import ffi, lib
from smb.engine.enums import Opcode, Status

NOWHERE: Any = ffi.NULL
_NOT_ENDED = -1  # a number that the engine does not use for a status


class Request(NamedTuple):
    """One request to the engine; csrc/smb/client.h: struct smb_request. Immutable.

    Offsets and sizes are bytes of the buffer. For APPLY, `op` is the rule and `hyper` has its parameters. This is a
    tuple because every call that is not direct makes one: a frozen dataclass takes four times as long to make.
    """

    opcode: Opcode
    offset: int
    nbytes: int
    source: Any = NOWHERE  # from memory_of or memory_at
    sink: Any = NOWHERE
    op: int = 0
    scale: float = 1.0
    argument: int = 0
    expected: int = 0
    wire: int = 0  # the encoding of elements in transfer
    # a lock's or publisher's token: the request is refused once another client holds it; every segment is reached over
    # a link then
    token: int = 0
    indices: Any = None  # int64 array of element indices, for a sparse accumulate
    hyper: Mapping[str, float] | None = None
    sources: tuple[tuple[float, int], ...] = ()  # scale and wire of each other buffer, if several are to be summed


_RAW_REQUEST, _RAW_OUTCOME = ffi.typeof("struct smb_request *"), ffi.typeof("struct smb_outcome *")


def raw_request(request: Request, timeout_ms: int) -> Any:
    """Return a struct smb_request. The fields that most calls have, opcode to token, are set in one step, by
    position.
    """
    raw = ffi.new(_RAW_REQUEST, request[:11])
    raw.timeout_ms = timeout_ms
    return raw


class UnknownParts:
    """The parts of a failed call whose outcome is unknown: they were not confirmed before the failure."""

    def __init__(self, pointer: Any, owner: object = None) -> None:
        """`owner` frees the parts at its own end."""
        self.pointer = ffi.gc(pointer, lib.smb_unknown_release) if owner is None else pointer
        self._owner = owner


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a failed call ended. `segment` is the index of the first segment that failed."""

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
    """One attempt of a call at the engine.

    A signal handler may raise at any point of Python code, also between the engine's return and the check of its
    outcome. So the outcome is stored here when the engine returns.
    """

    __slots__ = ("raw",)

    def __init__(self) -> None:
        # A struct smb_outcome, which the engine fills in. It is released by a C function: from a __del__ nothing can be
        # raised, so Python would drop what a signal handler raises there.
        self.raw = ffi.gc(ffi.new(_RAW_OUTCOME), lib.smb_outcome_release)
        self.raw.status = _NOT_ENDED

    @property
    def ended(self) -> Outcome | int | None:
        """How the attempt ended: the engine's number, or the Outcome of a failed attempt. None if it did not end."""
        raw = self.raw
        if raw.status == _NOT_ENDED:
            return None
        return int(raw.result) if raw.status == Status.OK else outcome_of(raw, raw)


def direct_call(request_address: int, outcome_address: int) -> tuple[Request, Outcome]:
    """Return the request of a `direct` method and how it ended, from the addresses of its structs."""
    asked = ffi.cast("struct smb_request *", request_address)
    request = Request(
        Opcode(asked.opcode), int(asked.offset), int(asked.bytes), asked.source, asked.sink, int(asked.op),
        float(asked.scale), int(asked.argument), int(asked.expected),
    )  # fmt: skip
    return request, outcome_of(ffi.cast("struct smb_outcome *", outcome_address))


# Returns the address of a contiguous array's bytes, for a Request; keeps the array alive. Raises TypeError, ValueError
# or BufferError if the array has no buffer protocol.
memory_of: Callable[[Any], Any] = ffi.from_buffer


def address_of(memory: Any) -> int:
    """Return the address of a result of memory_of or memory_at."""
    return int(ffi.cast("uintptr_t", memory))


def memory_at(address: int) -> Any:
    """Return an address for a Request."""
    return ffi.cast("void *", address)
