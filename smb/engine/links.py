"""A client's side of the engine: sessions, links to servers, mapped segments, waiting requests."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from smb._direct import take_interrupt
from smb._engine import ffi, lib
from smb.engine.arithmetic import check_isa
from smb.engine.calls import UnknownParts
from smb.engine.counters import ClientCounters, counters_of
from smb.engine.enums import DENIED, AskOpcode, EngineError, PartOutcome, Status, check
from smb.errors import InvalidArgumentError, PermissionDeniedError

LATEST = 2**64 - 1  # for Segment.find_version


class Segment:
    """A local mapping of a segment."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = ffi.gc(pointer, lib.smb_segment_release)

    def shared(self) -> bool:
        """Return True if this process may still use the mapping.

        It may not once the server runs in another PID namespace, the segment may move to another server, or the segment
        was deleted.
        """
        return bool(lib.smb_segment_is_shared(self.pointer))

    def bind(self) -> bool:
        """Bind the segment to its server, since a mapping could not follow a move. False if it may move already."""
        return bool(lib.smb_segment_bind(self.pointer) == Status.OK)

    def find_version(self, version: int) -> tuple[int, int]:
        """Return (published version, slot of `version`, or -1 once it is being overwritten). LATEST asks for the
        published one.
        """
        published = ffi.new("uint64_t *")
        slot = lib.smb_segment_find_version(self.pointer, version, published)
        return int(published[0]), int(slot)


@dataclass(frozen=True, slots=True)
class Token:
    """A session's rights to a segment, with their expiry; see csrc/channel/access.h."""

    segment_id: int
    epoch: int
    rights: int
    generation: int
    expires_at_ms: int
    secret: bytes = field(repr=False)


ROLES = {
    "client": lib.SMB_ROLE_CLIENT,
    "reader": lib.SMB_ROLE_READER,
    "operator": lib.SMB_ROLE_OPERATOR,
    "server": lib.SMB_ROLE_SERVER,
    "coordinator": lib.SMB_ROLE_COORDINATOR,
}  # roles that a certificate may have


def _bits(roles: Iterable[str]) -> int:
    return int(functools.reduce(operator.or_, (ROLES[role] for role in roles)))


class DamagedListsError(InvalidArgumentError):
    """Revocation lists are not what they should be."""


class Tls:
    """The parts of a TLS connection: an authority, a certificate of that authority and its key, as PEM."""

    def __init__(self, ca: bytes, certificate: bytes, key: bytes) -> None:
        """Raises InvalidArgumentError if the parts do not belong together."""
        made, why = ffi.new("struct smb_tls **"), _room_for_why()
        status = lib.smb_tls_create(ca, certificate, key, made, why)
        if status == Status.INVALID:
            raise InvalidArgumentError(
                f"the credentials' authority, certificate and key do not belong together ({ffi.string(why).decode()})"
            )
        check(status)
        self.pointer = ffi.gc(made[0], lib.smb_tls_release)

    def deny(self, lists: bytes, denied: bytes) -> None:
        """Refuse certificates that revocation lists (PEM) or lines "name=NAME" and "serial=HEX" name. Call it once,
        before anything else. Raises DamagedListsError.
        """
        why = _room_for_why()
        status = lib.smb_tls_deny(self.pointer, lists, denied, why)
        if status == Status.INVALID:
            raise DamagedListsError(ffi.string(why).decode() or "too long")
        check(status)

    def judge(self, chain: bytes, roles: Iterable[str], host: str = "") -> tuple[str, str]:
        """Return (role, name) of the holder of a certificate chain (PEM, the peer's own first), by the rules of the
        engine's connections.

        `host` is the peer that this process has called; empty if the peer has called.

        Raises PermissionDeniedError; its text is the end of a sentence about the peer.
        """
        holder, why = ffi.new("struct smb_holder *"), _room_for_why()
        status = lib.smb_tls_judge(self.pointer, chain, _bits(roles), host.encode(), holder, why)
        if status != Status.OK:
            raise PermissionDeniedError(ffi.string(why).decode() or "its certificate is too long")
        return ffi.string(holder.role).decode(), ffi.string(holder.name).decode()

    def meet(self, address: str, port: int, role: str, host: str, timeout_ms: int) -> tuple[bytes, str]:
        """Find out by a separate connection who serves the control plane at a numeric address. Blocks.

        Returns its certificate as PEM, empty if the peer is not the expected one, or nobody answers; and what is wrong,
        as the end of a sentence about the peer, empty if nothing is.
        """
        found, why = ffi.new("char[]", lib.SMB_CERTIFICATE_BYTES), _room_for_why()
        status = lib.smb_tls_meet(
            self.pointer, address.encode(), port, _bits([role]), host.encode(), timeout_ms, found, why
        )
        errno, text = ffi.errno, ffi.string(why).decode()
        if status == Status.OK:
            return ffi.string(found), text
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        if status == Status.TIMEOUT:
            return b"", "nobody answered in time"
        return b"", text or (os.strerror(errno).lower() if errno else "it closed the connection")


class EngineClient:
    """The links and calls of one session."""

    def __init__(self, session_id: int, *, checksums: bool = False, proofs: bool = False) -> None:
        """With `proofs`, servers must prove that they know the key of a token before they get anything else."""
        made = ffi.new("struct smb_client **")
        check_isa()
        check(lib.smb_client_create(session_id, made))
        self.pointer = ffi.gc(made[0], lib.smb_client_destroy)
        self.checksums = checksums
        if checksums:
            lib.smb_client_use_checksums(self.pointer)
        if proofs:
            lib.smb_client_want_proof(self.pointer)

    def spoilt(self) -> int:
        """Return how many answers arrived damaged. Only checksums detect that."""
        return int(lib.smb_client_spoilt(self.pointer))

    def count(self) -> None:
        """Start counting. This is off by default, since it costs calls in shared memory some nanoseconds."""
        lib.smb_client_count(self.pointer)

    def counters(self) -> ClientCounters:
        return counters_of(self.pointer)

    def close(self) -> None:
        """Fail every call in progress over a link, and every later one. Local segments stay usable."""
        lib.smb_client_close(self.pointer)

    def connect_tcp(self, host: str, port: int, lane: int, timeout_ms: int) -> tuple[Link, int]:
        """Return a link to a numeric address and the server's instance id. Blocks up to timeout_ms. EngineError."""
        return self._connect(lib.smb_client_connect_tcp, host.encode(), port, lane, timeout_ms)

    def connect_unix(self, path: str, lane: int, timeout_ms: int) -> tuple[Link, int]:
        """Like connect_tcp, over a server's Unix socket."""
        return self._connect(lib.smb_client_connect_unix, os.fsencode(path), lane, timeout_ms)

    def connect_tls(
        self, host: str, port: int, tls: Tls, expected: str, lane: int, timeout_ms: int
    ) -> tuple[Link, int]:
        """Like connect_tcp, inside TLS, to the server whose certificate is for the name `expected`.

        EngineError UNTRUSTED says who answers instead, or why the server refuses this client.
        """
        peer = _TlsPeer(host, port, tls, expected)
        return self._connect(lib.smb_client_connect_tls, peer.pointer, lane, timeout_ms, why=_room_for_why())

    def connect_reference(self, fd: int, lane: int, timeout_ms: int) -> tuple[Link, int]:
        """Like connect_tcp, on a connected stream socket. The engine owns the socket from here on, also after a
        failure.

        Requests travel by reference: the owner of the other end transfers the memory that they name.
        """
        return self._connect(lib.smb_client_connect_reference, fd, lane, timeout_ms)

    def _connect(self, connect: Callable[..., int], *arguments: Any, why: Any = None) -> tuple[Link, int]:
        made, instance = ffi.new("struct smb_link **"), ffi.new("uint64_t *")
        reason = () if why is None else (why,)
        check(connect(self.pointer, *arguments, made, instance, *reason), why)
        return Link(self, made[0]), int(instance[0])

    def wait_down(self, timeout_ms: int) -> int | None:
        """Return the id of a link that has calls but no connection, None if there is none in time.

        The caller resumes the link or lets it go. EngineError after close().
        """
        link_id = ffi.new("uint64_t *")
        status = lib.smb_client_wait_down(self.pointer, timeout_ms, link_id)
        if status == Status.TIMEOUT:
            return None
        check(status)
        return int(link_id[0])

    def resolve(self, unknown: UnknownParts, timeout_ms: int) -> list[tuple[int, int, PartOutcome]]:
        """Wait until the outcome of each part of a call is known; return (offset, length, state), in bytes. EngineError
        TIMEOUT.
        """
        status = lib.smb_unknown_resolve(self.pointer, unknown.pointer, timeout_ms)
        if (interrupt := take_interrupt()) is not None:
            raise interrupt
        check(status)
        offset, length, state = ffi.new("uint64_t *"), ffi.new("uint32_t *"), ffi.new("int *")
        parts: list[tuple[int, int, PartOutcome]] = []
        while lib.smb_unknown_part(unknown.pointer, len(parts), offset, length, state):
            parts.append((int(offset[0]), int(length[0]), PartOutcome(state[0])))
        return parts


class Link:
    """A lane to a server. It uses one connection after the other."""

    def __init__(self, client: EngineClient, pointer: Any) -> None:
        self._client = client  # the C side points to the client's
        self.pointer = ffi.gc(pointer, lib.smb_link_close)
        self.id = int(lib.smb_link_id(pointer))

    def beside(self, lane: int, follows: bool) -> Link:
        """Return another lane to the same server, which gets a connection when a call needs one.

        `follows`: an earlier link of that lane was closed, so calls wait until this one has a connection.
        """
        made = ffi.new("struct smb_link **")
        check(lib.smb_link_beside(self.pointer, lane, follows, made))
        return Link(self._client, made[0])

    def round_trip_s(self) -> float:
        """Return the shortest round trip in seconds that the kernel saw during the first connection; 0 if the link does
        not use TCP.
        """
        return int(lib.smb_link_round_trip_us(self.pointer)) / 1e6

    def alive(self) -> bool:
        """Return True if the link may be used: it was not closed. It need not have a connection now."""
        return bool(lib.smb_link_alive(self.pointer))

    def connected(self) -> bool:
        """Return True if the link has a connection, as far as is known."""
        return bool(lib.smb_link_connected(self.pointer))

    def wanted(self) -> bool:
        """Return True if calls wait for the link to have a connection."""
        return bool(lib.smb_link_wanted(self.pointer))

    def resume_tcp(self, host: str, port: int, accept_instance: int, timeout_ms: int) -> int:
        """Connect the link again, to the same run of the server or to the run `accept_instance`; return the run.
        EngineError.
        """
        return self._resume(lib.smb_link_resume_tcp, host.encode(), port, accept_instance, timeout_ms)

    def resume_unix(self, path: str, accept_instance: int, timeout_ms: int) -> int:
        """Like resume_tcp, over the server's Unix socket."""
        return self._resume(lib.smb_link_resume_unix, os.fsencode(path), accept_instance, timeout_ms)

    def resume_tls(self, host: str, port: int, tls: Tls, expected: str, accept_instance: int, timeout_ms: int) -> int:
        """Like resume_tcp, inside TLS; see connect_tls."""
        peer = _TlsPeer(host, port, tls, expected)
        return self._resume(lib.smb_link_resume_tls, peer.pointer, accept_instance, timeout_ms, why=_room_for_why())

    def resume_reference(self, fd: int, accept_instance: int, timeout_ms: int) -> int:
        """Like resume_tcp, on a socket as for connect_reference."""
        return self._resume(lib.smb_link_resume_reference, fd, accept_instance, timeout_ms)

    def _resume(self, resume: Callable[..., int], *arguments: Any, why: Any = None) -> int:
        instance = ffi.new("uint64_t *")
        reason = () if why is None else (why,)
        check(resume(self.pointer, *arguments, instance, *reason), why)
        return int(instance[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of roles under which the link asks from its next connection on. For a segment that has two
        copies.
        """
        lib.smb_link_set_epoch(self.pointer, epoch)

    def fail(self, status: Status) -> None:
        """End every call on the link with that status, and every later one."""
        lib.smb_link_fail(self.pointer, status)

    def connect_once(self) -> None:
        """Close the link, and end its calls, when this connection breaks: it will not get another connection."""
        lib.smb_link_once(self.pointer)

    def let_go(self) -> None:
        """Stop trying to connect the link."""
        lib.smb_link_let_go(self.pointer)

    def authorize(self, token: Token, timeout_ms: int) -> None:
        """Present a token, on the present connection and on every later one. Blocks up to timeout_ms.

        EngineError DENIED, with the reason, if the server refuses it.
        """
        why = ffi.new("uint64_t *")
        status = lib.smb_link_authorize(self.pointer, _shown(token), timeout_ms, why)
        if status == Status.DENIED:
            raise EngineError(status, why=DENIED.get(why[0], ""))
        if status == Status.UNTRUSTED:
            raise EngineError(status)
        check(status)

    def keep_token(self, token: Token) -> None:
        """Present a token from the next connection on. EngineError OUT_OF_MEMORY."""
        check(lib.smb_link_keep_token(self.pointer, _shown(token)))

    def attach(self, segment_id: int, epoch: int, timeout_ms: int) -> Segment:
        """Map a segment of the server behind this Unix link. One caller at a time. EngineError."""
        made = ffi.new("struct smb_segment **")
        check(lib.smb_link_attach(self.pointer, segment_id, epoch, timeout_ms, made))
        return Segment(made[0])

    def ask(self, opcode: AskOpcode, segment_id: int, epoch: int, argument: int, *words: int) -> PendingRequest:
        """Send a request that may wait; the link's lane is one for waiting requests."""
        return PendingRequest(self, opcode, segment_id, epoch, argument, words)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a PendingRequest. `sent`: the request may have reached the server."""

    status: Status
    sent: bool
    a: int
    b: int


class PendingRequest:
    """A request that may wait for a long time. The owner calls `end`."""

    def __init__(
        self, link: Link, opcode: AskOpcode, segment_id: int, epoch: int, argument: int, words: tuple[int, ...]
    ) -> None:
        ask = ffi.new("struct smb_ask *")
        ask.opcode, ask.segment, ask.epoch, ask.argument = opcode, segment_id, epoch, argument
        for index, word in enumerate(words):
            ask.words[index] = word
        # NULL before it is sent, and after its end. A signal handler may raise before the caller has this object. Then
        # C ends the request: from a __del__ nothing can be raised, so what a handler raises there would be lost.
        self._made = ffi.gc(ffi.new("struct smb_pending **"), lib.smb_ask_end)
        self._reply = ffi.new("struct smb_reply *")
        self.link = link  # after `_made`, which goes first
        check(lib.smb_ask_start(link.pointer, ask, self._made))

    def wait(self, timeout_ms: int) -> Reply | None:
        """Return the answer, None if there is none in time. May be called again."""
        status = lib.smb_ask_wait(self._made[0], timeout_ms, self._reply)
        if status == Status.BUSY:
            return None
        return Reply(Status(status), bool(self._reply.sent), int(self._reply.a), int(self._reply.b))

    def end(self) -> None:
        """Drop the request. A request without an answer is given up."""
        lib.smb_ask_end(self._made)


class _TlsPeer:
    """A struct smb_tls_peer, and the strings that it points to."""

    def __init__(self, host: str, port: int, tls: Tls, expected: str) -> None:
        self._texts = ffi.new("char[]", host.encode()), ffi.new("char[]", expected.encode())
        address, name = self._texts
        self.pointer = ffi.new("struct smb_tls_peer *", (address, port, tls.pointer, name))


def _room_for_why() -> Any:
    return ffi.new("char[]", lib.SMB_WHY_BYTES)


def _shown(token: Token) -> Any:
    shown = ffi.new("struct smb_token *")
    shown.segment, shown.epoch, shown.rights = token.segment_id, token.epoch, token.rights
    shown.generation, shown.expires_ms = token.generation, token.expires_at_ms
    ffi.memmove(shown.secret, token.secret, len(token.secret))
    return shown
