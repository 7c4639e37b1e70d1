"""A power failure of the coordinator's host took the second half of a creation that was answered: its memory was
dropped as half made, on servers that had not failed.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from smb.coordinator import store
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BufferWanted, Restarted
from smb.coordinator.store import SqliteStore
from smb.coordinator.validate import Creation
from tests.support.decisions import Cluster, registration, server


async def _begin_to_create(directory: Path) -> None:
    """Store the first half of a creation."""
    records = SqliteStore(directory)
    log = await CommitLog.open(records, 1)
    await log.commit(registration(log.state, server("a")))
    numbers = itertools.count(1)
    await log.commit(BufferWanted(Creation("w", (10,), "float32"), lambda: next(numbers)))
    await records.close()


async def _opened_again(directory: Path) -> list[tuple[str, bool]]:
    """Return the buffers that a coordinator knows now, and whether each counts as made."""
    records = SqliteStore(directory)
    log = await CommitLog.open(records, 2)
    await records.close()
    return [(name, record.ready) for name, record in log.state.buffers.items()]


@pytest.mark.parametrize("power_failed", [False, True])
def test_a_half_made_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power_failed: bool) -> None:
    """In another boot of the host it counts as made. After a stop of the coordinator alone it is taken back."""
    asyncio.run(_begin_to_create(tmp_path))
    if power_failed:
        monkeypatch.setattr(store, "boot_id", lambda: "another boot")
    assert asyncio.run(_opened_again(tmp_path)) == ([("w", True)] if power_failed else [])
    assert asyncio.run(_opened_again(tmp_path)) == ([("w", True)] if power_failed else [])


def test_the_end_may_be_missing_until_something_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that dies before it has stored anything leaves that to the next one; the boot is no record."""

    async def opened(*, writes: bool) -> bool:
        records = SqliteStore(tmp_path)
        there = await records.load()
        lacks = records.may_lack_its_end
        assert there == ({"a": "b"} if lacks else {})
        if writes:
            await records.change({"a": "b"})
            assert await records.load() == {"a": "b"}
            assert not records.may_lack_its_end
        await records.close()
        return lacks

    assert not asyncio.run(opened(writes=False))
    assert not asyncio.run(opened(writes=True))
    monkeypatch.setattr(store, "boot_id", lambda: "another boot")
    assert asyncio.run(opened(writes=False))
    assert asyncio.run(opened(writes=True))
    monkeypatch.setattr(store, "boot_id", lambda: "")  # the kernel does not tell
    assert asyncio.run(opened(writes=False))


def test_a_mirror_that_is_half_made_is_taken_back() -> None:
    """It has nothing that its source does not have, which may be gone."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.create("w", versions=2, server_names=("a",))
    cluster.want("m", mirror_of="w", server_names=("b",))
    cluster.do(Restarted(2, lacks_end=True))
    assert list(cluster.state.buffers) == ["w"]
