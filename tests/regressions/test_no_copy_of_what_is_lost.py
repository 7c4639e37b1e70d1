"""A segment of two copies that was lost at its source was begun to be copied five times a second, for ever. It took the
turns of segments that could be copied.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.copy_maker import CopyMaker
from smb.coordinator.events import BufferMade, BufferWanted
from smb.coordinator.records import Kind, ServerRecord
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import first_use
from smb.errors import UnavailableError
from tests.support.decisions import registration, server


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
