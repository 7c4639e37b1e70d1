"""moves.copy_maker: switches of roles that fail, that take long to store, and whose traffic moves along."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from smb.coordinator.events import BackupsLost, Event, Instant, RolesSwitched
from smb.coordinator.moves import balancer, copy_maker
from smb.coordinator.moves.copy_maker import SWITCH_AGAIN_S, SWITCH_SOON_S, CopyMaker
from smb.coordinator.moves.move import Move
from smb.coordinator.records import ServerRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.traffic import Traffic
from smb.errors import NotFoundError
from smb.rpc import control_pb2 as pb
from tests.support.decisions import Cluster


@dataclass
class Rig:
    """Servers a, b and c, and what the coordinator does to them. Each buffer has its primary on a."""

    ready: bool = True  # what primaries say when they are asked to hand over
    not_here: str = ""  # who does not know yet of what a server has: a server, or "records"
    stored_in_s: float = 0.0
    ready_after: bool = True  # likewise, once something was stored
    cluster: Cluster = field(default_factory=Cluster)
    at: float = 0.0
    did: list[tuple[str, str]] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster.register("a", "b", "c")
        self.maker = CopyMaker(self, self, self._tell, self._drop)  # type: ignore[arg-type]

    @property
    def state(self) -> Any:
        return self.cluster.state

    def now(self) -> Instant:
        return replace(self.cluster.now, monotonic=self.cluster.now.monotonic + self.at)

    async def commit(self, event: Event) -> object:
        if self.not_here == "records":
            raise NotFoundError("the server has not confirmed that it has a copy")
        self.did.append(("stored", type(event).__name__))
        self.at += self.stored_in_s
        self.ready = self.ready_after
        return SimpleNamespace(effects=self.cluster.do(event), state=self.cluster.state)

    async def can_switch(self, server: ServerRecord, parts: Sequence[pb.Replica]) -> bool:
        self.did.append(("asked", server.name))
        if server.name == self.not_here:
            raise NotFoundError("segment 1 has no role here")
        return self.ready or all(part.role != CopyRole.PRIMARY.value for part in parts)

    async def take_roles(self, *_: object) -> frozenset[int]:
        return frozenset()

    async def create(self, server: ServerRecord, *_: object) -> int:
        self.copied.append(server.name)
        return 0

    async def _tell(self, _: tuple[int, ...], servers: tuple[str, ...]) -> None:
        self.did.append(("told", ",".join(servers)))

    async def _drop(self, _: object) -> None:
        pass

    def create_buffer(self, name: str = "w") -> Move:
        segment = self.cluster.create(name, 1000, replicas=2, server_names=("a",)).segments[0]
        assert segment.server == "a"
        return Move(segment.id, "a", segment.backup, segment.file_bytes, name, switches=True)

    def look(self) -> None:
        asyncio.run(self.maker.begin())

    def due(self) -> list[Move]:
        return balancer.due(self.state, self.cluster.now, {}, frozenset(self.maker.unswitchable()))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_maker, "HAND_OVER_PAUSE_S", 0.0)


def test_a_switch_that_fails_waits_and_nothing_else_does() -> None:
    """Each try holds up writers. Copies from the same server are made meanwhile, and other roles may switch."""
    rig = Rig(ready=False)
    move = rig.create_buffer()
    rig.maker.switch([move])
    rig.look()
    asked = list(rig.did)
    assert ("asked", "a") in asked
    assert not any(what == "stored" for what, _ in asked)
    rig.create_buffer("v")
    rig.create_buffer("x")
    rig.look()
    assert rig.did == asked
    assert list(rig.maker.unswitchable()) == [move.segment_id]
    rig.ready = True
    due = {each.segment_id for each in rig.due()}
    assert due
    assert move.segment_id not in due
    lost = rig.state.buffers["v"].segments[0]
    rig.cluster.do(BackupsLost("a", frozenset({lost.id})))
    rig.look()
    assert len(rig.copied) == 1
    rig.at += SWITCH_SOON_S
    assert list(rig.maker.unswitchable()) == [move.segment_id]
    rig.at += SWITCH_AGAIN_S
    assert not rig.maker.unswitchable()


@pytest.mark.parametrize("waits_for", ["backup", "primary", "records"])
def test_a_switch_that_was_only_too_early_is_tried_again_soon(waits_for: str) -> None:
    """A server that has just registered does not have its roles yet, or has not said that it has its copies."""
    rig = Rig()
    move = rig.create_buffer()
    rig.not_here = {"primary": "a", "backup": move.target}.get(waits_for, waits_for)
    rig.maker.switch([move])
    rig.look()
    assert list(rig.maker.unswitchable()) == [move.segment_id]
    rig.at += SWITCH_SOON_S
    assert not rig.maker.unswitchable()


def test_an_operator_may_ask_again_at_once() -> None:
    """The coordinator's own switches, which come later, do not replace what the operator asked for."""
    rig = Rig(ready=False)
    first, second = rig.create_buffer(), rig.create_buffer("v")
    rig.maker.switch([first])
    rig.look()
    rig.ready = True
    rig.maker.move([first])
    rig.maker.switch([second])
    rig.look()
    assert [rig.state.buffers[name].segments[0].backup for name in "wv"] == ["a", "a"]


@pytest.mark.parametrize(("stored_in_s", "again"), [(0.1, False), (1.5, True)])
def test_a_primary_hands_over_once_more_if_storing_took_long(stored_in_s: float, again: bool) -> None:
    """Otherwise it could have changes on their way when it is told that it is the backup, and would be copied to."""
    rig = Rig(stored_in_s=stored_in_s)
    move = rig.create_buffer()
    rig.maker.switch([move])
    rig.look()
    once_more = [("asked", "a")] if again else []
    told = ("told", f"a,{move.target}")
    assert rig.did == [("asked", move.target), ("asked", "a"), ("stored", RolesSwitched.__name__), *once_more, told]


def test_both_servers_are_told_though_the_primary_does_not_hand_over_again() -> None:
    rig = Rig(stored_in_s=1.5, ready_after=False)
    move = rig.create_buffer()
    rig.maker.switch([move])
    rig.look()
    assert rig.did[-1] == ("told", f"a,{move.target}")
    assert not rig.maker.unswitchable()


def test_traffic_goes_with_the_role() -> None:
    """The balancer would count a server as idle to which it had just given the busiest segment, and give it more."""
    rig, traffic = Rig(), Traffic()
    rig.maker.on_switched = traffic.switched
    move = rig.create_buffer()
    traffic.record("a", [pb.BusyLoad(id=move.segment_id, bytes=1 << 20)], 10.0)
    rig.maker.switch([move])
    rig.look()
    assert rig.state.buffers["w"].segments[0].server == move.target
    assert traffic.of_primaries(rig.state) == {move.segment_id: float(1 << 20)}
    traffic.record("a", [], 11.0)
    traffic.record(move.target, [], 10.0)
    assert traffic.of_primaries(rig.state) == {move.segment_id: float(1 << 20)}
