"""smb.coordinator.dashboard, history and diagnosis: what people are told of loads and events, without a network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from smb.coordinator.commit_log import Committed
from smb.coordinator.dashboard.buffer_rows import BUFFERS_MAX
from smb.coordinator.dashboard.diagnosis import Problem, problems
from smb.coordinator.dashboard.history import SPAN_S, STEP_S, Amounts, Bins, EventWatch
from smb.coordinator.dashboard.moment import Moment
from smb.coordinator.dashboard.overview import buffer_detail, overview, server_detail, training_detail
from smb.coordinator.dashboard.states import REPORTS_MAX
from smb.coordinator.events import (
    BackupsLost,
    BufferDeleted,
    BufferMade,
    BufferWanted,
    Event,
    Instant,
    ServerLeft,
    ServerRenewed,
    SessionClosed,
    SessionRenewed,
    Ticked,
)
from smb.coordinator.records import ServerRecord
from smb.coordinator.state import State
from smb.coordinator.steps import step
from smb.coordinator.validate import Creation
from smb.errors import NotFoundError
from smb.rpc import control_pb2 as pb
from smb.rpc import metadata
from tests.support.decisions import registration

MIB = 1 << 20
START_S = 1000.0


@dataclass
class Scene:
    """A coordinator's state, its watch, and a clock that stands until it is told to go on."""

    seconds: float = START_S
    state: State = field(default_factory=State)
    watch: EventWatch = field(init=False)
    next_id: int = 0

    def __post_init__(self) -> None:
        self.watch = EventWatch(self.now)

    @property
    def now(self) -> Instant:
        return Instant(self.seconds, 1.7e9 + self.seconds)

    def do(self, event: Event) -> None:
        before = self.state
        self.state, effects = step(before, event, self.now)
        self.watch.saw(event, before, Committed(self.state, effects), self.now)

    def register(self, name: str = "a", instance_id: int = 1, held: frozenset[int] = frozenset()) -> None:
        record = ServerRecord(name, instance_id, "10.0.0.1:1", "10.0.0.1:2", "/s", "10.0.0.1:3", 64 * MIB, 0, 0.0)
        self.do(registration(self.state, record, held))

    def create(
        self, name: str = "w", elements: int = MIB, about: object = None, server: str = "", **options: Any
    ) -> None:
        creation = Creation(name, (elements,), "float32", metadata=metadata.pack(json.dumps(about)) if about else b"")
        self.do(BufferWanted(replace(creation, server_names=(server,) if server else (), **options), self._id))
        self.do(BufferMade(name))

    def renew(
        self, name: str = "a", used_bytes: int = 0, load: pb.ServerLoad | None = None, after: float = 2.0
    ) -> None:
        self.seconds += after
        instance_id = self.state.servers[name].instance_id
        self.do(ServerRenewed(name, instance_id, used_bytes))
        self.watch.record_load(name, instance_id, load or pb.ServerLoad(), self.now)

    def view(self) -> Moment:
        return Moment(self.state, self.watch.seen(self.now), self.now, b"salt")

    def problems(self) -> list[Problem]:
        return problems(self.state, self.watch.seen(self.now), self.now)

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id


def load(count: int, nbytes: int, kind: str = "write", **more: object) -> pb.ServerLoad:
    return pb.ServerLoad(operations=[pb.OperationLoad(transport="tcp", kind=kind, count=count, bytes=nbytes)], **more)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.register("a")
    return made


def test_amounts_are_spread_over_the_steps_that_they_cover() -> None:
    """What was told for 4 s lies in these seconds, in proportion, and a late report finds its place among others."""
    bins = Bins()
    bins.add(101.0, 105.0, Amounts(40, 400, 0))
    bins.add(97.0, 99.0, Amounts(0, 0, 60))  # from a server that told later
    history = bins.history(Instant(110.0, 5110.0))
    assert history.end == 5106.0
    rates = {history.end - STEP_S * back: i for i, back in enumerate(range(len(history.operations), 0, -1))}
    at = {start - 5000: i for start, i in rates.items()}
    assert [history.operations[at[s]] for s in (98, 100, 102, 104)] == [0, 5, 10, 5]
    assert [history.out_bytes[at[s]] for s in (94, 96, 98, 100)] == [0, 15, 15, 0]
    assert sum(history.in_bytes) * STEP_S == pytest.approx(400)


def test_history_is_bounded() -> None:
    """After hours of reports there are still the steps of the last minutes only, however long a server was silent."""
    bins = Bins()
    for second in range(0, 20_000, 2):
        bins.add(second, second + 2, Amounts(2))
    bins.add(0, 20_000, Amounts(20_000))
    assert len(bins._bins) <= SPAN_S / STEP_S + 4
    assert len(bins.history(Instant(20_000, 0)).operations) == SPAN_S / STEP_S


def test_rates_are_those_between_two_renewals_of_one_run(scene: Scene) -> None:
    """None after the first, then per second; a restarted server, whose counters begin anew, starts again with none."""
    scene.renew(load=load(100, 1000))
    assert overview(scene.view(), "")["servers"][0]["rates"] is None
    scene.renew(load=load(120, 5000))
    expected = {"operations": 10, "in": 2000, "out": 0, "within": 0}
    assert overview(scene.view(), "")["servers"][0]["rates"] == expected
    assert overview(scene.view(), "")["totals"]["rates"] == expected
    scene.register("a", instance_id=2)
    assert overview(scene.view(), "")["servers"][0]["rates"] is None
    scene.renew(load=load(1, 10))
    assert overview(scene.view(), "")["servers"][0]["rates"] is None
    scene.renew(load=load(0, 0))  # counters that lie in memory of local clients may go back: never a negative rate
    assert overview(scene.view(), "")["servers"][0]["rates"] == dict.fromkeys(expected, 0)


def test_reads_writes_and_what_happens_in_place_are_told_apart(scene: Scene) -> None:
    """Bytes count as in, out or within by their kind; what only waits is no operation on data."""
    scene.renew()
    kinds = {"accumulate": 10, "read": 20, "apply": 40, "lock": 80}
    operations = [pb.OperationLoad(transport="shm", kind=kind, count=2, bytes=n) for kind, n in kinds.items()]
    scene.renew(load=pb.ServerLoad(operations=operations))
    assert overview(scene.view(), "")["servers"][0]["rates"] == {"operations": 3, "in": 5, "out": 10, "within": 20}


def test_a_server_is_late_then_gone_then_back(scene: Scene) -> None:
    """With what it holds and the command that brings it back; one that was stopped cleanly is said to be so."""
    scene.create("w")
    scene.renew()
    assert scene.problems() == []
    scene.seconds += 4
    (late,) = scene.problems()
    assert (late.severity, late.about) == ("warning", ("server", "a"))
    assert overview(scene.view(), "")["servers"][0]["state"] == "late"
    scene.seconds += 4
    scene.do(Ticked())
    (gone,) = scene.problems()
    assert gone.severity == "critical"
    assert 'buffer "w"' in gone.detail
    assert "smb-memserver --name a" in gone.action
    shown = overview(scene.view(), "")
    assert (shown["servers"][0]["state"], shown["buffers"][0]["state"]) == ("gone", "gone")
    assert "is gone" in shown["events"][0]["text"]
    held = frozenset(segment.id for segment in scene.state.buffers["w"].segments)
    scene.register("a", held=held)
    assert scene.problems() == []
    scene.do(ServerLeft("a", 1))
    assert overview(scene.view(), "")["servers"][0]["state"] == "left"
    assert "was stopped" in scene.problems()[0].title


def test_a_dead_servers_mirrors_are_told_apart(scene: Scene) -> None:
    """A mirror is a copy, which a relay made: it is to be stopped, or made anew by a relay. A server that has mirrors
    alone is a warning; one that has a buffer, too, or a buffer with such a name, is critical.
    """
    scene.create("w", versions=2)
    scene.register("b", instance_id=2)
    scene.create("w.mirror.b", server="b", mirror_of="w")
    scene.create("w.mirror.b.arrived", server="b")
    stop = "smb relay w --stop --to b"
    for extra in ("", "v.mirror.b.arrived"):
        if extra:
            scene.create(extra, server="b")
        for _ in range(4):  # longer than b's lease
            scene.renew("a")
        scene.do(Ticked())
        gone = next(each for each in scene.problems() if each.about == ("server", "b"))
        held = frozenset(s.id for record in scene.state.buffers.values() for s in record.segments if s.server == "b")
        scene.register("b", instance_id=2, held=held)
        scene.register("b", instance_id=3)
        (lost,) = scene.problems()
        for told in (gone, lost):
            assert told.severity == ("critical" if extra else "warning")
            assert "mirrors of w" in told.detail
            assert (stop if told is gone else "smb relay w --to b") in told.action
            assert "w.mirror" not in told.detail + told.action
            assert ("again" in told.action) == bool(extra)
            assert extra in told.action
        scene.register("b", instance_id=2, held=held)


def test_a_server_that_lost_its_memory_is_told_until_its_buffers_are_deleted(scene: Scene) -> None:
    """It is back and alive, and yet nothing of its buffers can be used."""
    scene.create("w")
    scene.register("a", instance_id=2)
    (lost,) = scene.problems()
    assert lost.severity == "critical"
    assert 'buffer "w"' in lost.detail
    assert buffer_detail(scene.view(), "w")["segment_list"][0]["state"] == "lost"
    scene.do(BufferDeleted("w", False))
    assert scene.problems() == []


def test_full_servers_and_promises_that_their_hosts_cannot_keep(scene: Scene) -> None:
    """Nearly full is a warning, full is critical; so is a capacity that the file system does not have a warning."""
    scene.create("w", 15 * MIB)  # 60 MiB of 64
    scene.renew(used_bytes=59 * MIB)
    assert [problem.severity for problem in scene.problems()] == ["warning"]
    scene.create("v", MIB * 3 // 4)
    scene.renew(used_bytes=63 * MIB)
    assert [(p.severity, p.title) for p in scene.problems()] == [("critical", "a is full")]
    scene.renew(used_bytes=0, load=pb.ServerLoad(memory_free_bytes=MIB))
    (promise,) = scene.problems()
    assert "promises more memory" in promise.title
    scene.renew(used_bytes=0, load=pb.ServerLoad(memory_free_bytes=64 * MIB))
    assert scene.problems() == []


def test_errors_count_for_a_minute(scene: Scene) -> None:
    """One stranger at the port is told, a few usual refusals are not, many are; and after a minute it is over."""
    scene.renew(load=pb.ServerLoad(errors={"protocol": 5, "not_found": 100}))
    assert scene.problems() == []  # of before: nobody knows when
    scene.renew(load=pb.ServerLoad(errors={"protocol": 6, "not_found": 110, "timeout": 500}))
    assert [problem.title for problem in scene.problems()] == ["a: 1 requests were not in our protocol"]
    assert overview(scene.view(), "")["servers"][0]["errors_recently"] == 11  # to wait in vain is no error
    scene.renew(load=pb.ServerLoad(errors={"protocol": 6, "not_found": 140, "timeout": 500}))
    assert "a refused 40 requests: not found" in [problem.title for problem in scene.problems()]
    for _ in range(32):
        scene.renew(load=pb.ServerLoad(errors={"protocol": 6, "not_found": 140, "timeout": 500}))
    assert scene.problems() == []


def test_deferred_requests_are_a_problem_once_they_last(scene: Scene) -> None:
    """A moment is normal; seconds mean a stopped process."""
    scene.renew(load=pb.ServerLoad(deferred_requests=3))
    assert scene.problems() == []
    scene.renew(load=pb.ServerLoad(deferred_requests=1))
    scene.renew(load=pb.ServerLoad(deferred_requests=2))
    (deferred,) = scene.problems()
    assert "2 requests wait for a chunk's lock" in deferred.title
    scene.renew()
    assert scene.problems() == []


def test_clients_come_go_and_are_lost(scene: Scene) -> None:
    """Since when each is there; one that closed is no news, one whose lease ran out is, for five minutes. The session's
    id appears nowhere.
    """
    session_id = 0xFEDCBA9876543210
    scene.do(SessionRenewed(session_id, "host:1"))
    scene.do(SessionRenewed(6, "host:2"))
    opened = scene.now.wall
    scene.seconds += 10
    scene.do(SessionRenewed(session_id, "host:1"))
    shown = overview(scene.view(), "")
    assert [(c["name"], c["since"], c["silent_s"]) for c in shown["clients"]] == [
        ("host:1", opened, 0),
        ("host:2", opened, 10),
    ]
    assert str(session_id) not in str(shown)
    assert f"{session_id:x}" not in str(shown)
    scene.do(SessionClosed(6))
    scene.register("a")
    assert scene.problems() == []
    scene.seconds += 29
    scene.do(Ticked())
    scene.register("a")
    assert scene.problems() == []
    scene.seconds += 2
    scene.do(Ticked())
    (lost,) = [problem for problem in scene.problems() if "client" in problem.title]
    assert "host:1" in lost.detail
    scene.seconds += 301
    scene.register("a")
    assert scene.problems() == []


def test_who_holds_a_lock_and_for_how_long(scene: Scene) -> None:
    """A holding is followed by its token; when others wait for it for a minute it is a problem with a name."""
    scene.do(SessionRenewed(7, "host:1"))
    scene.create("w")
    segment_id = scene.state.buffers["w"].segments[0].id

    def held(token: int, waiting: int) -> pb.ServerLoad:
        wait = pb.Wait(segment_id=segment_id, kind="lock", session_id=7, token=token, left_ms=9000, waiting=waiting)
        return pb.ServerLoad(waits=[wait])

    scene.renew(load=held(2, 0))
    scene.seconds += 1
    (wait,) = overview(scene.view(), "")["waits"]
    assert (wait["what"], wait["kind"], wait["name"], wait["holder"]) == ("lock", "buffer", "w", "host:1")
    assert (wait["left_s"], wait["for_s"], wait["waiting"]) == (8.0, 1.0, 0)
    assert wait["title"] == "lock of buffer w"
    (client,) = overview(scene.view(), "")["clients"]
    assert (client["holds"], client["connected_s"]) == (1, 3.0)
    assert client["lease_left_s"] == client["lease_s"] - client["silent_s"]
    scene.renew(load=held(4, 2))
    assert overview(scene.view(), "")["waits"][0]["for_s"] == 0  # another holding
    for _ in range(32):
        scene.do(SessionRenewed(7, "host:1"))
        scene.renew(load=held(4, 2))
    (problem,) = scene.problems()
    assert 'buffer "w": host:1 has held the lock for 64 s, and 2 clients wait for it' in problem.title
    assert server_detail(scene.view(), "a", scene.watch.history_of("a", scene.now))["waits"][0]["waiting"] == 2


def test_locks_of_a_training_are_its(scene: Scene) -> None:
    """They name it and come last, however many wait for them; its detail has them and no others."""
    scene.do(SessionRenewed(7, "host:1"))
    for name, about in (("run", {"smb.train": {"scheme": "ssp"}}), ("run/turn", None), ("w", None)):
        scene.create(name, about=about)
    segments = {name: record.segments[0].id for name, record in scene.state.buffers.items()}
    waits = [
        pb.Wait(segment_id=segments[name], kind="lock", session_id=7, token=2, left_ms=9000, waiting=waiting)
        for name, waiting in (("run/turn", 5), ("w", 0), ("run", 1))
    ]
    scene.renew(load=pb.ServerLoad(waits=waits))
    shown = overview(scene.view(), "")
    found = [(wait["name"], wait["training"]) for wait in shown["waits"]]
    assert found == [("w", None), ("run/turn", "run"), ("run", "run")]
    assert shown["of_trainings"] == {"buffers": 2, "waits": 2}
    assert [training["stage"] for training in shown["trainings"]] == ["idle"]
    past = scene.watch.trainings.rounds("run", scene.now)
    assert [wait["name"] for wait in training_detail(scene.view(), "run", past)["waits"]] == ["run/turn", "run"]


def test_why_a_training_is_slow(scene: Scene) -> None:
    """The mean shares of its workers' time, and for whom they wait: the one furthest behind that does not wait itself.
    If nobody waits, or all do, nobody is named; neither is more said than is known."""
    scene.create("run", about={"smb.train": {"scheme": "bsp"}})

    def told(*workers: tuple[int, bool]) -> dict[str, Any]:
        """Two seconds more of workers that are in a round, and wait or not."""
        scene.seconds += 2
        for slot, (clock, waits) in enumerate(workers):
            member_ms = round(1000 * (scene.seconds - START_S))
            report = pb.TrainingReport(
                name="run", slot=slot, clock=clock, member_ms=member_ms, blocked_ms=member_ms // 2 * waits,
                waiting_ms=member_ms // 2 * waits, waits=waits,
            )  # fmt: skip
            scene.watch.trainings.record_reports(10 + slot, [report], scene.now)
        (training,) = overview(scene.view(), "")["trainings"]
        return dict(training)

    for slot in range(3):
        scene.do(SessionRenewed(10 + slot, f"host:{slot}"))
    assert (told((7, True), (7, True), (6, False))["why"], told((7, True))["waits_for"]) == ("", ["host:2"])
    training = told((7, True), (7, True), (6, False))
    assert training["time"] == {"computing": 0.667, "exchanging": 0.0, "waiting": 0.333}
    assert training["why"] == "computing 67%, exchanging 0%, waiting 33%; waits for host:2"
    assert told((7, True), (6, False), (6, False))["waits_for"] == ["host:1", "host:2"]
    for workers in (((7, False), (7, False), (6, False)), ((7, True), (7, True), (7, True))):
        assert told(*workers)["waits_for"] == []
    past = scene.watch.trainings.rounds("run", scene.now)
    rows = training_detail(scene.view(), "run", past)["worker_list"]
    assert [row["waits"] for row in rows] == [True, True, True]
    assert rows[0]["time"]["waiting"] == 0.5


def test_who_publishes_a_state_and_how_far_its_readers_are(scene: Scene) -> None:
    """As clients told last: the latest generation, the reader that is furthest behind and its mirror, until sessions
    end. A state that nobody told of is shown, and a buffer or a mirror is none.
    """
    about: dict[str, object] = {"smb.publish": {"deltas": 0}}
    for name in ("policy", "quiet"):
        scene.create(name, about=about, versions=2)
    scene.create("w", versions=2)
    for session_id, client in ((7, "trainer"), (8, "near"), (9, "far")):
        scene.do(SessionRenewed(session_id, client))
    reports = {
        7: pb.StateReport(name="policy", publishes=True, generation=12),
        8: pb.StateReport(name="policy", generation=11, source="policy.mirror.b"),
        9: pb.StateReport(name="policy", generation=4),
    }
    for session_id, report in reports.items():
        scene.watch.states.record_reports(session_id, [report], scene.now)
    policy, quiet = overview(scene.view(), "")["states"]
    told = {key: policy[key] for key in ("name", "generation", "publishers", "publisher", "readers", "behind")}
    assert list(told.values()) == ["policy", 12, 1, "trainer", 2, 8]
    assert (quiet["generation"], quiet["publishers"], quiet["readers"], quiet["behind"]) == (0, 0, 0, None)
    assert (policy["published_by"], quiet["published_by"]) == ("trainer", "")
    detail = buffer_detail(scene.view(), "policy")
    assert [(each["client"], each["behind"], each["from"]) for each in detail["readers"]] == [
        ("far", 8, ""),
        ("near", 1, "policy.mirror.b"),
    ]
    assert [each["client"] for each in detail["publishers"]] == ["trainer"]
    scene.do(SessionClosed(9))
    scene.watch.states.record_reports(7, [], scene.now)
    (policy, _) = overview(scene.view(), "")["states"]
    assert (policy["publishers"], policy["readers"], policy["generation"], policy["behind"]) == (0, 1, 11, 0)
    many = [pb.StateReport(name=f"s{number}") for number in range(REPORTS_MAX + 1)]
    scene.watch.states.record_reports(7, many, scene.now)
    assert len(scene.watch.states.by_name()) == REPORTS_MAX + 1  # and the other session's


def test_a_buffer_that_lost_copies_is_a_problem(scene: Scene) -> None:
    """A note while they are made anew, a warning where no server has room for them."""
    scene.register("b")
    scene.create("w", replicas=2)
    scene.do(BackupsLost("a", frozenset(segment.id for segment in scene.state.buffers["w"].segments)))
    (problem,) = (found for found in scene.problems() if "degraded" in found.title)
    assert (problem.severity, problem.about) == ("note", ("buffer", "w"))
    assert "1 of its 2 segments have one copy" in problem.detail
    for name in ("a", "b"):
        full = replace(scene.state.servers[name], capacity_bytes=1)
        scene.state = replace(scene.state, servers={**scene.state.servers, name: full})
    (problem,) = (found for found in scene.problems() if "degraded" in found.title)
    assert problem.severity == "warning"
    assert "Start another" in problem.action


@pytest.mark.parametrize("count", [4, 5, 60])
def test_many_problems_of_one_kind_are_one(scene: Scene, count: int) -> None:
    """From five on, with their number and the first of them; fewer stay apart, and so does another kind. What is told
    fits into few bytes."""
    for number in range(count):
        scene.register(f"s{number}")
        scene.create(f"w{number}", 1024, server=f"s{number}")
    for _ in range(2):  # most servers at once are given another lease first
        scene.seconds += 7
        scene.do(Ticked())
    gone = [problem for problem in scene.problems() if problem.severity == "critical"]
    assert [problem.title for problem in scene.problems() if problem not in gone] == ["a is gone"]  # without data
    if count < 5:
        assert [(problem.title, problem.count) for problem in gone] == [(f"s{n} is gone", 1) for n in range(count)]
        return
    (problem,) = gone
    assert (problem.severity, problem.title, problem.count) == (
        "critical",
        f"{count} memory servers are gone",
        count,
    )
    assert len(problem.members) == min(count, 20)
    assert problem.members[0].about[0] == "server"
    assert problem.members[0].title in {f"s{n} is gone" for n in range(count)}
    assert "smb-memserver --name NAME" in problem.action
    told = overview(scene.view(), "c:1")["problems"]
    assert (told[0]["count"], len(told)) == (count, 2)
    assert len(json.dumps(told)) < 30_000


def test_the_busiest_buffer_comes_first(scene: Scene) -> None:
    """Buffers are sorted by the traffic of the copies that users reach, then by name; of too many, the idle and small
    ones are left out."""
    for name in ("idle", "calm", "busy"):
        scene.create(name, 1024)
    ids = {name: scene.state.buffers[name].segments[0].id for name in ("calm", "busy")}
    scene.renew()
    scene.renew(
        load=pb.ServerLoad(
            segments=[pb.BusyLoad(id=ids[name], count=1, bytes=n) for name, n in (("calm", 10), ("busy", 99))]
        )
    )
    rows = overview(scene.view(), "c:1")["buffers"]
    assert [(row["name"], row["rates"]["bytes"]) for row in rows] == [("busy", 50), ("calm", 5), ("idle", 0)]
    for number in range(BUFFERS_MAX):
        scene.create(f"large{number}", 2048)
    rows = overview(scene.view(), "c:1")["buffers"]
    assert [row["name"] for row in rows[:2]] == ["busy", "calm"]
    assert "idle" not in {row["name"] for row in rows}


def test_where_copies_lie_and_how_even_the_traffic_is(scene: Scene) -> None:
    """A buffer of two copies on three servers: what each holds of the first and of the second copies, each one's
    traffic, and its skew; after a loss, how many segments have one copy and where the new ones grow."""
    for name in "bc":
        scene.register(name)
    scene.create("w", 3 * MIB, server_count=3, replicas=2)
    record = scene.state.buffers["w"]
    assert buffer_detail(scene.view(), "w")["skew"] is None  # without traffic
    for name, nbytes in (("a", 600), ("b", 200), ("c", 100)):
        loads = [pb.BusyLoad(id=each.id, count=1, bytes=nbytes) for each in record.segments if each.server == name]
        loads += [pb.BusyLoad(id=each.id, count=1, bytes=7) for each in record.segments if each.backup == name]
        scene.renew(name, after=0.1)
        scene.renew(name, load=pb.ServerLoad(segments=loads), after=1.0)
    told = buffer_detail(scene.view(), "w")
    assert {part["server"]: part["rate"] for part in told["parts"]} == {"a": 600, "b": 200, "c": 100}
    assert told["skew"] == 2.0
    assert told["rates"]["bytes"] == 900  # what second copies receive is no traffic of users
    assert sum(copy["size"] for copy in told["copies"]) == record.nbytes
    assert {copy["server"] for copy in told["copies"]} == {segment.backup for segment in record.segments}
    assert [segment["copy"] for segment in told["segment_list"]] == [segment.backup for segment in record.segments]
    assert (told["replicas"], told["degraded"]) == (2, 0)
    scene.do(BackupsLost("a", frozenset(segment.id for segment in record.segments if segment.server == "a")))
    told = buffer_detail(scene.view(), "w")
    assert told["degraded"] == 1
    assert [bool(segment["copy"]) for segment in told["segment_list"]].count(False) == 1


def test_lists_are_bounded_and_say_what_they_leave_out(scene: Scene) -> None:
    """Of too many buffers the largest are shown, by name, and the rest is counted."""
    for number in range(BUFFERS_MAX + 5):
        scene.create(f"b{number:04}", elements=1 + number)
    shown = overview(scene.view(), "")
    assert len(shown["buffers"]) == BUFFERS_MAX
    assert shown["left_out"]["buffers"] == 5
    assert [buffer["name"] for buffer in shown["buffers"][:2]] == ["b0005", "b0006"]
    with pytest.raises(NotFoundError):
        buffer_detail(scene.view(), "none")
    with pytest.raises(NotFoundError):
        server_detail(scene.view(), "none", scene.watch.history_of("none", scene.now))


def test_a_server_that_is_forgotten_leaves_nothing(scene: Scene) -> None:
    """Its loads go with its record, so servers that come and go under new names take no memory for good."""
    scene.renew(load=load(1, 1))
    scene.renew(load=load(2, 2))
    scene.do(ServerLeft("a", 1))
    assert not scene.state.servers
    assert not scene.watch._servers
    assert not scene.watch._bins
    assert not scene.watch._errors
