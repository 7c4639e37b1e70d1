"""Which copies move, and which switch their roles, so that all servers have their shares. Pure.

In this order: primaries are balanced by traffic, which moves no data. Copies that share a host or a zone are taken
apart. The stripes of each buffer are spread over the servers, the busiest buffer's first. Then memory is balanced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.moves.move import MOVES_MAX, Move
from smb.coordinator.moves.primaries import switches
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.coordinator.replicas import stays_on

SPREAD_MAX = 0.05  # fraction of the capacity; servers that differ by less count as equally full
FULL = 0.9  # fraction of the capacity up to which servers get copies so that a buffer lies on more servers
ENDS = 8  # how many of the fullest servers, and of the emptiest, are considered for a move


def plan(
    records: Collection[BufferRecord],
    pool: Pool,
    capacity: Mapping[str, int],
    *,
    traffic: Mapping[int, float] | None = None,
    single_copies: bool = False,
    bound: Container[int] = frozenset(),
) -> list[Move]:
    """Return the moves in order. No move brings two copies closer together than they are. `capacity`: of the servers on
    which buffers are placed. `traffic`: bytes by segment, lately. `single_copies`: also move segments of buffers with
    one copy, except those `bound` to their servers.
    """
    found = switches(records, pool, traffic or {})
    moving = _Moving(records, pool, capacity, found, single_copies, bound)
    moving.take_apart()
    moving.spread(traffic or {})
    moving.level()
    return moving.moves


@dataclass(frozen=True, slots=True)
class _MovableCopy:
    """The copy of a segment on a server; `segment` has the bytes of the whole bundle."""

    server: str
    segment: SegmentRecord
    record: BufferRecord


@dataclass(slots=True)
class _Moving:
    """A plan in the making: what is free, and what lies where, after the moves so far."""

    records: Collection[BufferRecord]
    pool: Pool
    capacity: Mapping[str, int]
    moves: list[Move]
    single_copies: bool
    bound: Container[int]
    free: dict[str, int] = field(init=False)
    held: dict[str, list[_MovableCopy]] = field(init=False)  # by server: what may move
    counts: dict[str, Counter[str]] = field(init=False)  # by key of the buffer and server: copies of its segments
    bundles: Bundles = field(init=False)
    moved: set[int] = field(init=False)  # each segment moves once in a plan, as it has one copy during the move

    def __post_init__(self) -> None:
        self.free = dict(self.pool.free_bytes)
        self.bundles = Bundles(self.records)
        self.moved = {move.segment_id for move in self.moves}
        self.held = {name: [] for name in self.free}
        for copy in (*self._pairs(), *self._alone()):
            if copy.server in self.held:
                self.held[copy.server].append(copy)
        # The largest copies first; among equals a backup first, since its move changes no roles.
        for name, copies in self.held.items():
            copies.sort(key=lambda each: (-each.segment.file_bytes, each.segment.server == name, each.segment.id))
        self.counts = {record.key: Counter(copy.server for copy in record.copies) for record in self.records}

    def take_apart(self) -> None:
        """Move copies that share a host or a zone with the other one, where there is another with room."""
        copies = [copy for name in sorted(self.held) for copy in self.held[name]]
        for copy in sorted(copies, key=lambda each: each.segment.server == each.server):  # backups first
            other = stays_on(copy.segment, copy.server)
            near = self.pool.nearness(other, copy.server) if other else 0
            better = [each for each in self.free if near and self.pool.nearness(other, each) < near]
            targets = [(self.pool.nearness(other, each), -self.free[each], each) for each in better]
            targets = [each for each in targets if self._may(copy, each[-1])]
            if targets:
                self._move(copy, min(targets)[-1])

    def spread(self, traffic: Mapping[int, float]) -> None:
        """Spread the copies of each buffer over the servers, until no server has two more of them than another."""

        def busy(record: BufferRecord) -> float:
            return sum(traffic.get(segment.id, 0.0) for segment in record.segments)

        of_buffer: dict[str, list[_MovableCopy]] = {}
        for copies in self.held.values():
            for copy in copies:
                of_buffer.setdefault(copy.record.key, []).append(copy)
        several = [each for each in self.records if len(each.segments) > 1 and each.key in of_buffer]
        for record in sorted(several, key=lambda each: (-busy(each), each.key)):
            copies, counts = of_buffer[record.key], self.counts[record.key]
            while True:
                # a backup first, since its move changes no roles
                copies.sort(key=lambda each: (-self._share(counts, each.server), each.segment.server == each.server))
                empty = sorted(self.free, key=lambda each: (self._share(counts, each), -self.free[each], each))
                found = next(
                    (
                        (copy, target)
                        for copy in copies
                        for target in empty
                        if self._gain(counts, copy.server, target) > 0
                        and self._used(target, copy.segment.file_bytes) <= FULL
                        and self._may(copy, target)
                    ),
                    None,
                )
                if found is None:
                    break
                self._move(*found)

    def level(self) -> None:
        """Move copies from the fullest servers to the emptiest, each of which makes its two servers less different."""
        while True:
            order = sorted(self.free, key=lambda name: (self._used(name), name))
            found = next(
                (
                    (copy, empty)
                    for full in reversed(order[-ENDS:])
                    for empty in order[:ENDS]
                    if self._used(full) - self._used(empty) > SPREAD_MAX
                    for copy in self.held[full]
                    if self._used(empty, copy.segment.file_bytes) < self._used(full)
                    and self._stays_spread(copy, empty)
                    and self._may(copy, empty)
                ),
                None,
            )
            if found is None:
                return
            self._move(*found)

    def _share(self, counts: Mapping[str, int], name: str) -> float:
        return counts.get(name, 0) / self.pool.weights.get(name, 1.0)

    def _gain(self, counts: Mapping[str, int], leaving: str, target: str) -> float:
        """Return how much better a buffer is spread with one copy less on one server and one more on the other."""
        weights = self.pool.weights
        before = (counts.get(leaving, 0) - 0.5) / weights.get(leaving, 1.0)
        return before - (counts.get(target, 0) + 0.5) / weights.get(target, 1.0)

    def _stays_spread(self, copy: _MovableCopy, target: str) -> bool:
        """Whether no buffer of the bundle that has several segments is spread worse if a copy of it moves."""
        return all(
            len(of.segments) < 2 or self._gain(self.counts[of.key], copy.server, target) >= 0
            for of, _ in self.bundles.members(copy.record, copy.segment)
        )

    def _used(self, name: str, more: int = 0) -> float:
        return (self.capacity[name] - self.free[name] + more) / self.capacity[name]

    def _move(self, copy: _MovableCopy, target: str) -> None:
        segment = copy.segment
        self.moves.append(Move(segment.id, copy.server, target, segment.file_bytes, copy.record.title))
        self.moved.add(segment.id)
        self.free[copy.server] += segment.file_bytes
        self.free[target] -= segment.file_bytes
        for of, _ in self.bundles.members(copy.record, segment):
            self.counts[of.key][copy.server] -= 1
            self.counts[of.key][target] += 1

    def _may(self, copy: _MovableCopy, target: str) -> bool:
        segment = copy.segment
        if segment.id in self.moved or self.free[target] < segment.file_bytes or len(self.moves) >= MOVES_MAX:
            return False
        other = stays_on(segment, copy.server)
        if not other:  # one copy
            return self.pool.may_copy(copy.server, target)
        near = self.pool.nearness(other, copy.server)
        return target != copy.server and self.pool.may_copy(other, target) and self.pool.nearness(other, target) <= near

    def _pairs(self) -> Iterator[_MovableCopy]:
        """Yield the copies of segments with two. One segment stands for its bundle."""
        seen: set[int] = set()
        for record in self.records:
            for segment in record.segments if record.replicas > 1 and record.ready and record.mirror_of == 0 else ():
                if bundle_of(segment) in seen:
                    continue
                seen.add(bundle_of(segment))
                whole = replace(segment, file_bytes=self.bundles.file_bytes(record, segment))
                for name in (segment.backup, segment.server):
                    if self.pool.alive(stays_on(segment, name)):
                        yield _MovableCopy(name, whole, record)

    def _alone(self) -> Iterable[_MovableCopy]:
        for record in self.records if self.single_copies else ():
            for segment in record.segments if record.moves_alone else ():
                under_way = segment.backup or segment.copying_to
                if not under_way and segment.id not in self.bound and self.pool.alive(segment.server):
                    yield _MovableCopy(segment.server, segment, record)
