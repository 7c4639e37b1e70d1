"""One client with the weakest certificate asks for as much as it can: servers keep their leases, and others are served.

The long form floods for half a minute, in which a lease of 6 s that is not renewed would end several times.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

import smb
from smb.coordinator.limits import CALLS_PER_CERTIFICATE_MAX
from smb.daemon.process import GRPC_HANDSHAKE_MS
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.rpc.coordinator_client import BUSY, OUTCOME
from smb.security.credentials import COORDINATOR_NAME, channel, load_directory

FLOOD_S = 30.0 if os.environ.get("SMB_LONG") else 4.0
# Keeps very many small calls in flight, over several connections.
_READER = """
import sys, threading
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.security.credentials import COORDINATOR_NAME, channel, load_directory
address, credentials = sys.argv[1], load_directory(sys.argv[2])
def flood():
    room = threading.Semaphore(2000)
    stub = CoordinatorStub(channel(address, COORDINATOR_NAME, credentials))
    while True:
        room.acquire()
        stub.ListServers.future(pb.ListServersRequest(), timeout=30).add_done_callback(lambda _: room.release())
for _ in range(4):
    threading.Thread(target=flood, daemon=True).start()
print("begun", flush=True)
sys.stdin.read()
"""


@contextmanager
def flooded(address: str, credentials: Path) -> Iterator[None]:
    """A process of a reader floods the coordinator during the block."""
    flood = subprocess.Popen(
        [sys.executable, "-c", _READER, address, str(credentials)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"begun\n"
        yield
        assert flood.poll() is None
    finally:
        flood.send_signal(signal.SIGKILL)
        flood.communicate()


def test_renewals_are_answered_beside_thousands_of_calls(guarded: smb.LocalCluster, certificates: Path) -> None:
    """A memory server's renewals have a port of their own, so they do not queue behind a reader's calls. A reader is
    refused there."""
    host, port = guarded.address.split(":")
    servers = load_directory(certificates / "server-2")
    with channel(f"{host}:{port}", COORDINATOR_NAME, servers) as first:
        known = CoordinatorStub(first).RegisterServer(  # type: ignore[no-untyped-call]
            pb.RegisterServerRequest(
                name="server-2", instance_id=1, data_address=f"{host}:1", control_address=f"{host}:1",
                capacity_bytes=4096,
            ), timeout=20,
        )  # fmt: skip
    assert known.servers_port not in (0, int(port))
    own = f"{host}:{known.servers_port}"
    with channel(own, COORDINATOR_NAME, load_directory(certificates / "reader")) as stranger:
        with pytest.raises(grpc.RpcError) as refused:
            CoordinatorStub(stranger).ListServers(pb.ListServersRequest(), timeout=20)  # type: ignore[no-untyped-call]
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "roles operator and server alone" in str(refused.value.details())
    # An operator is admitted there, and so gets through while others flood the port for all.
    with smb.connect(own, credentials=certificates / "operator", timeout=60) as operator:
        assert {server.name for server in operator.servers()} >= {"server-0", "server-1"}
    with channel(own, COORDINATOR_NAME, servers) as ours, flooded(guarded.address, certificates / "reader"):
        stub = CoordinatorStub(ours)  # type: ignore[no-untyped-call]
        until, slowest_s = time.monotonic() + FLOOD_S, 0.0
        while time.monotonic() < until:
            begun = time.monotonic()
            stub.RenewServer(pb.RenewServerRequest(name="server-2", instance_id=1), timeout=20)
            slowest_s = max(slowest_s, time.monotonic() - begun)
            time.sleep(0.1)  # the pace of this loop; nothing is waited for
        stub.LeaveServer(pb.LeaveServerRequest(name="server-2", instance_id=1), timeout=20)
    assert slowest_s < known.lease_ms / 2000
    assert _alive(guarded.address, certificates / "operator") == {"server-0", "server-1"}


def test_a_certificate_with_many_calls_in_progress_is_refused_more(
    guarded: smb.LocalCluster, certificates: Path
) -> None:
    """Each of these calls waits for its turn in another thread. Sessions of the same certificate are renewed meanwhile,
    operators are answered, and the library tries a refused call again."""
    reader = load_directory(certificates / "reader")
    with channel(guarded.address, COORDINATOR_NAME, reader) as way:
        stub = CoordinatorStub(way)  # type: ignore[no-untyped-call]
        session = stub.OpenSession(pb.OpenSessionRequest(client_name="many"), timeout=20)
        os.kill(guarded.coordinator.pid, signal.SIGSTOP)  # so that all are there at once
        asked = [stub.Overview.future(pb.OverviewRequest(), timeout=120) for _ in range(3 * CALLS_PER_CERTIFICATE_MAX)]
        os.kill(guarded.coordinator.pid, signal.SIGCONT)
        renewal = pb.RenewSessionRequest(session_id=session.session_id, session_secret=session.session_secret)
        stub.RenewSession(renewal, timeout=20)
        assert _alive(guarded.address, certificates / "operator") >= {"server-0", "server-1"}
        with smb.connect(guarded.address, credentials=certificates / "reader", timeout=60) as client:
            assert client.list() == []
        failed = [error for error in (each.exception() for each in asked) if error is not None]
        stub.CloseSession(
            pb.CloseSessionRequest(session_id=session.session_id, session_secret=session.session_secret), timeout=20
        )
    assert 0 < len(failed) < len(asked)
    for error in failed:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata()).items() >= {BUSY: "1", OUTCOME: "not applied"}.items()
        assert "in progress already" in error.details()


def _alive(address: str, credentials: Path) -> set[str]:
    """The servers with a lease. While the rest of a flood fills the queue of the port for all, calls are refused."""
    until = time.monotonic() + 60
    while True:
        try:
            with smb.connect(address, credentials=credentials, timeout=60) as client:
                return {server.name for server in client.servers() if server.alive}
        except smb.UnavailableError:
            if time.monotonic() > until:
                raise


def test_strangers_at_grpc_ports_are_closed_after_some_seconds(guarded: smb.LocalCluster, certificates: Path) -> None:
    """They show no certificate. It takes 5 s, the time that everybody has for a handshake; a client stays."""
    host, port = guarded.address.split(":")
    with smb.connect(guarded.address, credentials=certificates / "operator", timeout=60) as client, ExitStack() as held:
        strangers = [held.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(100)]
        begun = time.monotonic()
        for stranger in strangers:
            stranger.settimeout(GRPC_HANDSHAKE_MS / 1000 + 20)
            with suppress(ConnectionError):
                while stranger.recv(1000):
                    pass
        assert time.monotonic() - begun > 1.0
        assert len(client.servers()) >= 2
