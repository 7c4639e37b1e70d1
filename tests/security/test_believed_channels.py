"""A channel of the control plane follows its server over new certificates, and follows nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer, CoordinatorStub, add_CoordinatorServicer_to_server
from smb.security.credentials import COORDINATOR_NAME, Credentials, add_port, aio_channel, channel, load_directory
from smb.security.lab_ca import Authority, Holder
from smb.security.roles import Role
from tests.support.daemons import keep_port


class Servicer(CoordinatorServicer):
    """Answers who leads."""

    def Leader(self, request: pb.LeaderRequest, context: grpc.ServicerContext) -> pb.LeaderReply:  # noqa: N802
        """Answer."""
        return pb.LeaderReply(leads=True)


@contextlib.contextmanager
def serving(shown: Credentials, address: str) -> Iterator[None]:
    """At that address, until the end."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_CoordinatorServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    assert add_port(server, address, shown)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.fixture
def address() -> Iterator[str]:
    """One that stays free."""
    with keep_port() as kept:
        yield f"127.0.0.1:{kept.getsockname()[1]}"


class Lab:
    """Certificates of the coordinator, each with a key of its own, and others."""

    def __init__(self, place: Path) -> None:
        self._authority, self._place, self._made = Authority.make(), place, 0
        self.client = self.issue(Role.CLIENT)

    def issue(self, role: Role = Role.COORDINATOR, name: str = "") -> Credentials:
        self._made += 1
        self._authority.issue(Holder(role, name), self._place / str(self._made))
        return load_directory(self._place / str(self._made))


def ask(stub: Any, way: str, timeout: float = 20) -> bool:
    """Make the call, in one of three ways."""
    if way == "future":
        return bool(stub.Leader.future(pb.LeaderRequest(), timeout=timeout).result().leads)
    return bool(stub.Leader(pb.LeaderRequest(), timeout=timeout).leads)


@pytest.mark.parametrize("way", ["call", "future"])
def test_a_server_with_a_new_certificate(tmp_path: Path, address: str, way: str) -> None:
    """It was started again with another one of the authority: the channel goes on. Between them an impostor with a
    certificate of the same authority hears nothing, and while nobody is there the error is the network's.
    """
    lab = Lab(tmp_path)
    with channel(address, COORDINATOR_NAME, lab.client) as opened:
        stub = CoordinatorStub(opened)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError, match=r"failed to connect.*refused"):
            ask(stub, "call", 5)
        for _ in range(2):
            with serving(lab.issue(), address):
                with contextlib.suppress(grpc.RpcError):  # a future tells of the change, and the next one follows it
                    ask(stub, way)
                assert ask(stub, way)
            with serving(lab.issue(Role.SERVER, "a"), address):
                for _ in range(2):
                    with pytest.raises(grpc.RpcError) as refused:
                        ask(stub, "call")
                    assert (
                        'role "server", name "a"; expected the certificate of coordinator.smb'
                        in refused.value.details()
                    )
                    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(ValueError, match="closed channel"):
        ask(stub, "call")


def test_the_same_for_asyncio(tmp_path: Path, address: str) -> None:
    """As the coordinator calls memory servers."""
    lab = Lab(tmp_path)

    async def use() -> None:
        async with aio_channel(address, COORDINATOR_NAME, lab.client) as opened:
            stub = CoordinatorStub(opened)  # type: ignore[no-untyped-call]
            for _ in range(2):
                with serving(lab.issue(), address):
                    assert (await stub.Leader(pb.LeaderRequest(), timeout=20)).leads
                with serving(lab.issue(Role.CLIENT), address):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.Leader(pb.LeaderRequest(), timeout=20)
                    assert 'role "client"' in str(refused.value.details())

    asyncio.run(use())


def test_a_look_takes_no_longer_than_the_call(tmp_path: Path) -> None:
    """At a host that takes the connection and says nothing."""
    lab = Lab(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = f"127.0.0.1:{mute.getsockname()[1]}"
        with channel(where, COORDINATOR_NAME, lab.client) as opened:
            stub = CoordinatorStub(opened)  # type: ignore[no-untyped-call]
            for way in ("call", "future"):
                with pytest.raises(grpc.RpcError, match="nobody answered in time"):
                    ask(stub, way, 0.2)
