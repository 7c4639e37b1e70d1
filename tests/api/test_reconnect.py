"""Servers and the coordinator die and come back while clients hold buffers open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.daemons import running_daemons, wait_for
from tests.support.transports import EACH_WAY, FAR

SIZE = 300_001


@pytest.fixture(scope="module")
def cluster() -> Iterator[smb.LocalCluster]:
    """Two servers: the tests here restart them."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as running:
        yield running


@pytest.fixture
def values() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(SIZE)


def test_a_killed_server_is_unavailable_and_comes_back(cluster: smb.LocalCluster, values: np.ndarray) -> None:  # type: ignore[type-arg]
    """kill -9: TCP calls fail within their timeout and say of whom; started again, the same buffer has its data."""
    server = cluster.servers[1]
    with (
        smb.connect(cluster.address, transport=FAR, timeout=1) as hasty,
        smb.connect(cluster.address, transport=FAR) as patient,
    ):
        buffer = hasty.create("w", SIZE, "int64", stripe="64KiB")
        waiting = patient.open("w")
        buffer.write(values)
        waiting.read(0, 1)
        server.kill()
        for call in (buffer.read, lambda: buffer.accumulate(values), lambda: hasty.open("w").fill(0)):
            start = time.monotonic()
            with pytest.raises(smb.UnavailableError, match=r"buffer 'w'.*server-1 at 127\.0\.0\.1"):
                call()
            assert time.monotonic() - start < 5
        later = waiting.read_async()  # waits for the server within its timeout
        server.start()
        first = later.result()
        # The accumulates above may have reached the server that lives; on the other one they can't have.
        for piece, offset in pieces(buffer, server=1):
            np.testing.assert_array_equal(first[offset : offset + piece], values[offset : offset + piece])
        buffer.write(values)
        buffer.accumulate(values)
        np.testing.assert_array_equal(buffer.read(), 2 * values)
        hasty.delete("w")


def test_nothing_is_created_on_a_dead_server(cluster: smb.LocalCluster) -> None:
    """create names the server that it can't reach and leaves nothing on the others; without it, it works."""
    with smb.connect(cluster.address) as client:
        client.create("w", SIZE, servers=["server-0"])
        files = sorted(cluster.memory_directory.glob("*.segment"))
        cluster.servers[1].kill()
        with pytest.raises(smb.UnavailableError, match=r"server-1.* at 127\..*nothing was created"):
            client.create("v", SIZE, stripe=4096, servers=["server-0", "server-1"])
        assert [info.name for info in client.list()] == ["w"]
        assert sorted(cluster.memory_directory.glob("*.segment")) == files
        client.create("u", SIZE, servers=["server-0"]).fill(1)
        cluster.servers[1].start()
        client.create("v", SIZE, stripe=4096, servers=["server-0", "server-1"]).fill(1)
        for name in "wuv":
            client.delete(name)


def pieces(buffer: smb.Buffer, server: int) -> Iterator[tuple[int, int]]:
    """(count, offset in the buffer) of what lies on one server."""
    at = 0
    for piece in buffer.layout.pieces(0, buffer.size):
        if buffer.layout.segments[piece.segment].server == f"server-{server}":
            yield piece.count, at
        at += piece.count


def test_calls_in_progress_are_finished_after_a_restart(cluster: smb.LocalCluster) -> None:
    """Additions of several threads whose connection breaks are finished once the server is back: each once."""
    server = cluster.servers[0]
    with smb.connect(cluster.address, transport=FAR, timeout=20) as client:
        buffer = client.create("w", 6 << 20, "float32", servers=["server-0"])
        ones = np.ones(6 << 20, np.float32)
        pending = [buffer.accumulate_async(ones) for _ in range(8)]
        wait_for(lambda: buffer.read(0, 1)[0] >= 1, "first addition")
        server.kill()
        server.start()
        for future in pending:
            future.result()
        assert (buffer.read() == len(pending)).all()
        client.delete("w")


def test_mappings_work_without_the_server(cluster: smb.LocalCluster) -> None:
    """Over shm an open buffer reads and accumulates while its server is dead, and the server finds the result."""
    server = cluster.servers[0]
    with smb.connect(cluster.address, transport="shm") as client, smb.connect(cluster.address) as late:
        buffer = client.create("w", 1000, "int64", servers=["server-0"])
        unused = late.open("w")
        buffer.fill(1)
        server.kill()
        buffer.accumulate(np.ones(1000, np.int64))
        assert (buffer.read() == 2).all()
        server.start()
        assert (unused.read() == 2).all()
        with smb.connect(cluster.address, transport=FAR) as far:
            far.open("w").accumulate(np.ones(1000, np.int64))
        assert (buffer.read() == 3).all()
        client.delete("w")


def test_a_buffer_opened_before_a_restart_is_first_used_after_it(cluster: smb.LocalCluster) -> None:
    """What was learnt of a server before its restart does not stop shm from finding it again."""
    with smb.connect(cluster.address, transport="shm") as client:
        client.create("w", 10, servers=["server-0"]).fill(4)
        buffer = client.open("w")
        cluster.servers[0].kill()
        cluster.servers[0].start()
        assert buffer.read().sum() == 40
        client.delete("w")


def test_a_server_may_return_on_another_port(tmp_path: Path) -> None:
    """Restarted under its name on a new port, after SIGTERM or SIGKILL, it is found through the coordinator."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator().address
        server = daemons.memory_server(coordinator, "a")
        ports = {server.address}
        with smb.connect(coordinator, transport=FAR, timeout=20) as client:
            buffer = client.create("w", 1000, "int64")
            buffer.fill(5)
            for restart in (1, 2):
                if restart == 1:
                    assert server.stop() == 0
                else:
                    server.kill()
                server = daemons.memory_server(coordinator, "a", "--listen", "127.0.0.1:0")
                ports.add(server.address)
                assert buffer.fetch_add(0, 0) == 5
                assert client.servers()[0].address == server.address
        assert len(ports) > 1  # the kernel picks another each time, as good as always


@pytest.mark.parametrize("transport", EACH_WAY)
def test_data_needs_no_coordinator(cluster: smb.LocalCluster, transport: str) -> None:
    """kill -9 of the coordinator: open buffers go on, names are unavailable; started again it knows what it knew."""
    with smb.connect(cluster.address, transport=transport, timeout=5) as client:
        buffer = client.create("w", 1000, "int64", stripe=4096)
        buffer.fill(1)
        hasty = smb.connect(cluster.address, timeout=0.2)
        cluster.coordinator.kill()
        buffer.accumulate(np.ones(1000, np.int64))
        assert (buffer.read() == 2).all()
        for call in (hasty.list, hasty.servers, lambda: hasty.open("w"), lambda: hasty.create("v", 5)):
            with pytest.raises(smb.UnavailableError, match=rf"{cluster.address}.*check that it runs"):
                call()
        hasty.close()
        with pytest.raises(smb.UnavailableError, match=r"check that it runs"):
            smb.connect(cluster.address, timeout=0.5)
        cluster.coordinator.start()
        assert [info.name for info in client.list()] == ["w"]
        assert (client.open("w").read() == 2).all()
        wait_for(lambda: all(server.alive for server in client.servers()) and len(client.servers()) == 2, "servers")
        client.create("v", 5).fill(1)
        client.delete("v")
        client.delete("w")
