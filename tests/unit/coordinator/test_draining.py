"""A server that is emptied: what is refused, what is wanted, and what becomes of roles; by state.step alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from smb import errors
from smb.coordinator.events import (
    CopiesEnded,
    CopyBegun,
    CopyDropped,
    DropSegments,
    MoveAllowed,
    SaveBuffer,
    SaveServer,
    ServerDied,
    ServerDrained,
    ServerLeft,
)
from smb.coordinator.moves import wanted_copies
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.moves.wanted_copies import AT_ONCE, Wish, wishes
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord, ServerRecord
from smb.coordinator.room_to_drain import BOUND, MIRROR, staying
from smb.rpc import control_pb2 as pb
from tests.support.decisions import MIB, Cluster, registration, returned, server
from tests.unit.coordinator.test_replicas import roles


@pytest.fixture
def cluster() -> Cluster:
    """Four servers; "w" has its primary on a and its backup on b."""
    made = Cluster()
    made.register("a", "b")
    record = made.create(replicas=2, server_names=("a",))
    assert roles(record) == [("a", "b", 1)]
    made.register("c", "d")
    return made


def segment(cluster: Cluster, name: str = "w") -> SegmentRecord:
    return cluster.state.buffers[name].segments[0]


def wanted(cluster: Cluster) -> list[Wish]:
    return wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now))


def begin(cluster: Cluster, leaving: str, target: str = "c", **changes: object) -> None:
    event = CopyBegun("w", segment(cluster).id, target, 1, segment(cluster).epoch + 1, leaving)
    cluster.do(replace(event, **changes))  # type: ignore[arg-type]


def test_it_gets_nothing_new(cluster: Cluster) -> None:
    """Neither segments nor copies, also where it is named; undrain takes that back, and neither is an error twice."""
    for _ in range(2):
        cluster.do(ServerDrained("c"))
    assert cluster.effects == ()
    record = cluster.create("v", 20 * MIB, replicas=2)
    assert not any("c" in (each.server, each.backup) for each in record.segments)
    with pytest.raises(errors.UnavailableError, match=r'"c" is being drained and gets no new segments.*smb undrain c'):
        cluster.want("u", server_names=("c",))
    for _ in range(2):
        cluster.do(ServerDrained("c", undo=True))
    assert "c" in cluster.create("u", server_names=("c",)).segments[0].server


def test_it_is_stored(cluster: Cluster) -> None:
    """Restarts of the coordinator and of the server keep it; older coordinators read the record of any other server."""
    assert "draining" not in cluster.state.servers["a"].to_json()
    cluster.do(ServerDrained("a"))
    saved = cluster.only(SaveServer).record
    assert ServerRecord.from_json(saved.to_json()) == saved == cluster.state.servers["a"]
    cluster.do(registration(cluster.state, replace(server("a"), instance_id=2), frozenset((segment(cluster).id,))))
    assert cluster.state.servers["a"].draining


def test_what_is_refused(cluster: Cluster) -> None:
    """An unknown server, the last one, and where the others have no room: that is named. Nothing has changed then."""
    with pytest.raises(errors.NotFoundError, match='"x": no memory server has that name; there are: a, b, c, d'):
        cluster.do(ServerDrained("x"))
    alone = Cluster()
    alone.register("a")
    with pytest.raises(errors.UnavailableError, match="no other live memory server"):
        alone.do(ServerDrained("a"))
    cluster.create("large", 14 * MIB, replicas=2, server_names=("a",))
    for name in ("b", "d"):
        cluster.create(f"on-{name}", 14 * MIB, server_names=(name,))
    before = cluster.state
    with pytest.raises(
        errors.OutOfMemoryError, match=r'room for copies of buffer "large" \(56.*free: .*Delete buffers'
    ):
        cluster.do(ServerDrained("a"))
    assert cluster.state is before


def test_a_backup_leaves(cluster: Cluster) -> None:
    """Its primary copies the segment elsewhere; the copy that leaves is dropped, but not one of a later epoch."""
    cluster.do(ServerDrained("b"))
    (wish,) = wanted(cluster)
    assert (wish.source, wish.leaving, wish.target in ("c", "d")) == ("a", "b", True)
    begin(cluster, "b")
    assert (roles(cluster.state.buffers["w"]), segment(cluster).copying_to) == ([("a", "", 2)], "c")
    drop = cluster.only(DropSegments)
    assert (drop.epoch, [each.server for each in drop.segments]) == (2, ["b"])
    assert cluster.state.allocation("b").segments == 0
    assert wanted(cluster) == []
    cluster.do(CopiesEnded("a", {segment(cluster).id: 2}, whole=True))
    assert roles(cluster.state.buffers["w"]) == [("a", "c", 3)]


def test_a_primary_leaves(cluster: Cluster) -> None:
    """Its backup is promoted, and copies the segment elsewhere, in one epoch."""
    cluster.do(ServerDrained("a"))
    (wish,) = wanted(cluster)
    assert (wish.source, wish.leaving) == ("b", "a")
    begin(cluster, "a")
    assert (roles(cluster.state.buffers["w"]), segment(cluster).copying_to) == ([("b", "", 2)], "c")
    assert [each.server for each in cluster.only(DropSegments).segments] == ["a"]
    cluster.do(CopiesEnded("b", {segment(cluster).id: 2}, whole=True))
    assert roles(cluster.state.buffers["w"]) == [("b", "c", 3)]
    assert cluster.state.allocation("a").segments == 0


def test_who_comes_late_opens_what_has_moved(cluster: Cluster) -> None:
    """A creation with exist_ok that names the servers of the beginning, or their number, or a buffer like it."""
    cluster.create("like", replicas=2, server_names=("c",), like="")
    cluster.do(ServerDrained("a"))
    begin(cluster, "a")
    cluster.do(CopiesEnded("b", {segment(cluster).id: 2}, whole=True))
    for wish in ({"server_names": ("a",)}, {"server_count": 1}, {"like": "like", "shape": (), "dtype": ""}):
        assert cluster.want("w", replicas=2, exist_ok=True, **wish) == ()
    with pytest.raises(errors.AlreadyExistsError, match="with stripe"):
        cluster.want("w", replicas=2, exist_ok=True, server_names=("a",), stripe_bytes=4096)


def test_what_does_not_begin(cluster: Cluster) -> None:
    """In another epoch, on a server that has a copy, of one that has none, or where the other copy's server is away."""
    for leaving, changes in (
        ("a", {"epoch": 1}),
        ("a", {"epoch": 3}),
        ("a", {"target": "b"}),
        ("b", {"target": "a"}),
        ("c", {"target": "d"}),
        ("", {}),
    ):
        with pytest.raises(errors.NotFoundError, match="needs no copy"):
            begin(cluster, leaving, **changes)
    cluster.do(ServerDied("b", 1))
    with pytest.raises(errors.NotFoundError, match='"b", which has the other copy, has not confirmed that it has it'):
        begin(cluster, "a")
    assert roles(cluster.state.buffers["w"]) == [("a", "b", 1)]


def test_both_leave(cluster: Cluster) -> None:
    """One after the other, the backup first."""
    cluster.do(ServerDrained("a"))
    cluster.do(ServerDrained("b"))
    assert [wish.leaving for wish in wanted(cluster)] == ["b"]
    begin(cluster, "b")
    cluster.do(CopiesEnded("a", {segment(cluster).id: 2}, whole=True))
    (wish,) = wanted(cluster)
    assert (wish.leaving, wish.source, wish.target) == ("a", "c", "d")


def test_lost_copies_go_first_and_a_few_leave_at_a_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few segments have one copy, if they are not small."""
    monkeypatch.setattr(wanted_copies, "SMALL_BYTES", 0)
    for number in range(6):
        cluster.create(f"v{number}", 1000, replicas=2, server_names=("a",))
    lost = replace(cluster.state.buffers["v5"], segments=(replace(segment(cluster, "v5"), backup=""),))
    cluster.state = replace(cluster.state, buffers={**cluster.state.buffers, "v5": lost})
    cluster.do(ServerDrained("b"))
    found = wanted(cluster)
    assert found[0].record.name == "v5"
    assert len([wish for wish in found if wish.source == "a"]) == AT_ONCE


def test_what_stays_is_named(cluster: Cluster) -> None:
    """With the reason; locks go by themselves, and what moves is not said to stay."""
    cluster.create("one", server_names=("a",))
    cluster.use(Kind.LOCK, "lock")
    cluster.create("source", 1000, versions=2, server_names=("c",))
    cluster.create("mirror", mirror_of="source", server_names=("a",))
    cluster.do(ServerDrained("a"))
    pool = cluster.state.pool(cluster.now)

    records = dict(cluster.state.buffers)
    number = segment(cluster, "one").id
    assert [(each.record.name, each.why) for each in staying(records.values(), pool, "a")] == [("mirror", MIRROR)]
    bound = staying(records.values(), pool, "a", {number})
    assert [(each.record.name, each.why) for each in bound] == [("mirror", MIRROR), ("one", BOUND)]
    assert not any(wish.segment.id == number for wish in wishes([*records.values()], pool, bound={number}))
    full = replace(pool, free_bytes=dict.fromkeys(pool.free_bytes, 1))
    for name in ("w", "one"):
        (found,) = staying((records[name],), full, "a")
        assert found.why.startswith("no other server has room for 4")
        assert found.segments == 1


def move(cluster: Cluster, name: str, target: str) -> None:
    """Up to where the copy on the target is whole."""
    number = segment(cluster, name).id
    cluster.do(CopyBegun(name, number, target, 1, segment(cluster, name).epoch + 1))
    source = segment(cluster, name).server
    cluster.do(CopiesEnded(source, {number: segment(cluster, name).epoch}, whole=True))


def test_a_buffer_with_one_copy_moves(cluster: Cluster) -> None:
    """Its server lets it, so that it has roles; it gets a copy elsewhere; the one on the drained server goes."""
    made = cluster.create("one", server_names=("c",))
    number = made.segments[0].id
    assert (made.segments[0].epoch, made.movable, "epoch" in made.to_json().split("segments")[1]) == (0, False, False)
    cluster.do(ServerDrained("c"))
    (wish,) = wanted(cluster)
    assert (wish.source, wish.leaving, wish.segment.epoch) == ("c", "", 0)
    with pytest.raises(errors.NotFoundError, match="needs no copy"):
        cluster.do(CopyBegun("one", number, "d", 1, 1))
    cluster.do(MoveAllowed("one", number))
    assert roles(cluster.only(SaveBuffer).record) == [("c", "", 2)]
    with pytest.raises(errors.NotFoundError, match="already has roles"):
        cluster.do(MoveAllowed("one", number))
    (wish,) = wanted(cluster)
    assert (wish.source, wish.leaving, wish.segment.epoch) == ("c", "", 2)
    move(cluster, "one", wish.target)
    assert roles(cluster.state.buffers["one"]) == [("c", wish.target, 4)]
    (last,) = wanted(cluster)
    assert (last.target, last.source, last.leaving) == ("", wish.target, "c")
    for leaving, epoch in (("c", 4), ("c", 6), ("d" if wish.target == "a" else "a", 5)):
        with pytest.raises(errors.NotFoundError, match="does not leave"):
            cluster.do(CopyDropped("one", number, leaving, epoch))
    cluster.do(CopyDropped("one", number, "c", 5))
    drop = cluster.only(DropSegments)
    assert (drop.epoch, [each.server for each in drop.segments]) == (5, ["c"])
    moved = cluster.state.buffers["one"]
    assert (roles(moved), moved.movable, moved.degraded) == ([(wish.target, "", 5)], True, False)
    assert BufferRecord.from_json(moved.to_json()) == moved
    assert cluster.state.allocation("c").segments == 0
    assert wanted(cluster) == []


def test_a_move_that_is_not_wanted_any_more(cluster: Cluster) -> None:
    """The server is not drained any more: the copy elsewhere goes. One whose server is dead is kept."""
    cluster.create("one", server_names=("c",))
    cluster.do(ServerDrained("c"))
    cluster.do(MoveAllowed("one", segment(cluster, "one").id))
    move(cluster, "one", "d")
    cluster.do(ServerDrained("c", undo=True))
    (wish,) = wanted(cluster)
    assert (wish.target, wish.source, wish.leaving) == ("", "c", "d")
    died = cluster.state
    cluster.do(ServerDied("c", 1))
    assert wanted(cluster) == []
    with pytest.raises(errors.NotFoundError, match='"c", which has the other copy, has not confirmed that it has it'):
        cluster.do(CopyDropped("one", segment(cluster, "one").id, "d", 5))
    cluster.state = died
    cluster.do(CopyDropped("one", segment(cluster, "one").id, "d", 5))
    assert roles(cluster.state.buffers["one"]) == [("c", "", 5)]


def test_a_server_that_moves_a_buffer_is_restarted(cluster: Cluster) -> None:
    """With its memory it goes on, though the copy elsewhere is whole: that may be lost, and its server's lease run.
    Without it that copy goes on.
    """
    cluster.create("one", server_names=("c",))
    number = segment(cluster, "one").id
    cluster.do(ServerDrained("c"))
    cluster.do(MoveAllowed("one", number))
    move(cluster, "one", "d")
    before = cluster.state
    cluster.do(returned(cluster.state, "c", 2, frozenset({number})))
    assert roles(cluster.state.buffers["one"]) == [("c", "", 5)]
    cluster.state = before
    cluster.do(returned(cluster.state, "c", 2, frozenset()))
    assert roles(cluster.state.buffers["one"]) == [("d", "", 5)]


def test_a_server_of_before_does_not_let_a_buffer_move(cluster: Cluster) -> None:
    """It does not know the question, but that it is asked to confirm a role that it has not. Nothing is stored then."""
    cluster.create("one", server_names=("c",))
    cluster.do(ServerDrained("c"))
    asked, stored = [], []

    class Servers:
        async def take_roles(self, _: object, parts: tuple[pb.Replica, ...]) -> frozenset[int]:
            asked.extend(parts)
            if parts[0].confirm:  # as memserver/replication.py did
                raise errors.NotFoundError("no such role here")
            return frozenset()

    async def commit(event: object) -> None:
        stored.append(event)

    async def nothing(*_: object) -> None:
        pass

    commit_log: Any = SimpleNamespace(state=cluster.state, now=lambda: cluster.now, commit=commit)
    servers: Any = Servers()
    asyncio.run(CopyMaker(commit_log, servers, nothing, nothing).begin())
    assert [(part.segment_id, part.let_move, part.confirm) for part in asked] == [
        (segment(cluster, "one").id, True, True)
    ]
    assert stored == []


def test_two_copies_are_not_one_too_many(cluster: Cluster) -> None:
    """Of a buffer with two copies none is dropped in this way, and none is made movable: it is."""
    number = segment(cluster).id
    with pytest.raises(errors.NotFoundError, match="does not leave"):
        cluster.do(CopyDropped("w", number, "b", 2))
    with pytest.raises(errors.NotFoundError, match="already has roles"):
        cluster.do(MoveAllowed("w", number))


def test_who_comes_late_opens_what_has_moved_alone(cluster: Cluster) -> None:
    """A creation with exist_ok that names the server of the beginning, of a buffer with one copy."""
    cluster.create("one", server_names=("c",))
    cluster.do(ServerDrained("c"))
    cluster.do(MoveAllowed("one", segment(cluster, "one").id))
    move(cluster, "one", "d")
    cluster.do(CopyDropped("one", segment(cluster, "one").id, "c", 5))
    assert cluster.want("one", exist_ok=True, server_names=("c",)) == ()


def test_one_that_stops_empty_comes_back_as_a_new_one(cluster: Cluster) -> None:
    """Which gets segments."""
    cluster.do(ServerDrained("d"))
    cluster.do(ServerLeft("d", 1))
    cluster.register("d")
    assert not cluster.state.servers["d"].draining
