"""The server part of the C engine (csrc/smb/server.h), typed. No other file of the daemon touches the library.

Each call releases Python's lock, and may be made from any thread until `close`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from smb._engine import ffi, lib
from smb.engine import KINDS, TRANSPORTS, Latency, Tls, Token, check_isa, latencies_of, status_name
from smb.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    UnavailableError,
)

CHUNK_BYTES_MAX: int = lib.SMB_CHUNK_BYTES_MAX
SHARED_MAX = 1024  # segments, and sessions, whose shares one scrape reads: 1 KiB each
DENIALS_MAX = 64  # kinds of refused requests that are kept between two looks
_SHARE_BYTES = ffi.sizeof("struct smb_share")
LOOPS_MAX = 64  # each loop is a thread, and more threads than cores do not help

WAITS: dict[int, str] = {
    lib.SMB_WAIT_LOCK: "lock",
    lib.SMB_WAIT_PUBLISHER: "publication",
    lib.SMB_WAIT_BARRIER: "barrier",
    lib.SMB_WAIT_VERSION: "version",
    lib.SMB_WAIT_SHARED: "shared",
}
_ERRORS: dict[int, type[Error]] = {
    lib.SMB_NOT_FOUND: NotFoundError,
    lib.SMB_INVALID: InvalidArgumentError,
    lib.SMB_OUT_OF_MEMORY: OutOfMemoryError,
    lib.SMB_EXISTS: AlreadyExistsError,
    lib.SMB_UNTRUSTED: PermissionDeniedError,
}


@dataclass(frozen=True, slots=True)
class SegmentForm:
    """The description of a new segment. Sizes are bytes; dtype is the engine's number."""

    id: int
    epoch: int
    dtype: int
    nbytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment that this server holds, as its file says. See struct smb_held in csrc/smb/server.h."""

    id: int
    file_bytes: int
    epoch: int  # of its last role, or the epoch in which it was made if it has no role
    whole: bool | None  # False: a copy that is being made, or was about to be; None: unknown
    role: int  # given to this run: 0 none, 1 primary, 2 backup
    untouched: bool = False  # nothing was ever written to it


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's counters. Operations and bytes by (transport, kind), errors by name of status."""

    operations: dict[tuple[str, str], int]
    transferred_bytes: dict[tuple[str, str], int]
    errors: dict[str, int]
    connections_opened: dict[str, int]
    connections: dict[str, int]
    turned_away_total: int
    strangers: int
    strangers_evicted_total: int
    deferred: int
    deferred_total: int
    waits: int
    repeated_total: int
    replayed_total: int
    backlog_bytes: int
    backlog_total: int
    journal_slots: int
    journal_slots_max: int
    locks_granted: int
    lock_waits: int
    lock_timeouts: int
    locks_expired: int
    locks_revoked: int
    barriers_broken: int
    recovered_locks: int
    segments: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """This server's copy of a segment that has two; see struct smb_replica_status."""

    segment_id: int
    bundle_id: int  # of the segments that move together; the other fields are about the whole bundle
    epoch: int
    role: int
    paired: bool
    dialled: bool
    broken_ms: int
    unconfirmed: int
    queued_bytes: int
    refused: str  # why the last connection to the backup ended; empty while one works, or if none has ended


class CopyStep(Enum):
    """The state of a copy that is being made."""

    MORE = "more"
    BUSY = "busy"  # nothing could be sent just now
    WHOLE = "whole"  # complete and confirmed
    GONE = "gone"  # given up, or not wanted any more


class NotReadyError(UnavailableError):
    """Not ready yet: the server has no keys for tokens."""


# (operations, bytes) by (transport, opcode). Kinds that never happened are left out.
Share = Mapping[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Wait:
    """A lock that is held, or a wait, at one segment. `session` holds the lock (0: none) for `left_ms` unless it
    renews, and `token` identifies this holding. Each holder of a shared lock has an item of the kind "shared", all with
    one token; the first one has the number of waiting requests. `waiting` requests wait. At a barrier, `arrived` of
    `parties` have arrived.
    """

    segment_id: int
    kind: str
    session: int
    token: int
    left_ms: int
    waiting: int
    arrived: int
    parties: int


@dataclass(frozen=True, slots=True)
class Denial:
    """Refused requests of one kind of a session. Unless `proven`, any client may have claimed to be that session."""

    session_id: int
    segment_id: int
    kind: str
    count: int
    proven: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was found in the journal of an earlier run: changes that are finished now, chunks whose journal is gone
    (each element has its old or new value), and whether the file was not a journal."""

    finished: int
    torn_chunks: int
    journal_lost: bool


class Slots:
    """Slots of CHUNK_BYTES_MAX, for payloads that come from outside. Call `close` once no peer can write to them."""

    def __init__(self, pointer: object, count: int) -> None:
        self.pointer = pointer
        self.addresses = [int(ffi.cast("uintptr_t", lib.smb_slots_payload(pointer, i))) for i in range(count)]

    def close(self) -> None:
        """Release the slots, once no connection uses them."""
        lib.smb_slots_release(self.pointer)


class HeldSegment:
    """A segment whose memory stays until `close`, even if it is deleted. Addresses are those of this process."""

    def __init__(self, pointer: object) -> None:
        info = ffi.new("struct smb_segment_info *")
        nbytes, at = ffi.new("uint64_t *"), ffi.new("uint32_t *")
        lib.smb_segment_info(pointer, info)
        self._pointer = pointer
        self.form = SegmentForm(info.id, info.epoch, info.dtype, info.data_bytes, info.chunk_bytes)
        self.address = int(ffi.cast("uintptr_t", lib.smb_segment_data(pointer)))
        self.states_address = int(ffi.cast("uintptr_t", lib.smb_segment_states(pointer, nbytes, at)))
        self.states_bytes = int(nbytes[0])
        self.sequence_at = int(at[0])

    def close(self) -> None:
        lib.smb_segment_release(self._pointer)


class Engine:
    """The engine's server: listeners, loops and segments. Call `close` at the end."""

    def __init__(self, instance_id: int, loops: int, capacity_bytes: int) -> None:
        """Start the loops, without listening yet. Raises UnavailableError if threads cannot be started."""
        made = ffi.new("struct smb_server **")
        check_isa()
        _check(lib.smb_server_create(instance_id, loops, capacity_bytes, made), "start the engine")
        self._server = made[0]

    def listen_tcp(self, address: str, port: int) -> int:
        """Listen on a numeric address; port 0 picks a free one. Returns the port. Raises UnavailableError."""
        bound = ffi.new("uint16_t *")
        what = f"listen on {address} port {port}"
        _check(lib.smb_server_listen_tcp(self._server, address.encode(), port, bound), what)
        return int(bound[0])

    def listen_unix(self, path: Path) -> None:
        """Listen on a Unix socket, for processes of this user. Raises UnavailableError."""
        _check(lib.smb_server_listen_unix(self._server, os.fsencode(path)), f"listen on {path}")

    def use_tls(self, tls: Tls) -> None:
        """Use TLS on all new TCP connections, and close those whose peer these credentials do not accept (any more)."""
        lib.smb_server_use_tls(self._server, tls.pointer)

    def take_slots(self, count: int) -> Slots:
        """Return `count` slots. Raises OutOfMemoryError, UnavailableError."""
        made = ffi.new("struct smb_slots **")
        _check(lib.smb_server_take_slots(self._server, count, made), f"take {count} slots")
        return Slots(made[0], count)

    def adopt_reference(self, fd: int, slots: Slots) -> None:
        """Serve one more peer over a connected stream socket, which the engine owns from here on, even if this fails.
        Its requests refer to payloads in these slots. Raises OutOfMemoryError, UnavailableError.
        """
        _check(lib.smb_server_adopt_reference(self._server, fd, slots.pointer), "serve one more connection")

    def hold_segment(self, segment_id: int) -> HeldSegment:
        """Return a served segment. Raises NotFoundError."""
        found = ffi.new("struct smb_segment **")
        _check(lib.smb_server_hold_segment(self._server, segment_id, found), f"find segment {segment_id:016x}")
        return HeldSegment(found[0])

    def guard(self) -> None:
        """Require tokens on each connection. Must be called before anything listens."""
        lib.smb_server_guard(self._server)

    def set_keys(self, keys: Mapping[int, bytes], now_ms: int) -> None:
        """Replace the keys of tokens, by generation, that are shared with the coordinator, whose clock says now_ms.

        Raises InvalidArgumentError for a key of a wrong length, and for no keys or too many.
        """
        if not 1 <= len(keys) <= lib.SMB_KEYS_MAX or any(len(key) != lib.SMB_KEY_BYTES for key in keys.values()):
            raise InvalidArgumentError(
                f"a server takes 1 to {lib.SMB_KEYS_MAX} keys of {lib.SMB_KEY_BYTES} bytes, not {len(keys)} of "
                f"{sorted({len(key) for key in keys.values()})} bytes"
            )
        taken = ffi.new("struct smb_key[]", len(keys))
        for known_key, (generation, key) in zip(taken, keys.items(), strict=True):
            known_key.generation = generation
            ffi.memmove(known_key.bytes, key, len(key))
        _check(lib.smb_server_set_keys(self._server, len(keys), taken, now_ms), "take keys")

    def check_proof(self, session_id: int, shown: Token, bond: bytes) -> float:
        """Return for how many more seconds the session may use a token. The token's `secret` is the proof that the
        session has it. `bond` is that of the caller's certificate (smb.security.bond).

        Raises PermissionDeniedError; NotReadyError while no key is known.
        """
        token, left = ffi.new("struct smb_token *"), ffi.new("uint64_t *")
        token.segment, token.epoch, token.rights = shown.segment_id, shown.epoch, shown.rights
        token.generation, token.expires_ms = shown.generation, shown.expires_at_ms
        status = lib.SMB_DENIED
        if len(shown.secret) == lib.SMB_KEY_BYTES:
            ffi.memmove(token.secret, shown.secret, lib.SMB_KEY_BYTES)
            status = lib.smb_server_check_proof(self._server, session_id, token, bond, left)
        if status == lib.SMB_VERSION:
            raise PermissionDeniedError(
                "this client is of an earlier release, whose proofs could be used by others: upgrade it"
            )
        if status == lib.SMB_BUSY:
            raise NotReadyError("this memory server has not heard from the coordinator yet; try again")
        if status != lib.SMB_OK:
            raise PermissionDeniedError(
                f"session {session_id:016x} has not proved a valid token for segment {shown.segment_id:016x}; open the "
                f"buffer again"
            )
        return int(left[0]) / 1e9

    def create_segment(self, path: Path, form: SegmentForm, *, bundle_id: int | None = None) -> None:
        """Make the file and serve it. Blocks while its pages are zeroed. `bundle_id` is given for a segment with two
        copies: it moves with the segments that were made with this number; 0: alone. Clients are refused until that
        segment has a role.

        Raises OutOfMemoryError (capacity or file system), InvalidArgumentError, AlreadyExistsError, UnavailableError.
        Then nothing is left behind.
        """
        name, cut = os.fsencode(path), (form.epoch, form.dtype, form.nbytes, form.chunk_bytes)
        if bundle_id is None:
            status = lib.smb_server_create_segment(self._server, name, form.id, *cut)
        else:
            status = lib.smb_server_create_replica(self._server, name, form.id, bundle_id, *cut)
        _check(status, f"make a segment of {form.nbytes} bytes at {path}")

    def adopt_segment(self, path: Path) -> SegmentForm:
        """Serve a file of an earlier run. Raises NotFoundError if its segment was deleted, PermissionDeniedError if
        another user made the file or may change it, and otherwise as `create_segment` does.
        """
        info = ffi.new("struct smb_segment_info *")
        _check(lib.smb_server_adopt_segment(self._server, os.fsencode(path), info), f"take over {path}")
        return SegmentForm(info.id, info.epoch, info.dtype, info.data_bytes, info.chunk_bytes)

    def open_journal(self, path: Path) -> Recovery:
        """Finish changes that an earlier run left half done, and journal all changes from here on. Must be called after
        all segments are adopted and before anything listens. Raises OutOfMemoryError, UnavailableError.
        """
        found = ffi.new("struct smb_recovery *")
        _check(lib.smb_server_open_journal(self._server, os.fsencode(path), found), f"open the journal {path}")
        return Recovery(int(found.finished), int(found.torn_chunks), bool(found.journal_lost))

    def delete_segment(self, segment_id: int) -> None:
        """Stop serving the segment and unlink its file; users of its mapping get errors. Raises NotFoundError."""
        _check(lib.smb_server_delete_segment(self._server, segment_id), f"delete segment {segment_id:016x}")

    def retire_segment(self, segment_id: int, idle_ms: int) -> int | None:
        """Have the segment's lock and barrier refuse all requests from now on, if they were idle for that long.

        Returns the lock's last token, or None if they were not idle. Raises NotFoundError.
        """
        token = ffi.new("uint64_t *")
        status = lib.smb_server_retire_segment(self._server, segment_id, idle_ms, token)
        if status == lib.SMB_BUSY:
            return None
        _check(status, f"retire segment {segment_id:016x}")
        return int(token[0])

    def raise_token(self, segment_id: int, token: int) -> None:
        """Have the next token of the segment's lock be above this one. Raises NotFoundError, InvalidArgumentError."""
        _check(lib.smb_server_raise_token(self._server, segment_id, token), f"raise tokens of {segment_id:016x}")

    def set_replica(self, segment_id: int, epoch: int, role: int, peer: str, *, copying: bool = False) -> None:
        """Give this server its role for a segment and its bundle, from that epoch on. `peer`: the server of the other
        copy; empty: none. `copying`: the backup is still to be copied to. The role NONE ends a primary's role in its
        epoch, because another server may be the primary. Raises NotFoundError, InvalidArgumentError.
        """
        name = peer.encode()
        status = lib.smb_server_set_replica(self._server, segment_id, epoch, role, bool(peer), copying, name)
        _check(status, f"take a role in {segment_id:016x}")

    def copy(self, segment_id: int, epoch: int, nbytes: int) -> tuple[CopyStep, int, int]:
        """Send about `nbytes` more to the new backup. Returns the state, the bytes copied and the bytes in all. Waits a
        little if nothing can be sent. Raises UnavailableError if memory is out.
        """
        copied, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        status = lib.smb_server_copy(self._server, segment_id, epoch, nbytes, copied, total)
        if status in (lib.SMB_STALE_EPOCH, lib.SMB_NOT_FOUND):
            return CopyStep.GONE, 0, 0
        states = {lib.SMB_OK: CopyStep.MORE, lib.SMB_BUSY: CopyStep.BUSY, lib.SMB_EXISTS: CopyStep.WHOLE}
        if status not in states:
            _check(status, f"copy {segment_id:016x}")
        return states[status], copied[0], total[0]

    def abandon_copy(self, segment_id: int, epoch: int) -> bool:
        """Give up that copy, and return whether it was in progress."""
        return bool(lib.smb_server_abandon_copy(self._server, segment_id, epoch) == lib.SMB_OK)

    def let_move(self, segment_id: int) -> bool:
        """Let a segment with one copy get a role and move. Returns whether it can. Raises NotFoundError."""
        status = lib.smb_server_let_move(self._server, segment_id)
        if status == lib.SMB_BUSY:
            return False
        _check(status, f"let {segment_id:016x} move")
        return True

    def bind(self, segment_id: int) -> bool:
        """Bind a segment to this server. Returns False if it may move already. Raises NotFoundError."""
        status = lib.smb_server_bind(self._server, segment_id)
        if status == lib.SMB_BUSY:
            return False
        _check(status, f"bind {segment_id:016x}")
        return True

    def yield_role(self, segment_id: int, epoch: int) -> None:
        """Have the primary ask its backup at each read, because the backup is about to be promoted. Raises
        NotFoundError, and UnavailableError if this server is not the primary in that epoch.
        """
        _check(lib.smb_server_yield(self._server, segment_id, epoch), f"yield {segment_id:016x}")

    def note_unrecorded(self, segment_id: int, unrecorded: bool) -> None:
        """While the records do not have this role of its bundle, have a primary ask its backup at each read: its lease
        was given without the role. The next role ends that. A segment that is gone is not an error.
        """
        lib.smb_server_note_unrecorded(self._server, segment_id, unrecorded)

    def hand_over(self, segment_id: int, epoch: int) -> bool:
        """As yield_role, for two copies that are about to switch their roles: for a second, or until it gets another
        role, the primary also begins no change. Returns whether the backup has everything; if not, call again.
        """
        status = lib.smb_server_hand_over(self._server, segment_id, epoch)
        if status == lib.SMB_BUSY:
            return False
        _check(status, f"hand over {segment_id:016x}")
        return True

    def serve_until(self, boot_s: float) -> None:
        """Set until when no other server is made the primary of this server's segments, on the boot-time clock."""
        lib.smb_server_serve_until(self._server, int(boot_s * 1e9))

    def feed(
        self, segment_id: int, epoch: int, fd: int, instance_id: int, tls: Tls | None = None, expected: str = ""
    ) -> None:
        """Forward changes over a socket that is connected to the backup. The engine owns the socket from here on, even
        if this fails. `tls`: forward inside TLS, to the server whose certificate has the name `expected`. Raises
        NotFoundError, UnavailableError.
        """
        inside = tls.pointer if tls is not None else ffi.NULL
        status = lib.smb_server_feed(
            self._server, segment_id, epoch, fd, instance_id, inside, expected.encode() if tls is not None else ffi.NULL
        )
        _check(status, f"forward changes of {segment_id:016x}")

    def suspend(self, segment_id: int) -> None:
        """Send requests that wait for the backup to another server."""
        lib.smb_server_suspend(self._server, segment_id)

    def await_replicas(self, seen: int, timeout_s: float | None) -> int:
        """Block until roles or connections have changed since `seen` (0 at first). Returns the next value of `seen`."""
        timeout_ms = 0 if timeout_s is None else max(1, round(timeout_s * 1000))
        return int(lib.smb_server_await_replicas(self._server, seen, timeout_ms))

    def wake_replicas(self) -> None:
        """End await_replicas."""
        lib.smb_server_wake_replicas(self._server)

    def replicas(self) -> list[ReplicaStatus]:
        """Return the status of each segment with two copies."""
        most, found = 0, 64
        while found > most:
            most = 2 * found
            raw = ffi.new("struct smb_replica_status[]", most)
            found = lib.smb_server_replicas(self._server, raw, most)
        return [
            ReplicaStatus(
                each.segment, each.group, each.epoch, each.role, bool(each.paired), bool(each.dialled), each.broken_ms,
                each.unconfirmed, each.queued_bytes, status_name(each.refused) if each.refused else "",
            )
            for each in raw[0:found]
        ]  # fmt: skip

    def feed_fault(self, segment_id: int) -> str:
        """Return what TLS reported about the last connection to a segment's backup, as the end of a sentence."""
        why = ffi.new("char[]", lib.SMB_WHY_BYTES)
        lib.smb_server_feed_why(self._server, segment_id, why)
        return str(ffi.string(why).decode())

    def forget_ends(self) -> None:
        """Let segments without a role take roles of earlier epochs than the one in which theirs was ended, but later
        ones than they had.
        """
        _check(lib.smb_server_forget_ends(self._server), "forget when roles were ended")

    def held(self) -> dict[int, FoundSegment]:
        """Return all segments that this server holds, by id."""
        most, found = 0, 64
        while found > most:
            most = 2 * found
            raw = ffi.new("struct smb_held[]", most)
            found = lib.smb_server_held(self._server, raw, most)
        return {each.id: _held(each) for each in raw[0:found]}

    def holds(self, segment_id: int) -> FoundSegment | None:
        """Return one of the segments; None if this server does not hold it."""
        raw = ffi.new("struct smb_held *")
        if lib.smb_server_holds(self._server, segment_id, raw) == lib.SMB_NOT_FOUND:
            return None
        return _held(raw)

    def end_session(self, session_id: int) -> None:
        """Give up all that the session holds here, and refuse it from now on. May be repeated."""
        lib.smb_server_end_session(self._server, session_id)

    def know_ended(self, all_of_them: bool) -> None:
        """Set whether each session that ended before now, also during earlier runs, has been ended here."""
        lib.smb_server_know_ended(self._server, all_of_them)

    def used_bytes(self) -> int:
        """Return how many bytes of capacity the segments take. Fast, however many there are."""
        return int(lib.smb_server_used_bytes(self._server))

    def counters(self) -> Counters:
        raw = ffi.new("struct smb_server_counters *")
        lib.smb_server_counters(self._server, raw)
        cells = [(t, transport, k, kind) for t, transport in TRANSPORTS.items() for k, kind in KINDS.items()]
        errors = {}
        for status in range(1, lib.SMB_STATUS_COUNT):
            name = status_name(status)
            if name:
                errors[name] = int(raw.errors[status])
        return Counters(
            operations={(transport, kind): int(raw.operations[t][k]) for t, transport, k, kind in cells},
            transferred_bytes={(transport, kind): int(raw.bytes[t][k]) for t, transport, k, kind in cells},
            errors=errors,
            connections_opened={name: int(raw.connections_opened[t]) for t, name in TRANSPORTS.items()},
            connections={name: int(raw.connections_now[t]) for t, name in TRANSPORTS.items()},
            turned_away_total=int(raw.turned_away_total),
            strangers=int(raw.strangers_now),
            strangers_evicted_total=int(raw.strangers_evicted_total),
            deferred=int(raw.deferred_now),
            deferred_total=int(raw.deferred_total),
            waits=int(raw.waits_now),
            repeated_total=int(raw.repeated_total),
            replayed_total=int(raw.replayed_total),
            backlog_bytes=int(raw.backlog_bytes),
            backlog_total=int(raw.backlog_total),
            journal_slots=int(raw.journal_slots),
            journal_slots_max=int(raw.journal_slots_most),
            locks_granted=int(raw.locks_granted),
            lock_waits=int(raw.locks_waited),
            lock_timeouts=int(raw.locks_timed_out),
            locks_expired=int(raw.locks_expired),
            locks_revoked=int(raw.locks_revoked),
            barriers_broken=int(raw.barriers_broken),
            recovered_locks=int(raw.recovered_locks),
            segments=int(raw.segments),
            segment_bytes=int(raw.segment_bytes),
        )

    def latencies(self) -> dict[tuple[str, str], Latency]:
        """Return how long requests took, by (transport, kind). Kinds without requests are left out."""
        raw = ffi.new("struct smb_latencies *")
        lib.smb_server_latencies(self._server, raw)
        return latencies_of(raw, TRANSPORTS, KINDS)

    def segment_shares(self) -> dict[int, Share]:
        """Return what was done for each segment, by its id; for at most SHARED_MAX segments."""
        return {number: share for number, share, _ in _shares(lib.smb_server_segment_shares, self._server)}

    def session_shares(self) -> dict[int, Share]:
        """Return what was done for each session that has not ended; for at most SHARED_MAX sessions."""
        return self.sessions()[0]

    def sessions(self) -> tuple[dict[int, Share], dict[int, int]]:
        """Return what session_shares returns, and the number of open connections of each of these sessions."""
        found = list(_shares(lib.smb_server_session_shares, self._server))
        return {number: share for number, share, _ in found}, {number: count for number, _, count in found}

    def take_denials(self) -> tuple[list[Denial], int]:
        """Return the requests refused since the last call, by kind, and the number of those that were not kept."""
        raw, left_out = ffi.new("struct smb_denial[]", DENIALS_MAX), ffi.new("uint64_t *")
        count = int(lib.smb_server_take_denials(self._server, raw, DENIALS_MAX, left_out))
        denials = [
            Denial(
                int(each.session),
                int(each.segment),
                KINDS.get(each.opcode, "request"),
                int(each.count),
                each.proven != 0,
            )
            for each in raw[0:count]
        ]
        return denials, int(left_out[0])

    def waits(self, most: int) -> tuple[list[Wait], int]:
        """Return at most `most` of the held locks and waits, and their total number."""
        raw = ffi.new("struct smb_wait[]", most)
        found = int(lib.smb_server_waits(self._server, raw, most))
        waits = [
            Wait(
                segment_id=int(wait.segment),
                kind=WAITS[wait.kind],
                session=int(wait.session),
                token=int(wait.token),
                left_ms=int(wait.left_ms),
                waiting=int(wait.waiting),
                arrived=int(wait.arrived),
                parties=int(wait.parties),
            )
            for wait in raw[0 : min(found, most)]
        ]
        return waits, found

    def close(self) -> None:
        """Stop the loops, close all connections, unmap. Files stay for the next run. The object is unusable then."""
        lib.smb_server_destroy(self._server)
        self._server = ffi.NULL


def _shares(read: Callable[[Any, Any, int], int], server: Any) -> Iterator[tuple[int, Share, int]]:
    """Yield the id, the share and the connections of each entry."""
    raw = ffi.new("struct smb_share[]", SHARED_MAX)
    found = read(server, raw, SHARED_MAX)
    numbers = memoryview(ffi.buffer(raw, found * _SHARE_BYTES)).cast("B").cast("Q").tolist()
    cells, width = lib.SMB_TRANSPORT_COUNT * lib.SMB_OPCODE_COUNT, _SHARE_BYTES // 8
    for at in range(0, len(numbers), width):
        operations, transferred = numbers[at + 1 : at + 1 + cells], numbers[at + 1 + cells : at + 1 + 2 * cells]
        share = {
            divmod(cell, lib.SMB_OPCODE_COUNT): (count, transferred[cell])
            for cell, count in enumerate(operations)
            if count
        }
        yield numbers[at], share, numbers[at + width - 1]


def _held(raw: Any) -> FoundSegment:
    whole = {lib.SMB_COPY_BEGUN: False, lib.SMB_COPY_WHOLE: True}.get(raw.copy)
    return FoundSegment(int(raw.id), int(raw.file_bytes), int(raw.epoch), whole, int(raw.role), bool(raw.untouched))


def _check(status: int, what: str) -> None:
    if status == lib.SMB_OK:
        return
    if status == lib.SMB_SYSTEM:
        raise UnavailableError(f"cannot {what}: {os.strerror(ffi.errno)}")
    raise _ERRORS.get(status, UnavailableError)(f"cannot {what}: {status_name(status) or status}")
