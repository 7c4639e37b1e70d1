"""Every RPC of the .proto with every kind of certificate: what may be called by whom, and nothing else."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import smb
from smb.errors import PermissionDeniedError
from smb.files.copying import copy_buffer, restore, snapshot
from smb.files.open_file import open_file
from smb.rpc import control_pb2 as pb
from smb.rpc.trailers import ANSWERED
from smb.security.credentials import CA_FILE, COORDINATOR_NAME, channel, load_directory, server_name
from smb.security.roles import RULES, Caller, Role, permit

# Who may. Written down here once more, on purpose: a slip in the table of smb.security.roles is seen.
USERS, WRITERS, SERVERS, COORDINATOR = "client reader operator", "client operator", "server-0", "coordinator"
RELAYS = " server-0 server-1"  # which reach their mirrors alone: test_mirrors.py
MAY = {
    "Coordinator": {
        "OpenSession": USERS + RELAYS,
        "RenewSession": USERS + RELAYS,
        "CloseSession": USERS + RELAYS,
        "RegisterServer": SERVERS,
        "RenewServer": SERVERS,
        "LeaveServer": SERVERS,
        "CreateBuffer": WRITERS + RELAYS,
        "OpenBuffer": USERS + RELAYS,
        "ListBuffers": USERS,
        "DeleteBuffer": WRITERS + RELAYS,
        "RenameBuffer": WRITERS,
        "ListServers": USERS,
        "DrainServer": "operator",
        "Rebalance": "operator",
        "Maintain": "operator",
        "ForgetSegments": "operator",
        "Overview": USERS,
        "KickClients": "operator",
        "LockHolder": WRITERS,
        "Leader": USERS + RELAYS,
    },
    "MemoryServer": {
        "CreateSegment": COORDINATOR,
        "DeleteSegment": COORDINATOR,
        "EndSessions": COORDINATOR,
        "TakeRoles": COORDINATOR,
        "RetireSegments": COORDINATOR,
        "Inventory": COORDINATOR,
        "ConnectVerbs": USERS + RELAYS,  # with the proof of a token: test_verbs_keys.py
        "OpenSegmentVerbs": USERS + RELAYS,
        "CloseVerbs": USERS + RELAYS,
    },
}
STRANGERS = ("in the clear", "without one", "other/operator", "expired")
KINDS = (*STRANGERS, "client", "reader", "server-0", "server-1", "operator", "coordinator")
RPCS = [(service, method) for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods]


def test_every_rpc_has_a_rule() -> None:
    """An RPC of the .proto without a rule is refused to all; this names it. Nor is there a rule without an RPC."""
    paths = {f"/{service.full_name}/{method.name}" for service, method in RPCS}
    assert paths == set(RULES)
    assert {(service.name, method.name) for service, method in RPCS} == {
        (service, method) for service, methods in MAY.items() for method in methods
    }


def test_what_has_no_rule_nobody_may_call() -> None:
    """Deny by default: an unknown method, and a caller without a role."""
    for role in Role:
        with pytest.raises(PermissionDeniedError, match="Invent: no certificate may call this"):
            permit("/smb.v1.Coordinator/Invent", None, Caller(role))
    with pytest.raises(PermissionDeniedError, match="without a role"):
        permit("/smb.v1.Coordinator/ListServers", pb.ListServersRequest(), Caller(None))


@pytest.fixture(scope="module")
def addresses(guarded: smb.LocalCluster, certificates: Path) -> dict[str, str]:
    """Where the services are."""
    with channel(guarded.address, COORDINATOR_NAME, load_directory(certificates / "client")) as opened:
        stub = opened.unary_unary(
            "/smb.v1.Coordinator/ListServers",
            request_serializer=pb.ListServersRequest.SerializeToString,
            response_deserializer=pb.ListServersReply.FromString,
        )
        servers = stub(pb.ListServersRequest(), timeout=5).servers
    memory = next(server.control_address for server in servers if server.name == "server-0")
    return {"Coordinator": guarded.address, "MemoryServer": memory}


def opened_as(kind: str, service: str, address: str, certificates: Path) -> grpc.Channel:
    """A channel to a service with that kind of certificate, or without."""
    peer = COORDINATOR_NAME if service == "Coordinator" else server_name("server-0")
    options = [("grpc.ssl_target_name_override", peer)]
    if kind == "in the clear":
        return channel(address, peer, None)
    if kind == "without one":
        secured = grpc.ssl_channel_credentials((certificates / "client" / CA_FILE).read_bytes())
        return grpc.secure_channel(address, secured, options=options)
    if kind == "other/operator":  # believes in our authority, but has a certificate of another
        other = load_directory(certificates / kind)
        ca = (certificates / "client" / CA_FILE).read_bytes()
        secured = grpc.ssl_channel_credentials(ca, other.key, other.certificate)
        return grpc.secure_channel(address, secured, options=options)
    return channel(address, peer, load_directory(certificates / kind))


def outcome(opened: grpc.Channel, service: Any, method: Any) -> grpc.StatusCode:
    """Call with an empty request, in the name of server-0 where it takes one."""
    request = getattr(pb, method.input_type.name)()
    if "name" in method.input_type.fields_by_name:
        request.name = "server-0"
    call = opened.unary_unary(
        f"/{service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(pb, method.output_type.name).FromString,
    )
    try:
        call(request, timeout=10)
    except grpc.RpcError as error:
        answered = any(key == ANSWERED for key, _ in error.trailing_metadata() or ())
        by_rule = error.code() is grpc.StatusCode.PERMISSION_DENIED and "takes the role" in (error.details() or "")
        own_name = "may use only its own name" in (error.details() or "")
        if answered and not by_rule and not own_name:
            return grpc.StatusCode.OK  # let in: what it then says of an empty request does not matter here
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("service", MAY)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rpc_with_every_kind_of_certificate(
    kind: str, service: str, addresses: dict[str, str], certificates: Path
) -> None:
    """A stranger's connection does not come about; of who is known each call is let in or refused as the table says."""
    with opened_as(kind, service, addresses[service], certificates) as opened:
        for described, method in RPCS:
            if described.name != service:
                continue
            code = outcome(opened, described, method)
            if kind in STRANGERS:
                assert code is grpc.StatusCode.UNAVAILABLE, method.name
            elif kind in MAY[service][method.name].split():
                assert code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE), method.name
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, method.name


def test_nobody_stands_for_the_coordinator(addresses: dict[str, str], certificates: Path) -> None:
    """Who expects the coordinator takes no memory server for it, though the same authority signed for both."""
    with channel(addresses["MemoryServer"], COORDINATOR_NAME, load_directory(certificates / "client")) as opened:
        service, method = RPCS[0]
        assert outcome(opened, service, method) is grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def team(connect_as: Any) -> Iterator[smb.Client]:
    """A client limited to the namespace "team"."""
    return connect_as("of-team")


def test_a_certificate_may_be_limited_to_namespaces(connect_as: Any, team: smb.Client) -> None:
    """Inside its namespace a client does all that a client may; of what is outside it sees no name."""
    everybody = connect_as("client")
    everybody.create("other/weights", (4,))
    everybody.create("plain", (4,))
    everybody.create("teams/weights", (4,))
    ours = team.create("team/weights", (4,))
    ours.fill(2)
    assert team.open("team/weights").read().tolist() == [2, 2, 2, 2]
    assert [buffer.name for buffer in team.list()] == ["team/weights"]
    for name in ("other/weights", "plain", "teams/weights", "team"):
        for refused in (
            lambda name=name: team.open(name),
            lambda name=name: team.create(name, (4,), exist_ok=True),
            lambda name=name: team.delete(name, missing_ok=True),
            lambda name=name: team.create("team/copy", like=name),
            lambda name=name: team.lock(name),
            lambda name=name: team.barrier(name, 1),
        ):
            with pytest.raises(smb.PermissionDeniedError, match="limited to team/"):
                refused()
    with pytest.raises(smb.PermissionDeniedError, match="limited to namespaces; use a certificate of role operator"):
        team._session.coordinator.overview(5)
    assert '"buffers":' in everybody._session.coordinator.overview(5)
    with team.lock("team/lock", ttl=5), everybody.lock("other/lock", ttl=5):
        asked = team._session.coordinator
        with pytest.raises(smb.TimeoutError, match=rf"lock 'team/lock': .* {re.escape(team.name)} \(.*\) holds it"):
            team.lock("team/lock", timeout=0).acquire()
        with pytest.raises(smb.PermissionDeniedError, match="limited to team/"):
            asked.lock_holder("other/lock", 1, 5)
    assert team._session.coordinator.lock_holder("team/lock", 1, 5) == ""
    team.delete("team/weights")
    assert len(everybody.list()) == 3


def test_names_are_changed_inside_the_own_namespaces(connect_as: Any, team: smb.Client) -> None:
    """Each name of a rename is asked: what is renamed, its new name, what is put aside; and those of folders."""
    everybody, reader = connect_as("client"), connect_as("reader-of-team")
    for name in ("other/there", "other/folder/x", "teams/there", "plain"):
        everybody.create(name, (4,))
    for name in ("team/a", "team/b", "team/folder/x"):
        team.create(name, (4,))
    before = [buffer.name for buffer in everybody.list()]
    for refused in (
        lambda: team.rename("other/there", "team/stolen"),
        lambda: team.rename("plain", "team/stolen"),
        lambda: team.rename("team/a", "other/put"),
        lambda: team.rename("team/a", "put"),
        lambda: team.rename("team/a", "other/there", replace=True),
        lambda: team.displace("team/a", "team/b", "other/aside"),
        lambda: team.displace("team/a", "other/there", "team/stolen"),
        lambda: team.rename_folder("other/folder", "team/stolen"),
        lambda: team.rename_folder("team/folder", "other/put"),
        lambda: team.rename_folder("team", "teams"),
        lambda: team.rename_folder("other", "team/stolen"),
        lambda: reader.rename("team/a", "team/c"),
    ):
        with pytest.raises(smb.PermissionDeniedError, match=r"limited to team/|takes the role client"):
            refused()
    assert [buffer.name for buffer in everybody.list()] == before
    team.rename_folder("team/folder", "team/moved")
    team.displace("team/a", "team/b", "team/aside")
    assert [buffer.name for buffer in team.list()] == ["team/aside", "team/b", "team/moved/x"]


def test_files_stay_in_the_own_namespaces(connect_as: Any, team: smb.Client, tmp_path: Path) -> None:
    """Staged files, copies, snapshots and what is removed while it is open lie in the namespace of their name: who is
    limited to one has files as everybody else; and none is left.
    """
    everybody = connect_as("client")
    everybody.create("other/there", (4,))
    with open_file("team/note", "wb", client=team) as file:
        file.write(b"made")
    with open_file("team/note", "wb", client=team) as file:
        file.write(b"made anew")
    with open_file("team/note", client=team) as file:
        assert file.read() == b"made anew"
    copy_buffer(team, "team/note", team, "team/copy")
    path = tmp_path / "note"
    snapshot(team, "team/copy", path)
    restore(team, path, "team/restored")
    assert path.read_bytes() == team.open("team/restored").read().tobytes() == b"made anew"
    names = ["other/there", "team/copy", "team/note", "team/restored"]
    assert [buffer.name for buffer in everybody.list()] == names
    for refused in (
        lambda: open_file("other/note", "wb", client=team).close(),
        lambda: copy_buffer(team, "team/note", team, "other/copy"),
        lambda: copy_buffer(team, "other/there", team, "team/stolen"),
    ):
        with pytest.raises((smb.PermissionDeniedError, PermissionError, FileNotFoundError)):
            refused()
    assert [buffer.name for buffer in everybody.list()] == names


def test_health_needs_no_certificate(guarded: smb.LocalCluster) -> None:
    """Probes of orchestrators have none; what they see names no buffer."""
    with urllib.request.urlopen(f"http://{guarded.coordinator.metrics}/healthz", timeout=5) as page:
        assert json.load(page)["ok"]
