"""Retention: every decision of the coordinator that a memory server may give memory up is made here. Pure.

Invariant: a server is told to drop a segment only if
- its deletion was acknowledged, or its creation was given up, in a store that has every change that the server was
  told of (smb/coordinator/lineage.py), or
- in such a store, another run, which has registered with this coordinator in this term, has a whole copy of at least
  its epoch (a copy that is not whole itself may go for any whole one), or
- an operator has named it.
All else that a server holds and that no record accounts for is **unexplained**: it is kept, counted and listed, and
judged again as other servers are heard of. What the store may be too old for is marked as quarantined at its server,
and stays so until a record has it there or an operator names it.

Of two whole copies of a segment the one of the later epoch has every acknowledged change that the other one has: the
epoch counts changes of roles, and in each epoch every copy has all that is acknowledged in it (replicas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from smb.coordinator.events import AnswerDrops, DropSegments, Effect
from smb.coordinator.records import UNKNOWN_EPOCH, BufferRecord, Held, SegmentRecord
from smb.drop_reasons import Ground

Where = Mapping[int, tuple[BufferRecord, SegmentRecord]]
# Whether a server, heard of in this term, has its copy of a segment.
Confirmed = Callable[[str, int], bool]


def epoch_of(record: BufferRecord, segment: SegmentRecord) -> int:
    """Return the epoch of a segment's roles, of one without roles its buffer's."""
    return segment.epoch or record.epoch


def is_newer(held: Held, record: BufferRecord, segment: SegmentRecord) -> bool:
    """Whether a server holds a later state of a segment than the record knows: the store is older than the server."""
    return record.ready and held.epoch > epoch_of(record, segment)


def is_that_copy(server: str, held: Held, segment: SegmentRecord) -> bool:
    """Whether a segment that a server holds is the copy that the record has there: not one that it had before that was
    made, nor one that was begun anew after the record.
    """
    if server == segment.copying_to or held.epoch == UNKNOWN_EPOCH:
        return True
    made = segment.made if server == segment.server else segment.backup_made
    return held.epoch >= made and (not held.begun or held.epoch <= max(segment.epoch, 1))


def ground_to_drop(
    server: str, segment_id: int, held: Held, where: Where, confirmed: Confirmed, *, covered: bool
) -> Ground | None:
    """Return why a server may drop a segment that no record says is there; None: it has to keep it. `covered`: the
    store has every change that the server was told of.
    """
    if segment_id not in where:
        return Ground.DELETED if covered and not held.quarantined else None
    record, segment = where[segment_id]
    others = {segment.server, segment.backup} - {server, ""}
    superseded = record.ready and any(confirmed(other, segment_id) for other in others)
    # A copy that is not whole has nothing that its source does not have. An epoch of records that the store does not
    # have may be of other changes than the same number of this one.
    if not held.begun and (not covered or held.quarantined or is_newer(held, record, segment)):
        return None
    return Ground.SUPERSEDED if superseded else None


def why_kept(server: str, segment_id: int, held: Held, where: Where) -> str:
    """Return why a server keeps memory that no record accounts for, for people."""
    if segment_id not in where:
        return "no buffer has it, and the coordinator's records may be older than it"
    record, segment = where[segment_id]
    if held.whole and is_newer(held, record, segment):
        return "it is newer than the coordinator's records: it is taken up once every server was heard of"
    if held.quarantined:
        return "the coordinator's records were restored or replaced since it was changed, and name another copy"
    others = " or ".join(sorted({segment.server, segment.backup} - {server, ""})) or "another server"
    return f"it may be the last copy: {others} has not confirmed to have a later one"


def dropped(
    segments: Iterable[SegmentRecord],
    ground: Ground,
    unexplained: Mapping[str, Mapping[int, Held]],
    epoch: int = 0,
) -> DropSegments:
    """Return the effect that these copies are dropped; with them, if they are gone for good, every other copy of these
    segments that a server still holds.
    """
    listed = {(segment.server, segment.id): segment for segment in segments}
    if ground is not Ground.SUPERSEDED:
        by_id = {segment.id: segment for segment in listed.values()}
        for server, held in unexplained.items():
            for segment_id in held.keys() & by_id.keys():
                listed.setdefault((server, segment_id), replace(by_id[segment_id], server=server))
    return DropSegments(tuple(listed.values()), epoch, ground)


def check(effects: Iterable[Effect], where: Callable[[], Where], confirmed: Confirmed, server: str) -> None:
    """Assert the rule for all that an event has dropped: by `server`, the one that registers, and by others.

    `where` and `confirmed` are of the state after the event. What fails is a fault of ours; nothing is dropped then.
    """
    drops = [
        (segment.server, segment.id, effect.ground)
        for effect in effects
        if isinstance(effect, DropSegments)
        for segment in effect.segments
    ]
    for effect in effects:
        if isinstance(effect, AnswerDrops):
            drops += [(server, *each) for each in zip(effect.segment_ids, effect.grounds, strict=True)]
    there = where() if drops else {}
    for name, number, ground in drops:
        known = there.get(number)
        holders = {known[1].server, known[1].backup} - {name, ""} if known is not None else set()
        whole = any(confirmed(other, number) for other in holders)
        over = known is None or not known[0].ready
        may_go = {
            Ground.SUPERSEDED: whole,
            Ground.DELETED: over,
            Ground.NEVER_MADE: over,
            Ground.FORGOTTEN: known is None or name not in (known[1].server, known[1].backup),
        }
        assert may_go.get(ground, False), f"segment {number:016x} must not go from {name}: {ground.name}"
