"""One client with the weakest certificate asks for as much as it can: servers keep their leases, and others are served.

The long form floods for half a minute, in which a lease of 6 s that is not renewed would end several times, also with
calls that are much work.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

import smb
from smb.coordinator.limits import LARGE_REQUESTS_MAX
from smb.daemon.process import GRPC_HANDSHAKE_MS
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.rpc.metadata import encode
from smb.rpc.trailers import BUSY, OUTCOME
from smb.security.credentials import COORDINATOR_NAME, channel, load_directory
from smb.security.lab_ca import Authority, Holder
from smb.security.roles import Role
from tests.support.daemons import stopped, wait_for
from tests.support.floods import flooded

LONG = bool(os.environ.get("SMB_LONG"))
FLOOD_S = 30.0 if LONG else 1.0


@pytest.mark.parametrize("everything", [False, True] if LONG else [False])
def test_renewals_are_answered_beside_thousands_of_calls(
    guarded: smb.LocalCluster, certificates: Path, everything: bool
) -> None:
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
    with (
        channel(own, COORDINATOR_NAME, servers) as ours,
        flooded(guarded.address, certificates / "reader", everything=everything),
    ):
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


def _large_creation(stub: CoordinatorStub, name: str) -> Callable[[], grpc.Future]:  # type: ignore[type-arg]
    """Return what asks for a buffer at the second server, with a request of more than 4 KiB."""
    made = pb.CreateBufferRequest(name=name, shape=[4], dtype="float32", exist_ok=True, server_names=["server-1"])
    made.packed_metadata = encode("a test", {"noise": secrets.token_hex(8192)})
    session = stub.OpenSession(pb.OpenSessionRequest(client_name=name), timeout=60)
    made.session_id, made.session_secret = session.session_id, session.session_secret
    return lambda: stub.CreateBuffer.future(made, timeout=60)  # type: ignore[no-any-return]


def test_a_certificate_with_many_large_requests_is_refused_more(guarded: smb.LocalCluster, certificates: Path) -> None:
    """Their calls wait for a creation at a memory server that stands still. Small calls of the same certificate and
    renewals of its sessions are answered meanwhile, operators, too, and the library tries a refused call again until it
    is answered.
    """
    client = load_directory(certificates / "client")
    with channel(guarded.address, COORDINATOR_NAME, client) as way:
        stub = CoordinatorStub(way)  # type: ignore[no-untyped-call]
        session = stub.OpenSession(pb.OpenSessionRequest(client_name="many"), timeout=20)
        ask = _large_creation(stub, "slow")
        with stopped(guarded.servers[1].pid):
            asked = [ask() for _ in range(256)]
            renewal = pb.RenewSessionRequest(session_id=session.session_id, session_secret=session.session_secret)
            stub.RenewSession(renewal, timeout=20)
            assert "server-0" in _alive(guarded.address, certificates / "operator")
            refused = asked[-1].exception()
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(refused.trailing_metadata()).items() >= {BUSY: "1", OUTCOME: "not applied"}.items()
            assert "requests of more than 4096 bytes in progress already" in refused.details()
            assert "leaves the rest for others; nothing was changed" in refused.details()
            small = [stub.ListServers.future(pb.ListServersRequest(), timeout=60) for _ in range(300)]
            assert [each.exception() for each in small if each.exception()] == []
        with smb.connect(guarded.address, credentials=certificates / "client", timeout=60) as owner:
            assert owner.create("slow", 4, exist_ok=True).shape == (4,)
            owner.delete("slow")
        answered = sum(each.exception() is None for each in asked)
        ending = pb.CloseSessionRequest(session_id=session.session_id, session_secret=session.session_secret)
        stub.CloseSession(ending, timeout=20)
    assert answered <= LARGE_REQUESTS_MAX * 3 // 4 // 4


def test_four_certificates_with_large_and_small_requests_keep_nobody_out(
    guarded: smb.LocalCluster, certificates: Path, tmp_path: Path
) -> None:
    """Each has 384 large requests that wait for a server which stands still, and 120 small ones in flight. Their large
    requests had all places, and of 33 small calls of another client 32 were refused. Now every call of the other client
    is answered, operators' are, and what is refused says why.
    """
    names = [f"flood-{number}" for number in range(4)]
    for name in names:
        Authority.load(certificates / "ca").issue(Holder(Role.CLIENT, name), tmp_path / name)
    with ExitStack() as held:
        connect = partial(smb.connect, guarded.address, timeout=60)
        client = held.enter_context(connect(credentials=certificates / "client"))
        operator = held.enter_context(connect(credentials=certificates / "operator"))

        def stub(credentials: Path) -> CoordinatorStub:
            way = channel(guarded.address, COORDINATOR_NAME, load_directory(credentials))
            return CoordinatorStub(held.enter_context(way))  # type: ignore[no-untyped-call]

        ours = stub(certificates / "client")
        asks = [_large_creation(stub(tmp_path / name), name) for name in names]
        with ExitStack() as flooding:
            flooding.enter_context(stopped(guarded.servers[1].pid))
            asked = [ask() for ask in asks for _ in range(384)]
            flooding.enter_context(flooded(guarded.address, *(tmp_path / name for name in names), in_flight=120))
            for _ in range(33):
                ours.ListServers(pb.ListServersRequest(), timeout=60)
            large = secrets.token_hex(8192)
            for number in range(3):
                made = client.create(f"beside{number}", 4, servers=["server-0"], metadata={"large": large})
                assert client.open(made.name).shape == (4,)
                client.delete(made.name)
            assert "server-0" in {server.name for server in operator.servers() if server.alive}
        refused = {each.exception() for each in asked} - {None}
        for name in names:
            client.delete(name, missing_ok=True)
    said = {str(each.details()) for each in refused}
    assert any("requests of more than 4096 bytes in progress already" in each for each in said)
    assert {each.code() for each in refused} == {grpc.StatusCode.UNAVAILABLE}


def test_others_are_answered_at_once_when_a_flood_waits(guarded: smb.LocalCluster, certificates: Path) -> None:
    """A reader keeps 8000 calls in flight. Once they wait, calls of another certificate do not."""
    with smb.connect(guarded.address, credentials=certificates / "client", timeout=60) as client:

        def is_quick() -> bool:
            begun = time.monotonic()
            with suppress(smb.Error):  # a call that gRPC had no place for
                for number in range(5):
                    client.create(f"quick{number}", 4, exist_ok=True)
                    client.delete(f"quick{number}")
                return time.monotonic() - begun < 1.0
            return False

        assert wait_for(is_quick, "quick answers")
        with flooded(guarded.address, certificates / "reader", everything=True):
            wait_for(is_quick, "quick answers beside the flood", 60.0)


def test_sessions_are_renewed_beside_many_connections_of_others(guarded: smb.LocalCluster, certificates: Path) -> None:
    """Sessions have a port of their own, which answers one call of a connection at a time and nothing but renewals."""
    reader, client = (load_directory(certificates / who) for who in ("reader", "client"))
    host = guarded.address.split(":")[0]
    with channel(guarded.address, COORDINATOR_NAME, client) as first:
        session = CoordinatorStub(first).OpenSession(  # type: ignore[no-untyped-call]
            pb.OpenSessionRequest(client_name="beside"), timeout=20
        )
    own = f"{host}:{session.sessions_port}"
    assert own != guarded.address
    renewal = pb.RenewSessionRequest(session_id=session.session_id, session_secret=session.session_secret)
    ending = pb.CloseSessionRequest(session_id=session.session_id, session_secret=session.session_secret)
    with channel(own, COORDINATOR_NAME, client) as ours, channel(own, COORDINATOR_NAME, reader) as theirs:
        stub, other = (CoordinatorStub(each) for each in (ours, theirs))  # type: ignore[no-untyped-call]
        for call, request in (
            (other.ListServers, pb.ListServersRequest()),
            (other.OpenBuffer, pb.OpenBufferRequest(name="none", timeout_ms=1000)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=20)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"ask {guarded.address}" in str(refused.value.details())
        with flooded(guarded.address, certificates / "reader"):
            flood = [other.OpenBuffer.future(pb.OpenBufferRequest(name="none"), timeout=60) for _ in range(1000)]
            stub.RenewSession(renewal, timeout=20)
        assert sum(each.done() for each in flood) < len(flood)  # it did not wait for all of these
        for each in flood:
            each.cancel()
        stub.CloseSession(ending, timeout=20)


def _alive(address: str, credentials: Path) -> set[str]:
    """The servers with a lease. While the rest of a flood fills the port's queue, the library tries again."""
    with smb.connect(address, credentials=credentials, timeout=60) as client:
        return {server.name for server in client.servers() if server.alive}


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


# Starts a coordinator that may have 1000 descriptors, and prints how many connections its ports take in all.
COUNTED = """
import grpc, resource, sys
from pathlib import Path
from smb.coordinator import process
from smb.coordinator.options import CoordinatorOptions
from smb.security.credentials import load_directory
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 1000))
taken, server = [], grpc.aio.server
def counted(options, **others):
    taken.append(dict(options)["grpc.max_allowed_incoming_connections"])
    return server(options=options, **others)
async def started(listening):
    print(len(list(listening)), sum(taken), flush=True)
    raise SystemExit
grpc.aio.server, process._start_all = counted, started
credentials = load_directory(sys.argv[2]) if len(sys.argv) > 2 else None
process.run(CoordinatorOptions("127.0.0.1:0", sys.argv[1], "127.0.0.1:0", credentials=credentials))
"""


@pytest.mark.parametrize("ports", [2, 3])
def test_connections_to_all_ports_leave_descriptors(certificates: Path, tmp_path: Path, ports: int) -> None:
    """Those to each port took up to three quarters, so those to two of them took all."""
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "state")]
    command += [str(certificates / "coordinator")] if ports == 3 else []
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.stdout.split() == [str(ports), "750"], told.stderr
