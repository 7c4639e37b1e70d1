"""Which copies move so that all servers are about equally full. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.coordinator.replicas import stays_on

SPREAD_MAX = 0.05  # fraction of the capacity; servers that differ by less count as equally full
MOVES_MAX = 1000  # in one plan, because each move makes clients wait; run rebalance again for more
ENDS = 8  # how many of the fullest servers, and of the emptiest, are considered for a move


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a copy, with the rest of its bundle, from one server to another. `title`: the buffer's title.
    `nbytes`: bytes of the whole bundle.
    """

    segment_id: int
    leaving: str
    target: str
    nbytes: int
    title: str


def plan(
    records: Iterable[BufferRecord],
    pool: Pool,
    capacity: Mapping[str, int],
    *,
    single_copies: bool = False,
    bound: Container[int] = frozenset(),
) -> list[Move]:
    """Return the moves in order, from the fullest servers to the emptiest. Each move makes its two servers less
    different. No move puts two copies on one host that were on two. `capacity`: of the servers on which buffers are
    placed. `single_copies`: also move segments of buffers with one copy, except those `bound` to their servers.
    """
    free = dict(pool.free_bytes)
    held: dict[str, list[tuple[SegmentRecord, str]]] = {name: [] for name in free}
    for name, segment, title in (*_pairs(list(records), pool), *_alone(records, pool, bound, single_copies)):
        if name in held:
            held[name].append((segment, title))
    # The largest copies first; among equals a backup first, since its move changes no roles.
    for name, copies in held.items():
        copies.sort(key=lambda each: (-each[0].file_bytes, each[0].server == name, each[0].id))

    def used(name: str, more: int = 0) -> float:
        return (capacity[name] - free[name] + more) / capacity[name]

    found: list[Move] = []
    moved: set[int] = set()  # each segment moves once in a plan, as it has one copy during the move
    while len(found) < MOVES_MAX:
        order = sorted(free, key=lambda name: (used(name), name))
        move = next(
            (
                Move(segment.id, full, empty, segment.file_bytes, title)
                for full in reversed(order[-ENDS:])
                for empty in order[:ENDS]
                if used(full) - used(empty) > SPREAD_MAX
                for segment, title in held[full]
                if segment.id not in moved
                and free[empty] >= segment.file_bytes
                and used(empty, segment.file_bytes) < used(full)
                and _may(segment, full, empty, pool)
            ),
            None,
        )
        if move is None:
            return found
        found.append(move)
        moved.add(move.segment_id)
        free[move.leaving] += move.nbytes
        free[move.target] -= move.nbytes
    return found


_Copy = tuple[str, SegmentRecord, str]  # the copy's server, the segment, the buffer's title


def _pairs(records: list[BufferRecord], pool: Pool) -> Iterator[_Copy]:
    """Yield the copies of segments with two. One segment stands for its bundle, with the bytes of the whole bundle."""
    bundles = Bundles(records)
    seen: set[int] = set()
    for record in records:
        for segment in record.segments if record.replicas > 1 and record.ready and record.mirror_of == 0 else ():
            if bundle_of(segment) in seen:
                continue
            seen.add(bundle_of(segment))
            whole = replace(segment, file_bytes=bundles.file_bytes(record, segment))
            for name in (segment.backup, segment.server):
                if pool.alive(stays_on(segment, name)):
                    yield name, whole, record.title


def _alone(records: Iterable[BufferRecord], pool: Pool, bound: Container[int], wanted: bool) -> Iterator[_Copy]:
    for record in records if wanted else ():
        for segment in record.segments if record.moves_alone else ():
            under_way = segment.backup or segment.copying_to
            if not under_way and segment.id not in bound and pool.alive(segment.server):
                yield segment.server, segment, record.title


def _may(segment: SegmentRecord, leaving: str, target: str, pool: Pool) -> bool:
    other = stays_on(segment, leaving)
    if not other:  # one copy
        return pool.may_copy(leaving, target)
    if not pool.may_copy(other, target):
        return False
    host = pool.hosts.get(other)
    return pool.hosts.get(target) != host or pool.hosts.get(leaving) == host
