"""A message with a server's roles was on its way while the host came back with memory from before a loss. The new run
took the roles, so its old memory passed for the copy that had been made since. It made and dropped segments, too, of
which the coordinator believed that the former run had them.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

import smb
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerStub


def test_roles_are_for_one_run(cluster: smb.LocalCluster, connect: Callable[..., smb.Client]) -> None:
    """Another run takes none of it. The one that is meant does, as does any for an older coordinator."""
    (server, *_) = connect()._session.coordinator.list_servers(10)
    with grpc.insecure_channel(server.control_address) as channel:
        stub = MemoryServerStub(channel)  # type: ignore[no-untyped-call]
        run = stub.Inventory(pb.InventoryRequest()).instance_id
        unknown = [pb.Replica(segment_id=1, epoch=2, role=2)]
        with pytest.raises(grpc.RpcError) as raised:
            stub.TakeRoles(pb.TakeRolesRequest(replicas=unknown, instance_id=run + 1))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        assert "another run" in raised.value.details()
        for meant in (0, run):
            stub.TakeRoles(pb.TakeRolesRequest(replicas=unknown, instance_id=meant))


def test_segments_are_made_and_dropped_by_one_run(
    cluster: smb.LocalCluster, connect: Callable[..., smb.Client]
) -> None:
    """Another run makes and drops nothing."""
    client = connect()
    buffer = client.create("kept", 10, servers=1)
    coordinator = client._session.coordinator
    (segment,) = coordinator.open_buffer("kept", 0.0, 10.0).layout.segments
    (server,) = (each for each in coordinator.list_servers(10) if each.name == segment.server)
    with grpc.insecure_channel(server.control_address) as channel:
        stub = MemoryServerStub(channel)  # type: ignore[no-untyped-call]
        run = stub.Inventory(pb.InventoryRequest()).instance_id
        made = pb.CreateSegmentRequest(id=1, epoch=1, dtype="float32", nbytes=4, chunk_bytes=4096, instance_id=run + 1)
        for call, request in (
            (stub.CreateSegment, made),
            (stub.DeleteSegment, pb.DeleteSegmentRequest(id=segment.id, instance_id=run + 1)),
        ):
            with pytest.raises(grpc.RpcError, match="another run"):
                call(request)
        assert {each.id for each in stub.Inventory(pb.InventoryRequest(ids=[1, segment.id])).held} == {segment.id}
    assert (buffer.read() == 0).all()
