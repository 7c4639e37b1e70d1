"""The servers of a segment's copies and their roles: docs/decisions/0025. Pure.

Invariant: a segment's server and its backup, if it has one, both have each acknowledged change. So either may go on
alone, and while one goes on alone the record has no backup. A server to which a segment is being copied never goes on
alone. It becomes the backup once the primary has reported that it has everything. From then on no answer is sent before
the backup has the change too. Roles change only in this file, and each change increments the segment's epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from smb.coordinator.records import BufferRecord, SegmentRecord

Alive = Callable[[str], bool]


class CopyRole(IntEnum):
    """A server's role for a segment; the numbers are those in csrc/smb/server.h."""

    PRIMARY = 1
    BACKUP = 2


@dataclass(frozen=True, slots=True)
class Copy:
    """A server's part in one segment. `peer` is the server of the other copy; empty: there is no other copy."""

    segment_id: int
    epoch: int
    role: CopyRole
    peer: str
    copying: bool = False  # the backup's copy is being made


def copies_on(record: BufferRecord, server: str) -> list[Copy]:
    """Return the parts that a server has in a buffer whose segments have roles."""
    found = []
    for segment in record.segments if record.movable else ():
        if not segment.epoch:
            continue
        if segment.server == server:
            peer = segment.backup or segment.copying_to
            found.append(Copy(segment.id, segment.epoch, CopyRole.PRIMARY, peer, bool(segment.copying_to)))
        elif server in (segment.backup, segment.copying_to):
            copying = segment.copying_to == server
            found.append(Copy(segment.id, segment.epoch, CopyRole.BACKUP, segment.server, copying))
    return found


def fail_over(record: BufferRecord, alive: Alive, heard: Alive) -> BufferRecord:
    """Return the record without the copies on dead servers. If both copies' servers are dead, nothing changes. Nothing
    changes either while the survivor has not been `heard` of, since its memory may be gone as well.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if segment.copying_to and not alive(segment.copying_to):
            return _without_backup(segment)
        if not segment.backup or alive(segment.server) == alive(segment.backup):
            return segment
        if alive(segment.server):
            return _without_backup(segment) if heard(segment.server) else segment
        return _promoted(segment) if heard(segment.backup) else segment

    return _each(record, judge)


def come_back(
    record: BufferRecord,
    server: str,
    missing: Collection[int],
    heard: Alive,
    *,
    restarted: bool,
    behind: Collection[int] = (),
    only_here: Collection[int] = (),
) -> BufferRecord:
    """Return the record after a server came back without the segments that are `missing`. A primary that was restarted
    has forgotten changes that it had not forwarded. So has a backup that is `behind`: it was the primary until the
    roles were switched, and has not heard of that. `only_here`: the server has the backups of these, and is the only
    one that holds all segments of their bundles.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if segment.copying_to and server in (segment.server, segment.copying_to):
            return _without_backup(segment) if restarted or segment.id in missing else segment
        if not segment.backup:
            return segment
        if segment.server == server and segment.id in missing:
            return _promoted(segment)
        if segment.server == server and restarted:
            # A segment that keeps one copy is moving, and the new copy's server may have a lease though it lost its
            # memory.
            keeps = record.replicas == 1 or not heard(segment.backup)
            return _without_backup(segment) if keeps else _promoted(segment)
        if segment.backup == server and segment.id in missing:
            return _without_backup(segment)
        if segment.backup == server and segment.id in only_here:
            return _promoted(segment)
        if segment.backup == server and segment.id in behind and restarted:
            # The present primary could acknowledge nothing without this server.
            return _without_backup(segment) if heard(segment.server) else _promoted(segment)
        return segment

    return _each(record, judge) if record.ready else record


def lose_backups(record: BufferRecord, segment_ids: Collection[int]) -> BufferRecord:
    """Return the record with these segments' primaries alone, without backups."""

    def judge(segment: SegmentRecord) -> SegmentRecord:
        lost = segment.id in segment_ids and (segment.backup or segment.copying_to)
        return _without_backup(segment) if lost else segment

    return _each(record, judge)


def lead_later(record: BufferRecord, server: str, epochs: Mapping[int, int]) -> BufferRecord:
    """Return the record with these segments' primaries on `server` alone, after these epochs, in which the server had
    another role of their bundles.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        last = epochs.get(segment.id, 0)
        early = segment.server == server and 0 < segment.epoch <= last  # at epoch 0 it has no roles
        return replace(_without_backup(segment), epoch=last + 1) if early else segment

    return _each(record, judge)


def stays_on(segment: SegmentRecord, leaving: str) -> str:
    """Return the server that keeps a segment when its copy on `leaving` goes; empty if `leaving` has no copy."""
    pair = (segment.server, segment.backup)
    if segment.copying_to or not segment.backup or leaving not in pair:
        return ""
    return pair[1 - pair.index(leaving)]


def begin_copy(record: BufferRecord, segment_id: int, target: str, epoch: int, leaving: str = "") -> BufferRecord:
    """Return the record with the segment being copied to `target` from that epoch on, if that may begin. The copy
    replaces a lost one, or the one on `leaving`, whose primary has yielded.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if segment.id != segment_id or segment.epoch + 1 != epoch or not segment.epoch:
            return segment
        alone = segment.server if not segment.backup and not segment.copying_to else ""
        source = stays_on(segment, leaving) if leaving else alone
        if not source or target in (segment.server, segment.backup):
            return segment
        return replace(_alone(segment, source, epoch), copying_to=target)

    return _each(record, judge)


def switch_roles(record: BufferRecord, segment_id: int, epoch: int) -> BufferRecord:
    """Return the record with the two copies of a segment in each other's roles from that epoch on, if that may be: both
    have everything, and the primary hands over.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if segment.id != segment_id or segment.epoch + 1 != epoch or not segment.backup or segment.copying_to:
            return segment
        return replace(
            segment,
            server=segment.backup,
            backup=segment.server,
            made=segment.backup_made,
            backup_made=segment.made,
            epoch=epoch,
            switched=epoch,
        )

    return _each(record, judge) if record.replicas > 1 else record


def let_move(record: BufferRecord, segment_id: int) -> BufferRecord:
    """Return the record with roles for a segment of one copy, which may then move or get a second copy. A lock with
    two replicas begins with one copy if there was only one server.
    """
    segments = tuple(
        replace(segment, epoch=record.epoch + 1) if segment.id == segment_id and not segment.epoch else segment
        for segment in record.segments
    )
    return record if segments == record.segments else replace(record, segments=segments)


def drop_copy(record: BufferRecord, segment_id: int, leaving: str, epoch: int) -> BufferRecord:
    """Return the record of a buffer with one copy without the copy on `leaving`, from that epoch on: the segment has
    moved. If the primary is on `leaving`, it has yielded.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        stays = stays_on(segment, leaving)
        if segment.id != segment_id or segment.epoch + 1 != epoch or not stays:
            return segment
        return _alone(segment, stays, epoch)

    return _each(record, judge) if record.replicas == 1 else record


def end_copies(record: BufferRecord, server: str, epochs: Mapping[int, int], *, whole: bool) -> BufferRecord:
    """Return the record after `server` reported that these copies, by segment, are whole or were given up. A report
    about another epoch is ignored.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if segment.server != server or not segment.copying_to or epochs.get(segment.id) != segment.epoch:
            return segment
        if not whole:
            return _without_backup(segment)
        made = segment.epoch
        return replace(segment, backup=segment.copying_to, backup_made=made, copying_to="", epoch=segment.epoch + 1)

    return _each(record, judge)


def _promoted(segment: SegmentRecord) -> SegmentRecord:
    return _alone(segment, segment.backup, segment.epoch + 1)


def _without_backup(segment: SegmentRecord) -> SegmentRecord:
    return replace(segment, backup="", backup_made=0, copying_to="", switched=0, epoch=segment.epoch + 1)


def _alone(segment: SegmentRecord, server: str, epoch: int) -> SegmentRecord:
    """Return the segment with only the copy on one of its two servers, from that epoch on."""
    made = segment.made if server == segment.server else segment.backup_made
    return replace(segment, server=server, made=made, backup="", backup_made=0, switched=0, epoch=epoch)


def _each(record: BufferRecord, judge: Callable[[SegmentRecord], SegmentRecord]) -> BufferRecord:
    if not record.movable:
        return record
    segments = tuple(map(judge, record.segments))
    return record if segments == record.segments else replace(record, segments=segments)
