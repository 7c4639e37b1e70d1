"""A lock with two copies that was made while one memory server was alive kept one copy for good: its record was refused
the role that a second copy needs, five times a second. The loss of that one host was the loss of the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from smb.coordinator.events import BufferMade, BufferWanted, CopiesEnded, Event
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.records import Kind
from smb.coordinator.validate import first_use
from smb.rpc import control_pb2 as pb
from tests.support.decisions import Cluster


class Servers:
    """Memory servers that do as they are told."""

    async def take_roles(self, _: object, parts: Sequence[pb.Replica], *__: object) -> frozenset[int]:
        return frozenset()

    async def create(self, *_: object) -> int:
        return 0

    async def drop(self, *_: object, **__: object) -> int:
        return 0


def test_it_gets_its_second_copy_once_there_is_another_server() -> None:
    """First a role, then a copy on the server that has come."""
    cluster = Cluster()
    cluster.register("a")
    cluster.do(BufferWanted(first_use(Kind.LOCK, "w", 2), lambda: next(cluster.ids)))
    cluster.do(BufferMade("lock:w"))
    (segment,) = cluster.state.buffers["lock:w"].segments
    assert (segment.server, segment.backup, segment.epoch) == ("a", "", 0)
    cluster.register("b")

    async def commit(event: Event) -> Any:
        cluster.do(event)
        log.state = cluster.state
        return SimpleNamespace(state=cluster.state, effects=cluster.effects)

    async def nothing(*_: object) -> None:
        pass

    async def look_twice() -> None:
        servers: Any = Servers()
        maker = CopyMaker(log, servers, nothing, nothing)
        await maker.begin()
        await maker.begin()

    log: Any = SimpleNamespace(state=cluster.state, now=lambda: cluster.now, commit=commit)
    asyncio.run(look_twice())
    (segment,) = cluster.state.buffers["lock:w"].segments
    assert (segment.server, segment.copying_to, segment.epoch) == ("a", "b", 3)
    cluster.do(CopiesEnded("a", {segment.id: segment.epoch}, True))
    (segment,) = cluster.state.buffers["lock:w"].segments
    assert (segment.server, segment.backup) == ("a", "b")
