"""A segment of two copies that was lost at its source was begun to be copied five times a second, for ever. It took the
turns of segments that could be copied.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferMade, BufferWanted
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.records import Kind, ServerRecord
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation, first_use
from smb.errors import UnavailableError
from tests.support.decisions import registration, returned, server


class Servers:
    """Memory servers that take note of what is asked, and do nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def take_roles(self, at: ServerRecord, *_: object) -> None:
        self.asked.append(at.name)
        raise UnavailableError("not now")


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_source_is_not_asked(tmp_path: Path, lost: bool) -> None:
    """A lock that was made beside one server has one copy, and gets another one, unless its server lost it."""

    async def work() -> None:
        store, servers, numbers = SqliteStore(tmp_path), Servers(), itertools.count(1)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        await log.commit(BufferWanted(first_use(Kind.LOCK, "lock", replicas=2), lambda: next(numbers)))
        (record,) = log.state.buffers.values()
        await log.commit(BufferMade(record.key))
        held = frozenset() if lost else frozenset(segment.id for segment in record.segments)
        await log.commit(registration(log.state, server("a", instance_id=2), held))
        await log.commit(registration(log.state, server("b")))
        maker = CopyMaker(log, cast(Any, servers), cast(Any, None), cast(Any, None))
        await maker.begin()
        assert servers.asked == ([] if lost else ["a"])
        await store.close()

    asyncio.run(work())


def test_two_that_are_lost_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They and the buffer that is there move together: one line names both, however often copies are looked for."""

    async def work() -> None:
        store, numbers = SqliteStore(tmp_path), itertools.count(1)
        log = await CommitLog.open(store, 1)
        for name in "ab":
            await log.commit(registration(log.state, server(name)))
        creation = Creation("w", (10,), "float32", replicas=2)
        for each in (creation, *(replace(creation, name=name, like="w", joins=True) for name in ("m", "v"))):
            await log.commit(BufferWanted(each, lambda: next(numbers)))
            await log.commit(BufferMade(each.name))
        segments = {name: log.state.buffers[name].segments[0] for name in "wmv"}
        source, gone = segments["w"].server, segments["w"].backup
        await log.commit(returned(log.state, gone, 2))
        await log.commit(registration(log.state, server(gone, 2)))
        await log.commit(registration(log.state, server(source, 3), [segments["w"].id]))
        maker = CopyMaker(log, cast(Any, Servers()), cast(Any, None), cast(Any, None))
        for _ in range(3):
            await maker.begin()
        await store.close()

    asyncio.run(work())
    said = [record.getMessage() for record in caplog.records if "move together" in record.getMessage()]
    assert len(said) == 1
    assert 'lacks buffer "m", buffer "v": delete what is lost' in said[0]
