"""What the coordinator looks at, and what may have changed before it uses that: callers that give up, servers that are
started anew or come back at another address, registrations that are late, changes that no transaction of etcd takes.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from smb.coordinator import registrations, replica_role_changes
from smb.coordinator import service as services
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.dashboard.history import EventWatch
from smb.coordinator.etcd import etcd_pb2
from smb.coordinator.etcd.election import campaign
from smb.coordinator.etcd.store import CHANGES_MAX, EtcdStore, read_records
from smb.coordinator.events import (
    BackupsLost,
    BufferDeleted,
    BufferWanted,
    Instant,
    ServerDied,
    ServerRenewed,
    Ticked,
    UnexplainedJudged,
)
from smb.coordinator.health import Health
from smb.coordinator.leader import _tick
from smb.coordinator.memserver_client import AnotherRunError, Look, MemoryServers, NotYetError, RunLiveness
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.moves import copy_maker
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.outside import new_id
from smb.coordinator.records import BufferRecord, Held, SegmentRecord, ServerRecord
from smb.coordinator.replica_role_changes import LOOK_COUNTS_S, LOOKS_AT_ONCE_MAX, RoleChanges
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.state import Interrupted
from smb.coordinator.store import SqliteStore, StoreError
from smb.coordinator.validate import Creation
from smb.drop_reasons import Ground
from smb.errors import AlreadyExistsError, NotFoundError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server
from smb.rpc.metadata import pack
from tests.support.decisions import registration, returned, server
from tests.support.fake_etcd import PLACE, FakeEtcd

LARGE = 1 << 34


class SlowEtcd(FakeEtcd):
    """Carries a change out, and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.done, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def transact(self, request: etcd_pb2.TxnRequest, timeout_s: float) -> tuple[etcd_pb2.TxnResponse, bool]:
        found = await super().transact(request, timeout_s)
        self.done.set()
        await self.answers.wait()
        return found


@dataclass
class Servers:
    """Memory servers, as a coordinator asks them. `holds`: which segments each has; `waits` for what a create waits."""

    holds: dict[str, set[int]] = field(default_factory=lambda: {"a": set(), "b": set(), "c": set()})
    waits: dict[str, Callable[[], Coroutine[Any, Any, object]]] = field(default_factory=dict)
    probed: list[int] = field(default_factory=list)
    living: int = 2  # runs from this one on are alive
    mute: frozenset[int] = frozenset()  # runs of which nobody can tell
    half: frozenset[str] = frozenset()  # servers whose copies are not known to them to be whole
    leads: frozenset[int] = frozenset()  # segments of which whoever is asked says that it is the primary

    async def create(self, at: ServerRecord, _: object, segment: SegmentRecord, *__: object) -> int:
        if at.name in self.waits:
            await self.waits.pop(at.name)()
        self.holds[at.name].add(segment.id)
        return 0

    async def drop(self, at: ServerRecord, segment_id: int, *_: object, **__: object) -> int:
        self.holds[at.name].discard(segment_id)
        return 0

    async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
        self.probed.append(at.instance_id)
        await asyncio.sleep(0)
        held = {
            each: Held(1, whole=at.name not in self.half, primary=each in self.leads)
            for each in self.holds[at.name] & frozenset(segment_ids)
        }
        if at.instance_id in self.mute:
            return Look(RunLiveness.MUTE)
        return Look(RunLiveness.DEAD if at.instance_id < self.living else RunLiveness.ALIVE, held)

    async def end_sessions(self, *_: object) -> None:
        pass

    async def take_roles(self, *_: object) -> frozenset[int]:
        return frozenset()


async def opened(etcd: FakeEtcd, **options: Any) -> tuple[CommitLog, Any]:
    """The commit log of a coordinator that leads, and its lead."""
    lead = await campaign(cast(Any, etcd), PLACE, "us:1", 8)
    assert lead is not None
    return await CommitLog.open(EtcdStore(cast(Any, etcd), PLACE, lead), 1, **options), lead


@asynccontextmanager
async def beside(directory: Path) -> AsyncIterator[CommitLog]:
    """The commit log of a coordinator with records in SQLite."""
    store = SqliteStore(directory)
    yield await CommitLog.open(store, 1)
    await store.close()


async def register(log: CommitLog, *names: str) -> None:
    for name in names:
        await log.commit(registration(log.state, server(name, capacity_bytes=LARGE), frozenset()))


def service_of(log: CommitLog, servers: Servers) -> services.CoordinatorService:
    known = cast(Any, servers)
    ends = SessionEndNotifier(log, known)
    maker, roles = SegmentMaker(log, known), RoleChanges(log, known, ends)
    copies = CopyMaker(log, known, roles.tell_roles, maker.drop)
    watch = EventWatch(log.now())
    return services.CoordinatorService(log, known, maker, roles, copies, ends, watch, cast(Any, None), Mirrors())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_caller_that_gives_up(has_begun: bool) -> None:
    """The coordinator hears what etcd carried out, though the caller has gone. It lost its lead, or showed what was
    deleted. A call that had to wait has changed nothing.
    """

    async def work() -> None:
        etcd = SlowEtcd()
        log, lead = await opened(etcd)
        await register(log, "a")
        maker = SegmentMaker(log, cast(Any, Servers()))
        for name in "wv":
            await maker.create(Creation(name, (8,), "float32"), 1.0)
        etcd.done.clear()
        etcd.answers.clear()
        calls = [asyncio.create_task(log.commit(BufferDeleted("w", missing_ok=False)))]
        await etcd.done.wait()
        calls.append(asyncio.create_task(log.commit(BufferDeleted("v", missing_ok=False))))
        await asyncio.sleep(0)
        calls[0 if has_begun else 1].cancel()
        await asyncio.sleep(0)
        etcd.answers.set()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*calls)
        await calls[1 if has_begun else 0]
        await log.commit(BufferDeleted("nothing", missing_ok=True))
        left = set() if has_begun else {"v"}
        assert set(log.state.buffers) == left
        assert {key for key in await read_records(cast(Any, etcd), PLACE) if "buffer" in key} == {
            f"buffer/{name}" for name in left
        }
        await maker.create(Creation("x", (8,), "float32"), 1.0)
        assert lead.holds

    asyncio.run(work())


def test_more_creations_under_way_than_etcd_takes_back_at_once() -> None:
    """No coordinator could lead any more."""

    async def work() -> None:
        etcd = FakeEtcd()
        log, lead = await opened(etcd)
        await register(log, "a")
        for number in range(2 * CHANGES_MAX + 1):
            await log.commit(BufferWanted(Creation(f"w{number}", (8,), "float32"), new_id))
        await lead.close()
        log, _ = await opened(etcd)
        await register(log, "a")
        while log.state.interrupted:
            await log.commit(UnexplainedJudged(changes_max=CHANGES_MAX // 4))
        assert not log.state.buffers
        assert not any("buffer" in key for key in await read_records(cast(Any, etcd), PLACE))

    asyncio.run(work())


def test_more_metadata_than_etcd_takes_at_once() -> None:
    """A server is lost whose buffers' records together are too much for a request: the work of leases ended unheard."""

    async def work() -> None:
        clock = [Instant(0.0, 1.7e9)]
        log, _ = await opened(FakeEtcd(), clock=lambda: clock[0])
        await register(log, "a", "b", "c")
        metadata = pack('{"x":"' + os.urandom(350_000).hex() + '"}')
        maker = SegmentMaker(log, cast(Any, Servers()))
        for number in range(6):
            creation = Creation(f"w{number}", (8,), "float32", replicas=2, metadata=metadata, server_names=("a",))
            await maker.create(creation, 1.0)
        await log.commit(ServerDied("a", 1))
        servers = cast(Any, Servers(living=1))
        endings = SessionEndNotifier(log, servers)
        seen = RoleChanges(log, servers, endings).seen_survivors
        ticks = asyncio.create_task(_tick(log, endings, Health("us:1"), seen))
        deadline = asyncio.get_running_loop().time() + 30
        while any(segment.server == "a" for record in log.state.buffers.values() for segment in record.segments):
            assert not ticks.done()
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        ticks.cancel()

    asyncio.run(work())


class OldHost(MemoryServerServicer):
    """A server's control port. It is silent until it is told to answer."""

    def __init__(self) -> None:
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def DeleteSegment(self, request: pb.DeleteSegmentRequest, _: object) -> pb.DeleteSegmentReply:  # noqa: N802
        self.asked.set()
        await self.answers.wait()
        return pb.DeleteSegmentReply(used_bytes=request.id)


def test_a_server_at_another_address_ends_no_call_to_the_former_one() -> None:
    """The former call's task was cancelled, and with it all later work of that task."""

    async def work() -> None:
        hosts = [OldHost(), OldHost()]
        daemons, addresses = [], []
        for host in hosts:
            daemon = grpc.aio.server()
            add_MemoryServerServicer_to_server(host, daemon)  # type: ignore[no-untyped-call]
            addresses.append(f"127.0.0.1:{daemon.add_insecure_port('127.0.0.1:0')}")
            await daemon.start()
            daemons.append(daemon)
        servers = MemoryServers()
        former, later = (replace(server("a"), control_address=address) for address in addresses)
        waits = asyncio.create_task(servers.drop(former, 5, 0, Ground.DELETED))
        await hosts[0].asked.wait()
        hosts[1].answers.set()
        assert await servers.drop(later, 6, 0, Ground.DELETED) == 6
        hosts[0].answers.set()
        assert await waits == 5
        await servers.close()
        for daemon in daemons:
            await daemon.stop(None)

    asyncio.run(work())


@pytest.mark.parametrize("patient", [True, False])
def test_a_server_that_is_started_anew_during_a_creation(tmp_path: Path, patient: bool) -> None:
    """The segment that it had made is gone. The buffer counted as made, and nobody knew that a part of it was not."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            await register(log, "a", "b")
            servers = Servers()

            async def restart() -> None:
                while not servers.holds["a"]:
                    await asyncio.sleep(0)
                servers.holds["a"].clear()
                await log.commit(returned(log.state, "a", 2, frozenset()))
                await log.commit(registration(log.state, server("a", instance_id=2), frozenset()))

            servers.waits["b"] = restart
            maker = SegmentMaker(log, cast(Any, servers))
            creation = Creation("w", (1 << 20,), "float32", server_names=("a", "b"))
            if not patient:
                with pytest.raises(UnavailableError, match='"a" was restarted meanwhile'):
                    await maker.create(creation, 0.0)
                assert not log.state.buffers
                assert servers.holds == {"a": set(), "b": set(), "c": set()}
                return
            record = await maker.create(creation, 5.0)
            assert [servers.holds[segment.server] for segment in record.segments] == [{s.id} for s in record.segments]

    asyncio.run(work())


def test_two_new_runs_of_one_server(tmp_path: Path) -> None:
    """Both found the former one dead, and both were taken: the buffers of the first were lost."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            await register(log, "a")
            servers = Servers()
            service = service_of(log, servers)

            def request(run: int) -> pb.RegisterServerRequest:
                at = f"10.0.0.{run}"
                return pb.RegisterServerRequest(
                    name="a", instance_id=run, data_address=f"{at}:1", control_address=f"{at}:2", capacity_bytes=1 << 26
                )

            calls = [service.RegisterServer(request(run), cast(Any, None)) for run in (2, 3)]
            first, second = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(first, pb.RegisterServerReply)
            assert isinstance(second, AlreadyExistsError)
            assert log.state.servers["a"].instance_id == 2
            assert servers.probed == [1, 2]

    asyncio.run(work())


def test_a_registration_of_before(tmp_path: Path) -> None:
    """It was sent to a coordinator that stood by: its list is older than what was made since. A good copy was dropped,
    and whole buffers were called lost.
    """

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker, service = SegmentMaker(log, cast(Any, servers)), service_of(log, servers)
            await maker.create(Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            await maker.create(Creation("v", (8,), "float32", server_names=("a",)), 1.0)
            made = dict(log.state.buffers)
            request = pb.RegisterServerRequest(
                name="a", instance_id=1, data_address="h:1", control_address="h:2", capacity_bytes=LARGE
            )
            await service.RegisterServer(request, cast(Any, None))
            assert log.state.buffers == made
            assert not log.state.lost_segments(log.now())
            servers.holds["a"].clear()  # and what it says that it lacks, when it is asked, is gone
            await service.RegisterServer(request, cast(Any, None))
            assert [segment.server for segment in log.state.buffers["w"].segments] == ["b"]
            assert log.state.lost_segments(log.now()) == {log.state.buffers["v"].segments[0].id}

    asyncio.run(work())


def test_a_primary_is_back_while_its_backup_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up for a backup whose lease ran and that was lost by then. One that renews while it is looked at
    lives, though nobody answers at its address. An earlier renewal shows nothing, not even after an earlier look.
    """
    monkeypatch.setattr(replica_role_changes, "PROBE_S", 0.02)

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker, service = SegmentMaker(log, cast(Any, servers)), service_of(log, servers)
            record = await maker.create(Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            request = pb.RegisterServerRequest(
                name="a", instance_id=3, data_address="h:1", control_address="h:2", capacity_bytes=LARGE,
                segment_ids=[record.segments[0].id], segment_epochs=[1], segment_flags=[1],
            )  # fmt: skip
            servers.living, servers.mute = 3, frozenset({1})  # both former runs; b's is silent
            await log.commit(ServerDied("a", 1))
            renewal = ServerRenewed("b", 1, log.state.allocation("b").nbytes)
            for _ in range(3):
                with pytest.raises(
                    UnavailableError, match='"b", which has other copies of its segments, does not answer'
                ):
                    await service.RegisterServer(request, cast(Any, None))
                await log.commit(renewal)
            servers.probed.clear()
            registers = asyncio.ensure_future(service.RegisterServer(request, cast(Any, None)))
            while 1 not in servers.probed:
                await asyncio.sleep(0)
            await log.commit(renewal)
            await registers
            assert [segment.server for segment in log.state.buffers["w"].segments] == ["b"]

    asyncio.run(work())


def test_a_copy_stays_until_the_other_one_is_known_to_be_whole(tmp_path: Path) -> None:
    """A primary had reported its backup's copy as whole, and was restarted before the backup had heard of that. Its own
    copy was dropped at once; killed at that moment, the backup would have come back with half a copy.
    """

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1, half=frozenset({"b"}))
            await register(log, "a", "b")
            maker, service = SegmentMaker(log, cast(Any, servers)), service_of(log, servers)
            record = await maker.create(Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            (number,) = (segment.id for segment in record.segments)
            await log.commit(ServerDied("a", 1))
            stamp = log.state.lineage.stamp
            request = pb.RegisterServerRequest(
                name="a", instance_id=3, data_address="h:1", control_address="h:2", capacity_bytes=LARGE,
                segment_ids=[number], segment_epochs=[1], segment_flags=[1],
                stamps=[pb.StoreStamp(cluster=stamp.cluster, term=stamp.term, sequence=stamp.sequence)],
            )  # fmt: skip
            reply = await service.RegisterServer(request, cast(Any, None))
            assert [segment.server for segment in log.state.buffers["w"].segments] == ["b"]
            assert not reply.drop_segment_ids
            unproven = await service._roles.unproven_copies({number})
            assert unproven == {("b", number)}
            assert not (await log.commit(UnexplainedJudged(unproven=unproven))).effects
            servers.half = frozenset()
            unproven = await service._roles.unproven_copies({number})
            (drop,) = (await log.commit(UnexplainedJudged(unproven=unproven))).effects
            assert (drop.segments[0].id, drop.segments[0].server) == (number, "a")

    asyncio.run(work())


def test_a_server_that_the_records_do_not_know_is_taken(tmp_path: Path) -> None:
    """They place copies there nevertheless. Nobody had looked at the servers of the other copies, which was the reason
    to refuse it, each time anew.
    """

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker, service = SegmentMaker(log, cast(Any, servers)), service_of(log, servers)
            record = await maker.create(Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            await log.commit(ServerDied("a", 1))
            log.state = replace(log.state, servers={"b": log.state.servers["b"]})
            request = pb.RegisterServerRequest(
                name="a", instance_id=3, data_address="h:1", control_address="h:2", capacity_bytes=LARGE,
                segment_ids=[record.segments[0].id], segment_epochs=[1], segment_flags=[1],
            )  # fmt: skip
            await service.RegisterServer(request, cast(Any, None))
            assert [segment.server for segment in log.state.buffers["w"].segments] == ["b"]

    asyncio.run(work())


def test_a_copy_is_not_given_up_for_one_of_a_dead_server(tmp_path: Path) -> None:
    """Of two servers one was killed, and the other one lost right before: its lease ran, and it went on alone."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker = SegmentMaker(log, cast(Any, servers))
            roles = RoleChanges(log, cast(Any, servers), SessionEndNotifier(log, cast(Any, servers)))
            made = await maker.create(Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            await log.commit(ServerDied("a", 1))
            servers.mute = frozenset({1})
            assert await roles.seen_survivors() == frozenset()
            await log.commit(Ticked(seen=frozenset()))
            assert log.state.buffers["w"] == made
            servers.mute = frozenset()
            assert await roles.seen_survivors() == {"b"}
            servers.living = 2
            await roles.seen_survivors()  # it is dead
            await log.commit(Ticked())
            assert log.state.buffers["w"] == made
            assert not log.state.alive("b", log.now())

    asyncio.run(work())


def test_a_primary_that_can_lead_later_says_so_when_it_renews(tmp_path: Path) -> None:
    """A report of the epoch that the records have is about the connection to its backup alone."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = cast(Any, Servers(living=1))
            await register(log, "a", "b")
            roles = RoleChanges(log, servers, SessionEndNotifier(log, servers))
            made = await SegmentMaker(log, servers).create(
                Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0
            )
            log.state = replace(log.state, began=-math.inf)
            for name, epoch in (("a", 1), ("b", 4)):
                await roles.look_after(name, [pb.BrokenPair(segment_id=made.segments[0].id, epoch=epoch)])
                assert log.state.buffers["w"] == made
            await roles.look_after("a", [pb.BrokenPair(segment_id=made.segments[0].id, epoch=4)])
            (segment,) = log.state.buffers["w"].segments
            assert (segment.server, segment.backup, segment.epoch) == ("a", "", 5)

    asyncio.run(work())


@pytest.mark.parametrize("refused", [False, True])
def test_a_copy_is_not_given_up_for_that_of_a_server_that_died_after_its_report(tmp_path: Path, refused: bool) -> None:
    """A primary had not reached its backup for long, and said so. It was killed, and its host's memory lost, while the
    coordinator looked at the backup's server, which had the only copy then. Nor for one that has lost some of the
    segments that move together.
    """

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker = SegmentMaker(log, cast(Any, servers))
            roles = RoleChanges(log, cast(Any, servers), SessionEndNotifier(log, cast(Any, servers)))
            for creation in (
                Creation("w", (8,), "float32", replicas=2, server_names=("a",)),
                Creation("joined", (8,), "float32", like="w", joins=True, replicas=0),
            ):
                await maker.create(creation, 1.0)
            first, second = (log.state.buffers[name].segments[0].id for name in ("w", "joined"))
            broken = [
                pb.BrokenPair(segment_id=each, epoch=1, for_ms=9000, instance_id=1, refused=refused)
                for each in (first, second)
            ]

            async def part() -> list[str]:
                await roles.look_after("a", broken)
                return [log.state.buffers[name].segments[0].backup for name in ("w", "joined")]

            assert await part() == ["b"] * 2
            servers.leads = frozenset({first})
            assert await part() == ["b"] * 2
            record = log.state.buffers["joined"]
            log.state = replace(log.state, buffers=log.state.buffers.changed((replace(record, ready=False),)))
            log.state = replace(log.state, interrupted={record.id: Interrupted({})})
            assert await part() == ["b"] * 2, "a creation that was interrupted: it may be in use"
            log.state = replace(log.state, interrupted={})
            log.state = replace(log.state, buffers=log.state.buffers.changed((record,)))
            servers.leads, servers.half = frozenset({first, second}), frozenset({"a"})
            assert await part() == ["b"] * 2
            servers.half = frozenset()
            servers.mute = frozenset({1})
            assert await part() == ["b"] * 2
            servers.mute = frozenset()
            assert await part() == [""] * 2

    asyncio.run(work())


@pytest.mark.parametrize("full", [False, True])
def test_events_that_arrive_during_a_change_are_stored_together(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """In one change of etcd, each on the state that the one before leaves: the second of two deletions finds nothing.
    If etcd refuses them together, each is stored alone, and only the one that is refused again fails.
    """

    async def work() -> None:
        etcd = SlowEtcd()
        log, _ = await opened(etcd)
        await register(log, "a")
        maker = SegmentMaker(log, cast(Any, Servers()))
        for name in "wxyz":
            await maker.create(Creation(name, (8,), "float32"), 1.0)
        changes: list[int] = []
        change = log._store.change

        async def counted(changed: Mapping[str, str | None], *, urgent: bool = False) -> None:
            keys = [key for key in changed if key.startswith("buffer/")]
            changes.append(len(keys))
            if full and (len(keys) > 1 or keys == ["buffer/y"]):
                raise StoreError("etcd refused: no room")
            await change(changed, urgent=urgent)

        monkeypatch.setattr(log._store, "change", counted)
        etcd.done.clear()
        etcd.answers.clear()
        first = asyncio.create_task(log.commit(BufferDeleted("w", missing_ok=False)))
        await etcd.done.wait()
        calls = [asyncio.create_task(log.commit(BufferDeleted(name, missing_ok=False))) for name in "xxyz"]
        await asyncio.sleep(0)
        etcd.answers.set()
        await first
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[1], NotFoundError)
        assert isinstance(results[2], StoreError) == full
        assert set(log.state.buffers) == ({"y"} if full else set())
        assert changes == ([1, 3, 1, 1, 1] if full else [1, 3])
        found = {key for key in await read_records(cast(Any, etcd), PLACE) if "buffer" in key}
        assert found == {f"buffer/{name}" for name in log.state.buffers}

    asyncio.run(work())


def test_a_server_is_not_avoided_for_a_copy_that_nobody_wants_any_more(tmp_path: Path) -> None:
    """The buffer is deleted while the room for its copy is made: the next copy goes to the same server."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            maker = SegmentMaker(log, cast(Any, servers))
            for name in "wv":
                await maker.create(Creation(name, (8,), "float32", replicas=2, server_names=("a",)), 1.0)
            copies = CopyMaker(log, cast(Any, servers), nothing, maker.drop)
            await log.commit(BackupsLost("a", frozenset({log.state.buffers["w"].segments[0].id})))
            servers.waits["b"] = lambda: log.commit(BufferDeleted("w", missing_ok=False))
            await copies.begin()
            await log.commit(BackupsLost("a", frozenset({log.state.buffers["v"].segments[0].id})))
            await copies.begin()
            assert log.state.buffers["v"].segments[0].copying_to == "b"

    asyncio.run(work())


def test_a_server_renews_while_it_makes_room_for_a_copy(tmp_path: Path) -> None:
    """It had to register again, since no record has that room yet, and dropped nothing meanwhile. With a slow server
    elsewhere it registered all the time.
    """

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Servers(living=1)
            await register(log, "a", "b")
            service = service_of(log, servers)
            await SegmentMaker(log, cast(Any, servers)).create(
                Creation("w", (8,), "float32", replicas=2, server_names=("a",)), 1.0
            )
            await log.commit(BackupsLost("a", frozenset({log.state.buffers["w"].segments[0].id})))
            renewal = pb.RenewServerRequest(name="b", instance_id=1, used_bytes=1 << 20)
            servers.waits["b"] = lambda: service.RenewServer(renewal, cast(Any, None))
            await service._copy_maker.begin()
            assert log.state.buffers["w"].segments[0].copying_to == "b"
            with pytest.raises(NotFoundError, match="it holds more than the records say"):
                await service.RenewServer(renewal, cast(Any, None))

    asyncio.run(work())


def test_a_server_that_awaits_a_role_can_take_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know yet that it is a segment's primary. Copies of others went to a server in their source's zone.
    It is not asked for other copies of its own meanwhile: it was, at each look.
    """
    monkeypatch.setattr(copy_maker, "CONFIRM_PAUSE_S", 60.0)
    asked = 0

    class Unaware(Servers):
        async def take_roles(self, at: ServerRecord, messages: Sequence[pb.Replica] = (), *_: object) -> frozenset[int]:
            nonlocal asked
            if at.name == "b" and any(message.confirm for message in messages):
                asked += 1
                raise NotYetError("b has no role 1 here in epoch 2")
            return frozenset()

    async def work() -> None:
        async with beside(tmp_path) as log:
            servers = Unaware(living=1)
            await register(log, "a", "b")
            maker = SegmentMaker(log, cast(Any, servers))
            for name, at in (("w", "a"), ("v", "b"), ("u", "b")):
                await maker.create(Creation(name, (8,), "float32", replicas=2, server_names=(at,)), 1.0)
            copies = CopyMaker(log, cast(Any, servers), nothing, maker.drop)
            await log.commit(BackupsLost("b", frozenset({log.state.buffers["v"].segments[0].id})))
            await copies.begin()
            assert log.state.buffers["v"].segments[0].copying_to == ""
            await log.commit(BackupsLost("b", frozenset({log.state.buffers["u"].segments[0].id})))
            await copies.begin()
            assert asked == 1
            await log.commit(BackupsLost("a", frozenset({log.state.buffers["w"].segments[0].id})))
            await copies.begin()
            assert log.state.buffers["w"].segments[0].copying_to == "b"

    asyncio.run(work())


async def nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("look_s", [0.001, 0.1, 1.0])
def test_all_survivors_are_seen_however_long_looking_at_all_takes(
    look_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a look takes long, and what was seen of 100 servers together was always too old: their copies
    waited for ever to take over. Now some are looked at each time, and each sight is used while it counts.
    """

    async def work() -> None:
        clock = [Instant(0.0, 1.7e9)]
        log, _ = await opened(FakeEtcd(), clock=lambda: clock[0])
        names = [f"s{number:03}" for number in range(100)]
        await register(log, *names)
        began: dict[str, float] = {}

        class Busy(Servers):
            async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
                began[at.name] = clock[0].monotonic
                await asyncio.sleep(0)
                clock[0] = replace(clock[0], monotonic=clock[0].monotonic + look_s)
                return await super().look(at, segment_ids)

        servers = cast(Any, Busy(living=1, holds={name: set() for name in names}))
        roles = RoleChanges(log, servers, SessionEndNotifier(log, servers))
        monkeypatch.setattr(replica_role_changes, "survivors", lambda _state, _now: frozenset(names) - found)
        found: set[str] = set()
        for _ in range(60):
            now_seen = await roles.seen_survivors()
            assert all(clock[0].monotonic - began[name] <= LOOK_COUNTS_S for name in now_seen)
            found |= now_seen
        assert found == set(names)

    asyncio.run(work())


def test_a_server_with_hundreds_of_peers_can_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All were looked at together. With TLS some connections took longer than a look waits, and a registration that
    depended on 800 servers was refused for ever.
    """

    async def work() -> None:
        names = [f"s{number:03}" for number in range(300)]
        begun: list[str] = []

        class Busy(Servers):
            """Answers in time if a few are asked together."""

            async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
                begun.append(at.name)
                await asyncio.sleep(0)
                together = len(begun)
                await asyncio.sleep(0)
                begun.remove(at.name)
                held = {number: Held(1, whole=True) for number in segment_ids}
                return Look(RunLiveness.MUTE if together > LOOKS_AT_ONCE_MAX else RunLiveness.ALIVE, held)

        async with beside(tmp_path) as log:
            await register(log, "a", *names)
            service = service_of(log, Busy(living=1))
            made = registration(log.state, server("a", 2), frozenset())
            monkeypatch.setattr(registrations, "deciding_peers", lambda *_: names)
            assert await service._registrations._look_at_others(made) == frozenset(names)
            record = record_on(names)
            log.state = replace(log.state, buffers=log.state.buffers.changed([record]))
            assert await service._roles.unproven_copies({each.id for each in record.segments}) == frozenset()

    asyncio.run(work())


@pytest.mark.parametrize("look_s", [0.1, 1.5])
def test_looks_at_servers_in_turn_end_when_the_first_counts_no_more(look_s: float) -> None:
    """They went on although their caller then throws away what was seen."""

    async def work() -> None:
        clock = [Instant(0.0, 1.7e9)]
        log, _ = await opened(FakeEtcd(), clock=lambda: clock[0])
        names = [f"s{number:03}" for number in range(10 * LOOKS_AT_ONCE_MAX)]
        await register(log, *names)

        class Slow(Servers):
            async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
                asked_at = clock[0].monotonic
                await asyncio.sleep(0)  # until all of its batch are asked
                clock[0] = replace(clock[0], monotonic=asked_at + look_s)
                return Look(RunLiveness.ALIVE)

        servers = cast(Any, Slow())
        roles = RoleChanges(log, servers, SessionEndNotifier(log, servers))
        looks = await roles.looked_in_turn(dict.fromkeys(names, ()))
        assert len(looks) == (len(names) if look_s == 0.1 else 3 * LOOKS_AT_ONCE_MAX)
        assert clock[0].monotonic < LOOK_COUNTS_S + look_s

    asyncio.run(work())


def test_a_registration_names_the_first_server_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at all the others before. Each of them that did not answer took a second, so that it took too long."""
    monkeypatch.setattr(replica_role_changes, "PROBE_S", 0.02)

    async def work() -> None:
        names = [f"s{number:03}" for number in range(3 * LOOKS_AT_ONCE_MAX)]

        class Mute(Servers):
            async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
                self.probed.append(at.instance_id)
                await asyncio.sleep(0 if at.name == "s040" else 0.2)
                return Look(RunLiveness.MUTE if at.name == "s040" else RunLiveness.ALIVE)

        async with beside(tmp_path) as log:
            await register(log, "a", *names)
            servers = Mute()
            service = service_of(log, servers)
            made = registration(log.state, server("a", 2), frozenset())
            monkeypatch.setattr(registrations, "deciding_peers", lambda *_: names)
            with pytest.raises(UnavailableError, match=r'"s040", which has other copies .* does not answer'):
                await service._registrations._look_at_others(made)
            assert len(servers.probed) < len(names)

    asyncio.run(work())


def test_a_server_that_does_not_answer_holds_up_no_other_look() -> None:
    """Looks at each 32 servers waited for the slowest of these: three such servers took longer than looks count."""

    async def work() -> None:
        log, _ = await opened(FakeEtcd())
        names = [f"s{number:03}" for number in range(5 * LOOKS_AT_ONCE_MAX)]
        await register(log, *names)
        ends, others = asyncio.Event(), 0

        class Mute(Servers):
            async def look(self, at: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
                nonlocal others
                if at.name in names[:: 2 * LOOKS_AT_ONCE_MAX]:
                    await ends.wait()
                    return Look(RunLiveness.UNNAMED)
                others += 1
                if others == len(names) - 3:
                    ends.set()
                return Look(RunLiveness.ALIVE)

        servers = cast(Any, Mute())
        roles = RoleChanges(log, servers, SessionEndNotifier(log, servers))
        assert len(await asyncio.wait_for(roles.looked_in_turn(dict.fromkeys(names, ())), 20.0)) == len(names)

    asyncio.run(work())


def test_a_creation_that_another_run_refuses_is_made_again(tmp_path: Path) -> None:
    """A server was restarted after it was chosen. The process that is there now made nothing, and is as good."""

    async def work() -> None:
        async with beside(tmp_path) as log:
            await register(log, "a", "b")
            servers = Servers()

            async def restart() -> None:
                await log.commit(returned(log.state, "a", 2))
                await log.commit(registration(log.state, server("a", 2)))
                raise AnotherRunError('memory server "a" was restarted meanwhile')

            servers.waits["a"] = restart
            maker = SegmentMaker(log, cast(Any, servers))
            record = await maker.create(Creation("w", (1 << 20,), "float32", server_names=("a",)), 5.0)
            assert record.ready

    asyncio.run(work())


def record_on(servers: Sequence[str]) -> BufferRecord:
    """A buffer with a segment on each of these servers."""
    segments = tuple(SegmentRecord(number + 1, name, 8, 4096) for number, name in enumerate(servers))
    return BufferRecord("w", 1, (8,), "float32", 32, 1, 4096, 64, segments, 1.0, ready=True)
