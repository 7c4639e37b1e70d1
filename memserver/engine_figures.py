"""What the engine has counted and sees: for metrics, reports to the coordinator, and the log of refused requests.

An Engine has an EngineFigures, `figures`. Its methods may be called as the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memserver.engine_handle import ServerHandle
from smb._engine import ffi, lib
from smb.engine import KINDS, TRANSPORTS, Latency, latencies_of, status_name

SHARED_MAX = 1024  # segments, and sessions, whose shares one scrape reads: 1 KiB each
DENIALS_MAX = 64  # kinds of refused requests that are kept between two looks
_SHARE_BYTES = ffi.sizeof("struct smb_share")
WAITS: dict[int, str] = {
    lib.SMB_WAIT_LOCK: "lock",
    lib.SMB_WAIT_PUBLISHER: "publication",
    lib.SMB_WAIT_BARRIER: "barrier",
    lib.SMB_WAIT_VERSION: "version",
    lib.SMB_WAIT_SHARED: "shared",
}


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


class EngineFigures:
    """What an engine has counted and sees."""

    def __init__(self, handle: ServerHandle) -> None:
        self._handle = handle

    def counters(self) -> Counters:
        raw = ffi.new("struct smb_server_counters *")
        lib.smb_server_counters(self._handle.pointer, raw)
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
        lib.smb_server_latencies(self._handle.pointer, raw)
        return latencies_of(raw, TRANSPORTS, KINDS)

    def segment_shares(self) -> dict[int, Share]:
        """Return what was done for each segment, by its id; for at most SHARED_MAX segments."""
        return {number: share for number, share, _ in _shares(lib.smb_server_segment_shares, self._handle.pointer)}

    def session_shares(self) -> dict[int, Share]:
        """Return what was done for each session that has not ended; for at most SHARED_MAX sessions."""
        return self.sessions()[0]

    def sessions(self) -> tuple[dict[int, Share], dict[int, int]]:
        """Return what session_shares returns, and the number of open connections of each of these sessions."""
        found = list(_shares(lib.smb_server_session_shares, self._handle.pointer))
        return {number: share for number, share, _ in found}, {number: count for number, _, count in found}

    def take_denials(self) -> tuple[list[Denial], int]:
        """Return the requests refused since the last call, by kind, and the number of those that were not kept."""
        raw, left_out = ffi.new("struct smb_denial[]", DENIALS_MAX), ffi.new("uint64_t *")
        count = int(lib.smb_server_take_denials(self._handle.pointer, raw, DENIALS_MAX, left_out))
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
        found = int(lib.smb_server_waits(self._handle.pointer, raw, most))
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
