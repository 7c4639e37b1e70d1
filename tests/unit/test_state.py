"""smb.coordinator.state: every decision, without a network, a disk or a clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from smb import errors
from smb.coordinator import state as states
from smb.coordinator.events import (
    AnswerDrops,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferWanted,
    DropSegments,
    Effect,
    EraseBuffer,
    EraseServer,
    Event,
    Instant,
    MakeSegments,
    Report,
    Restarted,
    SaveBuffer,
    SaveServer,
    ServerCounted,
    ServerDoubted,
    ServerLeft,
    ServerRegistered,
    ServerRenewed,
    SessionClosed,
    SessionRenewed,
    Ticked,
    WakeOpeners,
)
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.request import Creation
from smb.coordinator.state import SERVER_LEASE_S, SESSION_LEASE_S, State, load, step

MIB = 1 << 20
Kind = TypeVar("Kind")


def server(name: str, instance_id: int = 1, capacity_bytes: int = 64 * MIB) -> ServerRecord:
    return ServerRecord(name, instance_id, "10.0.0.1:1", "10.0.0.1:2", "/s", "10.0.0.1:3", capacity_bytes, 0, 0.0)


@dataclass
class Cluster:
    """A state, a clock that stands until it is told to go on, and the effects of the last event."""

    state: State = field(default_factory=State)
    seconds: float = 1000.0
    effects: tuple[Effect, ...] = ()
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def now(self) -> Instant:
        return Instant(self.seconds, 1.7e9 + self.seconds)

    def do(self, event: Event) -> tuple[Effect, ...]:
        self.state, self.effects = step(self.state, event, self.now)
        return self.effects

    def register(self, *names: str, capacity_bytes: int = 64 * MIB) -> None:
        for name in names:
            self.do(ServerRegistered(server(name, capacity_bytes=capacity_bytes), frozenset()))

    def want(self, name: str = "w", elements: int = 1 << 20, **wishes: object) -> tuple[Effect, ...]:
        creation = replace(Creation(name, (elements,), "float32"), **wishes)  # type: ignore[arg-type]
        return self.do(BufferWanted(creation, lambda: next(self.ids)))

    def create(self, name: str = "w", elements: int = 1 << 20, **wishes: object) -> BufferRecord:
        self.want(name, elements, **wishes)
        self.do(BufferMade(name))
        return self.state.buffers[name]

    def renew(self, name: str, instance_id: int = 1, used_bytes: int = 0) -> None:
        self.do(ServerRenewed(name, instance_id, used_bytes))

    def only(self, kind: type[Kind]) -> Kind:
        (found,) = (effect for effect in self.effects if isinstance(effect, kind))
        return found


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
    assert cluster.effects == (SaveBuffer(pending), MakeSegments(pending))
    assert [segment.server for segment in pending.segments] == ["a", "b"]
    assert len({pending.id, *(segment.id for segment in pending.segments)}) == 3
    cluster.do(BufferMade("w"))
    assert cluster.only(SaveBuffer).record == replace(pending, ready=True)
    assert cluster.only(WakeOpeners).name == "w"
    assert pending.epoch == 1
    assert pending.created_at == cluster.now.wall


def test_a_failed_creation_leaves_nothing(cluster: Cluster) -> None:
    """After BufferFailed the record, the name and the promised memory are gone, and every segment is to be dropped."""
    before = cluster.state
    cluster.want("w")
    segments = cluster.only(MakeSegments).record.segments
    assert cluster.state.allocation("a").nbytes > 0
    cluster.do(BufferFailed("w"))
    assert cluster.effects == (EraseBuffer("w"), DropSegments(segments), WakeOpeners("w"))
    assert cluster.state.buffers == before.buffers
    assert cluster.state.allocation("a") == cluster.state.allocation("b") == states.Allocation()


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
        ({"stripe_bytes": 8192}, "with stripe 1048576, not 8192"),
        ({"server_count": 1}, "with server count 2, not 1"),
        ({"server_names": ("b", "a")}, r"with servers \('a', 'b'\), not \('b', 'a'\)"),
    ):
        with pytest.raises(errors.AlreadyExistsError, match=told):
            cluster.want("w", exist_ok=True, **wishes)
    assert cluster.want("w", exist_ok=True, server_count=2, stripe_bytes=MIB) == ()


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
    with pytest.raises(errors.InvalidArgumentError, match=r'like="w" needs shape \(1048576,\)'):
        cluster.want("t", like="w", shape=(3,))
    cluster.create("elsewhere", server_names=("a", "b"), stripe_bytes=64 << 10)
    with pytest.raises(errors.AlreadyExistsError, match="with layout"):
        cluster.want("elsewhere", like="w", exist_ok=True)


def test_delete_frees_name_and_memory_at_once(cluster: Cluster) -> None:
    """The record goes, its segments are to be dropped, and the name can be used in the very next event."""
    record = cluster.create("w")
    cluster.do(BufferDeleted("w", missing_ok=False))
    assert cluster.effects[:2] == (EraseBuffer("w"), DropSegments(record.segments))
    assert cluster.state.allocation("a").segments == 0
    cluster.create("w", elements=3)


def test_deleting_what_is_not_there_is_an_error_unless_allowed(cluster: Cluster) -> None:
    """Nobody's name and a half made buffer are not found; missing_ok makes that no error and changes nothing."""
    cluster.want("half")
    for name in ("nobody", "half"):
        with pytest.raises(errors.NotFoundError, match=f'no buffer "{name}" to delete'):
            cluster.do(BufferDeleted(name, missing_ok=False))
        assert cluster.do(BufferDeleted(name, missing_ok=True)) == ()
    assert "half" in cluster.state.buffers


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
    cluster.do(ServerRegistered(server("a", 2), frozenset({ready.id, pending.id, 777, 555})))
    assert cluster.only(AnswerDrops).segment_ids == (555, 777)
    assert cluster.only(SaveServer).record.instance_id == 2


def test_a_stranger_with_segments_is_not_told_to_drop_them(cluster: Cluster) -> None:
    """It may hold the data of another cluster, or of this one after a start on an empty state."""
    with pytest.raises(errors.InvalidArgumentError, match=r'"stranger".*holds 1 segments.*--state'):
        cluster.do(ServerRegistered(server("stranger"), frozenset({777})))
    cluster.do(ServerRegistered(server("stranger"), frozenset()))


def test_a_server_that_lost_its_memory_is_reported(cluster: Cluster) -> None:
    """Coming back without a ready buffer's segment is an error in the log; without a pending one's it is none."""
    cluster.create("w", server_names=("a",))
    cluster.want("half", server_names=("a",))
    cluster.do(ServerRegistered(server("a", 2), frozenset()))
    texts = [effect.text for effect in cluster.effects if isinstance(effect, Report)]
    assert any("came back without the memory of 1 buffers: w" in text for text in texts)
    kept = frozenset(segment.id for segment in cluster.state.buffers["w"].segments)
    cluster.do(ServerRegistered(server("a", 3), kept))
    assert not any("without" in effect.text for effect in cluster.effects if isinstance(effect, Report))


def test_a_server_that_could_not_be_told_must_register_again(cluster: Cluster) -> None:
    """A doubted server's renewal is refused until it registered: then it hears of the segments to drop."""
    orphan = cluster.create("w").segments[0]
    cluster.do(BufferDeleted("w", missing_ok=False))
    cluster.do(ServerDoubted("a"))
    assert cluster.state.alive("a", cluster.now)
    with pytest.raises(errors.NotFoundError, match="must register again"):
        cluster.renew("a")
    cluster.do(ServerRegistered(server("a"), frozenset({orphan.id})))
    assert cluster.only(AnswerDrops).segment_ids == (orphan.id,)
    cluster.renew("a")


def test_a_server_that_holds_more_than_the_buffers_must_register_again(cluster: Cluster) -> None:
    """A straggler of a creation that was given up shows in the used bytes, and is found by a registration."""
    taken = cluster.create("w").segments[0].file_bytes
    cluster.renew("a", used_bytes=taken)
    with pytest.raises(errors.NotFoundError, match="holds more than the buffers do"):
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
    cluster.seconds += states.SERVER_FORGOTTEN_AFTER_S
    cluster.do(Ticked())
    assert set(cluster.state.servers) == {"a", "b"}
    cluster.seconds += 1
    cluster.do(Ticked())
    assert set(cluster.state.servers) == {"a"}


def test_another_run_of_a_live_server_is_a_rival_until_the_lease_ends(cluster: Cluster) -> None:
    """The same run, a stranger and the successor of a dead one have no rival."""
    second = ServerRegistered(server("a", 2), frozenset())
    rival = cluster.state.rival(second, cluster.now)
    assert rival is not None
    assert rival.instance_id == 1
    assert cluster.state.rival(ServerRegistered(server("a", 1), frozenset()), cluster.now) is None
    assert cluster.state.rival(ServerRegistered(server("x", 2), frozenset()), cluster.now) is None
    cluster.seconds += SERVER_LEASE_S
    assert cluster.state.rival(second, cluster.now) is None


@pytest.mark.parametrize(
    "bad",
    [
        replace(server("a/b")),
        replace(server("c"), data_address="nowhere"),
        replace(server("c"), control_address="10.0.0.1:0"),
        replace(server("c"), capacity_bytes=0),
        replace(server("c"), instance_id=0),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(cluster: Cluster, bad: ServerRecord) -> None:
    """A name that is no file name, an address one cannot connect to, no capacity, no instance."""
    with pytest.raises(errors.InvalidArgumentError):
        cluster.do(ServerRegistered(bad, frozenset()))


def test_counts_of_an_earlier_run_are_ignored(cluster: Cluster) -> None:
    """Used bytes are taken from the run that is registered, no other."""
    cluster.do(ServerCounted("a", 1, 4096))
    cluster.do(ServerCounted("a", 9, 1))
    cluster.do(ServerCounted("x", 1, 1))
    assert cluster.state.servers["a"].used_bytes == 4096


def test_a_restart_takes_back_what_was_half_made_and_asks_servers_to_register(cluster: Cluster) -> None:
    """From the records alone: ready buffers are there, pending ones erased; servers live one lease but must report."""
    ready = cluster.create("w")
    cluster.want("half")
    later = Cluster(load(cluster.state.buffers.values(), cluster.state.servers.values()), seconds=5.0)
    later.do(Restarted())
    assert later.only(EraseBuffer).name == "half"
    assert later.state.buffers == {"w": ready}
    assert later.state.allocated == {
        segment.server: states.Allocation(segment.file_bytes, 1) for segment in ready.segments
    }
    assert later.state.alive("a", later.now)
    later.create("v")
    with pytest.raises(errors.NotFoundError, match="must register again"):
        later.renew("a")


def test_sessions_live_as_long_as_they_renew() -> None:
    """A session ends by its close or by its lease, the latter with a log line; renewing an unknown one makes it."""
    cluster = Cluster()
    cluster.do(SessionRenewed(1, "one"))
    cluster.do(SessionRenewed(2, "two"))
    cluster.do(SessionClosed(1))
    assert dict(cluster.state.client_names) == {2: "two"}
    cluster.seconds += SESSION_LEASE_S
    cluster.do(Ticked())
    assert cluster.only(Report).text == "session of two is gone: no renewal"
    assert not cluster.state.client_names
    cluster.do(SessionRenewed(2, "two"))
    assert cluster.state.client_names[2] == "two"
    with pytest.raises(errors.InvalidArgumentError):
        cluster.do(SessionRenewed(0, "nobody"))


def test_everything_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more buffer, server or session than the limit is refused as a whole; the known ones go on."""
    for name in ("BUFFERS_MAX", "SERVERS_MAX", "SESSIONS_MAX"):
        monkeypatch.setattr(states, name, 1)
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
