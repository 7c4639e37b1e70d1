"""A network held up what a coordinator had told a memory server. Meanwhile the coordinator was killed, and its store
restored from a backup of before. Then the message arrived, and the server destroyed what the records had again.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

import smb
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub, MemoryServerStub
from tests.support.daemons import running_daemons, wait_for
from tests.support.memory_server import fake_memory_servers


def term_of(coordinator: str) -> int:
    """What a coordinator tells a server that registers and leaves."""
    with fake_memory_servers("other") as (server,), grpc.insecure_channel(coordinator) as channel:
        stub = CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        term = int(server.register(stub).stamp.term)
        stub.LeaveServer(pb.LeaveServerRequest(name=server.name, instance_id=server.instance_id))
    return term


def made_anew(segment_id: int, term: int) -> pb.CreateSegmentRequest:
    """What has a server make a copy of a segment in place of what it has of it."""
    return pb.CreateSegmentRequest(
        id=segment_id, epoch=9, dtype="float32", nbytes=40, chunk_bytes=4096, stamp=pb.StoreStamp(cluster=1, term=term),
        replica=pb.Replica(segment_id=segment_id, epoch=9, role=2, peer="b", copying=True),
    )  # fmt: skip


def registrations(daemon_log: Path) -> int:
    return daemon_log.read_text().count("registered as")


def test_a_server_obeys_the_coordinator_that_it_registered_with(tmp_path: Path) -> None:
    """It does nothing for the one before, and all for its own, and for one of a release that names no term."""
    with running_daemons(tmp_path) as daemons:
        coordinator = daemons.coordinator()
        server = daemons.memory_server(coordinator.address, "a")
        assert server.address
        former = term_of(coordinator.address)
        with smb.connect(coordinator.address, timeout=30) as client:
            kept, gone = client.create("kept", 10), client.create("gone", 10)
            (kept_id,), (gone_id,) = ([each.id for each in buffer.layout.segments] for buffer in (kept, gone))
            (record,) = client._session.coordinator.list_servers(10)
            address = coordinator.address
            coordinator.kill()
            coordinator = daemons.coordinator(address)
            assert coordinator.address == address
            wait_for(lambda: registrations(server.log) >= 2, "the server to register again")
            present = term_of(address)
            assert present != former
            with grpc.insecure_channel(record.control_address) as channel:
                stub = MemoryServerStub(channel)  # type: ignore[no-untyped-call]
                roles = [pb.Replica(segment_id=kept_id, epoch=9, role=2, peer="b", copying=True)]
                for call, request in (
                    (stub.DeleteSegment, pb.DeleteSegmentRequest(id=kept_id, ground=pb.DELETED, term=former)),
                    (stub.DeleteSegment, pb.DeleteSegmentRequest(id=kept_id, epoch=9, room=True, term=former)),
                    (stub.RetireSegments, pb.RetireSegmentsRequest(ids=[kept_id], term=former)),
                    (stub.TakeRoles, pb.TakeRolesRequest(replicas=roles, term=former)),
                    (stub.CreateSegment, made_anew(kept_id, former)),
                    (stub.CreateSegment, made_anew(kept_id, present + 1)),
                    (stub.DeleteSegment, pb.DeleteSegmentRequest(id=kept_id, ground=pb.DELETED, term=present + 1)),
                    (stub.TakeRoles, pb.TakeRolesRequest(replicas=roles, term=present + 1)),
                ):
                    with pytest.raises(grpc.RpcError, match="of term") as raised:
                        call(request)
                    assert raised.value.code() is grpc.StatusCode.ABORTED
                kept.write(range(10))
                assert kept.read().tolist() == list(range(10))
                stub.TakeRoles(pb.TakeRolesRequest(term=present))
                for term in (present, 0):
                    stub.DeleteSegment(pb.DeleteSegmentRequest(id=gone_id, ground=pb.DELETED, term=term))
                    assert not stub.Inventory(pb.InventoryRequest(ids=[gone_id])).held
            client.delete("kept")  # at once, for the present one
            assert not any(f"{kept_id:016x}" in name for name in daemons.files())
