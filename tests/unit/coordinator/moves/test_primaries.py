"""moves.primaries, balancer and traffic: which copies switch their roles, when, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smb.coordinator.events import BackupsLost, HeldUp, RolesSwitched, ServerDied, ServerDrained
from smb.coordinator.moves import balancer
from smb.coordinator.moves.move import Move
from smb.coordinator.moves.primaries import switches
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, Held, Kind, SegmentRecord
from smb.coordinator.traffic import HALF_LIFE_S, Traffic
from smb.errors import NotFoundError, UnavailableError
from smb.rpc import control_pb2 as pb
from tests.support.decisions import MIB, Cluster, returned

NAMES = "abcd"
POOL = Pool(dict.fromkeys(NAMES, 1 << 40))


def buffer(number: int, pairs: list[tuple[str, str]], kind: Kind = Kind.BUFFER) -> BufferRecord:
    """A buffer with these servers and backups, and segments 100 * number + 0, 1, ..."""
    segments = tuple(
        SegmentRecord(100 * number + at, server, MIB, MIB, backup, 1) for at, (server, backup) in enumerate(pairs)
    )
    return BufferRecord(
        f"w{number}", number, (1,), "uint8", 1, 1, 4096, 4096, segments, 0.0, True, kind=kind, replicas=2
    )


def primaries(record: BufferRecord, moves: list[Move]) -> list[str]:
    """Where the primaries are after these moves."""
    switched = {move.segment_id for move in moves}
    return [each.backup if each.id in switched else each.server for each in record.segments]


def test_a_buffer_gets_its_primaries_spread() -> None:
    """As after a rolling restart: one switch alone does not help, a chain of two does."""
    skewed = buffer(1, [("a", "b"), ("a", "b"), ("b", "d"), ("c", "a"), ("d", "c"), ("c", "d")])
    moves = switches([skewed], POOL, {})
    assert all(move.switches for move in moves)
    assert sorted(Counter(primaries(skewed, moves)).values()) == [1, 1, 2, 2]
    chain = buffer(1, [("a", "b"), ("a", "b"), ("b", "c")])
    assert sorted(primaries(chain, switches([chain], POOL, {}))) == ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12))
def test_each_buffer_is_as_even_as_its_copies_allow(pairs: list[tuple[str, str]]) -> None:
    """No choice of primaries has a lower sum of squares."""
    record = buffer(1, [(server, backup) for server, backup in pairs if server != backup])
    best = {(0,) * len(NAMES)}
    for segment in record.segments:
        best = {
            tuple(held + (name == at) for name, held in zip(NAMES, counts, strict=True))
            for counts in best
            for at in (segment.server, segment.backup)
        }
    held = Counter(primaries(record, switches([record], POOL, {})))
    assert sum(number**2 for number in held.values()) == min(sum(each**2 for each in counts) for counts in best)


def test_buffers_are_balanced_by_traffic_and_else_by_memory() -> None:
    """The busy ones are on two servers afterwards, whatever else is there; locks stay."""
    records = [buffer(number, [("a", "b")]) for number in range(1, 5)]
    busy = {100: 1e9, 200: 1e9, 300: 1e3, 400: 1e3}
    moves = switches(records, POOL, busy)
    assert len({100, 200} & {move.segment_id for move in moves}) == 1
    assert len(switches(records, POOL, {})) == 2
    assert switches([buffer(1, [("a", "b")], Kind.LOCK), buffer(2, [("a", "b")], Kind.LOCK)], POOL, {}) == []
    assert switches(records, POOL, {100: 10.0}) == []  # nothing gets better
    assert switches(records, replace(POOL, weights={"a": 100.0, "b": 1.0}), {}) == []
    assert switches(records, replace(POOL, free_bytes={"a": 1}, draining=frozenset("b")), {}) == []


def test_traffic_fades_and_counts_where_the_primary_is() -> None:
    """What a backup reports does not count, and a server that is gone for good is forgotten."""
    cluster, traffic = Cluster(), Traffic()
    cluster.register("a", "b")
    made = cluster.create("w", replicas=2, server_names=("a",))
    number = made.segments[0].id
    for name in "abx":
        traffic.record(name, [pb.BusyLoad(id=number, bytes=1 << 20)], 10.0)
    assert traffic.of_primaries(cluster.state) == {number: float(1 << 20)}
    traffic.record("a", [], 10.0 + HALF_LIFE_S)
    assert traffic.of_primaries(cluster.state) == {number: float(1 << 19)}
    traffic.record("a", [], 10.0 + 30 * HALF_LIFE_S)
    assert traffic.of_primaries(cluster.state) == {}


@pytest.fixture
def cluster() -> Cluster:
    """A buffer with its primary on a and its backup on b."""
    made = Cluster()
    made.register("a", "b", "c")
    made.create("w", replicas=2, server_names=("a",))
    return made


def segment(cluster: Cluster) -> SegmentRecord:
    return cluster.state.buffers["w"].segments[0]


def test_roles_switch_in_the_next_epoch(cluster: Cluster) -> None:
    """Both copies stay, and the record says so to a store of any age. A switch of another epoch, or with a server that
    was not heard of, is refused.
    """
    before = segment(cluster)
    cluster.do(RolesSwitched("w", before.id, 2))
    assert segment(cluster) == replace(before, server="b", backup="a", epoch=2, switched=2)
    record = cluster.state.buffers["w"]
    assert BufferRecord.from_json(record.to_json()) == record
    with pytest.raises(NotFoundError):
        cluster.do(RolesSwitched("w", before.id, 2))
    cluster.do(BackupsLost("b", frozenset({before.id})))
    with pytest.raises(NotFoundError):
        cluster.do(RolesSwitched("w", before.id, 4))
    assert segment(cluster).switched == 0


def test_a_switch_needs_both_servers(cluster: Cluster) -> None:
    cluster.do(ServerDied("b", 1))
    with pytest.raises(NotFoundError, match="has not confirmed"):
        cluster.do(RolesSwitched("w", segment(cluster).id, 2))


@pytest.mark.parametrize("gone", [False, True])
def test_a_former_primary_that_has_not_heard_of_it_is_restarted(cluster: Cluster, gone: bool) -> None:
    """It may have changes that it had not forwarded: the other one goes on alone. If that is gone, it does itself."""
    number = segment(cluster).id
    cluster.do(RolesSwitched("w", number, 2))
    if gone:
        cluster.do(ServerDied("b", 1))
    cluster.do(returned(cluster.state, "a", 2, {number}, as_held=Held(1)))
    assert (segment(cluster).server, segment(cluster).backup) == ("a" if gone else "b", "")


def test_a_former_primary_that_has_heard_of_it_stays_the_backup(cluster: Cluster) -> None:
    number = segment(cluster).id
    cluster.do(RolesSwitched("w", number, 2))
    cluster.do(returned(cluster.state, "a", 2, {number}, as_held=Held(2)))
    assert (segment(cluster).server, segment(cluster).backup) == ("b", "a")
    cluster.do(returned(cluster.state, "a", 1, {number}, as_held=Held(1)))  # the same run: its engine knows
    assert segment(cluster).backup == "a"


def test_a_restarted_primary_is_not_given_up_for_a_server_that_nobody_looked_at(cluster: Cluster) -> None:
    """The other one's lease had run out when servers were looked at, and runs anew: the coordinator was held up. It may
    be dead."""
    number = segment(cluster).id
    primary, backup = segment(cluster).server, segment(cluster).backup
    event = returned(cluster.state, primary, 2, {number})
    cluster.seconds += 60.0
    cluster.do(HeldUp(60.0))
    with pytest.raises(UnavailableError, match="was not heard of yet"):
        cluster.do(replace(event, seen=frozenset()))
    assert (segment(cluster).server, segment(cluster).backup) == (primary, backup)
    cluster.do(replace(event, seen=frozenset({backup})))
    assert (segment(cluster).server, segment(cluster).backup) == (backup, "")


def test_nothing_is_decided_before_the_present_primary_was_heard_of(cluster: Cluster) -> None:
    number = segment(cluster).id
    cluster.do(RolesSwitched("w", number, 2))
    cluster.state = replace(cluster.state, suspected=frozenset("b"))
    with pytest.raises(UnavailableError, match="was not heard of yet"):
        cluster.do(returned(cluster.state, "a", 2, {number}, as_held=Held(1)))


def test_roles_rest_while_copies_are_missing_or_a_server_is_drained(cluster: Cluster) -> None:
    for number in range(4):
        cluster.create(f"v{number}", replicas=2, server_names=("a",))
    assert balancer.due(cluster.state, cluster.now, {})
    drained = replace(cluster.state)
    cluster.do(ServerDrained("c"))
    assert not balancer.due(cluster.state, cluster.now, {})
    cluster.state = drained
    cluster.do(BackupsLost("a", frozenset({segment(cluster).id})))
    assert not balancer.due(cluster.state, cluster.now, {})
