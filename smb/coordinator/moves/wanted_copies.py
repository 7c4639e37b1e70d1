"""Which copies to make now and where (docs/decisions/0025): replacements of lost copies, and copies that leave their
server. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from smb.coordinator.bundles import Bundles, Member, bundle_of
from smb.coordinator.moves.copy_pace import MOST
from smb.coordinator.moves.move import Move
from smb.coordinator.placement import Pool, place_copy
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.coordinator.replicas import stays_on

# Limit of copies in progress from one server, and to one. Two fill a link. More are allowed if they are small together,
# since clients wait for each. The limit also keeps little data at one copy at a time while copies leave their server.
AT_ONCE = 2
SMALL_BYTES = 32 << 20
SWITCHES_AT_ONCE = 8  # in the cluster: a segment's clients wait for a moment and ask for its new primary
LEAST_BYTES = 1 << 20  # a smaller segment counts as this many bytes


@dataclass(frozen=True, slots=True)
class Wish:
    """A copy to make from `source` on `target`: in place of a lost copy, or of the one on `leaving`. An empty `target`
    means that a segment of a buffer with one copy has moved to `source`, and its copy on `leaving` must go. `switches`:
    no copy is made; the primary, on `leaving`, and the backup, on `target`, switch their roles. `members`: all segments
    of the bundle, including this one.
    """

    record: BufferRecord
    segment: SegmentRecord
    target: str
    source: str
    leaving: str = ""
    members: tuple[Member, ...] = ()
    switches: bool = False


class _Load:
    """The copies in progress, by the server that they are from or to."""

    def __init__(self, copies: Iterable[tuple[str, int]]) -> None:
        self._copies: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        for server, nbytes in copies:
            self.add(server, nbytes)

    def add(self, server: str, nbytes: int) -> None:
        self._copies[server] += 1
        self._bytes[server] += max(nbytes, LEAST_BYTES)

    def allows(self, server: str, nbytes: int) -> bool:
        """Whether one more copy may begin."""
        return self._copies[server] < AT_ONCE or self._bytes[server] + max(nbytes, LEAST_BYTES) <= SMALL_BYTES


def wishes(
    records: list[BufferRecord],
    pool: Pool,
    avoid: frozenset[str] = frozenset(),
    moves: Mapping[int, Move] | None = None,
    apart: frozenset[frozenset[str]] = frozenset(),
    bound: Container[int] = frozenset(),
    resting: Container[int] = frozenset(),
    kept: Container[tuple[str, int]] = frozenset(),
    most: int = MOST,
    held: bool = False,
    unready: frozenset[str] = frozenset(),
) -> list[Wish]:
    """Return the copies to begin now, a few for each server: first replacements of lost copies, then copies that leave
    drained servers, then `moves`, by segment. `avoid`: servers that are asked for nothing. `apart`: pairs of servers
    that do not copy to each other. `bound`: segments that cannot move. `resting`: bundles that wait. `kept`: servers
    that have another copy of a segment in quarantine. `most`: copies that may be under way in all. `held`: lost copies
    are not replaced for now. `unready`: servers that are asked for no copies of theirs, but take those of others. A
    bundle is one copy, and it waits while one of its buffers is being made.
    """
    bundles = Bundles(records)
    # A copy whose source is lost stays in the records until that server is back, which may be never.
    under_way = {
        bundle_of(segment): (segment, bundles.file_bytes(record, segment))
        for record in records
        for segment in record.segments
        if segment.copying_to and pool.alive(segment.server) and pool.alive(segment.copying_to)
    }
    sources = _Load((segment.server, nbytes) for segment, nbytes in under_way.values())
    targets = _Load((segment.copying_to, nbytes) for segment, nbytes in under_way.values())
    free = {name: nbytes for name, nbytes in pool.free_bytes.items() if name not in avoid}
    mute = avoid | unready
    found = [wish for wish in _surplus(records, pool, moves or {}) if not {wish.source, wish.leaving} & mute]
    found += [wish for wish in _switching(bundles, records, moves or {}) if not {wish.target, wish.leaving} & avoid][
        :SWITCHES_AT_ONCE
    ]
    begun = {bundle_of(wish.segment) for wish in found if wish.switches}
    for record, segment, source, leaving, chosen in (
        *(() if held else _lost(records)),
        *_leaving(records, pool),
        *_moving_out(records, pool, bound),
        *_moving(records, moves or {}, bound),
    ):
        if len(under_way) + len(begun) >= most:
            break
        nbytes = bundles.file_bytes(record, segment)
        if (
            not pool.alive(source)
            or {source, leaving} & mute
            or bundle_of(segment) in begun
            or bundle_of(segment) in resting
            or not bundles.ready(record, segment)
            or not sources.allows(source, nbytes)
        ):
            continue
        names = (chosen,) if chosen else tuple(free)
        open_to = {
            name: free[name]
            for name in names
            if name in free
            and frozenset((source, name)) not in apart
            and not any((name, member.id) in kept for _, member in bundles.members(record, segment))
        }
        busy = frozenset(name for name in open_to if not targets.allows(name, nbytes))
        target = _target(replace(pool, free_bytes=open_to), source, nbytes, busy)
        if not target:
            continue
        begun.add(bundle_of(segment))
        sources.add(source, nbytes)
        targets.add(target, nbytes)
        free[target] -= nbytes
        found.append(Wish(record, segment, target, source, leaving, tuple(bundles.members(record, segment))))
    return found


def _target(pool: Pool, source: str, nbytes: int, busy: frozenset[str]) -> str:
    """Return the server for a copy; empty: none has room, or it waits. A copy waits for a busy server rather than go to
    one that shares more with its source, since it would stay there.
    """
    best = place_copy(pool, source, nbytes)
    if best in busy:
        near = pool.nearness(source, best)
        free = {
            name: room
            for name, room in pool.free_bytes.items()
            if name not in busy and pool.nearness(source, name) == near
        }
        best = place_copy(replace(pool, free_bytes=free), source, nbytes)
    return best


def copies_to_come(records: Collection[BufferRecord], pool: Pool, resting: Container[int] = frozenset()) -> int:
    """Return how many segments have one copy only for now: another is being made or will be. `resting`: see
    `wishes`."""
    bundles = Bundles(records)
    return sum(
        bool(
            segment.copying_to
            or (pool.alive(segment.server) and place_copy(pool, segment.server, bundles.file_bytes(record, segment)))
        )
        for record in records
        for segment in (record.segments if record.degraded else ())
        if not segment.backup and bundle_of(segment) not in resting
    )


def still_wanted(
    moves: Mapping[int, Move], records: list[BufferRecord], pool: Pool, bound: Container[int] = frozenset()
) -> dict[int, Move]:
    """Return the moves that have not been made and are still possible."""
    there = {segment.id: (record, segment) for record in records for segment in record.segments}
    return {
        number: move
        for number, move in moves.items()
        if number in there and number not in bound and _can_be_made(move, *there[number], pool)
    }


def _can_be_made(move: Move, record: BufferRecord, segment: SegmentRecord, pool: Pool) -> bool:
    if move.switches:
        there = (move.leaving, move.target) == (segment.server, segment.backup)
        return there and pool.alive(move.leaving) and pool.alive(move.target)
    room = pool.free_bytes.get(move.target, 0) >= move.nbytes
    if record.moves_alone:  # a second copy means that the move is half done
        coming = segment.copying_to or segment.backup
        return segment.server == move.leaving and (coming == move.target or (not coming and room))
    apart = move.target not in (segment.server, segment.backup)
    return bool(stays_on(segment, move.leaving)) and apart and room


_Wanted = tuple[BufferRecord, SegmentRecord, str, str, str]  # the source, the leaving server, the target if decided


def _lost(records: list[BufferRecord]) -> Iterator[_Wanted]:
    for record in records:
        for segment in record.segments if record.degraded and record.ready else ():
            if not segment.backup and not segment.copying_to:
                yield record, segment, segment.server, "", ""


def _leaving(records: list[BufferRecord], pool: Pool) -> Iterator[_Wanted]:
    """Yield the copies on drained servers. If both copies must leave, the backup goes first: that changes no roles."""
    for record in records if pool.draining else ():
        for segment in record.segments if record.replicas > 1 and record.ready else ():
            for leaving in (segment.backup, segment.server):
                if leaving in pool.draining and (source := stays_on(segment, leaving)):
                    yield record, segment, source, leaving, ""
                    break


def _moves_out(record: BufferRecord, segment: SegmentRecord, pool: Pool) -> bool:
    """Whether the only copy of a segment is on a drained server and can be copied to another one."""
    return record.moves_alone and segment.server in pool.draining and not segment.backup and not segment.copying_to


def _moving_out(records: list[BufferRecord], pool: Pool, bound: Container[int]) -> Iterator[_Wanted]:
    """Yield the segments of buffers with one copy on drained servers. They have a second copy during the move."""
    for record in records if pool.draining else ():
        for segment in record.segments:
            if segment.id not in bound and _moves_out(record, segment, pool):
                yield record, segment, segment.server, "", ""


def _surplus(records: list[BufferRecord], pool: Pool, moves: Mapping[int, Move]) -> Iterator[Wish]:
    """Yield the copies to drop: of segments that have moved, or whose move was given up."""
    for record in records:
        for segment in record.segments if record.replicas == 1 and record.ready else ():
            if segment.backup and pool.alive(segment.server) and pool.alive(segment.backup):
                wanted = segment.id in moves and segment.backup not in pool.draining
                moves_on = segment.server in pool.draining or wanted
                leaving = segment.server if moves_on else segment.backup
                yield Wish(record, segment, "", stays_on(segment, leaving), leaving, ((record, segment),))


def _switching(bundles: Bundles, records: list[BufferRecord], moves: Mapping[int, Move]) -> Iterator[Wish]:
    for record in records if moves else ():
        for segment in record.segments:
            move = moves.get(segment.id)
            if move is not None and move.switches and bundles.ready(record, segment):
                members = tuple(bundles.members(record, segment))
                yield Wish(record, segment, move.target, move.target, move.leaving, members, switches=True)


def _moving(records: list[BufferRecord], moves: Mapping[int, Move], bound: Container[int]) -> Iterator[_Wanted]:
    for record in records if moves else ():
        for segment in record.segments:
            move = moves.get(segment.id)
            if move is None or move.switches or not record.ready or segment.id in bound:
                continue
            if record.replicas > 1 and (source := stays_on(segment, move.leaving)):
                yield record, segment, source, move.leaving, move.target
            elif record.moves_alone and segment.server == move.leaving and not (segment.backup or segment.copying_to):
                yield record, segment, segment.server, "", move.target
