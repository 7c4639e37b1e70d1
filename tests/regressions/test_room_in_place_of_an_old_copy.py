"""A server made room for a copy in place of an older one. When the copy did not begin, the room was given back, and the
older copy stayed listed there.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferMade, BufferWanted
from smb.coordinator.moves.copy_maker import CopyMaker
from smb.coordinator.records import Held, ServerRecord
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from smb.errors import UnavailableError
from tests.support.decisions import registration, returned, server

NBYTES = 4096


class Servers:
    """Memory servers whose answer to a creation is lost."""

    async def take_roles(self, *_: object) -> None: ...

    async def create(self, *_: object) -> None:
        raise UnavailableError("no answer")

    async def drop(self, at: ServerRecord, *_: object, **__: object) -> int:
        return 0


def test_it_is_listed_no_more(tmp_path: Path) -> None:
    """Its server says how much it holds, in answer to the order to give the room back."""

    async def work() -> None:
        store, numbers = SqliteStore(tmp_path), itertools.count(1)
        log = await CommitLog.open(store, 1)
        for name in "ab":
            await log.commit(registration(log.state, server(name)))
        await log.commit(BufferWanted(Creation("w", (10,), "float32", replicas=2), lambda: next(numbers)))
        await log.commit(BufferMade("w", log.state.buffers["w"].segments))
        (segment,) = log.state.buffers["w"].segments
        await log.commit(returned(log.state, segment.backup, 2))
        await log.commit(registration(log.state, server(segment.backup, 2)))
        # The next run of the coordinator hears of the old copy before it has heard of the good one.
        log = await CommitLog.open(store, 2)
        old = Held(1, nbytes=NBYTES)
        await log.commit(registration(log.state, server(segment.backup, 3), [segment.id], as_held=old))
        await log.commit(registration(log.state, server(segment.server), [segment.id]))
        assert log.state.unexplained[segment.backup].keys() == {segment.id}
        await CopyMaker(log, cast(Any, Servers()), cast(Any, None), cast(Any, None)).begin()
        assert not log.state.unexplained[segment.backup]
        await store.close()

    asyncio.run(work())
