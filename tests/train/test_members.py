"""A group: who joins gets the shared model, who leaves or dies is missed, who comes back is somebody new."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import smb
import smb.train
from smb.train.exchange.mover import mover_of
from smb.train.group import Group
from smb.train.member_table import FIELDS, SLOTS
from smb.train.parameters import Parameters, Values
from smb.train.traits import FUSED
from tests.support.clients import in_process, make_event
from tests.support.daemons import stop, wait_for
from tests.support.training import LEASE_S

Connect = Callable[..., smb.Client]


@dataclass(frozen=True)
class Plain(smb.train.Scheme):
    """Adds what the worker did to the shared weights, every step."""

    NAME: ClassVar[str] = "plain"
    every: int = 1

    def run(self, group: Group, parameters: Parameters) -> smb.train.Exchange:
        return PlainExchange(group, parameters)


class PlainExchange(smb.train.Exchange):
    def __init__(self, group: Group, parameters: Parameters) -> None:
        self.group, self.deltas = group, mover_of(group, parameters, FUSED)

    def step(self, samples: int) -> None:
        self.group.check(self.deltas.take())
        self.deltas.send(fetch=True)
        self.group.count(samples, self.deltas.moved_bytes())

    def restart(self) -> None:
        self.deltas.restart()


def _ones(count: int = 100) -> Values:
    return np.ones(count, np.float32)


def test_join(client: smb.Client, connect: Connect) -> None:
    """The first one's values are the group's; a later one gets them as they are by then; what each did is told."""
    first, second = _ones(), np.zeros(100, np.float32)
    with smb.train.join(client, "run", first, Plain()) as worker:
        first += 1
        worker.step(samples=3)
        with smb.train.join(connect(), "run", second) as other:
            assert (second == 2).all()
            assert other.scheme == Plain()
            second += 0.5
            other.step(samples=4)
            assert (worker.shared() == 2.5).all()
            status = smb.train.status(client, "run")
            assert [(w.slot, w.alive, w.contributions, w.samples) for w in status.workers] == [
                (0, True, 1, 3),
                (1, True, 1, 4),
            ]
            assert status.workers[0].pid == os.getpid()
            assert status.workers[0].norm == pytest.approx(10)
            assert worker.status == status.workers[0]
        assert [w.alive for w in smb.train.status(client, "run").workers] == [True, False]
    smb.train.delete(client, "run")
    with pytest.raises(smb.NotFoundError):
        smb.train.status(client, "run")
    assert client.list() == []


def test_settings_differ(client: smb.Client) -> None:
    """Who joins with other settings is told which; the same ones are welcome."""
    with smb.train.join(client, "run", _ones(), Plain(every=2), guards=smb.train.Guards(norm_max=5.0)):
        with pytest.raises(smb.InvalidArgumentError, match="every is 2, not 3"):
            smb.train.join(client, "run", _ones(), Plain(every=3))
        with pytest.raises(smb.InvalidArgumentError, match=r"norm_max is 5.0, not None"):
            smb.train.join(client, "run", _ones(), guards=smb.train.Guards())
        with pytest.raises(smb.InvalidArgumentError, match="wire is 'exact', not 'int8'; leave these settings out"):
            smb.train.join(client, "run", _ones(), wire="int8")
        with pytest.raises(smb.InvalidArgumentError, match="100"):
            smb.train.join(client, "run", _ones(99))
        smb.train.join(client, "run", _ones(), Plain(every=2), guards=smb.train.Guards(norm_max=5.0)).close()
        smb.train.join(client, "run", _ones(), wire="exact").close()


def test_what_cannot_join(client: smb.Client) -> None:
    """Values that could not be changed in place, and groups that are none, are refused by name."""
    with pytest.raises(smb.NotFoundError, match="must pass a scheme"):
        smb.train.join(client, "run", _ones())
    masked = np.ma.masked_array(np.ones(100, np.float32), mask=np.arange(100) < 5)
    big = np.ones(100, ">f4")
    for values in (np.ones(100), np.ones((2, 50), np.float32), np.ones(200, np.float32)[::2], [1.0], masked, big):
        with pytest.raises(smb.InvalidArgumentError, match="values must be"):
            smb.train.join(client, "run", values, Plain())  # type: ignore[arg-type]
    with pytest.raises(smb.InvalidArgumentError, match="must be finite"):
        smb.train.join(client, "run", np.full(5, np.nan, np.float32), Plain())
    client.create("mine", 100)
    with pytest.raises(smb.InvalidArgumentError, match="not a group"):
        smb.train.join(client, "mine", _ones(), Plain())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheme": ["bsp"], "settings": {}, "guards": {}, "lease": 1},
        {"scheme": "bsp", "settings": {}, "guards": {"other": 1}, "lease": 1},
        {"scheme": "bsp", "settings": {}, "guards": {}, "lease": "long"},
    ],
)
def test_settings_that_no_group_has(client: smb.Client, settings: dict[str, Any]) -> None:
    """Whatever another program has stored there, it is refused as no group, not found out by a KeyError."""
    client.create("run", 4, metadata={"smb.train": settings})
    with pytest.raises(smb.InvalidArgumentError, match=r"'run' is not a group of this release .* choose another name"):
        smb.train.join(client, "run", np.zeros(4, np.float32), smb.train.BSP())
    with pytest.raises(smb.InvalidArgumentError, match="is not a group"):
        smb.train.status(client, "run")


def test_half_made(client: smb.Client) -> None:
    """A group whose maker died before it was complete is made anew by the next one to join, with its values."""
    settings = {"scheme": "plain", "settings": {"every": 1}, "guards": {}, "lease": 10.0}
    for left in (["run"], ["run", "run/tick"], ["run", "run/tick", "run/members"]):
        client.create("run", 7, metadata={"smb.train": settings})
        for name in left[1:]:
            client.create(name, (1 + SLOTS, FIELDS) if name == "run/members" else 1, "int64")
        with smb.train.join(client, "run", _ones(), Plain()) as worker:
            assert (worker.shared() == 1).all()
        smb.train.delete(client, "run")


MIB = 1 << 20
MODEL_BYTES = 3 * MIB  # as many stripes on each of the three servers


def _leave_room(client: smb.Client, models: int) -> None:
    """Fill the cluster up, but for so many models and a half."""
    client.delete("ballast", missing_ok=True)
    client.create("ballast", 3 * 64 * MIB - (2 * models + 1) * MODEL_BYTES // 2, "uint8")


@pytest.mark.parametrize("scheme", [smb.train.BSP(), smb.train.DiLoCo(every=1), smb.train.HSGD()], ids=lambda s: s.NAME)
def test_no_room(connect: Connect, scheme: smb.train.Scheme) -> None:
    """However far a join came before there was no room, nothing of it stays, and it is told how much it takes; a second
    one that fails leaves the first as it was."""
    client, values = connect(), np.zeros(MODEL_BYTES // 4, np.float32)
    needed = sum(scheme.footprint())
    says = (
        rf"of training 'run': scheme '{scheme.NAME}' keeps copies .*, {scheme.footprint().group} \+ .* of 3 MiB each; "
    )
    for models in range(needed):
        _leave_room(client, models)
        with pytest.raises(smb.OutOfMemoryError, match=says):
            smb.train.join(client, "run", values, scheme)
        assert [info.name for info in client.list()] == ["ballast"]
    _leave_room(client, needed)
    with smb.train.join(client, "run", values, scheme) as worker:
        names = [info.name for info in client.list()]
        with pytest.raises(smb.OutOfMemoryError, match=says):
            smb.train.join(client, "run", values.copy())
        assert [info.name for info in client.list()] == names
        assert worker.members == 1
        values += 1
        worker.step()
        worker.flush()
        assert worker.contributions == 1


def test_a_join_that_fails_leaves_the_group_to_others(client: smb.Client, connect: Connect) -> None:
    """Who made a group and can't take part takes it away, unless somebody else has come."""
    maker = smb.train.join(client, "run", _ones(), smb.train.BSP())
    assert maker.membership.withdraw()
    assert client.list() == []
    maker = smb.train.join(client, "run", _ones(), smb.train.BSP())
    with smb.train.join(connect(), "run", _ones()) as other:
        assert not maker.membership.withdraw()
        assert other.members == 1
        other.step()


@pytest.mark.parametrize("name", ["asp", "asyncdiloco", "bsp", "diloco", "eamsgd", "easgd", "hsgd", "localsgd", "r2sp",
                                  "seasgd", "ssp"])  # fmt: skip
def test_footprint(connect: Connect, name: str) -> None:
    """A scheme keeps as many copies of the model as it says."""
    client = connect()
    scheme = smb.train.scheme_of(name, {"every": 1} if name == "localsgd" else {})
    with smb.train.join(client, "run", _ones(), scheme), smb.train.join(client, "run", _ones()):
        found = sum(info.shape == (100,) for info in client.list())
    assert found == scheme.footprint().group + 2 * scheme.footprint().worker + scheme.footprint().host


def test_a_server_is_away_for_long() -> None:
    """A lease that can't be renewed names the group, the server and what to do, and step goes on afterwards."""
    says = (
        r"^member 0 of training 'run' can't renew its lease: .*memory server server-0 .*Start that server again "
        r"with the same --name"
    )
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=0.5) as client,
        smb.train.join(client, "run", _ones(), Plain(), lease=0.3) as worker,
    ):
        cluster.servers[0].kill()
        wait_for(lambda: not worker.group.member._lock.held, "the lease's end")
        with pytest.raises(smb.UnavailableError, match=says) as caught:
            worker.step()
        assert "waiting there" not in str(caught.value)
        cluster.servers[0].start()
        wait_for(lambda: _stepped(worker), "a step")


def _stepped(worker: smb.train.Worker) -> bool:
    try:
        worker.step()
    except smb.UnavailableError:
        return False
    return True


def test_guards(client: smb.Client) -> None:
    """NaN, infinity and an exploded norm are refused by name and counted; nothing of them gets to the others."""
    values = _ones()
    guards = smb.train.Guards(norm_max=50.0, norm_factor=10.0)
    with smb.train.join(client, "run", values, Plain(), guards=guards) as worker:
        for bad, reason in ((np.nan, "NaN"), (np.inf, "NaN or infinite"), (1e30, "norm_max"), (100.0, "norm_max")):
            values[7] += np.float32(bad)
            with pytest.raises(smb.train.RefusedContributionError, match=reason):
                worker.step()
            assert (values == 1).all()
        for _ in range(8):
            values += 0.01
            worker.step()
        values += 0.2
        with pytest.raises(smb.train.RefusedContributionError, match="norm_factor"):
            worker.step()
        np.testing.assert_allclose(worker.shared(), 1.08, rtol=1e-6)
        values += 0.02
        worker.step()
        assert (worker.status.refused, worker.status.contributions) == (5, 9)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A training that no other test has. The lock of a slot outlives a killed member by its lease: the first member of
    a new training of that name gets another slot."""
    return re.sub(r"\W+", "-", request.node.name)


def _step_twice(messages: Any, address: str, name: str, again: Any) -> None:
    """Tells its incarnation and how often it has joined again, after each step. It waits for `again` before the second
    one: a process that is stopped in the middle of a step over shared memory keeps others from that memory."""
    with smb.connect(address) as client:
        values = _ones()
        worker = smb.train.join(client, name, values, Plain(), lease=LEASE_S)
        for _ in range(2):
            values += 1
            worker.step()
            messages.put((worker.status.incarnation, worker.status.rejoins))
            again.wait()


def test_dead_member(cluster: smb.LocalCluster, client: smb.Client, name: str) -> None:
    """A member that is killed is found by its lock, not before its lease is over, and its slot is free again."""
    with in_process(_step_twice, cluster.address, name, make_event()) as (process, messages):
        messages.get(timeout=30)
        with smb.train.join(client, name, _ones()) as worker:
            group = worker.group
            assert group.reap([0]) == []
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: group.reap([0]) == [0], "the dead one's slot")
            assert [w.alive for w in smb.train.status(client, name).workers] == [False, True]
            with smb.train.join(client, name, _ones()) as third:
                assert third.status.slot == 0
                assert third.status.incarnation == 3


def test_stopped_member(cluster: smb.LocalCluster, client: smb.Client, name: str) -> None:
    """A member that is stopped past its lease, and missed, joins again by itself when it goes on."""
    again = make_event()
    with in_process(_step_twice, cluster.address, name, again) as (process, messages):
        messages.get(timeout=30)
        with smb.train.join(client, name, _ones()) as worker:
            stop(process.pid)
            wait_for(lambda: worker.group.reap([0]) == [0], "the stopped one's slot")
            os.kill(process.pid, signal.SIGCONT)
            again.set()
            assert messages.get(timeout=30) == (3, 1)


def test_a_wake_of_ours_hides_no_other(client: smb.Client, connect: Connect) -> None:
    """One thread of a worker may wake the group while another waits: others' wakes still count."""
    with smb.train.join(client, "run", _ones(), Plain()) as worker:
        group = worker.group
        with smb.train.join(connect(), "run", _ones()) as other:
            while group.wait(0.0):
                pass
            group.wake()
            assert not group.wait(0.0)
            other.group.wake()
            group.wake()
            assert group.wait(0.0)
            assert not group.wait(0.0)


def test_names() -> None:
    """A scheme is known by its name, and comes back from its settings."""
    assert smb.train.SCHEMES["plain"].from_settings(Plain(every=7).settings()) == Plain(every=7)
    with pytest.raises(smb.InvalidArgumentError, match="'plain' has no setting often; it takes every"):
        Plain.from_settings({"often": 1})
