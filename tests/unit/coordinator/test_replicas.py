"""smb.coordinator.replicas: who holds the copies of a segment, by state.step alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.events import (
    AnswerDrops,
    BackupsLost,
    CopyBegun,
    DropSegments,
    SaveBuffer,
    ServerDied,
    ServerLeft,
    ServerRenewed,
    Ticked,
)
from smb.coordinator.records import BufferRecord, Held, SegmentRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.state import SERVER_LEASE_S
from smb.drop_reasons import Ground
from tests.support.decisions import MIB, Cluster, registration, returned, server


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.register("a", "b", "c")
    return made


def roles(record: BufferRecord) -> list[tuple[str, str, int]]:
    return [(segment.server, segment.backup, segment.epoch) for segment in record.segments]


def make(cluster: Cluster, **wishes: object) -> BufferRecord:
    return cluster.create(replicas=2, server_names=("a",), **wishes)


def test_copies_lie_on_different_servers_and_hosts_and_count_twice(cluster: Cluster) -> None:
    """Each server gets one primary and one backup; where another host has room, the copy lies there."""
    record = cluster.create(replicas=2)
    assert all(segment.backup and segment.backup != segment.server for segment in record.segments)
    assert len({segment.backup for segment in record.segments}) == 3
    assert sum(held.nbytes for held in cluster.state.allocated.values()) == 2 * sum(
        segment.file_bytes for segment in record.segments
    )
    far = replace(server("far", capacity_bytes=8 * MIB), data_address="10.0.0.2:1")
    cluster.do(registration(cluster.state, far, frozenset()))
    assert roles(cluster.create("v", 1000, replicas=2, server_names=("b",))) == [("b", "far", 1)]
    assert cluster.state.copies("far")[0].role is CopyRole.BACKUP


def test_no_room_for_a_second_copy_is_an_error(cluster: Cluster) -> None:
    """And so is a cluster of one server; nothing is left of the attempt."""
    with pytest.raises(errors.OutOfMemoryError, match="in two copies"):
        cluster.create(elements=30 * MIB, replicas=2)
    assert not cluster.state.buffers
    alone = Cluster()
    alone.register("a")
    with pytest.raises(errors.UnavailableError, match="replicas=2 needs two live memory servers; alive: a"):
        alone.create(replicas=2)


def test_records_of_one_copy_are_stored_as_before(cluster: Cluster) -> None:
    """An older coordinator reads them; those of two copies come back as they were."""
    assert "backup" not in cluster.create().to_json()
    record = cluster.create("v", replicas=2)
    assert BufferRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("how", ["lease", "died", "left"])
def test_the_backup_is_promoted_once_the_primary_is_gone(cluster: Cluster, how: str) -> None:
    """Not before its lease is out, unless it is known to be dead or has left; the epoch counts up."""
    record = make(cluster)
    (segment,) = record.segments
    if how == "lease":
        cluster.seconds += SERVER_LEASE_S / 2
        cluster.renew("b")
        cluster.renew("c")
        cluster.do(Ticked())
        assert roles(cluster.state.buffers["w"]) == [("a", segment.backup, 1)]
        cluster.seconds += SERVER_LEASE_S / 2 + 0.1
    elif how == "died":
        cluster.do(ServerDied("a", 99))  # another run of it
        cluster.do(Ticked())
        assert roles(cluster.state.buffers["w"]) == [("a", segment.backup, 1)]
        cluster.do(ServerDied("a", 1))
    else:
        cluster.do(ServerLeft("a", 1))
    cluster.do(Ticked())
    assert roles(cluster.state.buffers["w"]) == [(segment.backup, "", 2)]
    assert cluster.state.allocation("a").segments == 0
    assert cluster.only(SaveBuffer).record == cluster.state.buffers["w"]
    # What it still has is dropped once it is back.
    cluster.do(returned(cluster.state, "a", 1, frozenset({segment.id})))
    cluster.do(registration(cluster.state, server("a"), frozenset({segment.id})))
    assert cluster.only(AnswerDrops).segment_ids == (segment.id,)
    assert roles(cluster.state.buffers["w"]) == [(segment.backup, "", 2)]


def test_room_for_a_copy_that_never_began_is_dropped(cluster: Cluster) -> None:
    """It was made for the next epoch. A server kept it for good, and no renewal was good as it held too much. What is
    being made now stays: the copy is about to begin, and the server need not register for it, which may take seconds
    if another server is slow.
    """
    (segment,) = make(cluster).segments
    cluster.do(ServerDied(segment.backup, 1))
    cluster.do(Ticked())
    (segment,) = cluster.state.buffers["w"].segments
    held, room = frozenset({segment.id}), Held(segment.epoch + 1, whole=False, begun=True)
    with pytest.raises(errors.NotFoundError, match="it holds more than the records say"):
        cluster.renew("c", used_bytes=segment.file_bytes)
    cluster.do(ServerRenewed("c", 1, segment.file_bytes, making=True))
    cluster.do(registration(cluster.state, server("c"), held, making=held, as_held=room))
    assert cluster.only(AnswerDrops) == AnswerDrops((), ())
    cluster.do(registration(cluster.state, server("c"), held, as_held=room))
    expected = AnswerDrops((segment.id,), (segment.epoch,), (segment.id,), (Ground.SUPERSEDED,))
    assert cluster.only(AnswerDrops) == expected
    cluster.do(CopyBegun("w", segment.id, "c", 1, segment.epoch + 1))
    cluster.do(registration(cluster.state, server("c"), held, as_held=room))
    assert cluster.only(AnswerDrops) == AnswerDrops((), ())


def test_a_lost_backup_leaves_the_record(cluster: Cluster) -> None:
    """The primary goes on alone under the next epoch."""
    (segment,) = make(cluster).segments
    cluster.do(ServerDied(segment.backup, 1))
    cluster.do(Ticked())
    assert roles(cluster.state.buffers["w"]) == [("a", "", 2)]
    assert cluster.state.buffers["w"].degraded


def test_both_gone_waits_for_whoever_comes_back(cluster: Cluster) -> None:
    """No server is given what neither of the two can tell; the first that is back with its memory goes on."""
    (segment,) = make(cluster).segments
    cluster.do(ServerDied("a", 1))
    cluster.do(ServerDied(segment.backup, 1))
    cluster.do(Ticked())
    assert roles(cluster.state.buffers["w"]) == [("a", segment.backup, 1)]
    cluster.do(returned(cluster.state, segment.backup, 2, frozenset({segment.id})))
    cluster.do(registration(cluster.state, server(segment.backup, 2), frozenset({segment.id})))
    cluster.do(Ticked())
    assert roles(cluster.state.buffers["w"]) == [(segment.backup, "", 2)]


@pytest.mark.parametrize(
    ("name", "held", "found"),
    [
        ("a", True, ("b", "", 2)),  # a primary forgets what it had not forwarded
        ("a", False, ("b", "", 2)),
        ("b", True, ("a", "b", 1)),  # a backup gets again what it had not answered
        ("b", False, ("a", "", 2)),
    ],
)
def test_a_server_that_was_restarted(cluster: Cluster, name: str, held: bool, found: tuple[str, str, int]) -> None:
    """With its memory or without."""
    record = cluster.create(replicas=2, server_names=("a",))
    (segment,) = record.segments
    name = segment.backup if name == "b" else name
    cluster.do(returned(cluster.state, name, 2, frozenset({segment.id}) if held else frozenset()))
    assert roles(cluster.state.buffers["w"]) == [tuple(segment.backup if part == "b" else part for part in found)]


def test_a_primary_that_reaches_its_backup_no_more_loses_it(cluster: Cluster) -> None:
    """Never itself: the backup's word alone changes nothing."""
    (segment,) = make(cluster).segments
    cluster.do(BackupsLost(segment.backup, frozenset({segment.id})))
    assert roles(cluster.state.buffers["w"]) == [("a", segment.backup, 1)]
    cluster.do(BackupsLost("a", frozenset({segment.id})))
    assert roles(cluster.state.buffers["w"]) == [("a", "", 2)]


def test_changes_are_bounded(cluster: Cluster) -> None:
    """A store takes so many records at a time; the rest follows with the next event."""
    for index in range(5):
        cluster.create(f"w{index}", 1000, replicas=2, server_names=("a",))
    cluster.do(ServerDied("a", 1))
    changed = []
    while any(isinstance(effect, SaveBuffer) for effect in cluster.do(Ticked(2))):
        changed.append(sum(isinstance(effect, SaveBuffer) for effect in cluster.effects))
    assert changed == [2, 2, 1]


def test_a_deletion_drops_both_copies(cluster: Cluster) -> None:
    """Each on its server."""
    from smb.coordinator.events import BufferDeleted

    (segment,) = make(cluster).segments
    cluster.do(BufferDeleted("w", missing_ok=False))
    dropped = cluster.only(DropSegments).segments
    assert {(part.id, part.server) for part in dropped} == {(segment.id, "a"), (segment.id, segment.backup)}
    assert all(isinstance(part, SegmentRecord) for part in dropped)
    assert not any(held.segments for held in cluster.state.allocated.values())
