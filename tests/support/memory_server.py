"""A memory server without memory: its side of the control plane, and faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorStub, MemoryServerServicer, add_MemoryServerServicer_to_server

OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.so_reuseport", 0))


class FakeMemoryServer(MemoryServerServicer):
    """Remembers the segments that it was asked for."""

    def __init__(self, name: str, instance_id: int = 1) -> None:
        self.name = name
        self.instance_id = instance_id
        self.segments: dict[int, Any] = {}
        self.asked = threading.Event()  # set at each create, before it is answered
        self.refuse_creation: grpc.StatusCode | None = None
        self.hold: threading.Event | None = None  # creates wait for it
        self.ended: list[int] = []  # sessions, as told
        self.keeps_together = True  # else it is of a release that does not
        self.deaf = False  # to being told at once which sessions ended
        self.seen = pb.SessionsSeen()
        self.quarantined: set[int] = set()
        self.stamp = pb.StoreStamp()  # of the coordinator's records, as told last
        self._server: grpc.Server | None = None
        self.port = 0

    def CreateSegment(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.asked.set()
        if self.hold is not None:
            self.hold.wait(30)
        if self.refuse_creation is not None:
            context.abort(self.refuse_creation, f"{self.name} refuses")
        self.segments[request.id] = request
        self.stamp = request.stamp
        group_id = request.group_id if self.keeps_together else 0
        return pb.CreateSegmentReply(used_bytes=self.used_bytes(), group_id=group_id)

    def DeleteSegment(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.segments.pop(request.id, None)
        return pb.DeleteSegmentReply(used_bytes=self.used_bytes())

    def TakeRoles(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return pb.TakeRolesReply(confirmed=[part.segment_id for part in request.replicas if part.confirm])

    def Inventory(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        held = [self._held(each) for each in request.ids if each in self.segments]
        return pb.InventoryReply(instance_id=self.instance_id, held=held)

    def _held(self, segment_id: int) -> Any:
        of = self.segments[segment_id]
        primary = of.HasField("replica") and of.replica.role == 1
        flags = 1 + 2 * primary + 8 * (segment_id in self.quarantined) + 32  # nobody writes to it
        return pb.HeldSegment(id=segment_id, epoch=of.epoch, flags=flags, file_bytes=of.nbytes)

    def EndSessions(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if self.deaf:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{self.name} is deaf")
        self.ended += request.session_ids
        return pb.EndSessionsReply()

    def used_bytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments.values())

    def start(self) -> None:
        """Answer on a free port."""
        self._server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
        add_MemoryServerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def stop(self) -> None:
        """Be gone, as after a crash: nobody is told."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def register(self, coordinator: CoordinatorStub, capacity_bytes: int = 64 << 20) -> Any:
        """Register with what is held; return the reply, having dropped what it says."""
        request = pb.RegisterServerRequest(
            name=self.name,
            instance_id=self.instance_id,
            data_address="127.0.0.1:1",
            control_address=f"127.0.0.1:{self.port}",
            capacity_bytes=capacity_bytes,
            used_bytes=self.used_bytes(),
            segment_ids=list(self.segments),
            segment_epochs=[self._held(each).epoch for each in self.segments],
            segment_flags=[self._held(each).flags for each in self.segments],
            stamps=[self.stamp] if self.stamp.term else (),
            sessions_seen=self.seen,
        )
        reply = coordinator.RegisterServer(request, timeout=10)
        for segment_id in reply.drop_segment_ids:
            self.segments.pop(segment_id, None)
        self.quarantined |= set(reply.quarantine_segment_ids)
        self.quarantined -= set(reply.taken_up_segment_ids)
        self.stamp = reply.stamp
        self._end(reply.ended_sessions)
        return reply

    def renew(self, coordinator: CoordinatorStub) -> Any:
        request = pb.RenewServerRequest(
            name=self.name, instance_id=self.instance_id, used_bytes=self.used_bytes(), sessions_seen=self.seen
        )
        reply = coordinator.RenewServer(request, timeout=10)
        self.stamp = reply.stamp
        self._end(reply.ended_sessions)
        return reply

    def _end(self, ended: Any) -> None:
        self.ended += ended.session_ids
        self.seen = pb.SessionsSeen(incarnation=ended.incarnation, last_number=ended.last_number)


@contextmanager
def fake_memory_servers(*names: str) -> Iterator[list[FakeMemoryServer]]:
    """Give started servers and stop them afterwards."""
    servers = [FakeMemoryServer(name, instance_id) for instance_id, name in enumerate(names, start=1)]
    for server in servers:
        server.start()
    try:
        yield servers
    finally:
        for server in servers:
            if server.hold is not None:
                server.hold.set()
            server.stop()


@contextmanager
def coordinator_stub(address: str) -> Iterator[CoordinatorStub]:
    """Give a client of the coordinator's gRPC that outlives the coordinator's restarts."""
    options = (*OPTIONS, ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))
    with grpc.insecure_channel(address, options=options) as channel:
        yield CoordinatorStub(channel)
