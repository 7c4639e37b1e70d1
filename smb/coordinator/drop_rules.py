"""Every decision of the coordinator that a memory server may drop memory is made here. Pure.

Invariant: a server is told to drop a segment only if
- its deletion was acknowledged, or its creation was given up, in a store that has each change that the server was
  told of (smb/coordinator/lineage.py), or
- its creation was interrupted, nobody has written to any of its buffer's segments, and one of these is nowhere,
  or not on a server that should have it and has run all along (smb/coordinator/steps/interrupted.py), or
- in such a store, another run, which has registered with this coordinator in this term, has a whole copy of at least
  the same epoch (an incomplete copy may be dropped if any whole copy exists), or
- an operator has named it.
All other segments that a server holds and no record accounts for are **unexplained**: they are kept, counted and
listed, and judged again as other servers are heard of. A segment for which the store may be too old is marked as
quarantined at its server. It stays quarantined until a record places it there or an operator names it.

Of two whole copies of a segment, the one with the later epoch has each acknowledged change that the other has. This
holds because the epoch counts changes of roles, and in each epoch all copies have all changes that are acknowledged in
it (replicas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from smb.coordinator.events import AnswerDrops, DropSegments, Effect
from smb.coordinator.records import UNKNOWN_EPOCH, BufferRecord, Held, SegmentRecord
from smb.drop_reasons import Ground

Where = Mapping[int, tuple[BufferRecord, SegmentRecord]]
# Whether a server was heard of in this term and has its copy of a segment.
Confirmed = Callable[[str, int], bool]


def epoch_of(record: BufferRecord, segment: SegmentRecord) -> int:
    """Return the epoch of a segment's roles, or its buffer's epoch if it has no roles."""
    return segment.epoch or record.epoch


def is_newer(held: Held, record: BufferRecord, segment: SegmentRecord) -> bool:
    """Whether a server holds a later state of a segment than the record, so that the store is older than the server."""
    return record.ready and held.epoch > epoch_of(record, segment)


def is_that_copy(server: str, held: Held, segment: SegmentRecord) -> bool:
    """Whether the segment that a server holds is the copy in the record: neither an earlier copy at the same server,
    nor one that was begun after the record was stored.
    """
    if server == segment.copying_to or held.epoch == UNKNOWN_EPOCH:
        return True
    made = segment.made if server == segment.server else segment.backup_made
    return held.epoch >= made and (not held.begun or held.epoch <= max(segment.epoch, 1))


def ground_to_drop(
    server: str, segment_id: int, held: Held, where: Where, confirmed: Confirmed, *, covered: bool
) -> Ground | None:
    """Return why a server may drop a segment that no record places there; None: the server has to keep it. `covered`:
    the store has each change that the server was told of.
    """
    if segment_id not in where:
        return Ground.DELETED if covered and not held.quarantined else None
    record, segment = where[segment_id]
    others = {segment.server, segment.backup} - {server, ""}
    superseded = record.ready and any(confirmed(other, segment_id) for other in others)
    # An incomplete copy has nothing that its source lacks. An epoch from records that this store does not have may
    # count other changes than the same number in this store.
    if not held.begun and (not covered or held.quarantined or is_newer(held, record, segment)):
        return None
    return Ground.SUPERSEDED if superseded else None


def why_kept(server: str, segment_id: int, held: Held, where: Where) -> str:
    """Return for operators why a server keeps memory that no record accounts for."""
    if segment_id not in where:
        return "no buffer has it, and the coordinator's records may be older than it"
    record, segment = where[segment_id]
    if held.whole and is_newer(held, record, segment):
        return "it is newer than the coordinator's records, and is taken up once every server was heard of"
    if held.quarantined:
        return "the coordinator's records were restored or replaced after it was changed, and name another copy"
    others = " or ".join(sorted({segment.server, segment.backup} - {server, ""})) or "another server"
    return f"it may be the last copy: {others} has not confirmed that it has a later one"


def dropped(
    segments: Iterable[SegmentRecord],
    ground: Ground,
    unexplained: Mapping[str, Mapping[int, Held]],
    epoch: int = 0,
) -> DropSegments:
    """Return the effect that drops these copies. If they are deleted for good, it also drops all other copies of the
    same segments that a server still holds.
    """
    listed = {(segment.server, segment.id): segment for segment in segments}
    if ground is not Ground.SUPERSEDED:
        by_id = {segment.id: segment for segment in listed.values()}
        for server, held in unexplained.items():
            for segment_id in held.keys() & by_id.keys():
                listed.setdefault((server, segment_id), replace(by_id[segment_id], server=server))
    return DropSegments(tuple(listed.values()), epoch, ground)


def check(effects: Iterable[Effect], where: Callable[[], Where], confirmed: Confirmed, server: str) -> None:
    """Assert the rule for all drops of an event: those by `server`, which registers, and those by other servers.

    `where` and `confirmed` are those of the state after the event. A failure is a bug of ours, and then nothing is
    dropped.
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
