"""A coordinator that stood by while its certificate was replaced called memory servers with the one of its start, once
it led. Every creation failed, and its error spoke of the network alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.records import ServerRecord
from smb.errors import UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server
from smb.security.credentials import Credentials, Current, add_port, load_directory
from smb.security.lab_ca import Authority, Holder
from smb.security.roles import Role

FILES = ("ca.pem", "cert.pem", "key.pem")


class Servicer(MemoryServerServicer):
    """A memory server that hears of sessions that ended."""

    async def EndSessions(  # noqa: N802 - as the service names it
        self, request: pb.EndSessionsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.EndSessionsReply:
        """Answer."""
        return pb.EndSessionsReply()


def replace(fresh: Path, place: Path, names: tuple[str, ...] = FILES) -> None:
    """Put files in the place of others, as docs/run.md says: each by one rename."""
    for name in names:
        (fresh / name).replace(place / name)


async def tell(credentials: Credentials, of_server: Credentials) -> None:
    """Make one call of the coordinator's to a memory server."""
    server = grpc.aio.server()
    add_MemoryServerServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    port = add_port(server, "127.0.0.1:0", of_server)
    await server.start()
    calls = MemoryServers(credentials)
    try:
        await calls.end_sessions(record(f"127.0.0.1:{port}"), [1])
    finally:
        await calls.close()
        await server.stop(None)


def record(address: str) -> ServerRecord:
    """The server's record, with its control service there."""
    return ServerRecord(
        name="a", instance_id=1, data_address="127.0.0.1:1", control_address=address, unix_path="",
        metrics_address="", capacity_bytes=1, used_bytes=0, last_seen_at=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("names", [FILES, ("cert.pem", "key.pem"), ("cert.pem",)])
def test_what_was_replaced_before_anybody_looked_counts(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Whichever of the files it was; and a second replacement counts, too."""
    authority = Authority.make()
    place, fresh = tmp_path / "place", tmp_path / "fresh"
    authority.issue(Holder(Role.COORDINATOR, ""), place)
    loaded = load_directory(place)
    for _ in range(2):
        if names == ("cert.pem",):  # of the same key
            fresh.mkdir()
            (fresh / "cert.pem").write_bytes((place / "cert.pem").read_bytes() + b"\n")
        else:
            authority.issue(Holder(Role.COORDINATOR, ""), fresh)
        expected = {name: (fresh / name).read_bytes() for name in names}
        replace(fresh, place, names)
        current = Current(loaded)
        found = current.now()
        assert expected.get("cert.pem") == found.certificate
        assert expected.get("key.pem", found.key) == found.key
        assert current.now() is found
        for left in fresh.glob("*"):
            left.unlink()
        fresh.rmdir()


def test_what_was_written_while_it_was_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that comes between the read of the one before and the end of the loading is not taken for it."""
    authority = Authority.make()
    place, fresh = tmp_path / "place", tmp_path / "fresh"
    authority.issue(Holder(Role.COORDINATOR, ""), place)
    authority.issue(Holder(Role.COORDINATOR, ""), fresh)
    expected = (fresh / "cert.pem").read_bytes()
    check = Credentials.check

    def replaced_meanwhile(self: Credentials) -> None:
        if (fresh / "key.pem").exists():
            replace(fresh, place)
        check(self)

    monkeypatch.setattr(Credentials, "check", replaced_meanwhile)
    assert Current(load_directory(place)).now().certificate == expected


def test_a_leader_that_stood_by_shows_the_certificate_of_now(tmp_path: Path) -> None:
    """The one of its start has expired since."""
    authority = Authority.make()
    authority.issue(Holder(Role.COORDINATOR, ""), tmp_path / "own", days=-1)
    authority.issue(Holder(Role.COORDINATOR, ""), tmp_path / "fresh")
    authority.issue(Holder(Role.SERVER, "a"), tmp_path / "server")
    of_server, of_start = load_directory(tmp_path / "server"), load_directory(tmp_path / "own")
    with pytest.raises(UnavailableError, match=r"cannot be reached to end sessions: .*own/cert.pem.*has expired"):
        asyncio.run(tell(of_start, of_server))
    replace(tmp_path / "fresh", tmp_path / "own")
    asyncio.run(tell(of_start, of_server))


@pytest.mark.parametrize(
    ("days", "name", "reason"),
    [(-1, "a", "certificate has expired"), (30, "b", "expected the certificate of a.server.smb")],
)
def test_the_error_says_what_tls_objects_to(tmp_path: Path, days: int, name: str, reason: str) -> None:
    """As the server's certificate is not what it has to be, not the network's fault."""
    authority = Authority.make()
    authority.issue(Holder(Role.COORDINATOR, ""), tmp_path / "own")
    authority.issue(Holder(Role.SERVER, name), tmp_path / "server", days=days)
    with pytest.raises(UnavailableError, match=reason):
        asyncio.run(tell(load_directory(tmp_path / "own"), load_directory(tmp_path / "server")))
