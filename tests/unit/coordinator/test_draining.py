"""A server that is emptied: what is refused, what is wanted, and what becomes of roles; by state.step alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.draining import MIRROR, ONE_COPY, staying
from smb.coordinator.events import (
    CopiesEnded,
    CopyBegun,
    DropSegments,
    SaveServer,
    ServerDied,
    ServerDrained,
    ServerLeft,
    ServerRegistered,
)
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord, ServerRecord
from smb.coordinator.wanted_copies import FROM_ONE_MAX, Wish, wishes
from tests.support.decisions import MIB, Cluster, server
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
    with pytest.raises(errors.UnavailableError, match=r'"c" is being drained and gets nothing new.*smb undrain c'):
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
    cluster.do(ServerRegistered(replace(server("a"), instance_id=2), frozenset((segment(cluster).id,))))
    assert cluster.state.servers["a"].draining


def test_what_is_refused(cluster: Cluster) -> None:
    """An unknown server, the last one, and where the others have no room: that is named. Nothing has changed then."""
    with pytest.raises(errors.NotFoundError, match='"x": no such memory server is known; there are: a, b, c, d'):
        cluster.do(ServerDrained("x"))
    alone = Cluster()
    alone.register("a")
    with pytest.raises(errors.UnavailableError, match="no other memory server is alive"):
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
        with pytest.raises(errors.NotFoundError, match="wants no copy"):
            begin(cluster, leaving, **changes)
    cluster.do(ServerDied("b", 1))
    with pytest.raises(errors.NotFoundError, match='"b", which has the other copy, is not alive'):
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


def test_lost_copies_go_first_and_a_few_leave_at_a_time(cluster: Cluster) -> None:
    """So few segments have one copy."""
    for number in range(6):
        cluster.create(f"v{number}", 1000, replicas=2, server_names=("a",))
    lost = replace(cluster.state.buffers["v5"], segments=(replace(segment(cluster, "v5"), backup=""),))
    cluster.state = replace(cluster.state, buffers={**cluster.state.buffers, "v5": lost})
    cluster.do(ServerDrained("b"))
    found = wanted(cluster)
    assert found[0].record.name == "v5"
    assert len([wish for wish in found if wish.source == "a"]) == FROM_ONE_MAX


def test_what_stays_is_named(cluster: Cluster) -> None:
    """With the reason; locks go by themselves, and what moves is not said to stay."""
    cluster.create("one", server_names=("a",))
    cluster.use(Kind.LOCK, "lock")
    cluster.create("source", 1000, versions=2, server_names=("c",))
    cluster.create("mirror", mirror_of="source", server_names=("a",))
    cluster.do(ServerDrained("a"))
    pool = cluster.state.pool(cluster.now)

    def shown(records: dict[str, BufferRecord]) -> list[tuple[str, str]]:
        return [(each.record.name, each.why) for each in staying(records.values(), pool, "a")]

    records = dict(cluster.state.buffers)
    assert shown(records) == [("mirror", MIRROR), ("one", ONE_COPY)]
    full = replace(pool, free_bytes=dict.fromkeys(pool.free_bytes, 1))
    (found,) = staying((records["w"],), full, "a")
    assert found.why.startswith("no other server has room for 4")
    assert found.segments == 1


def test_one_that_stops_empty_comes_back_as_a_new_one(cluster: Cluster) -> None:
    """Which gets segments."""
    cluster.do(ServerDrained("d"))
    cluster.do(ServerLeft("d", 1))
    cluster.register("d")
    assert not cluster.state.servers["d"].draining
