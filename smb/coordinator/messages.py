"""Records and events <-> gRPC messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat

from smb.coordinator.drop_rules import Where, why_kept
from smb.coordinator.ended_sessions import EndedSessions
from smb.coordinator.events import Instant, ServerRegistered
from smb.coordinator.lineage import Stamp
from smb.coordinator.records import UNKNOWN_EPOCH, BufferRecord, Held, Kind, ServerRecord
from smb.coordinator.replicas import Copy
from smb.coordinator.state import State
from smb.coordinator.validate import Creation, check_creation, first_use
from smb.errors import InvalidArgumentError
from smb.rpc import control_pb2 as pb

_NUMBERS: dict[Kind, pb.Kind] = {Kind.BUFFER: pb.BUFFER, Kind.LOCK: pb.LOCK, Kind.BARRIER: pb.BARRIER}
_KINDS: dict[int, Kind] = {number: kind for kind, number in _NUMBERS.items()}
_WHOLE, _PRIMARY, _BACKUP, _QUARANTINED, _UNKNOWN, _UNTOUCHED = 1, 2, 4, 8, 16, 32  # flags of HeldSegment
QUARANTINED_SHOWN_MAX = 4096


def kind_of(number: int) -> Kind:
    """Return the kind with that number on the wire. Raises InvalidArgumentError for a kind of a later version."""
    if number not in _KINDS:
        raise InvalidArgumentError(
            f"kind {number} is unknown to this coordinator, which is older than its client: upgrade the coordinator"
        )
    return _KINDS[number]


def creation_of(request: pb.CreateBufferRequest) -> Creation:
    """Return the creation that a request asks for, checked. Raises InvalidArgumentError."""
    kind = kind_of(request.kind)
    if kind is not Kind.BUFFER:
        _check_bare(request, kind)
        return first_use(kind, request.name, request.replicas)
    creation = Creation(
        name=request.name,
        shape=tuple(request.shape),
        dtype=request.dtype,
        server_count=request.server_count,
        server_names=tuple(request.server_names),
        stripe_bytes=request.stripe_bytes,
        like=request.like,
        exist_ok=request.exist_ok,
        versions=request.versions or 1,
        wire=request.wire,
        metadata=request.packed_metadata,
        attempt_id=request.attempt_id,
        mirror_of=request.mirror_of,
        joins=request.joins,
        model_id=request.model_id,
    )
    return check_creation(creation, replicas=request.replicas)


def without_session(request: pb.CreateBufferRequest) -> pb.CreateBufferRequest:
    """Return the request without its session, on which the result does not depend."""
    asked = pb.CreateBufferRequest()
    asked.CopyFrom(request)
    asked.ClearField("session_id")
    asked.ClearField("session_secret")
    return asked


def registration_of(request: pb.RegisterServerRequest) -> ServerRegistered:
    """Return the registration as an event, unchecked: the state checks it."""
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
        weight=request.weight or 1.0,
        data_tls=request.data_tls,
        zone=request.zone,
        host_name=request.host_name,
    )
    reported = len(request.segment_epochs) == len(request.segment_flags) == len(request.segment_ids)
    epochs, flags = (
        (request.segment_epochs, request.segment_flags) if reported else (repeat(UNKNOWN_EPOCH), repeat(_WHOLE))
    )
    held = {number: _held(epoch, of, 0) for number, epoch, of in zip(request.segment_ids, epochs, flags, strict=False)}
    stamps = tuple(Stamp(each.cluster, each.term, each.sequence) for each in request.stamps)
    return ServerRegistered(server, held, stamps=stamps)


def held_of(message: pb.HeldSegment) -> Held:
    """Return a segment as its server says that it holds it."""
    return _held(message.epoch, message.flags, message.file_bytes)


def _held(epoch: int, flags: int, nbytes: int) -> Held:
    return Held(
        epoch,
        bool(flags & _WHOLE),
        not flags & (_WHOLE | _UNKNOWN),
        primary=bool(flags & _PRIMARY),
        backup=bool(flags & _BACKUP),
        quarantined=bool(flags & _QUARANTINED),
        untouched=bool(flags & _UNTOUCHED),
        nbytes=nbytes,
    )


def stamp_message(stamp: Stamp) -> pb.StoreStamp:
    return pb.StoreStamp(cluster=stamp.cluster, term=stamp.term, sequence=stamp.sequence)


def add_quarantined(message: pb.Server, state: State, where: Where) -> None:
    """Add the segments that the server holds beside the records to its message."""
    listed = [
        pb.Quarantined(
            segment_id=number,
            name=where[number][0].name if number in where else "",
            nbytes=held.nbytes,
            reason=why_kept(message.name, number, held, where),
        )
        for number, held in sorted(state.unexplained.get(message.name, {}).items())
    ]
    message.quarantined.extend(listed[:QUARANTINED_SHOWN_MAX])
    message.quarantined_left_out = max(0, len(listed) - QUARANTINED_SHOWN_MAX)


def buffer_message(
    state: State, record: BufferRecord, *, listed: bool = False, names: Mapping[int, str] | None = None
) -> pb.Buffer:
    """Return the buffer with its servers' current addresses. With `listed` the metadata is left out. `names`: of all
    buffers, by id, where many messages are made; None: the source's name is looked up.
    """
    if names is None:
        source = state.source(record)
        source_name = source.name if source is not None else ""
    else:
        source_name = names.get(record.mirror_of, "")
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
        kind=_NUMBERS[record.kind],
        versions=record.versions,
        wire=record.wire,
        copy_stride_bytes=record.copy_stride_bytes,
        packed_metadata=b"" if listed else record.metadata,
        replicas=record.replicas,
        mirror_of=source_name,
        file_attributes=record.file_attributes,
    )


def server_message(state: State, server: ServerRecord, now: Instant) -> pb.Server:
    """Return the server and its state at `now`."""
    return pb.Server(
        name=server.name,
        data_address=server.data_address,
        control_address=server.control_address,
        unix_path=server.unix_path,
        instance_id=server.instance_id,
        capacity_bytes=server.capacity_bytes,
        used_bytes=server.used_bytes,
        segment_count=state.allocation(server.name).segments,
        alive=state.heard(server.name, now),
        unheard=state.alive(server.name, now) and not state.heard(server.name, now),
        last_seen_at=server.last_seen_at,
        metrics_address=server.metrics_address,
        weight=server.weight,
        data_tls=server.data_tls,
        zone=server.zone,
        host_name=server.host_name,
        draining=server.draining,
        overdue=server.name in state.overdue,
        maintenance_until=state.maintenance_until(server.name, now),
    )


def replica_messages(state: State, copies: Iterable[Copy]) -> list[pb.Replica]:
    """Return a server's parts in segments with two copies, with the current addresses of the other copies."""
    return [replica_message(state, copy) for copy in copies]


def replica_message(state: State, copy: Copy) -> pb.Replica:
    message = pb.Replica(
        segment_id=copy.segment_id, epoch=copy.epoch, role=copy.role.value, peer=copy.peer, copying=copy.copying
    )
    peer = state.servers.get(copy.peer)
    if peer is not None:
        message.data_address = peer.data_address
        message.instance_id = peer.instance_id
    return message


def ended_message(ended: EndedSessions, seen: pb.SessionsSeen) -> pb.EndedSessions:
    """Return the ended sessions that a server has not heard of, given what it has `seen`."""
    return pb.EndedSessions(
        incarnation=ended.incarnation,
        last_number=ended.last_number,
        session_ids=ended.after(seen.incarnation, seen.last_number),
        forgotten=ended.last_number > len(ended.numbers),
    )


def _check_bare(request: pb.CreateBufferRequest, kind: Kind) -> None:
    bare = pb.CreateBufferRequest(
        name=request.name, kind=request.kind, exist_ok=request.exist_ok, replicas=request.replicas
    )
    if request != bare:
        raise InvalidArgumentError(
            f'{kind.value} "{request.name}": give only the name and the number of copies; the coordinator decides '
            f"shape and place"
        )


def _segment_messages(state: State, record: BufferRecord) -> list[pb.Segment]:
    messages = []
    for segment in record.segments:
        message = pb.Segment(
            id=segment.id, server=segment.server, nbytes=segment.nbytes, epoch=segment.epoch, backup=segment.backup,
            copying_to=segment.copying_to, group_id=segment.group,
        )  # fmt: skip
        reported = state.progress.get(segment.server, {}) if segment.copying_to else {}
        progress = reported.get(segment.id) or reported.get(segment.group)  # one segment reports for its bundle
        if progress is not None and progress.total_bytes:
            message.copied = progress.copied_bytes / progress.total_bytes
            if progress.bytes_per_s:
                message.copy_left_s = (progress.total_bytes - progress.copied_bytes) / progress.bytes_per_s
        server = state.servers.get(segment.server)
        if server is not None:
            message.data_address = server.data_address
            message.unix_path = server.unix_path
            message.instance_id = server.instance_id
            message.control_address = server.control_address
            message.data_tls = server.data_tls
        messages.append(message)
    return messages
