"""The engine's numbers by name (csrc/smb/), and the error of a call of it that failed."""

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
RECORD_BYTES: int = lib.SMB_RECORD_BYTES  # of a request by reference
HELLO: int = lib.SMB_HELLO  # its opcode


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
    def _missing_(cls, value: object) -> Status:  # noqa: ARG003 - whichever it is
        """Any other status: the server does not speak our protocol."""
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
    """enum smb_opcode, as far as it is asked of a segment's locks, barrier and version; csrc/memory/sync.h has the
    meaning of the words."""

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


# Opcodes by number, as people and metrics call them.
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
    """The purpose of each link to a server. Changes of a lane are made in order; what waits has a lane of its own, so
    that nothing waits behind it."""

    TCP_DATA = 0
    TCP_WAITS = 1
    UNIX_DATA = 2
    UNIX_WAITS = 3
    UNIX_ATTACH = 4
    VERBS_DATA = 6
    # These carry what TCP_DATA carries, over further connections to a server that is far away.
    TCP_FURTHER = lib.SMB_LANE_FURTHER
    # From here on each is of one segment that has two copies.
    OF_SEGMENTS = lib.SMB_LANE_OF_SEGMENTS


def status_name(status: int) -> str:
    """Return the engine's word for the status, empty for a number that is none."""
    name = lib.smb_status_name(status)
    return ffi.string(name).decode() if name else ""


class PartOutcome(IntEnum):
    """enum smb_outcome_state."""

    APPLIED = lib.SMB_OUTCOME_APPLIED
    NOT_APPLIED = lib.SMB_OUTCOME_NOT_APPLIED
    UNKNOWN = lib.SMB_OUTCOME_UNKNOWN


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
    Status.UNTRUSTED: "the peer there could not prove that it is that server",
    Status.NAMESPACE: "this process is in another PID namespace than the server, where its locks do not hold",
    Status.SESSION_ENDED: "this client's session has ended there",
    Status.APART: "the source lies on another server",
}

DENIED = {  # why a token was not taken, for authorize
    lib.SMB_DENIED_GENERATION: "it does not know the key of this token: the coordinator's clock was put forward or "
    "back, of which it hears within 2 s, or it belongs to another coordinator",
    lib.SMB_DENIED_PROOF: "the token does not prove that its coordinator made it for this session and segment, or "
    "somebody between us and the server hands the proof on",
    lib.SMB_DENIED_EXPIRED: "the token has expired by the coordinator's clock",
}


def check(status: int, why: Any = None) -> None:
    """Raise what an interrupt left, else EngineError, unless the status is OK. `why`: the engine's own reason."""
    if status != Status.OK:
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        raise EngineError(status, ffi.errno, ffi.string(why).decode() if why is not None else "")
