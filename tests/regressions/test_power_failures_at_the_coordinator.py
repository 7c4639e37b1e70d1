"""A power failure of the coordinator's host, or a backup that was put back, took the second half of a creation that was
answered: the buffer's memory was dropped as half made, on servers that had not failed.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import AnswerDrops, BufferMade, BufferWanted, UnexplainedJudged
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from tests.support.decisions import registration, returned, server


async def _begin_to_create(directory: Path, backup: Path, *, made: bool) -> None:
    """Store a creation, or its first half. The backup is of its middle."""
    records = SqliteStore(directory)
    log = await CommitLog.open(records, 1)
    await log.commit(registration(log.state, server("a")))
    numbers = itertools.count(1)
    await log.commit(BufferWanted(Creation("w", (10,), "float32"), lambda: next(numbers)))
    kept = SqliteStore(backup)
    await kept.change(dict(await records.load()))
    await kept.close()
    if made:
        await log.commit(BufferMade("w"))
    await records.close()


async def _opened(directory: Path, *, has_it: bool) -> tuple[list[str], int]:
    """Return which buffers clients see once the server was heard of, and how many segments it must drop."""
    records = SqliteStore(directory)
    log = await CommitLog.open(records, 2)
    assert not log.state.listed(), "nobody was heard of yet"
    held = [segment.id for record in log.state.buffers.values() for segment in record.segments] if has_it else []
    await log.commit(returned(log.state, "a", 1, held))
    (answer,) = (
        each
        for each in (await log.commit(registration(log.state, server("a"), held))).effects
        if isinstance(each, AnswerDrops)
    )
    await log.commit(UnexplainedJudged())
    await records.close()
    return [record.name for record in log.state.listed()], len(answer.segment_ids)


@pytest.mark.parametrize("made", [True, False])
def test_a_half_made_buffer(tmp_path: Path, made: bool) -> None:
    """Its server decides: the memory that it has stays, and a buffer that it never made is taken back."""
    asyncio.run(_begin_to_create(tmp_path / "now", tmp_path / "backup", made=made))
    assert asyncio.run(_opened(tmp_path / "backup", has_it=made)) == (["w"] if made else [], 0)
