"""The engine's numbers by name (csrc/smb/), and the error of a failed engine call."""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any

from smb._direct import take_interrupt
from smb._engine import ffi, lib
from smb.errors import Error

DEFAULT_CHUNK_BYTES: int = lib.SMB_CHUNK_BYTES_DEFAULT
PAGE_BYTES: int = lib.SMB_CHUNK_BYTES_MIN
LANES_FURTHER_MAX: int = lib.SMB_LANES_FURTHER_MAX
SEGMENTS_MAX: int = lib.SMB_SEGMENTS_PER_BUFFER_MAX
RECORD_BYTES: int = lib.SMB_RECORD_BYTES  # size of a request by reference
HELLO: int = lib.SMB_HELLO  # an opcode


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
    APART = lib.SMB_APART
    DISCONNECTED = lib.SMB_DISCONNECTED
    LINK_LOST = lib.SMB_LINK_LOST
    PROTOCOL = lib.SMB_PROTOCOL
    VERSION = lib.SMB_VERSION
    NAMESPACE = lib.SMB_NAMESPACE
    UNTRUSTED = lib.SMB_UNTRUSTED
    SYSTEM = lib.SMB_SYSTEM

    @classmethod
    def _missing_(cls, value: object) -> Status:  # noqa: ARG003 - for any value
        """Return PROTOCOL for an unknown status: the server does not speak this protocol."""
        return cls.PROTOCOL


class Opcode(IntEnum):
    """enum smb_opcode: the values for a buffer's calls."""

    READ = lib.SMB_READ
    WRITE = lib.SMB_WRITE
    ACCUMULATE = lib.SMB_ACCUMULATE
    FILL = lib.SMB_FILL
    ACCUMULATE_FROM = lib.SMB_ACCUMULATE_FROM
    FETCH_ADD = lib.SMB_FETCH_ADD
    COMPARE_SWAP = lib.SMB_COMPARE_SWAP
    APPLY = lib.SMB_APPLY


class AskOpcode(IntEnum):
    """enum smb_opcode: the values for a segment's locks, barrier and version. csrc/sync/sync.h has the meaning of the
    words.
    """

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


# Opcodes by number, under the names that messages and metrics use.
KINDS: dict[int, str] = {
    number: name.removeprefix("SMB_").lower() for number, name in sorted(ffi.typeof("enum smb_opcode").elements.items())
}
TRANSPORTS: dict[int, str] = {
    lib.SMB_TRANSPORT_SHM: "shm",
    lib.SMB_TRANSPORT_TCP: "tcp",
    lib.SMB_TRANSPORT_UNIX: "unix",
    lib.SMB_TRANSPORT_VERBS: "verbs",
}


class Lane(IntEnum):
    """The purpose of each link to a server. Changes of a lane are made in order. Requests that wait have a lane of
    their own, so that nothing waits behind them.
    """

    TCP_DATA = 0
    TCP_WAITS = 1
    UNIX_DATA = 2
    UNIX_WAITS = 3
    UNIX_ATTACH = 4
    VERBS_DATA = 6
    # Lanes from here on carry the same as TCP_DATA, over further connections to a server with a long round trip.
    TCP_FURTHER = lib.SMB_LANE_FURTHER
    # From here on each lane belongs to one segment that has two copies.
    OF_SEGMENTS = lib.SMB_LANE_OF_SEGMENTS


def status_name(status: int) -> str:
    """Return the engine's name of the status, empty for an unknown number."""
    name = lib.smb_status_name(status)
    return ffi.string(name).decode() if name else ""


class PartOutcome(IntEnum):
    """enum smb_outcome_state."""

    APPLIED = lib.SMB_OUTCOME_APPLIED
    NOT_APPLIED = lib.SMB_OUTCOME_NOT_APPLIED
    UNKNOWN = lib.SMB_OUTCOME_UNKNOWN


class EngineError(Error):
    """An engine call failed. `status` says how; `errno` is that of the failed system call, 0 for none.

    Callers turn this into an error that names the user's call.
    """

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
    Status.PROTOCOL: "the peer does not speak the protocol of a memory server",
    Status.VERSION: "the peer speaks another version of the protocol",
    Status.UNTRUSTED: "the peer there could not prove that it is that server",
    Status.NAMESPACE: "this process is in another PID namespace than the server, where its locks do not hold",
    Status.SESSION_ENDED: "this client's session has ended there",
    Status.APART: "the source lies on another server",
}

DENIED = {  # the reasons for which a server refuses a token, for authorize
    lib.SMB_DENIED_GENERATION: "the server does not know the key of this token: the coordinator's clock was changed, "
    "which the server learns within 2 s, or the server belongs to another coordinator",
    lib.SMB_DENIED_PROOF: "the token does not prove that its coordinator made it for this session and segment, or "
    "the proof was forwarded by somebody between this client and the server",
    lib.SMB_DENIED_EXPIRED: "the token has expired by the coordinator's clock",
}


def check(status: int, why: Any = None) -> None:
    """Raise EngineError unless the status is OK; an exception that a signal handler left comes first. `why` is the
    engine's reason.
    """
    if status != Status.OK:
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        raise EngineError(status, ffi.errno, ffi.string(why).decode() if why is not None else "")
