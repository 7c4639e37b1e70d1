"""Which lost copies are to be made anew now, and where (docs/decisions/0025). Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from smb.coordinator.placement import Pool, place_copy
from smb.coordinator.records import BufferRecord, SegmentRecord

# At once from one server, and to one: each is a wait for its clients, and one at a time fills a link.
FROM_ONE_MAX, TO_ONE_MAX = 2, 2


@dataclass(frozen=True, slots=True)
class Wish:
    """A copy that is to be made."""

    record: BufferRecord
    segment: SegmentRecord
    target: str


def wishes(records: list[BufferRecord], pool: Pool, avoid: frozenset[str] = frozenset()) -> list[Wish]:
    """Return what to begin now, a few for each server. `avoid`: servers not to be copied to. Pure."""
    under_way = [segment for record in records for segment in record.segments if segment.copying_to]
    sources = Counter(segment.server for segment in under_way)
    targets = Counter(segment.copying_to for segment in under_way)
    free = {name: nbytes for name, nbytes in pool.free_bytes.items() if name not in avoid}
    found = []
    for record in records:
        for segment in record.segments if record.degraded and record.ready else ():
            if segment.backup or segment.copying_to or segment.server not in pool.free_bytes:
                continue
            open_to = {name: nbytes for name, nbytes in free.items() if targets[name] < TO_ONE_MAX}
            target = place_copy(replace(pool, free_bytes=open_to), segment.server, segment.file_bytes)
            if not target or sources[segment.server] >= FROM_ONE_MAX:
                continue
            sources[segment.server] += 1
            targets[target] += 1
            free[target] -= segment.file_bytes
            found.append(Wish(record, segment, target))
    return found


def without_room(record: BufferRecord, pool: Pool) -> bool:
    """Whether some segment of it has one copy, and no other live server has room for a second one."""
    return any(
        not segment.backup
        and not segment.copying_to
        and segment.server in pool.free_bytes
        and not place_copy(pool, segment.server, segment.file_bytes)
        for segment in record.segments
    )
