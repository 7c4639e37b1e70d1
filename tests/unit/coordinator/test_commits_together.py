"""smb.coordinator.commit_log: events that arrive while the store works are stored together, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import BufferWanted, Event, MaintenancePlanned, SessionClosed, SessionRenewed
from smb.coordinator.records import Kind, ShownCertificate
from smb.coordinator.store import Store, StoreError
from smb.coordinator.validate import first_use
from smb.rpc.coordinator_client import SessionEndedError
from tests.support.decisions import Cluster


class Gated:
    """A store that takes each change when the test lets it, or fails it."""

    changes_max = 100

    def __init__(self) -> None:
        self.asked: list[Mapping[str, str | None]] = []
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        self.asked.append(changes)
        await self._answer

    async def answer(self, error: Exception | None = None) -> None:
        """End the change that waits, and let the commit log go on until it asks for another one, or for nothing."""
        now, self._answer = self._answer, asyncio.get_running_loop().create_future()
        if error is None:
            now.set_result(None)
        else:
            now.set_exception(error)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(log: CommitLog, *events: Event) -> list[asyncio.Task[Committed]]:
    tasks = [asyncio.create_task(log.commit(event)) for event in events]
    await settle()
    return tasks


async def log_with_session(cluster: Cluster) -> tuple[CommitLog, Gated]:
    """A commit log in which session 5 lives, and whose store is busy with another event."""
    store = Gated()
    log = CommitLog(cast(Store, store), cluster.state, lambda: cluster.now)
    opened = await begun(log, SessionRenewed(5, "w", ShownCertificate()))
    await store.answer()
    await opened[0]
    await begun(log, MaintenancePlanned("", 60.0))
    return log, store


def test_a_refusal_is_told_once_what_it_rests_on_is_stored() -> None:
    async def scenario() -> None:
        log, store = await log_with_session(Cluster())
        closed, renewed = await begun(log, SessionClosed(5), SessionRenewed(5, "w", ShownCertificate()))
        await store.answer()
        assert len(store.asked) == 3
        assert not renewed.done()
        await store.answer()
        await closed
        with pytest.raises(SessionEndedError):
            await renewed

    asyncio.run(scenario())


def test_an_event_is_not_refused_because_of_one_that_was_not_stored() -> None:
    """Its session was to be closed before it, and lives on."""

    async def scenario() -> None:
        log, store = await log_with_session(Cluster())
        closed, renewed = await begun(log, SessionClosed(5), SessionRenewed(5, "w", ShownCertificate()))
        await store.answer()
        await store.answer(StoreError("the disk is full"))  # both together
        await store.answer(StoreError("the disk is full"))  # the first one alone
        with pytest.raises(StoreError):
            await closed
        await renewed
        assert 5 in log.state.sessions

    asyncio.run(scenario())


def test_creations_are_stored_together_with_other_events() -> None:
    """A flood in which both alternate would otherwise take a change of the store for each event."""

    async def scenario() -> None:
        cluster = Cluster()
        cluster.register("a")
        log, store = await log_with_session(cluster)
        mixed: list[Event] = []
        for number in range(10, 14):
            wanted = BufferWanted(first_use(Kind.LOCK, f"lock-{number}"), lambda: next(cluster.ids))
            mixed += (SessionRenewed(number, "w", ShownCertificate()), wanted)
        tasks = await begun(log, *mixed)
        await store.answer()
        await store.answer()
        await asyncio.gather(*tasks)
        assert len(store.asked) == 3
        assert sum(key.startswith(("session/", "buffer/")) for key in store.asked[2]) == len(mixed)

    asyncio.run(scenario())
