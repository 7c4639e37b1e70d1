"""A change whose caller had given up, and which could not be stored then, left a traceback in the coordinator's log."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferDeleted, BufferMade, BufferWanted
from smb.coordinator.store import StoreError
from smb.coordinator.validate import Creation
from tests.support.decisions import registration, server


class Store:
    """A store that waits, then fails, once it is told to."""

    changes_max = None

    def __init__(self) -> None:
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def load(self) -> dict[str, str]:
        return {}

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        self.asked.set()
        if not self.goes_on.is_set():
            await self.goes_on.wait()
            raise StoreError("the store broke")

    def free_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


def test_it_is_no_fault_of_ours() -> None:
    """Nothing is told to the loop, which would write it into the log."""
    told: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        store = Store()
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        ids = iter(range(10, 20))
        await log.commit(BufferWanted(Creation("w", (16,), "float32"), lambda: next(ids)))
        await log.commit(BufferMade("w", log.state.buffers["w"].segments))
        store.goes_on.clear()
        store.asked.clear()
        caller = asyncio.create_task(log.commit(BufferDeleted("w", missing_ok=False)))
        await store.asked.wait()
        caller.cancel()
        await asyncio.wait({caller})
        store.goes_on.set()
        await log.commit(BufferDeleted("x", missing_ok=True))  # behind it
        assert "w" in log.state.buffers

    asyncio.run(work())
    gc.collect()
    assert told == []
