"""Records and events <-> gRPC messages. Pure."""

from __future__ import annotations

from smb.coordinator.events import Instant, ServerRegistered
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.request import Creation, check_creation
from smb.coordinator.state import State
from smb.proto import control_pb2 as pb


def creation_of(request: pb.CreateBufferRequest) -> Creation:
    """Return the checked creation. Raises InvalidArgumentError."""
    creation = Creation(
        name=request.name,
        shape=tuple(request.shape),
        dtype=request.dtype,
        server_count=request.server_count,
        server_names=tuple(request.server_names),
        stripe_bytes=request.stripe_bytes,
        like=request.like,
        exist_ok=request.exist_ok,
    )
    return check_creation(creation, replicas=request.replicas, versions=request.versions)


def registration_of(request: pb.RegisterServerRequest) -> ServerRegistered:
    """Return the event; the state checks it."""
    server = ServerRecord(
        name=request.name,
        instance_id=request.instance_id,
        data_address=request.data_address,
        control_address=request.control_address,
        unix_path=request.unix_path,
        metrics_address=request.metrics_address,
        capacity_bytes=request.capacity_bytes,
        used_bytes=request.used_bytes,
        last_seen_at=0.0,
    )
    return ServerRegistered(server, frozenset(request.segment_ids))


def buffer_message(state: State, record: BufferRecord) -> pb.Buffer:
    """Return the buffer with the addresses that its servers have now."""
    layout = pb.Layout(
        epoch=record.epoch,
        stripe_bytes=record.stripe_bytes,
        chunk_bytes=record.chunk_bytes,
        segments=_segment_messages(state, record),
    )
    return pb.Buffer(
        name=record.name,
        id=record.id,
        shape=record.shape,
        dtype=record.dtype,
        nbytes=record.nbytes,
        layout=layout,
        created_at=record.created_at,
    )


def server_message(state: State, server: ServerRecord, now: Instant) -> pb.Server:
    """Return the server as it is now."""
    return pb.Server(
        name=server.name,
        data_address=server.data_address,
        control_address=server.control_address,
        unix_path=server.unix_path,
        instance_id=server.instance_id,
        capacity_bytes=server.capacity_bytes,
        used_bytes=server.used_bytes,
        segment_count=state.allocation(server.name).segments,
        alive=state.alive(server.name, now),
        last_seen_at=server.last_seen_at,
        metrics_address=server.metrics_address,
    )


def _segment_messages(state: State, record: BufferRecord) -> list[pb.Segment]:
    messages = []
    for segment in record.segments:
        message = pb.Segment(id=segment.id, server=segment.server, nbytes=segment.nbytes)
        server = state.servers.get(segment.server)
        if server is not None:
            message.data_address = server.data_address
            message.unix_path = server.unix_path
            message.instance_id = server.instance_id
        messages.append(message)
    return messages
