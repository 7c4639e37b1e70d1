"""smb.coordinator.moves.rebalance: which copies move, and where; and that wanted_copies wants those."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smb.coordinator.events import (
    CopiesEnded,
    CopyBegun,
    CopyDropped,
    MoveAllowed,
    RolesSwitched,
    ServerDrained,
)
from smb.coordinator.moves.move import MOVES_MAX, Move
from smb.coordinator.moves.rebalance import SPREAD_MAX, plan
from smb.coordinator.moves.wanted_copies import still_wanted, wishes
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, SegmentRecord
from tests.support.decisions import MIB, Cluster

CAPACITY = 64 * MIB


@pytest.fixture
def cluster() -> Cluster:
    """Six buffers of 8 MiB and two copies on a and b; c and d are empty."""
    made = Cluster()
    made.register("a", "b")
    for number in range(6):
        made.create(f"w{number}", 2 * MIB, replicas=2, server_names=("ab"[number % 2],))
    made.register("c", "d")
    return made


def planned(cluster: Cluster) -> list[Move]:
    pool = cluster.state.pool(cluster.now)
    capacity = {name: cluster.state.servers[name].capacity_bytes for name in pool.free_bytes}
    return plan(cluster.state.buffers.values(), pool, capacity)


def make(cluster: Cluster) -> int:
    """Make the planned moves, as far as the limits on what goes at once let them; return how many that took."""
    moves = {move.segment_id: move for move in planned(cluster)}
    rounds = 0
    while moves:
        rounds += 1
        records = list(cluster.state.buffers.values())
        found = wishes(records, cluster.state.pool(cluster.now), moves=moves)
        assert found
        for wish in found:
            assert wish.target == moves[wish.segment.id].target
            epoch = wish.segment.epoch + 1
            if wish.switches:
                cluster.do(RolesSwitched(wish.record.key, wish.segment.id, epoch))
                continue
            cluster.do(CopyBegun(wish.record.key, wish.segment.id, wish.target, 1, epoch, wish.leaving))
            cluster.do(CopiesEnded(wish.source, {wish.segment.id: epoch}, whole=True))
        moves = still_wanted(moves, list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))
    return rounds


def test_servers_become_about_equally_full(cluster: Cluster) -> None:
    """Each segment moves once, backups first, and then nothing is left to do."""
    moves = planned(cluster)
    assert len(moves) == len({move.segment_id for move in moves}) == 6
    assert {move.leaving for move in moves} == {"a", "b"}
    make(cluster)
    held = [cluster.state.allocation(name).nbytes for name in "abcd"]
    assert max(held) - min(held) <= SPREAD_MAX * CAPACITY
    for record in cluster.state.buffers.values():
        assert all(each.backup and each.backup != each.server for each in record.segments)
    assert all(move.switches for move in planned(cluster))  # the primaries are on a and b yet
    make(cluster)
    assert planned(cluster) == []
    primaries = Counter(record.segments[0].server for record in cluster.state.buffers.values())
    assert sorted(primaries.values()) == [1, 1, 2, 2]


def test_what_does_not_move(cluster: Cluster) -> None:
    """Buffers of one copy, copies that are not whole, and anything to a server that is drained."""
    cluster.do(ServerDrained("d"))
    assert {move.target for move in planned(cluster)} == {"c"}
    records = {
        name: replace(record, segments=tuple(replace(each, backup="") for each in record.segments))
        for name, record in cluster.state.buffers.items()
    }
    cluster.state = replace(cluster.state, buffers=records)
    assert planned(cluster) == []
    single = Cluster()
    single.register("a")
    single.create("w", 10 * MIB)
    single.register("b")
    assert planned(single) == []


def test_buffers_with_one_copy_move_if_that_is_asked() -> None:
    """Those that are bound to their server stay. A move is half made once the other copy is there, and then ends."""
    single = Cluster()
    single.register("a")
    for number in range(4):
        single.create(f"w{number}", 2 * MIB)
    single.register("b")
    records, pool = list(single.state.buffers.values()), single.state.pool(single.now)
    bound = {records[0].segments[0].id}
    moves = plan(records, pool, dict.fromkeys("ab", CAPACITY), single_copies=True, bound=bound)
    assert [(move.leaving, move.target) for move in moves] == [("a", "b")] * 2
    assert not bound & {move.segment_id for move in moves}
    (move, *others) = moves
    wanted = {each.segment_id: each for each in moves}
    assert not still_wanted(wanted, records, pool, frozenset(wanted))
    key = next(record.key for record in records if record.segments[0].id == move.segment_id)

    def wished() -> list[tuple[str, str, str]]:
        now = list(single.state.buffers.values())
        assert still_wanted(wanted, now, single.state.pool(single.now)).keys() == wanted.keys()
        found = wishes(now, single.state.pool(single.now), moves=wanted)
        return [(wish.target, wish.source, wish.leaving) for wish in found if wish.segment.id == move.segment_id]

    assert wished() == [("b", "a", "")]
    single.do(MoveAllowed(key, move.segment_id))
    assert wished() == [("b", "a", "")]
    single.do(CopyBegun(key, move.segment_id, "b", 1, 3))
    assert wished() == []
    single.do(CopiesEnded("a", {move.segment_id: 3}, whole=True))
    assert wished() == [("", "b", "a")]
    assert [(wish.source, wish.leaving) for wish in wishes(*_now(single)) if not wish.target] == [("a", "b")]
    single.do(CopyDropped(key, move.segment_id, "a", 5))
    assert single.state.buffers[key].segments[0].server == "b"
    assert still_wanted(wanted, *_now(single)).keys() == {each.segment_id for each in others}


def _now(cluster: Cluster) -> tuple[list[BufferRecord], Pool]:
    return list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)


def test_copies_stay_on_two_hosts() -> None:
    """A move to the other copy's host is none, unless they were on one."""
    record = _record("a", "b", 8 * MIB)
    pool = Pool({"a": 10, "b": 10, "c": CAPACITY}, hosts={"a": "1", "b": "2", "c": "2"})
    (move,) = plan([record], pool, dict.fromkeys("abc", CAPACITY))
    assert (move.leaving, move.target) == ("b", "c")
    assert plan([record], replace(pool, hosts={"a": "2", "b": "1", "c": "3"}), dict.fromkeys("abc", CAPACITY))
    assert not plan([_record("b", "a", 8 * MIB)], replace(pool, free_bytes={"a": 10, "c": 10}), {"a": 99, "c": 99})


def test_a_move_that_can_not_be_made_any_more_is_forgotten(cluster: Cluster) -> None:
    """Its buffer is gone, the copy has left already, or its target has no room, or is drained."""
    moves = {move.segment_id: move for move in planned(cluster)}
    records, pool = list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)
    assert still_wanted(moves, records, pool) == moves
    assert still_wanted(moves, records[1:], pool).keys() == moves.keys() - {records[0].segments[0].id}
    assert still_wanted(moves, records, replace(pool, free_bytes=dict.fromkeys("abcd", 1))) == {}
    cluster.do(ServerDrained("c"))
    cluster.do(ServerDrained("d"))
    assert still_wanted(moves, records, cluster.state.pool(cluster.now)) == {}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 20)), max_size=40),
    st.lists(st.integers(100, 300), min_size=5, max_size=5),
)
def test_no_plan_makes_it_worse(copies: list[tuple[int, int, int]], sizes: list[int]) -> None:
    """Whatever lies where: no server gets more than it has room for, the fullest never gets fuller, and it ends."""
    names = "abcde"
    records, used = [], dict.fromkeys(names, 0)
    for first, step, nbytes in copies:
        server, backup = names[first], names[(first + step) % 5]
        records.append(_record(server, backup, nbytes, len(records) + 1))
        used[server] += nbytes
        used[backup] += nbytes
    capacity = {name: max(size, used[name]) for name, size in zip(names, sizes, strict=True)}
    pool = Pool({name: capacity[name] - used[name] for name in names})
    pairs = {record.segments[0].id: {record.segments[0].server, record.segments[0].backup} for record in records}
    moves = plan(records, pool, capacity)
    assert len(moves) <= MOVES_MAX
    highest = max(used[name] / capacity[name] for name in names)
    for move in moves:
        if move.switches:
            assert {move.leaving, move.target} == pairs[move.segment_id]
            continue
        used[move.leaving] -= move.nbytes
        used[move.target] += move.nbytes
        assert move.target not in pairs[move.segment_id]
        assert max(used[name] / capacity[name] for name in names) <= highest


def _record(server: str, backup: str, nbytes: int, number: int = 1) -> BufferRecord:
    segment = SegmentRecord(number, server, nbytes, nbytes, backup, 1)
    return BufferRecord(f"w{number}", number, (1,), "uint8", 1, 1, 4096, 4096, (segment,), 0.0, True, replicas=2)


def test_copies_in_one_zone_are_taken_apart() -> None:
    """Where another zone has room; the backup moves."""
    names, record = "abc", _record("a", "b", 8)
    pool = Pool(dict.fromkeys(names, 100), hosts={name: name for name in names}, zones={"a": "x", "b": "x", "c": "y"})
    (move,) = plan([record], pool, dict.fromkeys(names, 1000))
    assert (move.leaving, move.target) == ("b", "c")
    assert plan([record], replace(pool, free_bytes={"a": 100, "b": 100, "c": 1}), dict.fromkeys(names, 1000)) == []


def test_stripes_of_a_buffer_are_spread_over_the_servers() -> None:
    """Memory alone would not tell: two servers have all copies of a small buffer. Each server gets as many."""
    pairs = [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")]
    segments = tuple(SegmentRecord(at + 1, *pair[:1], 8, 8, pair[1], 1) for at, pair in enumerate(pairs))
    record = replace(_record("a", "b", 8), segments=segments)
    pool = Pool(dict.fromkeys("abcd", 10_000), hosts={name: name for name in "abcd"})
    moves = plan([record], pool, dict.fromkeys("abcd", 10_100))
    held = Counter(copy.server for copy in record.copies)
    for move in moves:
        held[move.leaving] -= 1
        held[move.target] += 1
    assert set(held.values()) == {2}
    assert len({move.segment_id for move in moves}) == len(moves) == 4


def test_plans_come_to_an_end() -> None:
    """One after the other, each carried out: no two steps undo each other, whatever weights, zones and traffic are."""
    for seed in range(60):
        print("seed", seed)
        rng = random.Random(seed)
        names, numbers = "abcdef"[: rng.randint(3, 6)], itertools.count(1)
        records = []
        for at in range(1, rng.randint(2, 9)):
            size, pairs = rng.randint(1, 20), [rng.sample(names, 2) for _ in range(rng.randint(1, 8))]
            segments = tuple(SegmentRecord(next(numbers), pair[0], size, size, pair[1], 1) for pair in pairs)
            records.append(replace(_record("a", "b", 1, at), segments=segments))
        capacity = {name: rng.choice((600, 1000, 2000)) for name in names}
        traffic = {each: rng.choice((0.0, 0.0, 10.0, 1000.0)) for each in range(1, next(numbers))}
        zones = {name: rng.choice("xy") for name in names if seed % 2}
        weights = {name: rng.choice((1.0, 1.0, 2.0)) for name in names if seed % 3}
        for _ in range(10):
            used = Counter[str]()
            for copy in (copy for record in records for copy in record.copies):
                used[copy.server] += copy.file_bytes
            free = {name: capacity[name] - used[name] for name in names}
            pool = Pool(free, weights=weights, hosts={name: name for name in names}, zones=zones)
            moves = {
                move.segment_id: move for move in plan(records, pool, capacity, traffic=traffic if seed % 5 else {})
            }
            if not moves:
                break
            for at, record in enumerate(records):
                records[at] = replace(
                    record, segments=tuple(_moved(each, moves.get(each.id)) for each in record.segments)
                )
        else:
            raise AssertionError(f"seed {seed}: {moves}")


def _moved(segment: SegmentRecord, move: Move | None) -> SegmentRecord:
    if move is None:
        return segment
    if move.switches:
        return replace(segment, server=segment.backup, backup=segment.server)
    stays = segment.backup if move.leaving == segment.server else segment.server
    return replace(segment, server=stays, backup=move.target)
