"""smb.coordinator.moves.wanted_copies and replicas: which lost copies are made anew, where, and when they count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.bundles import Bundles
from smb.coordinator.events import (
    CopiesEnded,
    CopyBegun,
    CopyProgress,
    SaveBuffer,
    ServerDied,
    ServerRenewed,
)
from smb.coordinator.messages import buffer_message
from smb.coordinator.moves.wanted_copies import AT_ONCE, LEAST_BYTES, SMALL_BYTES, Wish, wishes
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.coordinator.replicas import Copy, CopyRole
from smb.coordinator.room_to_drain import without_room
from tests.support.decisions import MIB, Cluster, registration, returned, server
from tests.unit.coordinator.test_replicas import roles


@pytest.fixture
def cluster() -> Cluster:
    """Three servers; "w" has lost its copy on b, and goes on with the one on a, in epoch 2."""
    made = Cluster()
    made.register("a", "b", "c")
    record = made.create(replicas=2, server_names=("a",))
    backup = record.segments[0].backup
    made.do(ServerDied(backup, 1))
    made.do(returned(made.state, backup, 2, frozenset()))
    made.do(registration(made.state, replace(server(backup), instance_id=2), frozenset()))
    assert roles(made.state.buffers["w"]) == [("a", "", 2)]
    return made


def wanted(cluster: Cluster, **options: frozenset[str]) -> list[Wish]:
    return wishes(list(cluster.state.buffers.values()), cluster.state.pool(cluster.now), **options)


def segment(cluster: Cluster) -> SegmentRecord:
    return cluster.state.buffers["w"].segments[0]


def begin(cluster: Cluster, target: str = "c", **changes: object) -> None:
    instance_id = cluster.state.servers[target].instance_id
    event = CopyBegun("w", segment(cluster).id, target, instance_id, segment(cluster).epoch + 1)
    cluster.do(replace(event, **changes))  # type: ignore[arg-type]


def test_a_lost_copy_is_wanted_where_there_is_room(cluster: Cluster) -> None:
    """Not on the server that has the other one, nor on one to be avoided, or that its source does not reach; on another
    host before others."""
    (wish,) = wanted(cluster)
    assert wish.target in ("b", "c")
    assert [wish.target for wish in wanted(cluster, avoid=frozenset(("b",)))] == ["c"]
    assert wanted(cluster, avoid=frozenset(("b", "c"))) == []
    apart = [frozenset((wish.source, other)) for other in ("b", "c")]
    assert [wish.target for wish in wanted(cluster, apart=frozenset(apart[:1]))] == ["c"]
    assert wanted(cluster, apart=frozenset(apart)) == []
    assert wanted(cluster, apart=frozenset((frozenset(("b", "c")),))) == [wish]
    far = replace(server("far", capacity_bytes=8 * MIB), data_address="10.0.0.2:1")
    cluster.do(registration(cluster.state, far, frozenset()))
    assert [wish.target for wish in wanted(cluster)] == ["far"]


def test_without_room_it_stays_degraded(cluster: Cluster) -> None:
    """Nothing is wanted, and that is known."""
    record, pool = cluster.state.buffers["w"], cluster.state.pool(cluster.now)
    assert not without_room(record, pool, Bundles([record]))
    full = replace(pool, free_bytes={"a": 64 * MIB, "b": 1, "c": 1})
    assert without_room(record, full, Bundles([record]))
    assert wishes([record], full) == []


@pytest.mark.parametrize(("nbytes", "most"), [(17 << 20, AT_ONCE), (8 << 20, 4), (1000, SMALL_BYTES // LEAST_BYTES)])
def test_a_few_are_made_at_a_time(cluster: Cluster, nbytes: int, most: int) -> None:
    """From one server, and to one: two large ones, or more that are small together; those under way count."""
    records = []
    for number in range(100):
        made = cluster.create(f"v{number}", 1000, replicas=2, server_names=("a",))
        one = replace(made.segments[0], backup="", file_bytes=nbytes, copying_to="c" if number == 0 else "")
        records.append(replace(made, segments=(one,)))
    pool = replace(cluster.state.pool(cluster.now), free_bytes=dict.fromkeys("abc", 1 << 40))
    found = wishes(records, pool)
    assert len(found) == most - 1
    targets = [wish.target for wish in found] + ["c"]
    assert max(map(targets.count, targets)) <= most


def test_a_copy_waits_for_another_zone(cluster: Cluster) -> None:
    """Rather than be made in its source's zone while the other zone's server gets others. Without room there, or if
    that server is avoided, it is made in its zone."""
    records = []
    for number, target in enumerate(("b", "b", "")):
        made = cluster.create(f"v{number}", 1000, replicas=2, server_names=("a" if not target else "c",))
        one = replace(made.segments[0], backup="", file_bytes=SMALL_BYTES, copying_to=target)
        records.append(replace(made, segments=(one,)))
    pool = replace(cluster.state.pool(cluster.now), free_bytes=dict.fromkeys("abc", 1 << 40))
    pool = replace(pool, hosts={name: name for name in "abc"}, zones={"a": "x", "b": "y", "c": "x"})
    assert wishes(records, pool) == []
    assert [wish.target for wish in wishes(records[-1:], pool)] == ["b"]
    assert [wish.target for wish in wishes(records, pool, avoid=frozenset("b"))] == ["c"]
    assert [wish.target for wish in wishes(records[-1:], pool, unready=frozenset("b"))] == ["b"]
    assert wishes(records[-1:], pool, unready=frozenset({records[-1].segments[0].server})) == []
    full = replace(pool, free_bytes=pool.free_bytes | {"b": 1})
    assert [wish.target for wish in wishes(records, full)] == ["c"]
    assert [wish.target for wish in wishes(records, replace(pool, zones={}))] == ["c"]


@pytest.mark.parametrize("lost", ["source", "target"])
def test_copies_that_cannot_end_do_not_count(cluster: Cluster, lost: str) -> None:
    """Their source or their target is lost: others begin, from any server and to any, as if these were not there."""
    records = []
    for number in range(10):
        made = cluster.create(f"v{number}", 1000, replicas=2, server_names=("a",))
        pair = {"server": "gone", "copying_to": "c"} if lost == "source" else {"server": "a", "copying_to": "gone"}
        one = replace(made.segments[0], backup="", file_bytes=SMALL_BYTES, **(pair if number < 8 else {}))
        records.append(replace(made, segments=(one,)))
    pool = replace(cluster.state.pool(cluster.now), free_bytes={"a": 1 << 40, "c": 1 << 40}, dead=frozenset({"gone"}))
    found = wishes(records, pool, most=4)
    assert [(wish.record.name, wish.source, wish.target) for wish in found] == [("v8", "a", "c"), ("v9", "a", "c")]


def test_a_copy_counts_once_its_primary_says_so(cluster: Cluster) -> None:
    """While it is made its server has the memory in its books, and a part; then it is the backup, one epoch on."""
    before = cluster.state.allocation("c")
    begin(cluster)
    assert cluster.only(SaveBuffer).record.degraded
    assert cluster.state.allocation("c").nbytes == before.nbytes + segment(cluster).file_bytes
    assert cluster.state.copies("a") == [Copy(segment(cluster).id, 3, CopyRole.PRIMARY, "c", copying=True)]
    assert cluster.state.copies("c") == [Copy(segment(cluster).id, 3, CopyRole.BACKUP, "a", copying=True)]
    assert BufferRecord.from_json(cluster.state.buffers["w"].to_json()) == cluster.state.buffers["w"]
    assert wanted(cluster) == []
    for name, epoch in (("a", 2), ("a", 4), ("c", 3)):  # an old word, one from nowhere, and not the primary's
        cluster.do(CopiesEnded(name, {segment(cluster).id: epoch}, whole=True))
        assert cluster.effects == ()
    cluster.do(CopiesEnded("a", {segment(cluster).id: 3}, whole=True))
    assert roles(cluster.state.buffers["w"]) == [("a", "c", 4)]
    assert cluster.state.allocation("c").nbytes == before.nbytes + segment(cluster).file_bytes
    cluster.do(ServerDied("a", 1))
    cluster.do(returned(cluster.state, "a", 2, frozenset()))
    assert roles(cluster.state.buffers["w"]) == [("c", "", 5)]


def test_a_copy_that_was_given_up_is_begun_anew(cluster: Cluster) -> None:
    """In a later epoch, and its memory is free again."""
    begin(cluster)
    cluster.do(CopiesEnded("a", {segment(cluster).id: 3}, whole=False))
    assert roles(cluster.state.buffers["w"]) == [("a", "", 4)]
    assert cluster.state.allocation("c").nbytes == 0
    begin(cluster, "b")
    assert (segment(cluster).copying_to, segment(cluster).epoch) == ("b", 5)


def test_what_is_being_copied_to_is_never_promoted(cluster: Cluster) -> None:
    """Without its primary it waits; a primary that restarts begins anew, as what was on its way is forgotten."""
    begin(cluster)
    cluster.do(ServerDied("a", 1))
    cluster.do(returned(cluster.state, "c", 1, frozenset((segment(cluster).id,))))
    assert roles(cluster.state.buffers["w"]) == [("a", "", 3)]
    cluster.do(returned(cluster.state, "a", 2, frozenset((segment(cluster).id,))))
    assert roles(cluster.state.buffers["w"]) == [("a", "", 4)]
    assert segment(cluster).copying_to == ""


@pytest.mark.parametrize("held", [True, False])
def test_a_new_copy_is_lost_with_its_server(cluster: Cluster, held: bool) -> None:
    """Also when that comes back with what it had so far."""
    begin(cluster)
    cluster.do(returned(cluster.state, "c", 2, frozenset((segment(cluster).id,) if held else ())))
    assert (roles(cluster.state.buffers["w"]), segment(cluster).copying_to) == ([("a", "", 4)], "")


def test_a_copy_that_is_not_wanted_any_more_is_not_begun(cluster: Cluster) -> None:
    """Another one was begun meanwhile, the buffer is gone, or the server runs anew."""
    for changes in ({"key": "v"}, {"instance_id": 9}, {"epoch": 2}, {"epoch": 4}, {"segment_id": 99}):
        with pytest.raises(errors.NotFoundError, match="needs no copy"):
            begin(cluster, **changes)
    begin(cluster)
    with pytest.raises(errors.NotFoundError, match="needs no copy"):
        begin(cluster, "b")


def test_what_is_told_of_a_copy(cluster: Cluster) -> None:
    """Where it is made, how far that is, and how long it may take."""
    begin(cluster)
    cluster.do(ServerRenewed("a", 1, 0, (CopyProgress(segment(cluster).id, MIB, 4 * MIB, MIB),)))
    (shown,) = buffer_message(cluster.state, cluster.state.buffers["w"]).layout.segments
    assert (shown.copying_to, shown.copied, shown.copy_left_s, shown.backup) == ("c", 0.25, 3.0, "")
    cluster.renew("a")
    assert cluster.state.progress == {}
