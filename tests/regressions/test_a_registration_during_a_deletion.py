"""A server that registered while a deletion was on its way to it listed what was deleted: that was in quarantine, for
people, and counted as taken, long after it was gone.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from smb import errors
from smb.coordinator import limits
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferDeleted, BufferMade, BufferWanted, ServerCounted, ServerRenewed
from smb.coordinator.records import Held, ServerRecord
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.steps.copies import NotAskedError
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from tests.support.decisions import registration, server

NBYTES = 4096


class Servers:
    """A memory server that registers right before it hears of a deletion, and does, or does not, as it is told."""

    def __init__(self, log: CommitLog, keeps: bool) -> None:
        self._log, self._keeps = log, keeps

    async def drop(self, at: ServerRecord, segment_id: int, *_: object, **__: object) -> int:
        event = registration(self._log.state, server(at.name))
        held = Held(1, quarantined=True, nbytes=NBYTES)
        await self._log.commit(replace(event, held={segment_id: held}))
        assert segment_id in self._log.state.unexplained[at.name]
        return NBYTES if self._keeps else 0


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_server_has_dropped_is_listed_no_more(tmp_path: Path, keeps: bool) -> None:
    """One that keeps it must register again: it holds too much."""

    async def work() -> None:
        store = SqliteStore(tmp_path)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        ids = iter(range(10, 20))
        await log.commit(BufferWanted(Creation("w", (1024,), "float32"), lambda: next(ids)))
        await log.commit(BufferMade("w", log.state.buffers["w"].segments))
        maker = SegmentMaker(log, cast(Any, Servers(log, keeps)))
        await maker.drop(await log.commit(BufferDeleted("w", missing_ok=False)))
        assert log.state.unexplained["a"] == {}
        assert log.state.taken_bytes("a") == 0
        if keeps:
            with pytest.raises(errors.NotFoundError, match="holds more than the records say"):
                await log.commit(ServerRenewed("a", 1, NBYTES))
        await store.close()

    asyncio.run(work())


def test_what_a_server_drops_while_it_registers_is_not_on_its_list(tmp_path: Path) -> None:
    """The server said what it holds, dropped segments, and its answers to the drops came first. It need not be asked
    again, since some servers drop hundreds of segments a second all the time.
    """

    async def work() -> None:
        store = SqliteStore(tmp_path)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        await log.commit(ServerCounted("a", 1, 0, 5))  # not yet asked
        asked = {each: Held(1, quarantined=True, nbytes=NBYTES) for each in (5, 7, 8, 9)}
        listed = replace(registration(log.state, server("a")), held=asked, stamps=())
        for dropped in (7, 9):
            await log.commit(ServerCounted("a", 1, 0, dropped))
        await log.commit(listed)
        assert log.state.unexplained["a"].keys() == {5, 8}
        await store.close()

    asyncio.run(work())


def test_after_very_many_drops_a_server_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a coordinator remembers of drops is bounded."""
    monkeypatch.setattr(limits, "DROPS_REMEMBERED_MAX", 3)

    async def work() -> None:
        store = SqliteStore(tmp_path)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a")))
        listed = replace(registration(log.state, server("a")), held={7: Held(1, nbytes=NBYTES)}, stamps=())
        for dropped in (7, 8, 9):
            await log.commit(ServerCounted("a", 1, 0, dropped))
        await log.commit(listed)
        assert not log.state.unexplained.get("a")
        await log.commit(ServerCounted("a", 1, 0, 10))
        with pytest.raises(NotAskedError, match='memory server "a" dropped too many segments while it registered'):
            await log.commit(listed)
        await log.commit(registration(log.state, server("a")))
        await store.close()

    asyncio.run(work())
