"""A backup that refused one segment's changes for long was taken for a server that could not be reached: all segments
that the two servers shared lost their second copies, which were then made elsewhere.
"""

from __future__ import annotations

import grpc

import smb
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerStub
from smb.transport.base import SegmentLocation
from tests.support.daemons import wait_for

PARTED_S = 20.0  # 3 s of refusals, and a busy machine


def test_the_other_segments_keep_their_copies() -> None:
    """The backup of "a" is in an epoch that its primary does not know. "a" gets a new copy; "b" keeps its own."""
    with smb.LocalCluster(servers=2, capacity="64MiB") as cluster, smb.connect(cluster.address) as client:
        for name in ("a", "b"):
            client.create(name, (1000,), "float32", servers=1, replicas=2).fill(1.0)

        def segment(name: str) -> SegmentLocation:
            (found,) = client.open(name).layout.segments
            return found

        before = {name: segment(name) for name in ("a", "b")}
        servers = {server.name: server for server in client._session.coordinator.list_servers(10)}
        first = before["a"]
        later = pb.Replica(segment_id=first.id, epoch=first.epoch + 1, role=2, peer=first.server)
        with grpc.insecure_channel(servers[first.backup].control_address) as channel:
            stub = MemoryServerStub(channel)  # type: ignore[no-untyped-call]
            stub.TakeRoles(pb.TakeRolesRequest(replicas=[later]))
        wait_for(lambda: segment("a").epoch > first.epoch, "change of roles", PARTED_S)
        assert segment("b").epoch == before["b"].epoch
        wait_for(lambda: segment("a").backup, "new copy", PARTED_S)
        assert client.open("a").read()[0] == client.open("b").read()[0] == 1.0
        assert segment("b").epoch == before["b"].epoch
