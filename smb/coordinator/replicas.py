"""The servers of a segment's copies, and their roles: docs/decisions/0025. Pure.

Invariant: a segment's server and its backup, if it has one, both have every change that was acknowledged. So either of
them may go on alone, and one that goes on alone has no backup in the record. Roles change here alone; each change
counts the segment's epoch up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import IntEnum

from smb.coordinator.records import BufferRecord, SegmentRecord

Alive = Callable[[str], bool]


class CopyRole(IntEnum):
    """A server's role for a segment; csrc/smb.h has the numbers."""

    PRIMARY = 1
    BACKUP = 2


@dataclass(frozen=True, slots=True)
class Copy:
    """A server's part in one segment. `peer` has the other copy; empty: there is none."""

    segment_id: int
    epoch: int
    role: CopyRole
    peer: str


def copies_on(record: BufferRecord, server: str) -> list[Copy]:
    """Return the parts that a server has in a buffer of two copies."""
    found = []
    for segment in record.segments if record.replicas > 1 else ():
        if segment.server == server:
            found.append(Copy(segment.id, segment.epoch, CopyRole.PRIMARY, segment.backup))
        elif segment.backup == server:
            found.append(Copy(segment.id, segment.epoch, CopyRole.BACKUP, segment.server))
    return found


def fail_over(record: BufferRecord, alive: Alive) -> BufferRecord:
    """Return the record without the copies on servers that are gone. If both are gone, all stays as it is."""

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if not segment.backup or alive(segment.server) == alive(segment.backup):
            return segment
        return _without_backup(segment) if alive(segment.server) else _promoted(segment)

    return _each(record, judge)


def come_back(
    record: BufferRecord, server: str, held: Collection[int], alive: Alive, *, restarted: bool
) -> BufferRecord:
    """Return the record after a server came back with the segments `held`. A primary that was restarted has forgotten
    what it had not forwarded.
    """

    def judge(segment: SegmentRecord) -> SegmentRecord:
        if not segment.backup:
            return segment
        if segment.server == server and segment.id not in held:
            return _promoted(segment)
        if segment.server == server and restarted:
            return _promoted(segment) if alive(segment.backup) else _without_backup(segment)
        if segment.backup == server and segment.id not in held:
            return _without_backup(segment)
        return segment

    return _each(record, judge) if record.ready else record


def lose_backups(record: BufferRecord, segment_ids: Collection[int]) -> BufferRecord:
    """Return the record with the primaries of these segments alone."""
    return _each(
        record, lambda segment: _without_backup(segment) if segment.id in segment_ids and segment.backup else segment
    )


def _promoted(segment: SegmentRecord) -> SegmentRecord:
    return replace(segment, server=segment.backup, backup="", epoch=segment.epoch + 1)


def _without_backup(segment: SegmentRecord) -> SegmentRecord:
    return replace(segment, backup="", epoch=segment.epoch + 1)


def _each(record: BufferRecord, judge: Callable[[SegmentRecord], SegmentRecord]) -> BufferRecord:
    if record.replicas == 1:
        return record
    segments = tuple(map(judge, record.segments))
    return record if segments == record.segments else replace(record, segments=segments)
