"""The server part of the C engine (csrc/smb/server.h), typed: listeners, tokens, segments, sessions.

engine_copies.py has what is about roles and copies, engine_figures.py what was counted. In a daemon no other file
touches the library. Each call releases Python's lock, and may be made from any thread until `close`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memserver.engine_copies import EngineCopies
from memserver.engine_figures import EngineFigures
from memserver.engine_handle import ServerHandle, check
from smb._engine import ffi, lib
from smb.engine import Tls, Token, check_isa
from smb.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
)

CHUNK_BYTES_MAX: int = lib.SMB_CHUNK_BYTES_MAX
LOOPS_MAX = 64  # each loop is a thread, and more threads than cores do not help


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
class Recovery:
    """What was found in the journal of an earlier run: changes that are finished now, chunks whose journal is gone
    (each element has its old or new value), and whether the file was not a journal."""

    finished: int
    torn_chunks: int
    journal_lost: bool


class NotReadyError(UnavailableError):
    """Not ready yet: the server has no keys for tokens."""


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
        check(lib.smb_server_create(instance_id, loops, capacity_bytes, made), "start the engine")
        self._handle = ServerHandle(made[0])
        self.copies = EngineCopies(self._handle)
        self.figures = EngineFigures(self._handle)

    @property
    def _server(self) -> Any:
        return self._handle.pointer

    def listen_tcp(self, address: str, port: int) -> int:
        """Listen on a numeric address; port 0 picks a free one. Returns the port. Raises UnavailableError."""
        bound = ffi.new("uint16_t *")
        what = f"listen on {address} port {port}"
        check(lib.smb_server_listen_tcp(self._server, address.encode(), port, bound), what)
        return int(bound[0])

    def listen_unix(self, path: Path) -> None:
        """Listen on a Unix socket, for processes of this user. Raises UnavailableError."""
        check(lib.smb_server_listen_unix(self._server, os.fsencode(path)), f"listen on {path}")

    def use_tls(self, tls: Tls) -> None:
        """Use TLS on all new TCP connections, and close those whose peer these credentials do not accept (any more)."""
        lib.smb_server_use_tls(self._server, tls.pointer)

    def take_slots(self, count: int) -> Slots:
        """Return `count` slots. Raises OutOfMemoryError, UnavailableError."""
        made = ffi.new("struct smb_slots **")
        check(lib.smb_server_take_slots(self._server, count, made), f"take {count} slots")
        return Slots(made[0], count)

    def adopt_reference(self, fd: int, slots: Slots) -> None:
        """Serve one more peer over a connected stream socket, which the engine owns from here on, even if this fails.
        Its requests refer to payloads in these slots. Raises OutOfMemoryError, UnavailableError.
        """
        check(lib.smb_server_adopt_reference(self._server, fd, slots.pointer), "serve one more connection")

    def hold_segment(self, segment_id: int) -> HeldSegment:
        """Return a served segment. Raises NotFoundError."""
        found = ffi.new("struct smb_segment **")
        check(lib.smb_server_hold_segment(self._server, segment_id, found), f"find segment {segment_id:016x}")
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
        check(lib.smb_server_set_keys(self._server, len(keys), taken, now_ms), "take keys")

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
        check(status, f"make a segment of {form.nbytes} bytes at {path}")

    def adopt_segment(self, path: Path) -> SegmentForm:
        """Serve a file of an earlier run. Raises NotFoundError if its segment was deleted, PermissionDeniedError if
        another user made the file or may change it, and otherwise as `create_segment` does.
        """
        info = ffi.new("struct smb_segment_info *")
        check(lib.smb_server_adopt_segment(self._server, os.fsencode(path), info), f"take over {path}")
        return SegmentForm(info.id, info.epoch, info.dtype, info.data_bytes, info.chunk_bytes)

    def open_journal(self, path: Path) -> Recovery:
        """Finish changes that an earlier run left half done, and journal all changes from here on. Must be called after
        all segments are adopted and before anything listens. Raises OutOfMemoryError, UnavailableError.
        """
        found = ffi.new("struct smb_recovery *")
        check(lib.smb_server_open_journal(self._server, os.fsencode(path), found), f"open the journal {path}")
        return Recovery(int(found.finished), int(found.torn_chunks), bool(found.journal_lost))

    def delete_segment(self, segment_id: int) -> None:
        """Stop serving the segment and unlink its file; users of its mapping get errors. Raises NotFoundError."""
        check(lib.smb_server_delete_segment(self._server, segment_id), f"delete segment {segment_id:016x}")

    def retire_segment(self, segment_id: int, idle_ms: int) -> int | None:
        """Have the segment's lock and barrier refuse all requests from now on, if they were idle for that long.

        Returns the lock's last token, or None if they were not idle. Raises NotFoundError.
        """
        token = ffi.new("uint64_t *")
        status = lib.smb_server_retire_segment(self._server, segment_id, idle_ms, token)
        if status == lib.SMB_BUSY:
            return None
        check(status, f"retire segment {segment_id:016x}")
        return int(token[0])

    def raise_token(self, segment_id: int, token: int) -> None:
        """Have the next token of the segment's lock be above this one. Raises NotFoundError, InvalidArgumentError."""
        check(lib.smb_server_raise_token(self._server, segment_id, token), f"raise tokens of {segment_id:016x}")

    def bind(self, segment_id: int) -> bool:
        """Bind a segment to this server. Returns False if it may move already. Raises NotFoundError."""
        status = lib.smb_server_bind(self._server, segment_id)
        if status == lib.SMB_BUSY:
            return False
        check(status, f"bind {segment_id:016x}")
        return True

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

    def close(self) -> None:
        """Stop the loops, close all connections, unmap. Files stay for the next run. The object is unusable then."""
        lib.smb_server_destroy(self._server)
        self._handle.pointer = ffi.NULL


def _held(raw: Any) -> FoundSegment:
    whole = {lib.SMB_COPY_BEGUN: False, lib.SMB_COPY_WHOLE: True}.get(raw.copy)
    return FoundSegment(int(raw.id), int(raw.file_bytes), int(raw.epoch), whole, int(raw.role), bool(raw.untouched))
