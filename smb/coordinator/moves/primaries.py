"""Which of the two copies of each segment should be the primary, so that all servers answer about as much. Pure.

A switch of roles moves no data. First the primaries of each buffer are spread over the servers that have copies of it,
because a call takes as long as the busiest of them. Then whole buffers are, by their traffic.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.moves.move import MOVES_MAX, Move
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord

ROUNDS = 3  # over all buffers; each may make room for another one's switch


class _Roles:
    """The bundles whose roles may switch, with the server of each primary as planned so far."""

    def __init__(self, records: Collection[BufferRecord], pool: Pool, fixed: Container[int]) -> None:
        self._pool = pool
        self.bundles = Bundles(records)
        self.segments: dict[int, tuple[BufferRecord, SegmentRecord]] = {}  # by bundle
        self.primary: dict[int, str] = {}
        for record in records:
            for segment in record.segments if record.replicas > 1 and record.kind is Kind.BUFFER else ():
                number = bundle_of(segment)
                if number not in self.segments and number not in fixed and self._may(record, segment):
                    self.segments[number] = record, segment
                    self.primary[number] = segment.server

    def _may(self, record: BufferRecord, segment: SegmentRecord) -> bool:
        open_to = self._pool.free_bytes
        both = segment.server in open_to and segment.backup in open_to
        return both and not segment.copying_to and self.bundles.ready(record, segment)

    def weight(self, server: str) -> float:
        return self._pool.weights.get(server, 1.0)

    def other(self, number: int) -> str:
        """Return the server to which a bundle's primary would go."""
        _, segment = self.segments[number]
        return segment.backup if self.primary[number] == segment.server else segment.server

    def switch(self, number: int) -> None:
        self.primary[number] = self.other(number)

    def moves(self) -> Iterator[Move]:
        for number, (record, segment) in self.segments.items():
            if self.primary[number] != segment.server:
                nbytes = self.bundles.file_bytes(record, segment)
                yield Move(segment.id, segment.server, segment.backup, nbytes, record.title, switches=True)


def switches(
    records: Collection[BufferRecord],
    pool: Pool,
    traffic: Mapping[int, float],
    slack: float = 0.1,
    fixed: Container[int] = frozenset(),
) -> list[Move]:
    """Return the switches of roles, at most MOVES_MAX. `traffic`: bytes by segment; if there are none at all, memory
    counts. Servers whose shares differ by less than `slack` of the mean share count as equal. `fixed`: bundles that
    keep their roles.
    """
    roles = _Roles(records, pool, fixed)
    for record in records:
        _spread(record, roles)
    _balance(records, roles, traffic, slack)
    return list(roles.moves())[:MOVES_MAX]


def _spread(record: BufferRecord, roles: _Roles) -> None:
    """Spread a buffer's primaries as evenly as its copies allow. Where one switch does not help, a chain of them does:
    each server of the chain gives one primary to the next.
    """
    numbers = [number for segment in record.segments if (number := bundle_of(segment)) in roles.segments]
    if len(numbers) < 2:
        return
    while chain := _chain(record, roles, numbers):
        for number in chain:
            roles.switch(number)


def _chain(record: BufferRecord, roles: _Roles, numbers: Sequence[int]) -> Sequence[int]:
    """Return the bundles to switch so that one server has a primary less and another one more; empty: it is even."""
    held = _held(record, roles)
    from_server: dict[str, list[int]] = {}
    for number in numbers:
        from_server.setdefault(roles.primary[number], []).append(number)
    for full in sorted(from_server, key=lambda name: (-held[name] / roles.weight(name), name)):
        way: dict[str, tuple[str, int]] = {full: ("", 0)}  # by server: from where, by which bundle
        ahead = deque([full])
        while ahead:
            name = ahead.popleft()
            if (held[full] - 0.5) / roles.weight(full) > (held[name] + 0.5) / roles.weight(name):
                chain = []
                while name != full:
                    name, number = way[name]
                    chain.append(number)
                return chain
            for number in from_server.get(name, ()):
                other = roles.other(number)
                if other not in way:
                    way[other] = name, number
                    ahead.append(other)
    return ()


def _held(record: BufferRecord, roles: _Roles) -> Counter[str]:
    return Counter(roles.primary.get(bundle_of(segment), segment.server) for segment in record.segments)


def _balance(records: Collection[BufferRecord], roles: _Roles, traffic: Mapping[int, float], slack: float) -> None:
    """Switch roles of what is busiest from servers with more than their share to servers with less, without making any
    buffer less even.
    """
    measured = any(traffic.values())
    busy: defaultdict[int, float] = defaultdict(float)  # by bundle
    total: defaultdict[str, float] = defaultdict(float)  # by server
    of_bundle: dict[int, list[BufferRecord]] = {}
    for record in records:
        for segment, amount in _amounts(record, traffic, measured):
            number = bundle_of(segment)
            busy[number] += amount
            total[roles.primary.get(number, segment.server)] += amount
            of_bundle.setdefault(number, []).append(record)
    servers = {name for _, segment in roles.segments.values() for name in (segment.server, segment.backup)}
    if not servers:
        return
    least = slack * sum(total[name] for name in servers) / sum(map(roles.weight, servers))
    order = sorted(roles.segments, key=lambda each: (-busy[each], each))
    for number in order * ROUNDS:
        full, empty = roles.primary[number], roles.other(number)
        load, weights = busy[number], (roles.weight(full), roles.weight(empty))
        gain = (total[full] - load / 2) / weights[0] - (total[empty] + load / 2) / weights[1]
        if load and gain > least and all(_stays_even(record, roles, full, empty) for record in of_bundle[number]):
            roles.switch(number)
            total[full] -= load
            total[empty] += load


def _amounts(
    record: BufferRecord, traffic: Mapping[int, float], measured: bool
) -> Iterable[tuple[SegmentRecord, float]]:
    """Yield the traffic of each segment. The stripes of a buffer have equal shares, since a moment's differences
    between them pass.
    """
    if record.kind is not Kind.BUFFER:
        return
    if not measured:
        for segment in record.segments:
            yield segment, float(segment.file_bytes)
        return
    whole = sum(traffic.get(segment.id, 0.0) for segment in record.segments)
    for segment in record.segments:
        yield segment, whole / len(record.segments)


def _stays_even(record: BufferRecord, roles: _Roles, full: str, empty: str) -> bool:
    held = _held(record, roles)
    return (held[full] - 0.5) / roles.weight(full) >= (held[empty] + 0.5) / roles.weight(empty)
