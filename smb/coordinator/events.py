"""Changes of the coordinator's state (events), and what they require (effects). Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from smb.coordinator.lineage import Stamp
from smb.coordinator.records import BufferRecord, Held, SegmentRecord, ServerRecord, SessionRecord
from smb.coordinator.validate import Creation
from smb.drop_reasons import Ground


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on both clocks: leases follow the monotonic one, people read the other. Seconds."""

    monotonic: float
    wall: float  # since 1970


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How much of a copy there is, and how fast it grows."""

    segment_id: int
    copied_bytes: int
    total_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Restarted:
    """The records were just loaded: creations that were under way are taken back, servers and sessions are given one
    lease to report. `incarnation` is a random number, not 0, for this run. Again until none is under way: at most so
    many are taken back at a time. `lacks_end`: the last changes before may be missing.
    """

    incarnation: int
    changes_max: int | None = None
    lacks_end: bool = False


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: leases may have run out. At most so many sessions end, and so many servers are forgotten. No copy is
    given up for those of servers that are `silent`: they may be dead as well.
    """

    ends_max: int | None = None
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ServerRegistered:
    """A memory server says who it is (last_seen_at is ignored), what it holds, and how new the records were when it was
    told of them last (`stamps`; none: it does not tell). `missing`: segments that the records have there, and of which
    it said that it does not hold them when it was asked for them by name.
    """

    server: ServerRecord
    held: Mapping[int, Held]
    missing: frozenset[int] = frozenset()
    stamps: tuple[Stamp, ...] = ()
    making: frozenset[int] = frozenset()  # that the coordinator has it make now, for copies that have not begun
    silent: frozenset[str] = frozenset()  # servers that did not answer just now: what they have confirms nothing


@dataclass(frozen=True, slots=True)
class ServerRenewed:
    """A memory server says that it lives, and how far it is with copies of segments that it makes."""

    name: str
    instance_id: int
    used_bytes: int
    copies: tuple[CopyProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerLeft:
    """A memory server stops cleanly."""

    name: str
    instance_id: int


@dataclass(frozen=True, slots=True)
class ServerDied:
    """A memory server's process is known to be dead."""

    name: str
    instance_id: int


@dataclass(frozen=True, slots=True)
class ServerReturned:
    """A memory server is about to register, with what it holds, and has said of what is `missing` that it does not hold
    it: what is to become of its copies. Again until it changes nothing: at most so many records change at a time.
    """

    name: str
    instance_id: int
    missing: frozenset[int]
    changes_max: int | None = None
    held: Mapping[int, Held] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnexplainedJudged:
    """Other servers may have been heard of: what servers hold beside the records is taken up, dropped, or kept on.
    `making`: servers and segments that they make now, for copies that have not begun. Again as ServerReturned.
    """

    making: frozenset[tuple[str, int]] = frozenset()
    changes_max: int | None = None
    silent: frozenset[str] = frozenset()  # as of ServerRegistered


@dataclass(frozen=True, slots=True)
class SegmentsForgotten:
    """An operator gives up memory that a server holds beside the records: these segments, or (none named) all of it."""

    name: str
    segment_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class BackupsLost:
    """A primary has not reached the backups of these segments for long, though both live. Again as ServerReturned."""

    name: str
    segment_ids: frozenset[int]
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class ServerDrained:
    """A memory server is to be emptied, or (`undo`) is to get segments again."""

    name: str
    undo: bool = False


@dataclass(frozen=True, slots=True)
class CopyBegun:
    """`target`, in that run, has made room for a copy of a segment, to be made in that epoch. `leaving`: the server
    whose copy it takes the place of; empty: that is lost. If it has the primary, that has yielded. `members`: of the
    segments that move together with it, those for which there is room, too.
    """

    key: str
    segment_id: int
    target: str
    instance_id: int
    epoch: int
    leaving: str = ""
    members: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MoveAllowed:
    """The server of a segment with one copy has said that nobody uses it there who could not follow it elsewhere."""

    key: str
    segment_id: int


@dataclass(frozen=True, slots=True)
class CopyDropped:
    """A segment of a buffer with one copy has moved: its copy on `leaving` goes, in that epoch. If that is the primary,
    it has yielded.
    """

    key: str
    segment_id: int
    leaving: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CopiesEnded:
    """A primary says that these copies, by segment and epoch, are whole, or (`whole` False) that it gave them up. Again
    as ServerReturned.
    """

    name: str
    epochs: Mapping[int, int]
    whole: bool
    changes_max: int | None = None


@dataclass(frozen=True, slots=True)
class ServerCounted:
    """A memory server said, in answer to a create or drop, how much it holds. `dropped`: a segment that it was told to
    drop; 0: none. If it keeps that all the same it holds more than it should, and has to tell of all that it has.
    """

    name: str
    instance_id: int
    used_bytes: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ServerSuspected:
    """A call to drop segments did not reach a memory server: it must register again, and learns of them then."""

    name: str


@dataclass(frozen=True, slots=True)
class BufferWanted:
    """A create, checked. `new_id` gives random non-zero 64-bit ids. `avoid`: servers that did not answer just now; what
    names no servers goes to others. `waits`: it is put off where a lost copy of what it is to move together with can
    be made anew.
    """

    creation: Creation
    new_id: Callable[[], int]
    avoid: frozenset[str] = frozenset()
    waits: bool = False


@dataclass(frozen=True, slots=True)
class BufferMade:
    """All segments of a pending buffer are there. `segments`: as they were made; empty: as they are in the record.
    `instances`: by which runs of the servers.
    """

    key: str
    segments: tuple[SegmentRecord, ...] = ()
    instances: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BufferFailed:
    """A segment of a pending buffer could not be made. `copies`: those that perhaps were."""

    key: str
    copies: tuple[SegmentRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferDeleted:
    name: str
    missing_ok: bool
    id: int = 0  # not 0: of that buffer alone


@dataclass(frozen=True, slots=True)
class BufferRenamed:
    """A rename of one buffer, or of all in a folder. With `replace` a buffer of the new name is deleted, or gets the
    name `displaced_name` where that is not empty. With an `id` that is not 0 of that one buffer alone.
    """

    name: str
    new_name: str
    replace: bool = False
    displaced_name: str = ""
    folder: bool = False
    id: int = 0


@dataclass(frozen=True, slots=True)
class NamesFreed:
    """Segments of locks and barriers that were idle, and answer no request now: by id, their locks' last tokens. If
    `server` has another's primary no more, somebody may have used the name there.
    """

    server: str
    tokens: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SessionRenewed:
    """A client opens a session, or says that it lives. `owner`: its certificate's key, empty if there is none."""

    session_id: int
    client_name: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A client went away cleanly."""

    session_id: int


Event = (
    Restarted
    | Ticked
    | ServerRegistered
    | ServerRenewed
    | ServerLeft
    | ServerDied
    | ServerReturned
    | UnexplainedJudged
    | SegmentsForgotten
    | BackupsLost
    | ServerDrained
    | CopyBegun
    | CopyDropped
    | MoveAllowed
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
)


@dataclass(frozen=True, slots=True)
class SaveBuffer:
    """Put the record into the store."""

    record: BufferRecord


@dataclass(frozen=True, slots=True)
class EraseBuffer:
    """Take the record out of the store."""

    key: str


@dataclass(frozen=True, slots=True)
class SaveServer:
    """Put the record into the store."""

    record: ServerRecord


@dataclass(frozen=True, slots=True)
class EraseServer:
    """Take the record out of the store."""

    name: str


@dataclass(frozen=True, slots=True)
class SaveSession:
    """Put the record into the store."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class EraseSession:
    """Take the record out of the store."""

    session_id: int


@dataclass(frozen=True, slots=True)
class SaveTokenFloor:
    """Put the number into the store."""

    token: int


@dataclass(frozen=True, slots=True)
class SaveLineage:
    """Put the history of terms into the store."""

    terms: str


@dataclass(frozen=True, slots=True)
class SaveSequence:
    """Put the number of the last change of a buffer's record into the store."""

    sequence: int


@dataclass(frozen=True, slots=True)
class MakeSegments:
    """Have the segments of this pending buffer made, then report BufferMade or BufferFailed."""

    record: BufferRecord


@dataclass(frozen=True, slots=True)
class DropSegments:
    """Have the servers drop these; report ServerSuspected for one that cannot be reached. `epoch`: not one that is made
    anew in a later one; 0: they are gone for good. `room`: of copies that never began, which may be made in it again.
    """

    segments: tuple[SegmentRecord, ...]
    epoch: int
    ground: Ground
    room: bool = False


@dataclass(frozen=True, slots=True)
class AnswerDrops:
    """Tell the server that registers to drop these of its segments, unless they were made in a later epoch than its
    number in `epochs`; 0: in any. `rooms`: of these also what was made for the next epoch, for a copy that never began.
    """

    segment_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    rooms: tuple[int, ...] = ()
    grounds: tuple[Ground, ...] = ()
    quarantined: tuple[int, ...] = ()  # of the others, those that no record knows
    taken_up: tuple[int, ...] = ()  # quarantined, and known to a record now
    # Segment and epoch: the server keeps it as its primary, but the records have another primary. It stops serving it.
    superseded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EndQuarantine:
    """Tell a server that these segments need no mark any more: they can be compared with the copy that was taken up."""

    server: str
    segment_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WakeOpeners:
    """Those who wait for this name may look again."""

    key: str


@dataclass(frozen=True, slots=True)
class TellEnded:
    """Tell the memory servers at once that these sessions are over; what one misses it hears at its next renewal."""

    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Put a line into the log, at this level of the logging module."""

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
    | SaveSequence
)
Effect = StoreChange | MakeSegments | DropSegments | AnswerDrops | EndQuarantine | WakeOpeners | TellEnded | Report
