"""A full disk of the coordinator: a create that could not be finished left its name stuck until a restart, nothing
could be deleted, and a bad page of SQLite was a traceback.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import sqlite3
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from smb.coordinator import leader
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import (
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferWanted,
    Instant,
    ServerRegistered,
    SessionRenewed,
    Ticked,
)
from smb.coordinator.leader import _tick
from smb.coordinator.records import ServerRecord
from smb.coordinator.store import FILE_NAME, RESERVE_NAME, SqliteStore, StoreError
from smb.coordinator.validate import Creation
from smb.rpc import control_pb2 as pb
from tests.support.daemons import Daemon, Daemons, running_daemons, wait_for
from tests.support.memory_server import FakeMemoryServer, coordinator_stub, fake_memory_servers

DISK_MIB = 24


class BrokenStore:
    """Keeps texts, unless it is told to fail."""

    changes_max: int | None = None

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.fails = False

    async def load(self) -> dict[str, str]:
        return dict(self.texts)

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        if self.fails:
            raise StoreError("cannot write it; nothing was changed")
        for key, text in changes.items():
            self.texts.pop(key, None)
            if text is not None:
                self.texts[key] = text

    def free_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


def wanted(name: str) -> BufferWanted:
    numbers = iter(range(int.from_bytes(name.encode(), "big") << 16 | 1, 1 << 40))
    return BufferWanted(Creation(name, (8,), "float32"), lambda: next(numbers))


def test_a_creations_clean_up_is_owed_until_it_is_stored() -> None:
    """The store fails between a creation's beginning and end: the name and its memory are free at once, in the state;
    what was refused meanwhile left nothing; the record goes with the first tick that can be stored, and not the one of
    a later buffer of that name."""

    async def work() -> None:
        store = BrokenStore()
        commit_log = await CommitLog.open(store, 1)
        server = ServerRecord("a", 1, "h:1", "h:2", "", "", 1 << 30, 0, 0.0)
        await commit_log.commit(ServerRegistered(server, {}))
        for name in ("w", "v"):
            await commit_log.commit(wanted(name))
        store.fails = True
        for name in ("w", "v"):
            with pytest.raises(StoreError):
                await commit_log.commit(BufferMade(name))
            await commit_log.commit(BufferFailed(name))
        assert not commit_log.state.buffers
        assert commit_log.state.allocation("a").nbytes == 0
        assert commit_log.store_error
        with pytest.raises(StoreError, match="nothing was changed"):
            await commit_log.commit(wanted("w"))
        assert not commit_log.state.buffers
        await commit_log.commit(Ticked())
        assert {"buffer/w", "buffer/v"} <= store.texts.keys()
        store.fails = False
        await commit_log.commit(wanted("w"))
        assert "buffer/w" in store.texts
        assert "buffer/v" not in store.texts
        assert not commit_log.store_error
        store.fails = True
        await commit_log.commit(BufferFailed("w"))
        store.fails = False
        await commit_log.commit(Ticked())
        assert "buffer/w" not in store.texts

    asyncio.run(work())


def test_a_failing_store_is_tried_until_it_works() -> None:
    """After a failure each tick tries, though there is nothing to store: whoever looks is told what is."""

    async def work() -> None:
        store = BrokenStore()
        commit_log = await CommitLog.open(store, 1)
        store.fails = True
        with pytest.raises(StoreError):
            await commit_log.commit(ServerRegistered(ServerRecord("a", 1, "h:1", "h:2", "", "", 1, 0, 0.0), {}))
        await commit_log.commit(Ticked())
        assert commit_log.store_error
        store.fails = False
        await commit_log.commit(Ticked())
        assert not commit_log.store_error

    asyncio.run(work())


def test_a_tick_that_cannot_be_stored_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A session ran out, and the disk has no room to say so: every tick tries, the log says it once, none ends the
    ticks. Once the disk can be written, it is stored."""

    async def work() -> None:
        store = BrokenStore()
        clock = [Instant(0.0, 0.0)]
        commit_log = await CommitLog.open(store, 1, session_lease_s=1.0, clock=lambda: clock[0])
        await commit_log.commit(SessionRenewed(1, "one"))
        store.fails = True
        for half_seconds in range(200):
            clock[0] = Instant(half_seconds / 2, half_seconds / 2)
            commit_log.runs()  # it was not held up meanwhile
        ticked: list[float] = []
        health = SimpleNamespace(ticked=lambda: ticked.append(0.0))

        async def silent() -> frozenset[str]:
            return frozenset()

        endings: Any = SimpleNamespace(tell=lambda _: None)
        ticking = asyncio.create_task(_tick(commit_log, endings, health, silent))  # type: ignore[arg-type]

        async def until(is_so: Callable[[], bool]) -> None:
            while not is_so():
                assert not ticking.done()
                await asyncio.sleep(0.001)

        try:
            await asyncio.wait_for(until(lambda: len(ticked) > 5), 20)
            assert 1 in commit_log.state.sessions
            store.fails = False
            await asyncio.wait_for(until(lambda: 1 not in commit_log.state.sessions), 20)
        finally:
            ticking.cancel()

    monkeypatch.setattr(leader, "TICK_S", 0.001)
    asyncio.run(work())
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["cannot write it; nothing was changed"]


@pytest.mark.parametrize("what", ["exists", "unlink"])
def test_a_reserve_that_cannot_be_touched_is_a_refusal(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that answers EIO for the reserve's name: the change is refused with the store's error, nothing else."""

    def broken(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(self))

    async def work() -> None:
        store = SqliteStore(tmp_path)
        try:
            with monkeypatch.context() as patched:
                if what == "unlink":
                    patched.setattr(store, "_write", full)
                patched.setattr(Path, what, broken)
                with pytest.raises(StoreError, match=r"cannot .*Input/output error.*nothing was changed"):
                    await store.change({"a": "1"}, urgent=what == "unlink")
            await store.change({"a": "2"})
            assert await store.load() == {"a": "2"}
        finally:
            await store.close()

    def full(_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    asyncio.run(work())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "smb-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


def fill(disk: Path) -> Path:
    """Take what room there is."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    return filler


def create(stub: Any, name: str) -> str:
    try:
        stub.CreateBuffer(pb.CreateBufferRequest(name=name, shape=[8], dtype="float32"), timeout=20)
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return ""


def test_a_name_is_free_again_after_a_create_on_a_full_disk(disk: Path, daemons: Daemons) -> None:
    """The disk fills while a server makes the segment: the create fails and says why, the segment is dropped, and with
    room on the disk the same name is created."""
    state = str(disk / "state")
    coordinator = daemons.coordinator("127.0.0.1:0", state)
    with fake_memory_servers("a") as (server,), coordinator_stub(coordinator.address) as stub:
        server.register(stub)
        server.hold = threading.Event()
        failures: list[str] = []
        creating = threading.Thread(target=lambda: failures.append(create(stub, "w")))
        creating.start()
        assert server.asked.wait(20)
        filler = fill(disk)
        (disk / "state" / RESERVE_NAME).unlink()  # not even that is left
        fill(disk)
        server.hold.set()
        creating.join(20)
        assert re.match("RESOURCE_EXHAUSTED: .*disk is full", failures[0])
        assert "nothing was" in failures[0]
        wait_for(lambda: not server.segments, "drop of the segment")
        again = create(stub, "w")
        assert "disk is full" in again
        assert "another client" not in again
        filler.unlink()
        wait_for(lambda: create(stub, "w") == "", "creation")
        assert [buffer.name for buffer in stub.ListBuffers(pb.ListBuffersRequest(), timeout=5).buffers] == ["w"]


def health_of(coordinator: Daemon) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{coordinator.metrics}/readyz", timeout=10) as answer:
            return int(answer.status), str(json.load(answer)["store"])
    except urllib.error.HTTPError as error:
        return error.code, str(json.loads(error.read())["store"])


def started_on_a_full_disk(daemons: Daemons, state: str) -> Daemon:
    coordinator = daemons.coordinator("127.0.0.1:0", state)
    assert coordinator.address
    return coordinator


def test_a_coordinator_starts_and_deletes_with_its_disk_full(disk: Path, daemons: Daemons) -> None:
    """Killed and started again on a full disk it takes registrations, sessions and deletions from its reserve, and
    refuses creations; once there is room it makes the reserve again, and creates."""
    state = str(disk / "state")
    first = daemons.coordinator("127.0.0.1:0", state)
    with fake_memory_servers("a") as (server,):
        with coordinator_stub(first.address) as stub:
            server.register(stub)
            for number in range(20):
                assert create(stub, f"w{number}") == ""
        first.kill()
        filler = fill(disk)
        second = started_on_a_full_disk(daemons, state)
        with coordinator_stub(second.address) as stub:
            server.instance_id += 1
            server.register(stub)
            for number in range(20):
                stub.OpenSession(pb.OpenSessionRequest(client_name="one"), timeout=10)
                stub.DeleteBuffer(pb.DeleteBufferRequest(name=f"w{number}"), timeout=10)
            assert not server.segments
            assert re.match("RESOURCE_EXHAUSTED: .*the reserve is for deletions", create(stub, "v"))
            assert health_of(second) == (503, "failing")
            stub.OpenSession(pb.OpenSessionRequest(client_name="one"), timeout=10)
            assert health_of(second) == (503, "failing")  # that one was stored, but a buffer could not be
        second.kill()
        third = started_on_a_full_disk(daemons, state)
        with coordinator_stub(third.address) as stub:
            assert not stub.ListBuffers(pb.ListBuffersRequest(), timeout=5).buffers
            server.instance_id += 1
            server.register(stub)
            filler.unlink()
            assert create(stub, "v") == ""
            wait_for(lambda: health_of(third) == (200, "ok"), "its recovery")
            assert (disk / "state" / RESERVE_NAME).stat().st_size == 8 << 20


def _two_copies(stub: Any, servers: list[FakeMemoryServer]) -> tuple[FakeMemoryServer, FakeMemoryServer, pb.BrokenPair]:
    """Make a buffer; return its server, its backup's, and what the first one says when that is lost."""
    for server in servers:
        server.register(stub)
    request = pb.CreateBufferRequest(name="w", shape=[8], dtype="float32", server_count=1, replicas=2)
    (segment,) = stub.CreateBuffer(request, timeout=20).layout.segments
    named = {server.name: server for server in servers}
    pair = pb.BrokenPair(segment_id=segment.id, epoch=segment.epoch, for_ms=100)
    return named[segment.server], named[segment.backup], pair


def _renew(stub: Any, server: FakeMemoryServer, pair: pb.BrokenPair) -> str:
    """Renew; return the server of the other copy, as the answer has it."""
    request = pb.RenewServerRequest(name=server.name, instance_id=server.instance_id, broken=[pair])
    (role,) = stub.RenewServer(request, timeout=10).replicas
    return str(role.peer)


def test_a_lost_server_is_replaced_with_the_disk_full(disk: Path, daemons: Daemons) -> None:
    """What keeps data is stored from the reserve: of two copies the other one goes on alone, and the server that was
    lost registers again, empty. Creations are refused."""
    coordinator = daemons.coordinator("127.0.0.1:0", str(disk / "state"))
    with fake_memory_servers("a", "b") as servers, coordinator_stub(coordinator.address) as stub:
        primary, backup, pair = _two_copies(stub, servers)
        fill(disk)
        assert "disk is full" in create(stub, "v")
        backup.stop()
        assert _renew(stub, primary, pair) == ""
        backup.segments.clear()
        backup.instance_id += 10
        backup.start()
        backup.register(stub)
        assert "RESOURCE_EXHAUSTED" in create(stub, "v")


def test_servers_serve_on_when_nothing_can_be_stored(disk: Path, daemons: Daemons) -> None:
    """A change of roles that cannot be stored at all: the server that asks for it keeps its lease and its roles, and
    the log says once that the other one is dead, and once that the disk is full, however often it asks."""
    coordinator = daemons.coordinator("127.0.0.1:0", str(disk / "state"))
    with fake_memory_servers("a", "b") as servers, coordinator_stub(coordinator.address) as stub:
        primary, backup, pair = _two_copies(stub, servers)
        filler = fill(disk)
        (disk / "state" / RESERVE_NAME).unlink()
        fill(disk)
        backup.stop()
        for _ in range(20):
            assert _renew(stub, primary, pair) == backup.name
        said = [line for line in coordinator.log.read_text().splitlines() if " INFO " not in line]
        assert len(said) == 2, said
        assert "process is gone" in said[0]
        assert "is full" in said[1]
        filler.unlink()
        wait_for(lambda: _renew(stub, primary, pair) == "", "change of roles")


def test_a_store_that_comes_and_goes_is_told_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """Each creation fails and each tick finds the store well: one line of each. What stays for five seconds is told,
    and again after ten minutes."""

    async def work() -> None:
        store = BrokenStore()
        clock = [Instant(0.0, 0.0)]
        commit_log = await CommitLog.open(store, 1, clock=lambda: clock[0])
        await commit_log.commit(ServerRegistered(ServerRecord("a", 1, "h:1", "h:2", "", "", 1 << 30, 0, 0.0), {}))

        def told() -> list[str]:
            found = [record.levelname for record in caplog.records if "writ" in record.message]
            caplog.clear()
            return found

        def after(seconds: float) -> None:
            clock[0] = Instant(clock[0].monotonic + seconds, clock[0].wall)

        caplog.set_level("INFO")
        for number in range(10):
            store.fails = True
            with pytest.raises(StoreError):
                await commit_log.commit(wanted(f"w{number}"))
            store.fails = False
            await commit_log.commit(Ticked())
            assert not commit_log.store_error
            after(0.5)
        assert told() == ["ERROR", "INFO"]
        store.fails = True
        with pytest.raises(StoreError):
            await commit_log.commit(wanted("v"))
        for seconds, levels in ((0, []), (4.5, []), (0.5, ["ERROR"]), (1, []), (598, []), (1, ["ERROR"]), (1, [])):
            after(seconds)
            await commit_log.commit(Ticked())
            assert told() == levels
        store.fails = False
        await commit_log.commit(Ticked())
        assert told() == ["INFO"]

    asyncio.run(work())


def test_a_bad_page_is_an_error_with_the_files_name(tmp_path: Path, daemons: Daemons) -> None:
    """A coordinator whose file has a page that is garbage says so in one line, and does not start."""
    first = daemons.coordinator()
    with fake_memory_servers("a") as (server,), coordinator_stub(first.address) as stub:
        server.register(stub)
        for number in range(200):
            assert create(stub, f"w{number}") == ""
    assert first.stop() == 0
    file = tmp_path / "state" / FILE_NAME
    pages = bytearray(file.read_bytes())
    assert len(pages) > 8 * 4096
    pages[4096 : len(pages)] = b"\xa5" * (len(pages) - 4096)
    file.write_bytes(pages)
    second = daemons.coordinator()
    assert second.wait() == 1
    said = second.log.read_text()
    assert re.search(rf"cannot read {re.escape(str(file))}: database disk image is malformed", said)
    assert "Traceback" not in said


def test_deleting_needs_no_tick() -> None:
    """What is owed goes with the next change, whichever that is."""

    async def work() -> None:
        store = BrokenStore()
        commit_log = await CommitLog.open(store, 1)
        await commit_log.commit(ServerRegistered(ServerRecord("a", 1, "h:1", "h:2", "", "", 1 << 30, 0, 0.0), {}))
        await commit_log.commit(wanted("w"))
        await commit_log.commit(BufferMade("w"))
        await commit_log.commit(wanted("v"))
        store.fails = True
        await commit_log.commit(BufferFailed("v"))
        store.fails = False
        await commit_log.commit(BufferDeleted("w", False))
        assert not [key for key in store.texts if key.startswith("buffer/")]

    asyncio.run(work())
