"""What the caller of a create hears if the coordinator loses its leadership in the middle."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from smb.coordinator.events import BufferFailed, BufferMade
from smb.coordinator.segment_maker import SegmentMaker
from smb.coordinator.store import DeposedError
from smb.errors import NOT_APPLIED, UNKNOWN, OutOfMemoryError


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
