"""Changes of the coordinator's state (events), and what must be done after them (effects). Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from smb.coordinator.lineage import Stamp
from smb.coordinator.records import (
    NOBODY,
    BufferRecord,
    Held,
    SegmentRecord,
    ServerRecord,
    SessionRecord,
    ShownCertificate,
)
from smb.coordinator.validate import Creation
from smb.drop_reasons import Ground


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on both clocks, in seconds: leases follow the monotonic clock, people read the other one."""

    monotonic: float
    wall: float  # since 1970


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How much of a copy is there, and how fast it grows."""

    segment_id: int
    copied_bytes: int
    total_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Restarted:
    """The records were just loaded: servers and sessions get one lease in which to report, and pending mirrors are
    rolled back. `incarnation` is a random number, not 0, for this run. `changes_max` bounds how many mirrors are rolled
    back, so the event is repeated until none is left.
    """

    incarnation: int
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed, and leases may have run out. At most `ends_max` sessions end, and at most as many servers are
    forgotten. A copy is given up only if the server of the other copy is in `seen`: others may be dead as well.
    """

    ends_max: int | None = None
    seen: frozenset[str] | None = None  # servers that answered just now; None: all did


@dataclass(frozen=True, slots=True)
class HeldUp:
    """For so many seconds this process could not take renewals: it stood still, or waited for its store."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseShortened:
    """No lease of a server that a former leader granted, and that was longer than this leader's, runs any more."""


@dataclass(frozen=True, slots=True)
class ServerRegistered:
    """A memory server reports its identity (last_seen_at is ignored), the segments that it holds, and how new the
    records were when it was last told of them (`stamps`; empty: unknown). `missing`: segments that the records place
    there and that the server, asked for them by name, said it does not hold.
    """

    server: ServerRecord
    held: Mapping[int, Held]
    missing: frozenset[int] = frozenset()
    stamps: tuple[Stamp, ...] = ()
    making: frozenset[int] = frozenset()  # segments that it is being asked to make, for copies that have not begun
    drops: int = 0  # how many drops the server had answered before it was asked what it holds
    unproven: frozenset[tuple[str, int]] = (
        frozenset()
    )  # (server, segment): its server does not confirm now that it is whole


@dataclass(frozen=True, slots=True)
class ServerRenewed:
    """A memory server renews its lease and reports the progress of the copies that it makes. `making`: it is being
    asked to make room for copies that have not begun, which no record has yet.
    """

    name: str
    instance_id: int
    used_bytes: int
    copies: tuple[CopyProgress, ...] = ()
    making: bool = False


@dataclass(frozen=True, slots=True)
class ServerLeft:
    """A memory server stops cleanly."""

    name: str
    instance_id: int


@dataclass(frozen=True, slots=True)
class ServerDied:
    """A memory server's process is known to have ended."""

    name: str
    instance_id: int


@dataclass(frozen=True, slots=True)
class ServerReturned:
    """A memory server is about to register. It reports the segments that it holds, and of those that are `missing` it
    confirmed that it does not hold them. The event decides about its copies. It is repeated until it changes nothing,
    because one event changes a bounded number of records.
    """

    name: str
    instance_id: int
    missing: frozenset[int]
    changes_max: int | None = None
    held: Mapping[int, Held] = field(default_factory=dict)
    seen: frozenset[str] | None = None  # servers of other copies that answered just now; None: all did


@dataclass(frozen=True, slots=True)
class UnexplainedJudged:
    """Other servers may have been heard of: segments that servers hold beside the records are taken up, dropped, or
    kept, and interrupted creations end. `making`: (server, segment) being made now, for copies that have not begun.
    Repeated like ServerReturned.
    """

    making: frozenset[tuple[str, int]] = frozenset()
    changes_max: int | None = None
    unproven: frozenset[tuple[str, int]] = frozenset()  # as in ServerRegistered


@dataclass(frozen=True, slots=True)
class SegmentsForgotten:
    """An operator gives up segments that a server holds beside the records: those named, or all if none is named."""

    name: str
    segment_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class BackupsLost:
    """A primary has not reached these segments' backups for long, though both live. Repeated like ServerReturned."""

    name: str
    segment_ids: frozenset[int]
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class LeadsLater:
    """A server could not become the primary of these segments in the epochs of `refused`. It can only after those of
    `epochs`. Repeated like ServerReturned.
    """

    name: str
    refused: Mapping[int, int]
    epochs: Mapping[int, int]
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class ServerDrained:
    """A memory server is to be drained, or (`undo`) is to get segments again."""

    name: str
    undo: bool = False


@dataclass(frozen=True, slots=True)
class MaintenancePlanned:
    """For so many seconds lost copies are not made anew while this server is away, or at all if `name` is empty."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MaintenanceEnded:
    name: str


@dataclass(frozen=True, slots=True)
class CopyBegun:
    """The run `instance_id` of `target` has made room for a copy of a segment, to be made in that epoch. `leaving`: the
    server whose copy it replaces; empty: it replaces a lost copy. If `leaving` has the primary, that has yielded.
    `members`: the other segments of the bundle for which room was made, too.
    """

    key: str
    segment_id: int
    target: str
    instance_id: int
    epoch: int
    leaving: str = ""
    members: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RolesSwitched:
    """The primary of a segment hands over: its backup, with everything that it has, becomes the primary, and it becomes
    the backup, from that epoch on.
    """

    key: str
    segment_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class MoveAllowed:
    """The server of a segment with one copy has confirmed that all local users can follow the segment elsewhere."""

    key: str
    segment_id: int


@dataclass(frozen=True, slots=True)
class CopyDropped:
    """A segment of a buffer with one copy has moved: its copy on `leaving` goes, in that epoch. If `leaving` has the
    primary, that has yielded.
    """

    key: str
    segment_id: int
    leaving: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CopiesEnded:
    """A primary reports that these copies, by segment and epoch, are whole, or (`whole` False) that it gave them up.
    Repeated like ServerReturned.
    """

    name: str
    epochs: Mapping[int, int]
    whole: bool
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class ServerCounted:
    """A memory server reported, in its answer to a create or drop, how much it holds. `dropped`: the segment that it
    was told to drop; 0: none. If it kept that segment, it holds more than the records say, and must register again.
    """

    name: str
    instance_id: int
    used_bytes: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ServerSuspected:
    """A call to drop segments did not reach a memory server: it must register again, and is then told what to drop."""

    name: str


@dataclass(frozen=True, slots=True)
class BufferWanted:
    """A checked creation. `new_id` returns random non-zero 64-bit ids. `avoid`: servers that did not answer just now;
    a buffer whose creation names no servers goes to others. `waits`: the creation is put off while a lost copy in the
    bundle that it joins can be made anew.
    """

    creation: Creation
    new_id: Callable[[], int]
    avoid: frozenset[str] = frozenset()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class BufferMade:
    """All segments of a pending buffer were made. `segments`: as they were made; empty: as in the record. `instances`:
    the runs of the servers that made them.
    """

    key: str
    segments: tuple[SegmentRecord, ...] = ()
    instances: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BufferFailed:
    """A segment of a pending buffer could not be made. `copies`: those that may have been made."""

    key: str
    copies: tuple[SegmentRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferDeleted:
    name: str
    missing_ok: bool
    id: int = 0  # not 0: only the buffer with this id


@dataclass(frozen=True, slots=True)
class BufferRenamed:
    """A rename of one buffer, or of all buffers in a folder. With `replace`, an existing buffer of the new name is
    deleted, or gets the name `displaced_name` if that is not empty. With an `id` other than 0, only the buffer with
    that id is renamed. `file_attributes` replaces those of the buffer, unless it is None; not if `attributes_before` is
    given and other ones are stored by now.
    """

    name: str
    new_name: str
    replace: bool = False
    displaced_name: str = ""
    folder: bool = False
    id: int = 0
    file_attributes: bytes | None = None
    attributes_before: bytes | None = None


@dataclass(frozen=True, slots=True)
class NamesFreed:
    """Segments of idle locks and barriers that were retired: the locks' last tokens, by segment id. Segments whose
    primary has left `server` since are not freed, because a client may have used them at the new primary.
    """

    server: str
    tokens: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SessionRenewed:
    """A client opens a session or renews it. `holder`: of its certificate."""

    session_id: int
    client_name: str
    holder: ShownCertificate = NOBODY


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A client closed its session."""

    session_id: int


@dataclass(frozen=True, slots=True)
class ClientsKicked:
    """An operator ends sessions of a client, at most `ends_max` of them: the caller goes on until there are none.
    `name`: see SessionRecord.is_called. `by`: the operator's name.
    """

    name: str
    by: str
    ends_max: int | None = None


Event = (
    Restarted
    | Ticked
    | HeldUp
    | LeaseShortened
    | ServerRegistered
    | ServerRenewed
    | ServerLeft
    | ServerDied
    | ServerReturned
    | UnexplainedJudged
    | SegmentsForgotten
    | BackupsLost
    | LeadsLater
    | ServerDrained
    | MaintenancePlanned
    | MaintenanceEnded
    | CopyBegun
    | CopyDropped
    | MoveAllowed
    | RolesSwitched
    | CopiesEnded
    | ServerCounted
    | ServerSuspected
    | BufferWanted
    | BufferMade
    | BufferFailed
    | BufferDeleted
    | BufferRenamed
    | NamesFreed
    | SessionRenewed
    | SessionClosed
    | ClientsKicked
)


@dataclass(frozen=True, slots=True)
class SaveBuffer:
    record: BufferRecord


@dataclass(frozen=True, slots=True)
class EraseBuffer:
    key: str


@dataclass(frozen=True, slots=True)
class SaveServer:
    record: ServerRecord


@dataclass(frozen=True, slots=True)
class EraseServer:
    name: str


@dataclass(frozen=True, slots=True)
class SaveSession:
    record: SessionRecord


@dataclass(frozen=True, slots=True)
class EraseSession:
    session_id: int


@dataclass(frozen=True, slots=True)
class SaveTokenFloor:
    token: int


@dataclass(frozen=True, slots=True)
class SaveLineage:
    terms: str


@dataclass(frozen=True, slots=True)
class SaveServerLease:
    """Store how long the leases of servers run, in seconds, for the next leader."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SaveMaintenance:
    """`until`: by server, "" for all, in seconds since 1970; without any, the record is erased."""

    until: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SaveSequence:
    sequence: int


@dataclass(frozen=True, slots=True)
class MakeSegments:
    """Have this pending buffer's segments made, then report BufferMade or BufferFailed."""

    record: BufferRecord


@dataclass(frozen=True, slots=True)
class DropSegments:
    """Have the servers drop these segments; report ServerSuspected for a server that cannot be reached. `epoch`: keep a
    segment that was made anew in a later epoch; 0: drop it in any epoch. `room`: they are of copies that never began,
    and may be made again in the same epoch.
    """

    segments: tuple[SegmentRecord, ...]
    epoch: int
    ground: Ground
    room: bool = False


@dataclass(frozen=True, slots=True)
class AnswerDrops:
    """Tell the registering server to drop these segments, unless they were made in a later epoch than the number in
    `epochs`; 0: in any epoch. `rooms`: of these, also a copy of a later epoch that was begun at most.
    """

    segment_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    rooms: tuple[int, ...] = ()
    grounds: tuple[Ground, ...] = ()
    quarantined: tuple[int, ...] = ()  # kept segments that the server must mark as quarantined
    taken_up: tuple[int, ...] = ()  # quarantined segments that a record knows now
    # (segment, epoch) that the server holds as primary while the records have another one. It stops serving them.
    superseded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    """Tell a server to remove the marks of these segments: they can be compared with the copy that was taken up."""

    server: str
    segment_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WakeOpeners:
    """Wake the calls that wait for this name."""

    key: str


@dataclass(frozen=True, slots=True)
class TellEnded:
    """Tell the memory servers that these sessions have ended. A server that misses it hears it at its next renewal."""

    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Write a log line at this level of the logging module."""

    level: int
    text: str


StoreChange = (
    SaveBuffer
    | EraseBuffer
    | SaveServer
    | EraseServer
    | SaveSession
    | EraseSession
    | SaveTokenFloor
    | SaveLineage
    | SaveServerLease
    | SaveMaintenance
    | SaveSequence
)
Effect = StoreChange | MakeSegments | DropSegments | AnswerDrops | EndQuarantine | WakeOpeners | TellEnded | Report
