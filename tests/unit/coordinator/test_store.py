"""smb.coordinator.store: what outlives the coordinator."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from smb import errors
from smb.coordinator.records import BufferRecord, SegmentRecord, ServerRecord
from smb.coordinator.store import FILE_NAME, SqliteStore, StoreError, open_store


def write(directory: Path, changes: dict[str, str | None]) -> None:
    async def work() -> None:
        store = open_store(str(directory))
        try:
            await store.change(changes)
        finally:
            await store.close()

    asyncio.run(work())


def read(directory: Path) -> dict[str, str]:
    async def work() -> dict[str, str]:
        store = open_store(str(directory))
        try:
            return await store.load()
        finally:
            await store.close()

    return asyncio.run(work())


def test_what_is_put_is_there_again_and_what_is_taken_is_not(tmp_path: Path) -> None:
    """Texts survive the store's closing, in a directory that is made; one change puts, replaces and takes at once."""
    place = tmp_path / "new" / "state"
    write(place, {"a": "1", "b": "2"})
    write(place, {"a": "3", "b": None, "c": "4"})
    assert read(place) == {"a": "3", "c": "4"}


def test_a_change_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A change that fails in the middle leaves what was there before, and the store usable."""

    async def work() -> None:
        store = SqliteStore(tmp_path)
        try:
            await store.change({"a": "1"})
            with pytest.raises(StoreError, match="nothing was changed"):
                await store.change({"a": "2", "b": {"not": "text"}})  # type: ignore[dict-item]
            assert await store.load() == {"a": "1"}
            await store.change({"b": "2"})
        finally:
            await store.close()

    asyncio.run(work())
    assert read(tmp_path) == {"a": "1", "b": "2"}


def test_everything_changed_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    """A process that writes and is killed with SIGKILL, file open, loses nothing that change() returned for."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from smb.coordinator.store import SqliteStore\n"
        "async def work():\n"
        "    store = SqliteStore(Path(sys.argv[1]))\n"
        "    for i in range(300):\n"
        "        await store.change({f'k{i}': 'x' * 1000})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(work())\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60).returncode == -9
    assert read(tmp_path).keys() == {f"k{i}" for i in range(300)}


def test_one_coordinator_at_a_time_has_it(tmp_path: Path) -> None:
    """A second opening is refused while the first lasts, and works after it."""

    async def work() -> None:
        first = open_store(str(tmp_path))
        try:
            with pytest.raises(errors.UnavailableError, match="in use by another coordinator"):
                open_store(str(tmp_path))
        finally:
            await first.close()
        await open_store(str(tmp_path)).close()

    asyncio.run(work())


def test_other_kinds_of_store_are_refused() -> None:
    """Anything with a scheme that is not there is said to be unknown, with what there is."""
    with pytest.raises(errors.InvalidArgumentError, match="--state must be a directory"):
        open_store("redis://127.0.0.1")


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    """Garbage and a later version's file are refused with their path, not overwritten."""
    file = tmp_path / FILE_NAME
    file.write_text("this is no database, and long enough to be looked at as one" * 20)
    with pytest.raises(StoreError, match="is not the store of a coordinator"):
        open_store(str(tmp_path))
    assert file.read_text().startswith("this is no")
    file.unlink()
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="has format version 99"):
        open_store(str(tmp_path))


def test_a_directory_that_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    """A file where the directory should be is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot make .*file"):
        open_store(str(tmp_path / "file"))


def test_records_are_the_same_after_a_round_trip() -> None:
    """Buffers and servers read from their texts are equal to what was written, ids of 64 bits included."""
    segments = (SegmentRecord((1 << 64) - 1, "a", 8, 8192), SegmentRecord(2, "b", 4, 8192))
    buffer = BufferRecord("w", 1 << 63, (3, 4), "bfloat16", 24, 1, 4096, 4096, segments, 1.5, True)
    assert BufferRecord.from_json(buffer.to_json()) == buffer
    server = ServerRecord("a", 1 << 63, "h:1", "h:2", "/s", "h:3", 1 << 40, 5, 2.5)
    assert ServerRecord.from_json(server.to_json()) == server
    with pytest.raises(TypeError):
        ServerRecord.from_json(buffer.to_json())


def test_a_server_stored_before_there_were_weights_has_weight_one() -> None:
    """The text of an earlier version loads."""
    server = ServerRecord("a", 7, "h:1", "h:2", "/s", "h:3", 1 << 40, 5, 2.5, weight=3.5)
    fields = json.loads(server.to_json())
    assert fields.pop("weight") == 3.5
    assert ServerRecord.from_json(json.dumps(fields)) == replace(server, weight=1.0)
