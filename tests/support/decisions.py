"""The coordinator's decisions alone: a state, a clock that stands, and the effects of the last event."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TypeVar

from smb.coordinator.drop_rules import epoch_of
from smb.coordinator.events import (
    BufferMade,
    BufferWanted,
    Effect,
    Event,
    Instant,
    ServerRegistered,
    ServerRenewed,
    ServerReturned,
)
from smb.coordinator.lineage import Lineage, Stamp
from smb.coordinator.records import BufferRecord, Held, Kind, ServerRecord
from smb.coordinator.state import Drops, State
from smb.coordinator.steps import step
from smb.coordinator.validate import Creation, first_use

MIB = 1 << 20
Found = TypeVar("Found")


def server(name: str, instance_id: int = 1, capacity_bytes: int = 64 * MIB) -> ServerRecord:
    return ServerRecord(name, instance_id, "10.0.0.1:1", "10.0.0.1:2", "/s", "10.0.0.1:3", capacity_bytes, 0, 0.0)


def registration(
    state: State,
    record: ServerRecord,
    held: Collection[int] = (),
    making: frozenset[int] = frozenset(),
    stamps: tuple[Stamp, ...] | None = None,
    as_held: Held | None = None,
) -> ServerRegistered:
    """A server holds these segments, each as the records have it unless told, and was asked for all others that it
    should have. It has heard of every change, unless told otherwise.
    """
    where = state.where()
    shown = {each: as_held or Held(epoch_of(*where[each]) if each in where else 1) for each in held}
    missing = _due(state, record.name) - shown.keys()
    told = (state.lineage.stamp,) if stamps is None else stamps
    return ServerRegistered(record, shown, missing, told, making, drops=state.drops.get(record.name, Drops()).count)


def returned(
    state: State,
    name: str,
    instance_id: int,
    held: Collection[int] = (),
    changes_max: int | None = None,
    as_held: Held | None = None,
) -> ServerReturned:
    """A server is about to register with these segments, and was asked for all others that it should have."""
    shown = registration(state, server(name), held, as_held=as_held).held
    return ServerReturned(name, instance_id, _due(state, name) - frozenset(held), changes_max, shown)


def _due(state: State, server: str) -> frozenset[int]:
    return frozenset(copy.id for of in state.buffers.values() for copy in of.copies if copy.server == server)


@dataclass
class Cluster:
    """A state, a clock that stands until it is told to go on, and the effects of the last event."""

    state: State = field(default_factory=lambda: State(lineage=Lineage().begun(1)))
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
            self.do(registration(self.state, server(name, capacity_bytes=capacity_bytes)))

    def want(self, name: str = "w", elements: int = 1 << 20, **wishes: object) -> tuple[Effect, ...]:
        creation = replace(Creation(name, (elements,), "float32"), **wishes)  # type: ignore[arg-type]
        return self.do(BufferWanted(creation, lambda: next(self.ids)))

    def create(self, name: str = "w", elements: int = 1 << 20, **wishes: object) -> BufferRecord:
        self.want(name, elements, **wishes)
        self.do(BufferMade(name))
        return self.state.buffers[name]

    def use(self, kind: Kind, name: str = "w") -> tuple[Effect, ...]:
        return self.do(BufferWanted(first_use(kind, name), lambda: next(self.ids)))

    def renew(self, name: str, instance_id: int = 1, used_bytes: int = 0) -> None:
        self.do(ServerRenewed(name, instance_id, used_bytes))

    def only(self, kind: type[Found]) -> Found:
        (found,) = (effect for effect in self.effects if isinstance(effect, kind))
        return found
