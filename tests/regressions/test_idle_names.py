"""Named locks and barriers once kept their memory for good: 2 000 names that were used once took 32 MiB for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

import smb
from smb.coordinator import process
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.idle_names import IdleNames
from smb.coordinator.leases import Leases
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.process import CoordinatorOptions
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerStub
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from tests.fault.long import times
from tests.support.daemons import wait_for
from tests.support.transports import SLOWNESS

NAMES = 2000
FREED_S = 60 * SLOWNESS


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMB_COORDINATOR_IDLE_NAMES", "2")
    monkeypatch.setenv("SMB_COORDINATOR_SESSION_LEASE", "2")


@pytest.fixture
def cluster() -> Iterator[smb.LocalCluster]:
    with smb.LocalCluster(servers=1, capacity="256MiB") as cluster:
        yield cluster


def until(condition: Callable[[], bool], what: str) -> None:
    wait_for(condition, f"end of this: {what}", FREED_S)


def used_bytes(client: smb.Client) -> int:
    return sum(server.used for server in client.servers())


def files(cluster: smb.LocalCluster) -> int:
    return len(list(cluster.memory_directory.rglob("*.segment")))


# More than 5 s: a hundred names, one after the other, and then a lease until the last are freed.
def test_names_that_were_used_once_are_freed(cluster: smb.LocalCluster) -> None:
    """All of them, with their memory, on the server and in the coordinator's books; a buffer stays."""
    with smb.connect(cluster.address) as client:
        kept = client.create("kept", 8)
        before = used_bytes(client)
        for index in range(times(NAMES // 20, NAMES // 2)):
            with client.lock(f"once/{index}"):
                pass
            assert client.barrier(f"once/{index}", 1) == 0
        until(lambda: files(cluster) == 1 and used_bytes(client) == before, "their memory is not given back")
        kept.fill(1)
        assert (kept.read() == 1).all()


def test_what_is_used_stays(cluster: smb.LocalCluster) -> None:
    """A lock that is held, one that is waited for, and a barrier where somebody waits."""
    with smb.connect(cluster.address) as holder, smb.connect(cluster.address) as other, ThreadPoolExecutor(2) as pool:
        with holder.lock("held", ttl=60) as lock:
            waiting = pool.submit(other.lock("held").acquire)
            arrived = pool.submit(other.barrier, "met", 2)
            for index in range(3):  # each is freed after all that came before it could have been
                with holder.lock(f"once/{index}"):
                    pass
                until(lambda: files(cluster) == 2, "the idle name stays")
            lock.check()
            assert not waiting.done()
            assert not arrived.done()
        assert waiting.result(FREED_S).token > 0
        waiting.result().release()
        assert holder.barrier("met", 2) + arrived.result(FREED_S) == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_tokens_grow_over_the_names_return(cluster: smb.LocalCluster, restarted: bool) -> None:
    """For the client that has the name still as for a new one, also where the coordinator was restarted between."""
    with smb.connect(cluster.address) as client:
        tokens = []
        for _ in range(70):
            with client.lock("busy") as busy:
                tokens.append(busy.token)
        handle = client.lock("busy")
        for _ in range(3):
            until(lambda: files(cluster) == 0, "the name is not freed")
            if restarted:
                cluster.coordinator.kill()
                cluster.coordinator.start()
            with handle:
                tokens.append(handle.token)
            with smb.connect(cluster.address) as fresh, fresh.lock("busy") as again:
                tokens.append(again.token)
        assert tokens == sorted(set(tokens))
        until(lambda: files(cluster) == 0, "the name is not freed")
        assert client.barrier("busy", 1) == 0


def test_a_lock_that_ran_out_and_was_freed_is_lost(cluster: smb.LocalCluster) -> None:
    """Its holder learns that, and nothing of the name's new holder ends by it."""
    with smb.connect(cluster.address) as stopped, smb.connect(cluster.address) as client:
        lock = stopped.lock("ours", ttl=0.1).acquire()
        stopped._session.renewals.remove(lock)  # as where its process is stopped
        until(lambda: files(cluster) == 0, "the name is not freed")
        with client.lock("ours") as ours:
            with pytest.raises(smb.LockLostError):
                lock.check()
            with pytest.raises(smb.LockLostError):
                lock.release()
            ours.check()


def test_many_clients_use_a_name_that_comes_and_goes(cluster: smb.LocalCluster) -> None:
    """Each pauses for about the time after which it is freed: nobody meets an error, or another inside."""
    inside: list[int] = []
    tokens: list[int] = []

    def work(number: int) -> None:
        with smb.connect(cluster.address) as client:
            for turn in range(6):
                with client.lock("shared") as lock:
                    inside.append(number)
                    tokens.append(lock.token)
                    assert inside == [number]
                    inside.remove(number)
                time.sleep(1.0 + 0.1 * ((number + turn) % 5))  # the pause is what is tested

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, number) for number in range(3)]:
            done.result()
    assert tokens == sorted(set(tokens))


def test_what_was_retired_is_freed_after_a_crash(cluster: smb.LocalCluster) -> None:
    """Both daemons are killed all the while: whoever asks gets the lock in the end, with a higher token."""
    with smb.connect(cluster.address, timeout=60 * SLOWNESS) as client:
        tokens = []
        for turn in range(4):
            with client.lock("often") as lock:
                tokens.append(lock.token)
            until(lambda: files(cluster) == 0, "the name is not freed")
            daemon = (cluster.coordinator, cluster.servers[0])[turn % 2]
            daemon.kill()
            daemon.start()
        assert tokens == sorted(set(tokens))


def test_a_lock_that_is_retired_and_still_recorded(cluster: smb.LocalCluster) -> None:
    """As where the coordinator is killed between the two: nobody gets it, over restarts of the server too, until the
    coordinator has freed the name. One that is held is not retired.
    """
    with smb.connect(cluster.address, timeout=60 * SLOWNESS) as client:
        with client.lock("ours") as lock:
            first = lock.token
        with client.lock("held", ttl=600):
            (server,) = client._session.coordinator.list_servers(10)
            records = [client._session.coordinator.place(pb.LOCK, name, 10) for name in ("ours", "held")]
            ours, held = (record.layout.segments[0].id for record in records)
            cluster.coordinator.kill()
            with grpc.insecure_channel(server.control_address) as channel:
                ask = MemoryServerStub(channel).RetireSegments  # type: ignore[no-untyped-call]
                for _ in range(2):
                    assert ask(pb.RetireSegmentsRequest(ids=[ours, held, 17], idle_ms=0)).tokens == {ours: first}
            cluster.servers[0].kill()
            cluster.servers[0].spawn()
            cluster.coordinator.start()
            cluster.servers[0].wait_ready(time.monotonic() + FREED_S)
            with client.lock("ours") as again:
                assert again.token > first
            until(lambda: files(cluster) == 1, "the name is not freed")


def test_names_come_back_where_tokens_are_asked_for(tmp_path: Path) -> None:
    """With credentials: the client's token is for the segment that is gone, and it gets another for the new one."""
    holders = [Holder(Role.COORDINATOR, ""), Holder(Role.SERVER, "server-0"), Holder(Role.CLIENT, "")]
    make_set(tmp_path / "certs", holders)
    with (
        smb.LocalCluster(servers=1, capacity="16MiB", credentials=tmp_path / "certs") as cluster,
        smb.connect(cluster.address, credentials=tmp_path / "certs" / "client") as client,
    ):
        tokens = []
        for _ in range(2):
            with client.lock("ours") as lock:
                tokens.append(lock.token)
            until(lambda: files(cluster) == 0, "the name is not freed")
        assert client.barrier("ours", 1) == 0
        assert tokens == sorted(set(tokens))


def test_names_that_are_freed_before_a_lease_ends_are_refused(tmp_path: Path) -> None:
    """Names would be freed under clients that may still come back: the coordinator says so, and does not start."""
    options = CoordinatorOptions(
        "127.0.0.1:0", str(tmp_path / "state"), "127.0.0.1:0", session_lease_s=10.0, idle_names_s=9.9
    )
    with pytest.raises(
        smb.InvalidArgumentError, match=r"--idle-names must be at least --session-lease \(10 seconds\), not 9\.9"
    ):
        asyncio.run(process._start(options, AsyncExitStack()))
    assert not (tmp_path / "state").exists()


def test_a_server_that_frees_nothing_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A memory server of an earlier build does not know the request: one warning, one more after it knew it."""
    answers: list[Exception | None] = [smb.UnavailableError("it could not: Method not found!")] * 3

    async def retire(*_: object) -> dict[int, int]:
        if error := answers.pop():
            raise error
        return {}

    state = SimpleNamespace(servers={"a": object()}, obeys=lambda *_: True, session_leases=Leases[int](30.0))
    names = IdleNames(
        cast("CommitLog", SimpleNamespace(state=state, now=lambda: 0, changes_max=None)),
        cast("MemoryServers", SimpleNamespace(retire=retire)), None, 1.0,  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in range(3):
        asyncio.run(names._free_on("a", [1]))
    assert len(caplog.records) == 1
    answers += [smb.UnavailableError("it could not: Method not found!"), None]
    for _ in range(2):
        asyncio.run(names._free_on("a", [1]))
    assert len(caplog.records) == 2
