"""The daemons as services: what a supervisor hears of them, and how they end when the machine is taken away."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.call import cluster_session
from smb.engine import EngineClient
from tests.support.daemons import Daemons, running_daemons, wait_for

NOTICE_S = 30.0  # of a pre-emption, the shortest that clouds give
COUNT = 1 << 20
MIB = 1 << 20


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    with running_daemons(tmp_path) as running:
        yield running


class Supervisor:
    """systemd's side of Type=notify."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(20)

    def hear(self, wanted: str) -> None:
        """Wait for a message with this line."""
        while wanted not in self._socket.recv(4096).decode().splitlines():
            pass

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("kind", ["path", "abstract"])
@pytest.mark.parametrize("role", ["coordinator", "memory server"])
def test_a_supervisor_hears_of_start_life_and_stop(daemons: Daemons, tmp_path: Path, role: str, kind: str) -> None:
    """READY once it serves (a memory server without its coordinator too), WATCHDOG repeatedly, STOPPING; exit 0."""
    name = f"@smb-test-{os.getpid()}" if kind == "abstract" else str(tmp_path / "notify")
    supervisor = Supervisor("\0" + name[1:] if kind == "abstract" else name)
    daemons.variables |= {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "300000"}
    try:
        daemon = daemons.coordinator() if role == "coordinator" else daemons.memory_server("127.0.0.1:9", "alone")
        for wanted in ("READY=1", "WATCHDOG=1", "WATCHDOG=1"):
            supervisor.hear(wanted)
        daemon.process.send_signal(signal.SIGTERM)
        supervisor.hear("STOPPING=1")
        assert daemon.wait() == 0
    finally:
        supervisor.close()


def test_a_supervisor_that_cannot_be_told_stops_nobody(daemons: Daemons, tmp_path: Path) -> None:
    """Where nobody listens at NOTIFY_SOCKET, the daemon says so in its log and serves."""
    daemons.variables |= {"NOTIFY_SOCKET": str(tmp_path / "nobody")}
    daemon = daemons.coordinator()
    assert daemon.address
    assert daemon.stop() == 0
    assert "cannot tell the supervisor" in daemon.log.read_text()


def test_a_preempted_server_ends_within_the_notice(daemons: Daemons) -> None:
    """SIGTERM under load, with requests that wait: exit 0 within the notice. Who has a short timeout gets
    UnavailableError; the others go on once the server is back, and every addition counts once.
    """
    coordinator = daemons.coordinator()
    servers = [daemons.memory_server(coordinator.address, name) for name in ("a", "b")]
    assert all(server.address for server in servers)
    enough, added = threading.Event(), []

    def add(transport: str) -> None:
        with smb.connect(coordinator.address, transport=transport, timeout=25) as client:
            buffer = client.open("w")
            done = 0
            while not enough.is_set():
                buffer.accumulate(np.ones(COUNT, np.float32))
                done += 1
            added.append(done)

    refused: list[smb.Error] = []

    def add_impatiently() -> None:
        with smb.connect(coordinator.address, transport="tcp", timeout=0.5) as client:
            buffer = client.open("impatient")
            try:
                while not enough.is_set():
                    buffer.accumulate(np.ones(COUNT, np.float32))
            except smb.Error as error:
                refused.append(error)

    def wait_for_lock() -> None:
        with smb.connect(coordinator.address, timeout=25) as client, client.lock("busy", timeout=60):
            pass

    with smb.connect(coordinator.address, timeout=25) as client:
        weights = client.create("w", COUNT, servers=["a", "b"])
        client.create("impatient", COUNT, servers=["a", "b"])
        with client.lock("busy", ttl=60):
            work = [threading.Thread(target=add, args=(transport,)) for transport in ("tcp", "shm")]
            work += [threading.Thread(target=add_impatiently), threading.Thread(target=wait_for_lock)]
            for thread in work:
                thread.start()
            try:
                wait_for(lambda: float(weights.read(0, 1)[0]) > 3, "load")
                asked = time.monotonic()
                for server in servers:
                    server.process.send_signal(signal.SIGTERM)
                for server in servers:
                    assert server.process.wait(NOTICE_S) == 0
                took_s = time.monotonic() - asked
                assert took_s < NOTICE_S
                wait_for(lambda: refused, "error of the impatient one")
                assert isinstance(refused[0], smb.UnavailableError), refused[0]
                for name in ("a", "b"):
                    assert daemons.memory_server(coordinator.address, name).address
                before = float(weights.read(0, 1)[0])
                wait_for(lambda: float(weights.read(0, 1)[0]) > before + 3, "work that goes on")
            finally:
                enough.set()
        for thread in work:
            thread.join(30)
        assert not any(thread.is_alive() for thread in work)
        assert len(added) == 2
        assert (weights.read() == sum(added)).all()


def test_a_coordinator_ends_within_the_notice(daemons: Daemons) -> None:
    """SIGTERM while a client waits for a buffer to appear: exit 0, and the client is told at once."""
    coordinator = daemons.coordinator()
    told: list[smb.Error] = []

    def wait_for_buffer() -> None:
        with smb.connect(coordinator.address, timeout=5) as client:
            try:
                client.open("never", timeout=60)
            except smb.Error as error:
                told.append(error)

    waiting = threading.Thread(target=wait_for_buffer)
    waiting.start()
    wait_for(lambda: coordinator.metric("smb_coordinator_sessions") == 1, "session")
    asked = time.monotonic()
    assert coordinator.stop() == 0
    assert time.monotonic() - asked < NOTICE_S
    waiting.join(20)
    assert isinstance(told[0], smb.UnavailableError)


def test_what_all_clients_share_is_told_by_the_coordinator(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stripe is that of buffers created without one; its checksum holds for clients that say nothing, whose own
    word and whose variable count before it.
    """
    coordinator = daemons.coordinator("127.0.0.1:0", None, "--stripe", "1MiB", "--checksum")
    servers = [daemons.memory_server(coordinator.address, name) for name in ("a", "b")]
    assert all(server.address for server in servers)
    asked: list[bool] = []
    real = cluster_session.EngineClient

    def noting(session_id: int, *, checksums: bool, proofs: bool) -> EngineClient:
        asked.append(checksums)
        return real(session_id, checksums=checksums, proofs=proofs)

    monkeypatch.setattr(cluster_session, "EngineClient", noting)
    with smb.connect(coordinator.address) as client:
        assert client.create("told", 4 * MIB, "uint8").layout.stripe_bytes == MIB
        assert client.create("said", 4 * MIB, "uint8", stripe="64KiB").layout.stripe_bytes == 64 << 10
        assert client.create("small", 8, "uint8").nbytes == 8
        buffer = client.create("two", 8, "uint8", versions=2)
        buffer.publish(np.arange(8, dtype=np.uint8))
        assert list(buffer.read()) == list(range(8))
    smb.connect(coordinator.address, checksum=False).close()
    monkeypatch.setenv("SMB_CHECKSUM", "0")
    smb.connect(coordinator.address).close()
    assert asked == [True, False, False]
