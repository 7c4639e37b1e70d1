"""What the coordinator makes of mirrors: their records, and who feeds whom by what relays reported."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from smb import errors
from smb.coordinator.beside_loop import BesideLoop
from smb.coordinator.events import (
    BufferDeleted,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    EraseBuffer,
    Instant,
    ServerRenewed,
)
from smb.coordinator.mirrors.filling import Mirrors
from smb.coordinator.mirrors.plans import PACE_S
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.state import SERVER_LEASE_S, State
from smb.coordinator.steps import step
from smb.coordinator.validate import Creation
from smb.rpc import control_pb2 as pb
from tests.support.decisions import registration

NOW = Instant(1000.0, 1.7e9)
SERVERS = ("s0", "s1", "s2", "s3")


class Cluster:
    def __init__(self) -> None:
        self.state = State()
        self.ids = itertools.count(1)
        for name in SERVERS:
            record = ServerRecord(name, 1, "10.0.0.1:1", "10.0.0.1:2", "/s", "", 1 << 26, 0, 0.0, zone=f"zone-{name}")
            self.do(registration(self.state, record, frozenset()))
        self.make(Creation("p", (1 << 20,), "uint8", server_names=("s0",), versions=3, wire="exact"))

    def do(self, event: object) -> tuple[object, ...]:
        self.state, effects = step(self.state, event, NOW)  # type: ignore[arg-type]
        return effects

    def make(self, creation: Creation, *, ready: bool = True) -> BufferRecord:
        self.do(BufferWanted(creation, lambda: next(self.ids)))
        if ready:
            self.do(BufferMade(creation.name))
        return self.state.buffers[creation.name]

    def mirror(self, server: str, of: str = "p", *, ready: bool = True) -> BufferRecord:
        creation = Creation(f"{of}.mirror.{server}", (), "", server_names=(server,), mirror_of=of)
        return self.make(creation, ready=ready)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def report(
    mirrors: Mirrors,
    cluster: Cluster,
    server: str,
    at: Instant = NOW,
    published: int = 6,
    version: int = 4,
    plan: tuple[int, int] = (0, 0),
    **feeds: float,
) -> None:
    names = {"source": "p"} | {each: f"p.mirror.{each}" for each in SERVERS}
    told = pb.MirrorReport(name=f"p.mirror.{server}", version=version, published=published)
    told.plan_number, told.plan_last_version = plan
    told.feeds.extend(pb.Feed(name=names[name], bytes_per_s=rate, limited=True) for name, rate in feeds.items())
    mirrors.record(cluster.state, server, pb.RenewServerRequest(name=server, mirrors=[told]), at)


def shares(mirrors: Mirrors, cluster: Cluster, server: str, now: Instant = NOW) -> dict[str, float]:
    (task,) = mirrors.tasks(cluster.state, server, now)
    assert (task.name, task.source) == (f"p.mirror.{server}", "p")
    found: dict[str, float] = {}
    before = 0.0
    for parent in task.plans[-1].parents:
        name = parent.name.removeprefix("p.mirror.")
        found[name] = found.get(name, 0.0) + parent.end - before
        before = parent.end
    assert before == pytest.approx(1.0)
    return found


def test_a_mirror_has_its_sources_form_and_goes_with_it(cluster: Cluster) -> None:
    mirror = cluster.mirror("s1")
    source = cluster.state.buffers["p"]
    assert (mirror.shape, mirror.dtype, mirror.versions) == (source.shape, source.dtype, source.versions)
    assert mirror.mirror_of == source.id
    assert BufferRecord.from_json(mirror.to_json()) == mirror
    assert "mirror_of" not in source.to_json()
    cluster.make(Creation("p.mirror.s1.arrived", (18,), "int64", server_names=("s1",)))
    pending = cluster.mirror("s2", ready=False)
    for event in (BufferRenamed("p", "q"), BufferRenamed(mirror.name, "q")):
        with pytest.raises(errors.InvalidArgumentError, match="stop its relays"):
            cluster.do(event)
    effects = cluster.do(BufferDeleted("p", missing_ok=False))
    gone = {effect.key for effect in effects if isinstance(effect, EraseBuffer)}
    assert gone == {"p", "p.mirror.s1", "p.mirror.s1.arrived"}
    with pytest.raises(errors.NotFoundError, match="deleted meanwhile"):
        cluster.do(BufferMade(pending.key))


def test_what_can_have_no_mirror(cluster: Cluster) -> None:
    cluster.make(Creation("plain", (8,), "uint8", server_names=("s0",)))
    mirror = cluster.mirror("s1")
    for of, server, why in (("plain", "s1", "not published"), (mirror.name, "s2", "itself"), ("p", "s0", "itself")):
        with pytest.raises(errors.InvalidArgumentError, match=why):
            cluster.mirror(server, of)
    with pytest.raises(errors.NotFoundError):
        cluster.mirror("s1", "nothing")
    with pytest.raises(errors.AlreadyExistsError):
        cluster.mirror("s1")


def ranges(mirrors: Mirrors, cluster: Cluster, server: str, now: Instant = NOW) -> list[tuple[int, int, int]]:
    (task,) = mirrors.tasks(cluster.state, server, now)
    return [(plan.number, plan.first_version, plan.last_version) for plan in task.plans]


def test_until_relays_report_there_is_no_plan(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2", "s3"):
        cluster.mirror(server)
    assert ranges(mirrors, cluster, "s1") == []
    assert mirrors.tasks(cluster.state, "s0", NOW) == []
    told = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
    assert all(each.alive for each in told)  # they have just begun
    late = replace(NOW, wall=NOW.wall + 60)
    assert not any(each.alive for each in mirrors.messages(cluster.state, cluster.state.buffers["p"], late))


def test_those_that_report_feed_each_other_and_a_silent_one_feeds_nobody(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2", "s3"):
        cluster.mirror(server)
        report(mirrors, cluster, server)
    assert shares(mirrors, cluster, "s1") == pytest.approx({"p": 1 / 3, "s2": 1 / 3, "s3": 1 / 3})
    later = replace(NOW, monotonic=NOW.monotonic + SERVER_LEASE_S - 1)
    for server in ("s1", "s2"):
        report(mirrors, cluster, server, later, source=100.0)
    after = replace(NOW, monotonic=NOW.monotonic + SERVER_LEASE_S + 1)
    cluster.state, _ = step(cluster.state, ServerRenewed("s1", 1, 0), later)
    cluster.state, _ = step(cluster.state, ServerRenewed("s2", 1, 0), later)
    assert shares(mirrors, cluster, "s1", after).keys() == {"p", "s2"}
    assert shares(mirrors, cluster, "s3", after).keys() == {"s1", "s2"}


def test_the_first_plan_waits_for_all_that_may_report(cluster: Cluster) -> None:
    """A plan holds for a version at least, so one for a part of the relays would delay the plan for all."""
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
    report(mirrors, cluster, "s1")
    assert ranges(mirrors, cluster, "s1") == []
    assert ranges(mirrors, cluster, "s1", replace(NOW, wall=NOW.wall + 20)) == [(1, 0, 7)]
    mirrors = Mirrors()
    report(mirrors, cluster, "s1")
    report(mirrors, cluster, "s2")
    assert ranges(mirrors, cluster, "s2") == [(1, 0, 7)]


def test_a_plan_holds_for_what_is_published_until_servers_hear_of_it(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
        report(mirrors, cluster, server)
    assert ranges(mirrors, cluster, "s1") == [(1, 0, 7)]
    soon = replace(NOW, monotonic=NOW.monotonic + PACE_S)
    report(mirrors, cluster, "s1", soon, published=16)  # ten versions in that time, and so in the next
    assert ranges(mirrors, cluster, "s2", soon) == [(1, 0, 27)]


def test_a_new_plan_begins_after_the_versions_of_the_present_one(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
        report(mirrors, cluster, server)
    assert ranges(mirrors, cluster, "s1") == [(1, 0, 7)]
    cluster.mirror("s3")
    assert ranges(mirrors, cluster, "s3") == [(1, 0, 7)]  # its relay begins, and feeds no other one
    assert shares(mirrors, cluster, "s3") == pytest.approx({"s1": 0.5, "s2": 0.5})
    report(mirrors, cluster, "s3")
    for server in ("s1", "s2", "s3"):
        assert ranges(mirrors, cluster, server) == [(1, 0, 7), (2, 8, 8)]
    report(mirrors, cluster, "s3", version=7, published=7, s1=1.0)
    assert ranges(mirrors, cluster, "s3") == [(1, 0, 7), (2, 8, 9)]  # not yet in force, so it is not replaced


@pytest.mark.parametrize(("rate", "number"), [(46.0, 1), (40.0, 2)])
def test_a_new_plan_must_be_much_faster(cluster: Cluster, rate: float, number: int) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
        report(mirrors, cluster, server, source=50.0)
    assert ranges(mirrors, cluster, "s1")[-1][0] == 1
    report(mirrors, cluster, "s1", version=5, source=50.0, s2=95.0)
    report(mirrors, cluster, "s2", version=5, source=50.0, s1=rate)
    assert ranges(mirrors, cluster, "s1")[-1][0] == number


def test_a_dead_parent_is_skipped_within_the_plan(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2", "s3"):
        cluster.mirror(server)
        report(mirrors, cluster, server)
    assert shares(mirrors, cluster, "s1").keys() == {"p", "s2", "s3"}
    later = replace(NOW, monotonic=NOW.monotonic + SERVER_LEASE_S - 1)
    for server in ("s1", "s2"):
        cluster.state, _ = step(cluster.state, ServerRenewed(server, 1, 0), later)
        report(mirrors, cluster, server, later)
    after = replace(NOW, monotonic=NOW.monotonic + SERVER_LEASE_S + 1)
    (task,) = mirrors.tasks(cluster.state, "s1", after)
    assert [plan.number for plan in task.plans] == [1, 2]
    assert {parent.name for parent in task.plans[0].parents} == {"p", "p.mirror.s2"}


def test_a_restarted_coordinator_goes_on_after_the_plans_in_use(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
    old = replace(NOW, wall=NOW.wall + 60)
    report(mirrors, cluster, "s1", old, plan=(7, 9))
    assert ranges(mirrors, cluster, "s1", old) == []  # the relay of s2 may have a later one
    report(mirrors, cluster, "s2", old, plan=(8, 11))
    assert ranges(mirrors, cluster, "s1", old) == [(9, 12, 12)]


def test_what_is_published_is_what_any_mirror_heard_last(cluster: Cluster) -> None:
    """A dead mirror's own report says what was published when it died."""
    mirrors = Mirrors()
    for server, published in (("s1", 5), ("s2", 13), ("s3", 9)):
        cluster.mirror(server)
        report(mirrors, cluster, server, published=published)
    told = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
    assert [(each.server, each.version, each.published) for each in told] == [(s, 4, 13) for s in ("s1", "s2", "s3")]


def test_measured_rates_are_shares(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2", "s3"):
        cluster.mirror(server)
    report(mirrors, cluster, "s1", source=50.0, s2=100.0, s3=200.0)
    report(mirrors, cluster, "s2", source=50.0, s1=50.0, s3=200.0)
    report(mirrors, cluster, "s3", source=50.0, s1=50.0, s2=100.0)
    # Sent: the source 150, s1 100, s2 200, s3 400. Each of these zones has one way in: as one relay.
    assert shares(mirrors, cluster, "s1") == pytest.approx({"p": 1 / 7, "s2": 2 / 7, "s3": 4 / 7})
    (message, *_) = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
    assert (message.version, message.published, message.zone) == (4, 6, "zone-s1")
    stranger = pb.RenewServerRequest(name="s2", mirrors=[pb.MirrorReport(name="p.mirror.s1", version=9)])
    mirrors.record(cluster.state, "s2", stranger, NOW)  # it is not there
    assert mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)[0].version == 4


def test_a_slow_link_between_zones_is_gone_round(cluster: Cluster) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2", "s3"):
        cluster.mirror(server)
        report(mirrors, cluster, server)
    assert shares(mirrors, cluster, "s3")["p"] == pytest.approx(1 / 3)
    report(mirrors, cluster, "s1", version=8, published=8, source=50.0, s2=50.0, s3=50.0)
    report(mirrors, cluster, "s2", version=8, published=8, source=50.0, s1=50.0, s3=50.0)
    report(mirrors, cluster, "s3", version=8, published=8, source=2.0, s1=50.0, s2=50.0)
    assert shares(mirrors, cluster, "s3").get("p", 0.0) < 0.05


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, 0.0, 1e-300, 1e300])
def test_a_value_that_cannot_be_a_rate_is_left_out(cluster: Cluster, rate: float) -> None:
    mirrors = Mirrors()
    for server in ("s1", "s2"):
        cluster.mirror(server)
        report(mirrors, cluster, server, source=rate, s1=rate, s2=rate)
    assert shares(mirrors, cluster, "s1") == pytest.approx({"p": 0.5, "s2": 0.5})


def test_a_mirror_made_anew_has_told_nothing(cluster: Cluster) -> None:
    """Neither what the former one told, nor what is told of that one since."""
    mirrors = Mirrors()
    old = cluster.mirror("s1")
    report(mirrors, cluster, "s1")
    (told,) = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
    assert (told.version, told.published) == (4, 6)
    cluster.do(BufferDeleted(old.name, missing_ok=False))
    new = cluster.mirror("s1")
    (told,) = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
    assert (told.id, told.version, told.published) == (new.id, 0, 0)
    for report_of, version in ((old.id, 0), (new.id, 5)):
        late = pb.MirrorReport(name=new.name, id=report_of, version=5)
        mirrors.record(cluster.state, "s1", pb.RenewServerRequest(name="s1", mirrors=[late]), NOW)
        (told,) = mirrors.messages(cluster.state, cluster.state.buffers["p"], NOW)
        assert told.version == version


def test_trees_are_packed_beside_the_loop(cluster: Cluster) -> None:
    """A renewal does not wait for them: its answer has the plan before. What was packed for relays that are not the
    present ones any more is not used.
    """
    held: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    async def in_thread(work: Callable[[], Any]) -> Any:
        held.append((work, asyncio.get_running_loop().create_future()))
        return await held[-1][1]

    async def finish() -> None:
        work, done = held.pop(0)
        done.set_result(work())
        for _ in range(5):
            await asyncio.sleep(0)

    async def scenario() -> None:
        mirrors = Mirrors()
        mirrors.pack_beside(BesideLoop(in_thread))
        later = replace(NOW, monotonic=NOW.monotonic + 1, wall=NOW.wall + 100)
        cluster.mirror("s1")
        report(mirrors, cluster, "s1", later)
        (task,) = mirrors.tasks(cluster.state, "s1", later)
        assert not task.plans
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cluster.mirror("s2")
        report(mirrors, cluster, "s2", later)
        mirrors.tasks(cluster.state, "s2", later)  # is planned for both now
        await finish()
        assert not mirrors.tasks(cluster.state, "s1", later)[0].plans
        await finish()
        assert mirrors.tasks(cluster.state, "s1", later)[0].plans
        assert not held

    asyncio.run(scenario())
