"""The engine's segments with two copies: this server's roles, the copies that it makes, its connections to backups.

An Engine has an EngineCopies, `copies`. Its methods may be called as the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memserver.engine_handle import ServerHandle, check
from smb._engine import ffi, lib
from smb.engine import Tls, status_name


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


class EngineCopies:
    """An engine's segments with two copies."""

    def __init__(self, handle: ServerHandle) -> None:
        self._handle = handle

    def set_replica(self, segment_id: int, epoch: int, role: int, peer: str, *, copying: bool = False) -> None:
        """Give this server its role for a segment and its bundle, from that epoch on. `peer`: the server of the other
        copy; empty: none. `copying`: the backup is still to be copied to. The role NONE ends a primary's role in its
        epoch, because another server may be the primary. Raises NotFoundError, InvalidArgumentError.
        """
        name = peer.encode()
        status = lib.smb_server_set_replica(self._handle.pointer, segment_id, epoch, role, bool(peer), copying, name)
        check(status, f"take a role in {segment_id:016x}")

    def copy(self, segment_id: int, epoch: int, nbytes: int) -> tuple[CopyStep, int, int]:
        """Send about `nbytes` more to the new backup. Returns the state, the bytes copied and the bytes in all. Waits a
        little if nothing can be sent. Raises UnavailableError if memory is out.
        """
        copied, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        status = lib.smb_server_copy(self._handle.pointer, segment_id, epoch, nbytes, copied, total)
        if status in (lib.SMB_STALE_EPOCH, lib.SMB_NOT_FOUND):
            return CopyStep.GONE, 0, 0
        states = {lib.SMB_OK: CopyStep.MORE, lib.SMB_BUSY: CopyStep.BUSY, lib.SMB_EXISTS: CopyStep.WHOLE}
        if status not in states:
            check(status, f"copy {segment_id:016x}")
        return states[status], copied[0], total[0]

    def abandon_copy(self, segment_id: int, epoch: int) -> bool:
        """Give up that copy, and return whether it was in progress."""
        return bool(lib.smb_server_abandon_copy(self._handle.pointer, segment_id, epoch) == lib.SMB_OK)

    def let_move(self, segment_id: int) -> bool:
        """Let a segment with one copy get a role and move. Returns whether it can. Raises NotFoundError."""
        status = lib.smb_server_let_move(self._handle.pointer, segment_id)
        if status == lib.SMB_BUSY:
            return False
        check(status, f"let {segment_id:016x} move")
        return True

    def yield_role(self, segment_id: int, epoch: int) -> None:
        """Have the primary ask its backup at each read, because the backup is about to be promoted. Raises
        NotFoundError, and UnavailableError if this server is not the primary in that epoch.
        """
        check(lib.smb_server_yield(self._handle.pointer, segment_id, epoch), f"yield {segment_id:016x}")

    def note_unrecorded(self, segment_id: int, unrecorded: bool) -> None:
        """While the records do not have this role of its bundle, have a primary ask its backup at each read: its lease
        was given without the role. The next role ends that. A segment that is gone is not an error.
        """
        lib.smb_server_note_unrecorded(self._handle.pointer, segment_id, unrecorded)

    def hand_over(self, segment_id: int, epoch: int) -> bool:
        """As yield_role, for two copies that are about to switch their roles: for a second, or until it gets another
        role, the primary also begins no change. Returns whether the backup has everything; if not, call again.
        """
        status = lib.smb_server_hand_over(self._handle.pointer, segment_id, epoch)
        if status == lib.SMB_BUSY:
            return False
        check(status, f"hand over {segment_id:016x}")
        return True

    def serve_until(self, boot_s: float) -> None:
        """Set until when no other server is made the primary of this server's segments, on the boot-time clock."""
        lib.smb_server_serve_until(self._handle.pointer, int(boot_s * 1e9))

    def feed(
        self, segment_id: int, epoch: int, fd: int, instance_id: int, tls: Tls | None = None, expected: str = ""
    ) -> None:
        """Forward changes over a socket that is connected to the backup. The engine owns the socket from here on, even
        if this fails. `tls`: forward inside TLS, to the server whose certificate has the name `expected`. Raises
        NotFoundError, UnavailableError.
        """
        inside, name = (tls.pointer, expected.encode()) if tls is not None else (ffi.NULL, ffi.NULL)
        handle = self._handle.pointer
        status = lib.smb_server_feed(handle, segment_id, epoch, fd, instance_id, inside, name)
        check(status, f"forward changes of {segment_id:016x}")

    def suspend(self, segment_id: int) -> None:
        """Send requests that wait for the backup to another server."""
        lib.smb_server_suspend(self._handle.pointer, segment_id)

    def await_replicas(self, seen: int, timeout_s: float | None) -> int:
        """Block until roles or connections have changed since `seen` (0 at first). Returns the next value of `seen`."""
        timeout_ms = 0 if timeout_s is None else max(1, round(timeout_s * 1000))
        return int(lib.smb_server_await_replicas(self._handle.pointer, seen, timeout_ms))

    def wake_replicas(self) -> None:
        """End await_replicas."""
        lib.smb_server_wake_replicas(self._handle.pointer)

    def replicas(self) -> list[ReplicaStatus]:
        """Return the status of each segment with two copies."""
        most, found = 0, 64
        while found > most:
            most = 2 * found
            raw = ffi.new("struct smb_replica_status[]", most)
            found = lib.smb_server_replicas(self._handle.pointer, raw, most)
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
        lib.smb_server_feed_why(self._handle.pointer, segment_id, why)
        return str(ffi.string(why).decode())

    def forget_ends(self) -> None:
        """Let segments without a role take roles of earlier epochs than the one in which theirs was ended, but later
        ones than they had.
        """
        check(lib.smb_server_forget_ends(self._handle.pointer), "forget when roles were ended")
