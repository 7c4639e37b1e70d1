"""Bundles: segments that move together. A bundle has one server, one backup and one epoch (docs/decisions.md, 0038).
Pure.

Invariant: in each state all members of a bundle have the same server, backup, epoch and copying_to, including members
of buffers that are still being made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from smb.coordinator.records import BufferRecord, SegmentRecord

Member = tuple[BufferRecord, SegmentRecord]


class Bundles:
    """The members of each bundle among these records. A segment that moves alone is a bundle of one."""

    def __init__(self, records: Iterable[BufferRecord]) -> None:
        self._members: dict[int, list[Member]] = {}
        for record in records:
            for segment in record.segments:
                if segment.group:
                    self._members.setdefault(segment.group, []).append((record, segment))

    def members(self, record: BufferRecord, segment: SegmentRecord) -> Sequence[Member]:
        """Return the segments that move together with this one, including itself."""
        return self._members.get(segment.group) or ((record, segment),)

    def file_bytes(self, record: BufferRecord, segment: SegmentRecord) -> int:
        """Return the bytes that a copy of the whole bundle takes of a server's capacity."""
        return sum(member.file_bytes for _, member in self.members(record, segment))

    def ready(self, record: BufferRecord, segment: SegmentRecord) -> bool:
        """Whether all members belong to buffers that are ready."""
        return all(of.ready for of, _ in self.members(record, segment))

    def named_by(self, segment_ids: Collection[int]) -> frozenset[int]:
        """Return these segments and all other members of their bundles."""
        if not segment_ids:
            return frozenset()
        named = (
            member.id
            for members in self._members.values()
            if any(each.id in segment_ids for _, each in members)
            for _, member in members
        )
        return frozenset((*segment_ids, *named))

    def with_epochs(self, epochs: Mapping[int, int]) -> dict[int, int]:
        """Return the epochs, extended from some members to all members of the same bundles."""
        known = dict(epochs)
        for members in self._members.values():
            found = [epochs[each.id] for _, each in members if each.id in epochs]
            if found:
                known |= {member.id: max(found) for _, member in members}
        return known

    def lacking(self, server: str, missing: Collection[int], heard: Callable[[str], bool]) -> frozenset[int]:
        """Return the segments that count as missing on a server. `missing`: those that the server does not hold.

        If the server holds only some members of a bundle, the others do not count as missing when the server is the
        primary, no copy is being made, and no backup was heard of. The members that the server lacks are lost then,
        and the rest must not be lost with them. In all other cases the whole bundle counts as missing, because another
        server has or gets a copy of all members.
        """
        counted = set(missing)
        for members in self._members.values():
            here = [
                member
                for record, member in members
                if record.ready and server in (member.server, member.backup, member.copying_to)
            ]
            gone = {member.id for member in here if member.id in missing}
            if not gone or len(gone) == len(here):
                continue
            first = here[0]
            other = bool(first.backup) and heard(first.backup)
            if first.server == server and not first.copying_to and not other:
                counted -= gone
            else:
                counted |= {member.id for _, member in members}
        return frozenset(counted)

    def followers(
        self, judged: BufferRecord, changed: Mapping[str, BufferRecord] = MappingProxyType({})
    ) -> list[BufferRecord]:
        """Return the other records that change with `judged`, the new record of its key: members of the same bundles
        get the servers and epochs of its segments. `changed`: records that were replaced before.
        """
        leaders = {segment.group: segment for segment in judged.segments if segment.group}
        others = {record.key: record for bundle in leaders for record, _ in self._members.get(bundle, ())}
        others.pop(judged.key, None)
        found = []
        for key, known in others.items():
            record = changed.get(key, known)
            segments = tuple(_following(segment, leaders.get(segment.group)) for segment in record.segments)
            if segments != record.segments:
                found.append(replace(record, segments=segments))
        return found


def bundle_of(segment: SegmentRecord) -> int:
    """Return the id of a segment's bundle, which is its own id if it moves alone."""
    return segment.group or segment.id


def move_together(record: BufferRecord, other: BufferRecord) -> bool:
    """Whether each segment of one buffer is in the same bundle as the corresponding segment of the other."""
    return tuple(map(bundle_of, record.segments)) == tuple(map(bundle_of, other.segments))


def _following(segment: SegmentRecord, leader: SegmentRecord | None) -> SegmentRecord:
    if leader is None:
        return segment
    return replace(
        segment,
        server=leader.server,
        backup=leader.backup,
        epoch=leader.epoch,
        copying_to=leader.copying_to,
        made=leader.made,
        backup_made=leader.backup_made,
        switched=leader.switched,
    )
