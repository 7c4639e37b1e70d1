"""smb.coordinator.steps: every decision, without a network, a disk or a clock."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator import ended_sessions as sessions
from smb.coordinator import limits
from smb.coordinator.events import (
    AnswerDrops,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    ClientsKicked,
    DropSegments,
    EraseBuffer,
    EraseServer,
    EraseSession,
    MakeSegments,
    NamesFreed,
    Report,
    Restarted,
    SaveBuffer,
    SaveSequence,
    SaveServer,
    SaveSession,
    SaveTokenFloor,
    ServerCounted,
    ServerLeft,
    ServerRegistered,
    ServerSuspected,
    SessionClosed,
    SessionRenewed,
    TellEnded,
    Ticked,
    WakeOpeners,
)
from smb.coordinator.messages import ended_message
from smb.coordinator.records import BufferRecord, Kind, ServerRecord, SessionRecord, ShownCertificate
from smb.coordinator.state import SERVER_LEASE_S, SESSION_LEASE_S, Allocation, load
from smb.coordinator.validate import first_use
from smb.drop_reasons import Ground
from smb.rpc import control_pb2 as pb
from smb.rpc.coordinator_client import SessionEndedError
from smb.rpc.metadata import pack
from tests.support.decisions import MIB, Cluster, registration, server


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.register("a", "b")
    return made


def test_a_creation_is_stored_pending_made_and_only_then_shown(cluster: Cluster) -> None:
    """The pending record is saved before any segment is made; BufferMade saves it ready and wakes who waits."""
    cluster.want("w")
    pending = cluster.only(MakeSegments).record
    assert not pending.ready
    assert cluster.effects == (SaveBuffer(pending), MakeSegments(pending), SaveSequence(1))
    assert [segment.server for segment in pending.segments] == ["a", "b"]
    assert len({pending.id, *(segment.id for segment in pending.segments)}) == 3
    cluster.do(BufferMade("w"))
    assert cluster.only(SaveBuffer).record == replace(pending, ready=True)
    assert cluster.only(WakeOpeners).key == "w"
    assert pending.epoch == 1
    assert pending.created_at == cluster.now.wall


def test_a_failed_creation_leaves_nothing(cluster: Cluster) -> None:
    """After BufferFailed the record, the name and the promised memory are gone, and every segment is to be dropped."""
    before = cluster.state
    cluster.want("w")
    segments = cluster.only(MakeSegments).record.segments
    assert cluster.state.allocation("a").nbytes > 0
    cluster.do(BufferFailed("w"))
    assert cluster.effects[:3] == (
        EraseBuffer("w"),
        DropSegments(segments, 0, Ground.NEVER_MADE),
        WakeOpeners("w"),
    )
    assert cluster.state.buffers == before.buffers
    assert cluster.state.allocation("a") == cluster.state.allocation("b") == Allocation()


def test_pending_creations_reserve_their_memory(cluster: Cluster) -> None:
    """Two creations of 80 of 128 MiB at the same time: the second is refused while the first is still being made."""
    cluster.want("w", elements=20 * MIB)
    with pytest.raises(errors.OutOfMemoryError, match=r'create of "v": no room for 80 MiB; free: '):
        cluster.want("v", elements=20 * MIB)
    cluster.do(BufferFailed("w"))
    cluster.want("v", elements=20 * MIB)


def test_a_taken_name_is_refused_or_opened(cluster: Cluster) -> None:
    """ALREADY_EXISTS without exist_ok; with it the equal one is taken, and an unequal one's difference is told."""
    cluster.want("w")
    with pytest.raises(errors.AlreadyExistsError, match="is being created by another client"):
        cluster.want("w")
    cluster.do(BufferMade("w"))
    with pytest.raises(errors.AlreadyExistsError, match='a buffer "w" exists; choose another name'):
        cluster.want("w")
    assert cluster.want("w", exist_ok=True) == ()
    for wishes, told in (
        ({"elements": 5}, r"with shape \(1048576,\), not \(5,\)"),
        ({"dtype": "int32"}, "with dtype float32, not int32"),
        ({"stripe_bytes": 8192}, "with stripe 262144, not 8192"),
        ({"server_count": 1}, "with server count 2, not 1"),
        ({"server_names": ("b", "a")}, r"with servers \('a', 'b'\), not \('b', 'a'\)"),
        ({"versions": 2}, "with versions 1, not 2"),
    ):
        with pytest.raises(errors.AlreadyExistsError, match=told):
            cluster.want("w", exist_ok=True, **wishes)
    assert cluster.want("w", exist_ok=True, server_count=2, stripe_bytes=MIB // 4) == ()


def test_like_copies_shape_cut_and_servers(cluster: Cluster) -> None:
    """A buffer like another lies beside it; a missing model and a contradicting shape are refused."""
    model = cluster.create("w", server_names=("b", "a"), stripe_bytes=64 << 10)
    twin = cluster.create("v", like="w")
    assert [segment.server for segment in twin.segments] == ["b", "a"]
    assert (twin.stripe_bytes, twin.chunk_bytes, twin.shape) == (model.stripe_bytes, model.chunk_bytes, model.shape)
    assert {segment.id for segment in twin.segments}.isdisjoint(segment.id for segment in model.segments)
    assert cluster.create("u", like="w", shape=(), dtype="").shape == model.shape
    assert cluster.want("v", like="w", exist_ok=True) == ()
    with pytest.raises(errors.NotFoundError, match='no buffer "x"'):
        cluster.want("t", like="x")
    with pytest.raises(errors.InvalidArgumentError, match=r'like "w": shape and dtype must be \(1048576,\)'):
        cluster.want("t", like="w", shape=(3,))
    cluster.create("elsewhere", server_names=("a", "b"), stripe_bytes=64 << 10)
    with pytest.raises(errors.AlreadyExistsError, match="with layout"):
        cluster.want("elsewhere", like="w", exist_ok=True)


def test_delete_frees_name_and_memory_at_once(cluster: Cluster) -> None:
    """The record goes, its segments are to be dropped, and the name can be used in the very next event."""
    record = cluster.create("w")
    cluster.do(BufferDeleted("w", missing_ok=False))
    assert cluster.effects[:2] == (EraseBuffer("w"), DropSegments(record.segments, 0, Ground.DELETED))
    assert cluster.state.allocation("a").segments == 0
    cluster.create("w", elements=3)


def test_deleting_what_is_not_there_is_an_error_unless_allowed(cluster: Cluster) -> None:
    """Nobody's name and a half made buffer are not found; missing_ok makes that no error and changes nothing."""
    cluster.want("half")
    for name in ("nobody", "half"):
        with pytest.raises(errors.NotFoundError, match=f'no buffer "{name}"'):
            cluster.do(BufferDeleted(name, missing_ok=False))
        assert cluster.do(BufferDeleted(name, missing_ok=True)) == ()
    assert "half" in cluster.state.buffers


def test_what_is_named_with_its_id_is_that_buffer_or_none(cluster: Cluster) -> None:
    """Its name is another's by now: a delete, a rename, a creation like it and a mirror of it leave that alone."""
    meant = cluster.create("w", versions=2)
    cluster.do(BufferRenamed("w", "v", id=meant.id))
    other = cluster.create("w", versions=2)
    before = cluster.state
    assert cluster.do(BufferDeleted("w", missing_ok=True, id=meant.id)) == ()
    with pytest.raises(errors.NotFoundError, match=r'delete: "w" is another buffer now.*renamed or deleted'):
        cluster.do(BufferDeleted("w", missing_ok=False, id=meant.id))
    with pytest.raises(errors.NotFoundError, match=r'rename of "w" to "u": "w" is another buffer now'):
        cluster.do(BufferRenamed("w", "u", id=meant.id))
    with pytest.raises(errors.InvalidArgumentError, match="a folder has no id"):
        cluster.do(BufferRenamed("w", "u", folder=True, id=meant.id))
    mirror = {"elements": 0, "shape": (), "dtype": "", "server_names": ("a",), "mirror_of": "w"}
    for wishes in ({"like": "w"}, mirror):
        with pytest.raises(errors.NotFoundError, match='"w" is another buffer now'):
            cluster.want("u", **{"model_id": meant.id, **wishes})  # type: ignore[arg-type]
    assert cluster.state == before
    cluster.create("like", like="w", model_id=other.id)
    cluster.want("mirror", **{"model_id": other.id, **mirror})  # type: ignore[arg-type]
    cluster.do(BufferFailed("mirror"))
    cluster.do(BufferDeleted("w", missing_ok=False, id=other.id))
    cluster.do(BufferDeleted("v", missing_ok=False, id=meant.id))
    assert [record.name for record in cluster.state.listed()] == ["like"]


def test_a_rename_is_one_step(cluster: Cluster) -> None:
    """The record has the new name, what it takes of its servers stays; one that it replaces is dropped or put aside."""
    record, other = cluster.create("w"), cluster.create("v")
    taken = cluster.state.allocated
    cluster.do(BufferRenamed("w", "a/w"))
    moved = replace(record, name="a/w")
    assert cluster.effects[:3] == (EraseBuffer("w"), SaveBuffer(moved), WakeOpeners("a/w"))
    assert (cluster.state.find(Kind.BUFFER, "a/w"), cluster.state.find_id(record.id)) == (moved, moved)
    assert cluster.state.find(Kind.BUFFER, "w") is None
    assert cluster.state.allocated == taken
    with pytest.raises(errors.AlreadyExistsError):
        cluster.do(BufferRenamed("a/w", "v"))
    cluster.do(BufferRenamed("a/w", "v", replace=True, displaced_name="aside"))
    assert {name: found.id for name, found in cluster.state.buffers.items()} == {"v": record.id, "aside": other.id}
    assert cluster.state.allocated == taken
    cluster.do(BufferRenamed("v", "aside", replace=True))
    assert DropSegments(other.segments, 0, Ground.DELETED) in cluster.effects
    assert list(cluster.state.buffers) == ["aside"]
    assert cluster.do(BufferRenamed("aside", "aside")) == ()


def test_a_state_with_deltas_is_renamed_only_without_a_log(cluster: Cluster) -> None:
    """A log beside it, or beside the new name, would stay behind or be taken for its own."""
    metadata = pack(json.dumps({"smb.publish": {"deltas": 4, "log": 2}}))
    cluster.create("private", versions=2, metadata=metadata)
    cluster.create("policy.log")
    for name, new_name in (("private", "policy"), ("policy", "other")):
        with pytest.raises(errors.InvalidArgumentError, match="published with deltas="):
            cluster.do(BufferRenamed(name, new_name))
        cluster.do(BufferDeleted("policy.log", missing_ok=True))
        if name == "private":
            cluster.do(BufferRenamed(name, new_name))
            cluster.create("policy.log")
    cluster.do(BufferRenamed("policy", "other"))
    cluster.create("w")
    cluster.create("other.log")
    with pytest.raises(errors.InvalidArgumentError, match='"other" is published with deltas='):
        cluster.do(BufferRenamed("w", "other", replace=True))


def test_what_can_not_be_renamed(cluster: Cluster) -> None:
    """Nobody's name, half made ones, bad names, folders onto others or into themselves: nothing changes."""
    for name in ("d/a", "d/b", "e/x", "f"):
        cluster.create(name)
    cluster.want("half")
    before = cluster.state
    for event in (
        BufferRenamed("nobody", "x"),
        BufferRenamed("half", "x"),
        BufferRenamed("f", "half", replace=True),
        BufferRenamed("f", "a//b"),
        BufferRenamed("f", "d/a", replace=True, displaced_name="e/x"),
        BufferRenamed("d", "e", folder=True),
        BufferRenamed("d", "f", folder=True),
        BufferRenamed("d", "d/d", folder=True),
        BufferRenamed("nobody", "x", folder=True),
        BufferRenamed("d", "x" * 254, folder=True),
    ):
        with pytest.raises(errors.Error):
            cluster.do(event)
        assert cluster.state == before
    cluster.do(BufferRenamed("d", "g/h", folder=True))
    assert sorted(cluster.state.buffers) == ["e/x", "f", "g/h/a", "g/h/b", "half"]


def test_a_server_without_renewal_is_dead_and_its_buffers_stay(cluster: Cluster) -> None:
    """After the lease it is not placed on, is reported once, and must register again; its records remain."""
    cluster.create("w")
    cluster.seconds += SERVER_LEASE_S - 1
    cluster.renew("b")
    cluster.seconds += 1
    assert not cluster.state.alive("a", cluster.now)
    assert cluster.state.alive("b", cluster.now)
    cluster.do(Ticked())
    assert 'memory server "a" is gone' in cluster.only(Report).text
    assert cluster.do(Ticked()) == ()
    assert [segment.server for segment in cluster.create("v").segments] == ["b"]
    assert "w" in cluster.state.buffers
    with pytest.raises(errors.NotFoundError, match='"a" must register again'):
        cluster.renew("a")


def test_renewals_of_strangers_are_sent_to_register(cluster: Cluster) -> None:
    """An unknown name, and a known name with another run's instance, get NOT_FOUND."""
    cluster.renew("a")
    with pytest.raises(errors.NotFoundError, match="it must register"):
        cluster.renew("x")
    with pytest.raises(errors.NotFoundError, match="another run"):
        cluster.renew("a", instance_id=9)


def test_registering_tells_what_to_drop_and_keeps_what_is_being_made(cluster: Cluster) -> None:
    """Segments of no buffer are dropped; those of ready and of pending buffers are kept."""
    ready = cluster.create("w").segments[0]
    cluster.want("half", server_names=("a",))
    pending = cluster.state.buffers["half"].segments[0]
    cluster.do(registration(cluster.state, server("a", 2), frozenset({ready.id, pending.id, 777, 555})))
    assert cluster.only(AnswerDrops).segment_ids == (555, 777)
    assert cluster.only(SaveServer).record.instance_id == 2


def test_a_stranger_with_segments_is_not_told_to_drop_them(cluster: Cluster) -> None:
    """It may hold the data of another cluster, or of this one after a start on an empty state."""
    with pytest.raises(errors.InvalidArgumentError, match=r'"stranger".*holds 1 segments.*--state'):
        cluster.do(registration(cluster.state, server("stranger"), frozenset({777}), stamps=()))
    cluster.do(registration(cluster.state, server("stranger"), frozenset()))


def test_a_server_that_lost_its_memory_is_reported(cluster: Cluster) -> None:
    """Coming back without a ready buffer's segment is an error in the log; without a pending one's it is none."""
    cluster.create("w", server_names=("a",))
    cluster.want("half", server_names=("a",))
    cluster.do(registration(cluster.state, server("a", 2), frozenset()))
    texts = [effect.text for effect in cluster.effects if isinstance(effect, Report)]
    assert any("came back without the memory of 1 buffers: w" in text for text in texts)
    kept = frozenset(segment.id for segment in cluster.state.buffers["w"].segments)
    cluster.do(registration(cluster.state, server("a", 3), kept))
    assert not any("without" in effect.text for effect in cluster.effects if isinstance(effect, Report))


def test_a_server_that_could_not_be_told_must_register_again(cluster: Cluster) -> None:
    """A suspected server's renewal is refused until it registered: then it hears of the segments to drop."""
    orphan = cluster.create("w").segments[0]
    cluster.do(BufferDeleted("w", missing_ok=False))
    cluster.do(ServerSuspected("a"))
    assert cluster.state.alive("a", cluster.now)
    with pytest.raises(errors.NotFoundError, match="must register again"):
        cluster.renew("a")
    cluster.do(registration(cluster.state, server("a"), frozenset({orphan.id})))
    assert cluster.only(AnswerDrops).segment_ids == (orphan.id,)
    cluster.renew("a")


def test_a_server_that_holds_more_than_the_buffers_must_register_again(cluster: Cluster) -> None:
    """A straggler of a creation that was given up shows in the used bytes, and is found by a registration."""
    taken = cluster.create("w").segments[0].file_bytes
    cluster.renew("a", used_bytes=taken)
    with pytest.raises(errors.NotFoundError, match="holds more than the records say"):
        cluster.renew("a", used_bytes=taken + 4096)


def test_leaving_shows_at_once_and_forgets_who_holds_nothing(cluster: Cluster) -> None:
    """A server with segments stays, dead; one without is forgotten; a stranger's leave is refused."""
    cluster.create("w", server_names=("a",))
    cluster.do(ServerLeft("a", 1))
    assert not cluster.state.alive("a", cluster.now)
    assert "a" in cluster.state.servers
    cluster.do(ServerLeft("b", 1))
    assert cluster.only(EraseServer).name == "b"
    with pytest.raises(errors.NotFoundError):
        cluster.do(ServerLeft("b", 1))


def test_a_dead_server_that_holds_nothing_is_forgotten_after_a_while(cluster: Cluster) -> None:
    """Ten minutes after its last sign; one that holds segments is never forgotten."""
    cluster.create("w", server_names=("a",))
    cluster.seconds += limits.SERVER_FORGOTTEN_AFTER_S - SERVER_LEASE_S
    cluster.do(Ticked())  # both are late at once, so it waits a lease more
    cluster.seconds += SERVER_LEASE_S
    cluster.do(Ticked())
    assert set(cluster.state.servers) == {"a", "b"}
    cluster.seconds += 1
    cluster.do(Ticked())
    assert set(cluster.state.servers) == {"a"}


def test_another_run_of_a_live_server_is_a_rival_until_the_lease_ends(cluster: Cluster) -> None:
    """The same run, a stranger and the successor of a dead one have no rival."""
    second = ServerRegistered(server("a", 2), {})
    rival = cluster.state.rival(second, cluster.now)
    assert rival is not None
    assert rival.instance_id == 1
    assert cluster.state.rival(ServerRegistered(server("a", 1), {}), cluster.now) is None
    assert cluster.state.rival(ServerRegistered(server("x", 2), {}), cluster.now) is None
    cluster.seconds += SERVER_LEASE_S
    assert cluster.state.rival(second, cluster.now) is None


@pytest.mark.parametrize(
    "bad",
    [
        replace(server("a/b")),
        replace(server("c"), data_address="nowhere"),
        replace(server("c"), control_address="10.0.0.1:0"),
        replace(server("c"), capacity_bytes=0),
        replace(server("c"), weight=-1.0),
        replace(server("c"), weight=float("nan")),
        replace(server("c"), instance_id=0),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(cluster: Cluster, bad: ServerRecord) -> None:
    """A name that is no file name, an address one cannot connect to, no capacity, no instance."""
    with pytest.raises(errors.InvalidArgumentError):
        cluster.do(registration(cluster.state, bad, frozenset()))


def test_servers_of_unequal_weights_are_compared_each_once() -> None:
    """An existing buffer that lies on a server several times is what its wishes describe, in whatever order."""
    cluster = Cluster()
    for name, weight in (("a", 1.0), ("b", 3.0)):
        cluster.do(registration(cluster.state, replace(server(name), weight=weight), frozenset()))
    record = cluster.create("w", server_names=("a", "b"))
    assert [segment.server for segment in record.segments] == ["b", "a", "b", "b"]
    assert cluster.state.allocation("b").segments == 3
    assert cluster.want("w", exist_ok=True, server_count=2) == ()
    assert cluster.want("w", exist_ok=True, server_names=("a", "b")) == ()
    with pytest.raises(errors.AlreadyExistsError, match="servers"):
        cluster.want("w", exist_ok=True, server_names=("b",))


def test_counts_of_an_earlier_run_are_ignored(cluster: Cluster) -> None:
    """Used bytes are taken from the run that is registered, no other."""
    cluster.do(ServerCounted("a", 1, 4096))
    cluster.do(ServerCounted("a", 9, 1))
    cluster.do(ServerCounted("x", 1, 1))
    assert cluster.state.servers["a"].used_bytes == 4096


def test_what_an_earlier_run_is_said_to_have_dropped_is_looked_for(cluster: Cluster) -> None:
    """A next process of an earlier release takes such a drop, maybe after it listed the segment. It tells again."""
    cluster.do(registration(cluster.state, server("a", 2), {77, 78}, stamps=()))
    cluster.do(ServerCounted("a", 1, 0, dropped=79))
    cluster.renew("a", 2)
    cluster.do(ServerCounted("a", 1, 0, dropped=77))
    assert 77 in cluster.state.unexplained["a"]  # as long as nobody knows
    with pytest.raises(errors.NotFoundError, match="must register again"):
        cluster.renew("a", 2)
    cluster.do(registration(cluster.state, server("a", 2), {78}, stamps=()))
    assert cluster.state.unexplained["a"].keys() == {78}


def test_a_restart_asks_servers_to_register(cluster: Cluster) -> None:
    """From the records alone: ready buffers are there; servers live one lease but must report."""
    ready = cluster.create("w")
    later = Cluster(load(cluster.state.buffers.values(), cluster.state.servers.values()), seconds=5.0)
    later.do(Restarted(77))
    assert later.state.buffers == {"w": ready}
    assert later.state.allocated == {segment.server: Allocation(segment.file_bytes, 1) for segment in ready.segments}
    assert later.state.alive("a", later.now)
    later.create("v")
    with pytest.raises(errors.NotFoundError, match="must register again"):
        later.renew("a")


def test_two_versions_take_two_copies_of_the_capacity(cluster: Cluster) -> None:
    """nbytes stays one copy's; segments, and what is promised of the servers, are for both. like= takes no versions."""
    record = cluster.create("w", 3 * MIB // 4 + 1, versions=2)
    assert (record.nbytes, record.versions, record.copy_stride_bytes) == (3 * MIB + 4, 2, 7 * MIB // 2)
    assert [segment.nbytes for segment in record.segments] == [7 * MIB // 2, 7 * MIB // 2]
    assert cluster.state.allocation("a").nbytes > 7 * MIB // 2
    assert cluster.want("w", 3 * MIB // 4 + 1, versions=2, exist_ok=True) == ()
    once = cluster.create("v", shape=(), dtype="", like="w")
    assert (once.versions, once.copy_stride_bytes, once.nbytes) == (1, 0, record.nbytes)
    assert sum(segment.nbytes for segment in once.segments) == once.nbytes
    assert [segment.server for segment in once.segments] == [segment.server for segment in record.segments]
    twice = cluster.create("u", shape=(), dtype="", like="v", versions=2)
    assert [segment.nbytes for segment in twice.segments] == [7 * MIB // 2, 7 * MIB // 2]
    with pytest.raises(errors.OutOfMemoryError):
        cluster.want("x", 20 * MIB, versions=2)


def test_a_lock_a_barrier_and_a_buffer_share_a_name(cluster: Cluster) -> None:
    """Each is found by its kind alone; a buffer's delete and list leave the others alone."""
    cluster.use(Kind.LOCK)
    cluster.do(BufferMade("lock:w"))
    cluster.use(Kind.BARRIER)
    cluster.do(BufferMade("barrier:w"))
    assert cluster.state.find(Kind.BUFFER, "w") is None
    assert cluster.state.listed() == ()
    for name in ("w", "lock:w"):
        with pytest.raises(errors.NotFoundError):
            cluster.do(BufferDeleted(name, missing_ok=False))
    buffer = cluster.create("w")
    assert cluster.state.listed() == (buffer,)
    cluster.do(BufferDeleted("w", missing_ok=False))
    for kind in (Kind.LOCK, Kind.BARRIER):
        found = cluster.state.find(kind, "w")
        assert found is not None
        assert (found.kind, found.name, len(found.segments)) == (kind, "w", 1)
    with pytest.raises(errors.NotFoundError, match='no buffer "lock:w"'):
        cluster.want("v", like="lock:w")


def test_idle_names_are_freed(cluster: Cluster) -> None:
    """Those of the segments told, with their memory; no buffer, nothing that is being made. The floor never falls."""
    before = cluster.state.allocated
    for name, token in (("v", 40), ("w", 8)):
        cluster.use(Kind.LOCK, name)
        segment = cluster.only(MakeSegments).record.segments[0]
        assert cluster.do(NamesFreed(segment.server, {segment.id: token})) == ()
        cluster.do(BufferMade(f"lock:{name}"))
        assert cluster.do(NamesFreed(segment.server, {segment.id + 1000: token})) == ()
        assert cluster.do(NamesFreed("elsewhere", {segment.id: token})) == ()
        effects = cluster.do(NamesFreed(segment.server, {segment.id: token}))
        assert effects[:3] == (
            EraseBuffer(f"lock:{name}"),
            SaveTokenFloor(40),
            DropSegments((segment,), 0, Ground.DELETED),
        )
        assert cluster.do(NamesFreed(segment.server, {segment.id: token})) == ()
    assert cluster.state.find(Kind.LOCK, "w") is None
    assert {name: taken for name, taken in cluster.state.allocated.items() if taken.segments} == before
    cluster.do(BufferWanted(first_use(Kind.LOCK, "two", 2), lambda: next(cluster.ids)))
    cluster.do(BufferMade("lock:two"))
    (segment,) = cluster.state.buffers["lock:two"].segments
    assert {segment.server, segment.backup} == {"a", "b"}
    assert cluster.do(NamesFreed(segment.backup, {segment.id: 41})) == ()  # it was the primary when it was asked
    dropped = cluster.do(NamesFreed(segment.server, {segment.id: 41}))[2]
    assert isinstance(dropped, DropSegments)
    assert {copy.server for copy in dropped.segments} == {"a", "b"}
    assert {name: taken for name, taken in cluster.state.allocated.items() if taken.segments} == before
    buffer = cluster.create("w")
    assert cluster.do(NamesFreed(buffer.segments[0].server, {segment.id: 1 for segment in buffer.segments})) == ()
    assert cluster.state.token_floor == 41


def test_a_lock_has_one_home_while_it_is_used(cluster: Cluster) -> None:
    """Later uses find it where it is, also while it is being made, after its server died, and after a restart."""
    cluster.use(Kind.LOCK)
    assert cluster.use(Kind.LOCK) == ()
    cluster.do(BufferMade("lock:w"))
    assert cluster.use(Kind.LOCK) == ()
    home = cluster.state.buffers["lock:w"]
    cluster.seconds += SERVER_LEASE_S
    cluster.do(Ticked())
    assert cluster.use(Kind.LOCK) == ()
    later = Cluster(load(cluster.state.buffers.values(), cluster.state.servers.values()))
    later.do(Restarted(7))
    assert later.use(Kind.LOCK) == ()
    assert later.state.find(Kind.LOCK, "w") == home


def test_a_record_of_before_there_were_kinds_versions_wires_and_metadata_is_read(cluster: Cluster) -> None:
    """It is a buffer of one version whose elements travel exact, without metadata."""
    record = cluster.create("w")
    fields = json.loads(record.to_json())
    assert BufferRecord.from_json(record.to_json()) == record
    del fields["kind"], fields["versions"], fields["wire"], fields["metadata"]
    assert BufferRecord.from_json(json.dumps(fields)) == record


def test_metadata_is_the_first_creations_for_good(cluster: Cluster) -> None:
    """It is stored with the record; a later creation with exist_ok changes nothing; like= does not take it along."""
    record = cluster.create("w", metadata=b"packed")
    assert record.metadata == b"packed"
    assert BufferRecord.from_json(record.to_json()) == record
    for other in (b"", b"other"):
        assert cluster.want("w", exist_ok=True, metadata=other) == ()
        assert cluster.state.buffers["w"] == record
    assert cluster.create("v", like="w").metadata == b""


def test_all_metadata_together_has_a_limit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that would go beyond it is refused, and what a deletion frees can be used again."""
    monkeypatch.setattr(limits, "METADATA_BYTES_MAX", 20)
    cluster.create("w", elements=1, metadata=bytes(7))
    cluster.create("v", elements=1, metadata=bytes(7))
    with pytest.raises(
        errors.OutOfMemoryError, match=r'"u": no room for 7 bytes of packed metadata: .* have 14 of at most 20 bytes'
    ):
        cluster.want("u", elements=1, metadata=bytes(7))
    cluster.create("t", elements=1)
    cluster.do(BufferDeleted("v", False))
    cluster.create("u", elements=1, metadata=bytes(7))


def test_attributes_of_a_file_are_stored_with_the_record(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or by a rename, and kept by every other rename; a folder has none. Beyond the usual length they count as
    metadata."""
    cluster.create("f/w", elements=1)
    cluster.do(BufferRenamed("f/w", "f/w", file_attributes=b"one"))
    assert cluster.only(SaveBuffer).record == cluster.state.buffers["f/w"]
    cluster.do(BufferRenamed("f/w", "f/v"))
    record = cluster.state.buffers["f/v"]
    assert record.file_attributes == b"one"
    assert BufferRecord.from_json(record.to_json()) == record
    cluster.do(BufferRenamed("f/v", "f/w", file_attributes=b""))
    plain = cluster.state.buffers["f/w"]
    assert plain.file_attributes == b""
    assert "file_attributes" not in plain.to_json()  # as versions before wrote it
    with pytest.raises(errors.InvalidArgumentError, match=r"a folder has no id and no attributes"):
        cluster.do(BufferRenamed("f", "g", folder=True, file_attributes=b"one"))
    monkeypatch.setattr(limits, "METADATA_BYTES_MAX", 300)
    cluster.create("v", elements=1)
    cluster.do(BufferRenamed("v", "v", file_attributes=bytes(200)))
    with pytest.raises(errors.OutOfMemoryError, match=r"no room for 200 bytes"):
        cluster.do(BufferRenamed("f/w", "f/w", file_attributes=bytes(200)))
    cluster.do(BufferRenamed("f/w", "f/w", file_attributes=bytes(128)))  # usual ones have room in any case


def test_sessions_live_as_long_as_they_renew() -> None:
    """A session ends by its close or by its lease, the latter with a log line; it is never taken back."""
    cluster = Cluster()
    cluster.do(SessionRenewed(1, "one"))
    cluster.do(SessionRenewed(2, "two"))
    cluster.do(SessionClosed(1))
    assert {number: each.client_name for number, each in cluster.state.sessions.items()} == {2: "two"}
    cluster.seconds += SESSION_LEASE_S
    cluster.do(Ticked())
    assert cluster.only(Report).text == "session of two is gone: no renewal"
    assert not cluster.state.sessions
    for session_id in (1, 2):
        with pytest.raises(SessionEndedError, match=r"its lease ran out.*connect again"):
            cluster.do(SessionRenewed(session_id, "late"))
    cluster.do(SessionRenewed(3, "of before a restart"))
    assert cluster.state.client_name(3) == "of before a restart"
    with pytest.raises(errors.InvalidArgumentError):
        cluster.do(SessionRenewed(0, "nobody"))


def test_an_end_is_stored_told_at_once_and_answered_to_whoever_has_not_seen_it() -> None:
    """Ends are numbered; a server hears of those after the last that it has seen, and of all in another incarnation."""
    cluster = Cluster()
    cluster.do(Restarted(77))
    for session_id in (5, 6, 7):
        cluster.do(SessionRenewed(session_id, f"client {session_id}"))
        assert cluster.effects == (
            SaveSession(SessionRecord(session_id, f"client {session_id}", since=cluster.now.wall)),
        )
        assert cluster.do(SessionRenewed(session_id, "again")) == ()
    cluster.do(SessionClosed(6))
    assert cluster.effects == (SaveSession(SessionRecord(6, "", 1)), TellEnded((6,)))
    assert cluster.do(SessionClosed(6)) == ()
    cluster.seconds += SESSION_LEASE_S
    cluster.do(Ticked())
    assert cluster.only(TellEnded).session_ids == (5, 7)
    ended = cluster.state.ended_sessions
    assert (ended.incarnation, ended.last_number) == (77, 3)
    assert ended.after(77, 0) == ended.after(76, 3) == ended.after(0, 0) == (6, 5, 7)
    assert ended.after(77, 1) == (5, 7)
    assert ended.after(77, 3) == ()


def test_a_client_is_kicked_by_its_certificates_name_or_its_own() -> None:
    """All its sessions end and no other; it hears who did it, also after a restart of the coordinator; and the words
    are forgotten with the ends.
    """
    cluster, store = Cluster(), dict[int, SessionRecord]()
    alice, bob = ShownCertificate("k1", "client", "alice", ("x", "y")), ShownCertificate("k2", "client", "bob")
    of_role = ShownCertificate("k3", "reader")
    for number, (name, holder) in enumerate(
        [
            ("h:1 (alice)", alice),
            ("t (h:2) (alice)", alice),
            ("h:3 (bob)", bob),
            ("h:4 (reader)", of_role),
            ("h:5", ShownCertificate()),
        ],
        1,
    ):
        cluster.do(SessionRenewed(number, name, holder))
        store |= {e.record.id: e.record for e in cluster.effects if isinstance(e, SaveSession)}
    again = load((), (), [SessionRecord.from_json(each.to_json()) for each in store.values()])
    assert again.sessions == cluster.state.sessions
    for name in ("ali", "", "h", "1", "(alice)", "h:1 (bob)", "client", "x"):
        with pytest.raises(errors.NotFoundError, match="no client that is connected has the name"):
            cluster.do(ClientsKicked(name, "ann"))
    for name, ended in (("alice", (1, 2)), ("h:3", (3,)), ("h:4 (reader)", (4,)), ("h:5", (5,))):
        cluster.do(ClientsKicked(name, "ann"))
        assert cluster.only(TellEnded).session_ids == ended
        store |= {e.record.id: e.record for e in cluster.effects if isinstance(e, SaveSession)}
    assert not cluster.state.sessions
    again = load((), (), [SessionRecord.from_json(each.to_json()) for each in store.values()])
    for state in (cluster.state, again):
        with pytest.raises(SessionEndedError, match=r"^an operator ended the session of h:1 \(alice\) .*kick, by ann"):
            Cluster(state).do(SessionRenewed(1, "h:1 (alice)", alice))


def test_a_kick_by_the_programs_own_name_ends_that_one() -> None:
    """Of two programs with one certificate."""
    cluster = Cluster()
    for number, name in enumerate(("t (h:1) (alice)", "h:2 (alice)", "u (h:3) (alice)"), 1):
        cluster.do(SessionRenewed(number, name, ShownCertificate("k", "client", "alice")))
    for name, ended in (("t", (1,)), ("h:2", (2,)), ("h:3", (3,))):
        cluster.do(ClientsKicked(name, "ann"))
        assert cluster.only(TellEnded).session_ids == ended


def test_many_sessions_are_kicked_in_parts() -> None:
    """No more at once than one change of the store may end."""
    cluster = Cluster()
    for number in range(1, 6):
        cluster.do(SessionRenewed(number, f"h:{number} (alice)", ShownCertificate("k", "client", "alice")))
    for ended in ((1, 2), (3, 4), (5,)):
        cluster.do(ClientsKicked("alice", "ann", 2))
        assert cluster.only(TellEnded).session_ids == ended
    with pytest.raises(errors.NotFoundError):
        cluster.do(ClientsKicked("alice", "ann", 2))


def test_so_many_kicks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as ended sessions."""
    monkeypatch.setattr(sessions, "ENDED_MAX", 2)
    cluster = Cluster()
    for number in range(1, 6):
        cluster.do(SessionRenewed(number, f"h:{number}"))
        cluster.do(ClientsKicked(f"h:{number}", "ann"))
    assert set(cluster.state.kicked) == {4, 5}


def test_a_session_follows_its_clients_certificate() -> None:
    """A renewal with another certificate is stored, and since when it lives stays; an equal one stores nothing."""
    cluster = Cluster()
    cluster.do(SessionRenewed(1, "h:1 (a)", ShownCertificate("k1", "client", "a")))
    since = cluster.now.wall
    cluster.seconds += 5
    assert cluster.do(SessionRenewed(1, "h:1 (a)", ShownCertificate("k1", "client", "a"))) == ()
    cluster.do(SessionRenewed(1, "h:1 (b)", ShownCertificate("k2", "reader", "b")))
    assert cluster.only(SaveSession).record == SessionRecord(
        1, "h:1 (b)", 0, ShownCertificate("k2", "reader", "b"), since
    )
    old = SessionRecord.from_json('{"id": 1, "client_name": "h:1", "ended": 0, "owner": "k"}')  # of an earlier release
    assert old == SessionRecord(1, "h:1", holder=ShownCertificate("k"))


def test_a_restart_knows_who_lived_and_who_had_ended() -> None:
    """The living have one lease to renew, or end; the ended stay ended and are told anew under another incarnation."""
    store: dict[int, SessionRecord] = {}
    cluster = Cluster()
    cluster.do(Restarted(1))
    for event in (SessionRenewed(1, "one"), SessionRenewed(2, "two"), SessionRenewed(3, "three"), SessionClosed(2)):
        cluster.do(event)
        store |= {e.record.id: e.record for e in cluster.effects if isinstance(e, SaveSession)}
    later = Cluster(load((), (), store.values(), session_lease_s=2.0), seconds=5.0)
    later.do(Restarted(9))
    with pytest.raises(SessionEndedError):
        later.do(SessionRenewed(2, "two"))
    later.seconds += 1
    later.do(SessionRenewed(1, "one"))
    later.seconds += 1
    later.do(Ticked())
    assert later.only(TellEnded).session_ids == (3,)
    assert later.state.ended_sessions.after(1, 1) == (2, 3)
    assert later.state.ended_sessions.after(9, 1) == (3,)
    assert set(later.state.sessions) == {1}


def test_so_many_ended_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest make room, in the store too, and memory servers are told that there were more."""
    monkeypatch.setattr(sessions, "ENDED_MAX", 2)
    cluster = Cluster()
    for session_id in (1, 2, 3, 4):
        cluster.do(SessionRenewed(session_id, "one"))
    cluster.do(SessionClosed(1))
    assert not ended_message(cluster.state.ended_sessions, pb.SessionsSeen()).forgotten
    cluster.seconds += SESSION_LEASE_S
    cluster.do(Ticked())
    assert [e.record.id for e in cluster.effects if isinstance(e, SaveSession)] == [3, 4]
    assert [e.session_id for e in cluster.effects if isinstance(e, EraseSession)] == [1, 2]
    assert cluster.only(TellEnded).session_ids == (2, 3, 4)
    assert dict(cluster.state.ended_sessions.numbers) == {3: 3, 4: 4}
    kept = [SessionRecord(session_id, "", ended) for session_id, ended in cluster.state.ended_sessions.numbers.items()]
    for state in (cluster.state, load((), (), kept)):
        assert ended_message(state.ended_sessions, pb.SessionsSeen()).forgotten


def test_everything_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more buffer, server or session than the limit is refused as a whole; the known ones go on."""
    for name in ("BUFFERS_MAX", "SERVERS_MAX", "SESSIONS_MAX"):
        monkeypatch.setattr(limits, name, 1)
    cluster = Cluster()
    cluster.register("a")
    cluster.create("w", 1)
    cluster.do(SessionRenewed(1, "one"))
    for refused in (
        lambda: cluster.register("b"),
        lambda: cluster.want("v", 1),
        lambda: cluster.do(SessionRenewed(2, "two")),
    ):
        with pytest.raises(errors.OutOfMemoryError, match="no place for"):
            refused()
    cluster.register("a")
    cluster.do(SessionRenewed(1, "one"))


def test_a_server_that_registers_as_it_was_is_not_stored_again(cluster: Cluster) -> None:
    """All do after a change of leader. A change is stored, and that it holds something now: one that is away is not
    forgotten then.
    """

    def stored(record: ServerRecord) -> list[ServerRecord]:
        cluster.do(registration(cluster.state, record, frozenset()))
        return [effect.record for effect in cluster.effects if isinstance(effect, SaveServer)]

    assert stored(server("a")) == []
    for changed in (server("a", 2), replace(server("a", 2), data_address="10.0.0.9:1"), server("a", 2)):
        assert [one.data_address for one in stored(changed)] == [changed.data_address]
    full = replace(server("a", 2), used_bytes=8192)
    assert [one.used_bytes for one in stored(full)] == [8192]
    assert stored(replace(full, used_bytes=4096)) == []
    assert [one.used_bytes for one in stored(server("a", 2))] == [0]
