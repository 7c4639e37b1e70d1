"""What cannot be reached because of a certificate says so, on every path, and names the rule: not the network."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from memserver.engine import Engine, SegmentForm
from memserver.replication import BACKUP, PRIMARY
from smb.coordinator.etcd import etcd_pb2
from smb.coordinator.etcd.connection import Access, Etcd, SilentError
from smb.coordinator.memserver_client import MemoryServers
from smb.engine import EngineClient, EngineError, Lane, Tls
from smb.errors import Error
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub
from smb.rpc.coordinator_client import Coordinator
from smb.security.credentials import COORDINATOR_NAME, Credentials, add_port, channel, server_name
from tests.regressions.test_credentials_of_the_start import record
from tests.security.test_one_verifier import AS_CLIENT, AS_SERVER, Case, Lab
from tests.support.daemons import wait_for

AS_COORDINATOR = "URI:smb:role/coordinator,DNS:coordinator.smb"
AS_ETCD = "IP:127.0.0.1"


@contextlib.contextmanager
def control_port(shown: Credentials) -> Iterator[str]:
    """A port of the control plane, on which nothing is served: a call that gets there is not implemented."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = add_port(server, "127.0.0.1:0", shown)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def client_to_coordinator(peer: Credentials, own: Credentials) -> str:
    with control_port(peer) as address:
        coordinator = Coordinator(address, own)
        try:
            coordinator.list_servers(0.2)
        except Error as error:
            return str(error)
        finally:
            coordinator.close()
    return ""


def server_to_coordinator(peer: Credentials, own: Credentials) -> str:
    with control_port(peer) as address, channel(address, COORDINATOR_NAME, own) as opened:
        stub = CoordinatorStub(opened)  # type: ignore[no-untyped-call]
        try:
            stub.RegisterServer(pb.RegisterServerRequest(), timeout=10)
        except grpc.RpcError as error:
            return str(error.details())
    return ""


def coordinator_to_server(peer: Credentials, own: Credentials) -> str:
    async def tell(address: str) -> None:
        calls = MemoryServers(own)
        try:
            await calls.end_sessions(replace(record(address), name="s1"), [1])
        finally:
            await calls.close()

    with control_port(peer) as address:
        try:
            asyncio.run(tell(address))
        except Error as error:
            return str(error)
    return ""


@contextlib.contextmanager
def engine(number: int, shown: Credentials) -> Iterator[Engine]:
    """A memory server's engine with a segment of two copies."""
    made, path = Engine(number, 1, 1 << 24), Path("/dev/shm") / f"smb-test-{secrets.token_hex(6)}"
    made.guard()
    made.set_keys({1: bytes(32)}, 1)
    made.use_tls(Tls(shown.ca, shown.certificate, shown.key))
    made.create_segment(path, SegmentForm(7, 1, 2, 16384, 16384), bundle_id=0)
    made.copies.serve_until(time.clock_gettime(time.CLOCK_BOOTTIME) + 600)
    try:
        yield made
    finally:
        made.close()
        path.unlink()


def client_to_data_port(peer: Credentials, own: Credentials) -> str:
    client = EngineClient(secrets.randbits(63))
    with engine(1, peer) as served:
        port = served.listen_tcp("127.0.0.1", 0)
        try:
            tls = Tls(own.ca, own.certificate, own.key)
            client.connect_tls("127.0.0.1", port, tls, server_name("s1"), Lane.TCP_DATA, 10_000)
        except EngineError as error:
            return str(error)
        finally:
            client.close()
    return ""


def primary_to_backup(peer: Credentials, own: Credentials) -> str:
    with engine(1, peer) as backup, engine(2, own) as primary:
        port = backup.listen_tcp("127.0.0.1", 0)
        backup.copies.set_replica(7, 1, BACKUP, "s2")
        primary.copies.set_replica(7, 1, PRIMARY, "s1")
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setblocking(False)
            tls = Tls(own.ca, own.certificate, own.key)
            primary.copies.feed(7, 1, connection.detach(), 1, tls, server_name("s1"))
        wait_for(
            lambda: primary.copies.replicas()[0].refused or not primary.copies.replicas()[0].broken_ms,
            "the feed, or its end",
        )
        return primary.copies.feed_fault(7)


def coordinator_to_etcd(peer: Credentials, own: Credentials) -> str:
    async def ask(address: str) -> None:
        etcd = Etcd([address], Access(own))
        try:
            await etcd.range(etcd_pb2.RangeRequest(key=b"k"), 0.2)
        finally:
            await etcd.close()

    with control_port(peer) as address:
        try:
            asyncio.run(ask(address))
        except SilentError as error:
            return str(error)
        except Error:  # it was asked, and serves no such thing
            return ""
    return ""


Path_ = Callable[[Credentials, Credentials], str]
# From whom to whom: what each shows if all is well.
PATHS: dict[str, tuple[Path_, str, str]] = {
    "client to coordinator": (client_to_coordinator, AS_COORDINATOR, AS_CLIENT),
    "server to coordinator": (server_to_coordinator, AS_COORDINATOR, AS_SERVER),
    "coordinator to server": (coordinator_to_server, AS_SERVER, AS_COORDINATOR),
    "client to data port": (client_to_data_port, AS_SERVER, AS_CLIENT),
    "primary to backup": (primary_to_backup, AS_SERVER, AS_SERVER.replace("s1", "s2")),
    "coordinator to etcd": (coordinator_to_etcd, AS_ETCD, AS_CLIENT),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Made once."""
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("path", PATHS)
def test_the_reason(lab: Lab, path: str) -> None:
    """The peer's certificate has expired, is of an unknown authority, for another name or role; or it is ours."""
    call, of_peer, of_us = PATHS[path]
    peer, own = (lab.credentials(Case(True, names)) for names in (of_peer, of_us))
    said = call(peer, own)
    assert "ertificate" not in said
    assert "SSL" not in said
    by_name = "Hostname Verification" if path == "coordinator to etcd" else "expected the certificate of"
    faults = {
        "expired": (lab.credentials(Case(False, of_peer, days=(-9, -1))), own, "certificate has expired"),
        "another authority": (
            lab.credentials(Case(False, of_peer, by="namesake")),
            own,
            "certificate signature failure|unable to|CERTIFICATE_VERIFY_FAILED",
        ),
        "another name": (lab.credentials(Case(False, "URI:smb:role/server,DNS:x.server.smb")), own, by_name),
        "another role": (
            lab.credentials(Case(False, "URI:smb:role/client," + of_peer.split(",")[-1])),
            own,
            'role "client"',
        ),
        "ours has expired": (
            peer,
            lab.credentials(Case(False, of_us, days=(-9, -1))),
            "does not (accept us|take our certificate)",
        ),
        "ours is of another authority": (
            peer,
            lab.credentials(Case(False, of_us, by="namesake")),
            "does not (accept us|take our certificate)",
        ),
    }
    if path == "coordinator to etcd":
        del faults["another role"]  # etcd's has none
    wrong = {}
    for name, (shown, ours, why) in faults.items():
        said = call(shown, ours)
        if not re.search(why, said):
            wrong[name] = said
    assert not wrong, wrong
