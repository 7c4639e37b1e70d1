"""A server registered while a buffer was being made on it, and said that it had no such segment yet. By the time that
the answer came the buffer was made, and it counted as lost.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferMade, BufferWanted
from smb.coordinator.memserver_client import Look, RunLiveness
from smb.coordinator.registrations import Registrations
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from smb.errors import UnavailableError
from tests.support.decisions import registration, server


@pytest.mark.parametrize("made_before", [False, True])
def test_it_is_there(tmp_path: Path, made_before: bool) -> None:
    """What was made before the server was asked, and is not there, is lost. What was made since is asked for again."""

    async def work() -> None:
        store, numbers = SqliteStore(tmp_path), itertools.count(1)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        await log.commit(BufferWanted(Creation("w", (10,), "float32"), lambda: next(numbers)))
        made = BufferMade("w", log.state.buffers["w"].segments)
        if made_before:
            await log.commit(made)

        class Servers:
            async def look(self, *_: object) -> Look:
                if not made_before:  # the answer takes longer than what is left to do
                    await log.commit(made)
                return Look(RunLiveness.ALIVE)

        service: Any = SimpleNamespace(_commit_log=log, _servers=Servers())
        event = await cast(Any, Registrations)._asked_back(service, registration(log.state, server("a")))
        with nullcontext() if made_before else pytest.raises(UnavailableError, match="it must register again"):
            await log.commit(event)
        assert bool(log.state.lost_segments(log.now())) is made_before
        await store.close()

    asyncio.run(work())
