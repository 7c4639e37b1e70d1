"""What the caller of a create hears if the coordinator loses its leadership in the middle, or a server is silent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import BufferFailed, BufferMade, BufferWanted, Event
from smb.coordinator.records import ServerRecord
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.store import DeposedError, SqliteStore
from smb.coordinator.validate import Creation
from smb.errors import NOT_APPLIED, UNKNOWN, AlreadyExistsError, OutOfMemoryError, UnavailableError
from tests.support.decisions import registration, server


class Deposed:
    """The commit log of a coordinator whose store falls silent with BufferMade: it may be stored, and nothing later."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    async def commit(self, event: Any) -> None:
        self.events.append(event)
        outcome = UNKNOWN if isinstance(event, BufferMade) else NOT_APPLIED
        raise DeposedError(f"{type(event).__name__} is not stored", outcome=outcome)


class NoServers:
    """Memory servers of a buffer that has no segments."""


@pytest.mark.parametrize("full", [False, True])
def test_the_first_failure_is_told(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """The record of its failure cannot be stored either: that one was told, and that nothing had been done."""
    log = Deposed()
    maker = SegmentMaker(log, NoServers())  # type: ignore[arg-type]

    async def make_segments(*_: object) -> None:
        if full:
            raise OutOfMemoryError("no room")

    monkeypatch.setattr(maker, "_make_segments", make_segments)
    record: Any = SimpleNamespace(key="w", segments=(), copies=())
    with pytest.raises(OutOfMemoryError if full else DeposedError) as raised:
        asyncio.run(maker._make(SimpleNamespace(), record, "create 'w'"))  # type: ignore[arg-type]
    assert raised.value.outcome == (NOT_APPLIED if full else UNKNOWN)
    assert isinstance(log.events[-1], BufferFailed)


def test_what_another_client_made_meanwhile_is_anothers(tmp_path: Path) -> None:
    """A server did not answer; before others were tried somebody else made a buffer of that name. It was the answer,
    whatever its shape."""

    async def work() -> None:
        store = SqliteStore(tmp_path)
        log = await CommitLog.open(store, 1)
        for name in "ab":
            await log.commit(registration(log.state, server(name), frozenset()))

        class Servers:
            """Whichever is asked first does not answer, and takes time for that."""

            mute: str = ""

            async def create(self, at: ServerRecord, *_: object) -> int:
                self.mute = self.mute or at.name
                if at.name == self.mute:
                    raise UnavailableError(f'memory server "{at.name}" does not answer')
                return 0

            async def drop(self, at: ServerRecord, *_: object, **__: object) -> int:
                (answers,) = {"a", "b"} - {at.name}
                await maker.create(Creation("w", (3,), "float32", server_names=(answers,)), 1.0)
                raise UnavailableError(f'memory server "{at.name}" does not answer')

        maker = SegmentMaker(log, Servers())  # type: ignore[arg-type]
        with pytest.raises(AlreadyExistsError, match='"w" exists'):
            await maker.create(Creation("w", (10,), "float32"), 1.0)
        assert log.state.buffers["w"].shape == (3,)
        await store.close()

    asyncio.run(work())


def test_what_gets_ready_before_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes nobody any more. A creator of the same name waited for 30 s."""

    async def work() -> None:
        store = SqliteStore(tmp_path)
        log = await CommitLog.open(store, 1)
        await log.commit(registration(log.state, server("a"), frozenset()))
        decided, ready = asyncio.Event(), asyncio.Event()
        commit = log.commit

        async def late(event: Event) -> Committed:
            committed = await commit(event)
            if isinstance(event, BufferWanted) and not committed.effects:
                decided.set()
                await ready.wait()
            elif isinstance(event, BufferMade):
                ready.set()
            return committed

        class Servers:
            async def create(self, *_: object) -> int:
                await decided.wait()
                return 0

        monkeypatch.setattr(log, "commit", late)
        maker = SegmentMaker(log, Servers())  # type: ignore[arg-type]
        creation = Creation("w", (10,), "float32", exist_ok=True)
        made = asyncio.gather(*(maker.create(creation, 1.0) for _ in range(2)))
        first, second = await asyncio.wait_for(made, 10)
        assert first == second
        await store.close()

    asyncio.run(work())
