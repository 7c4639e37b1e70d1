"""Creation of buffers, locks and barriers: what is allowed, and on which servers they are placed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

from smb.coordinator import limits
from smb.coordinator.bundles import Bundles, bundle_of, move_together
from smb.coordinator.drop_rules import dropped
from smb.coordinator.events import (
    BufferFailed,
    BufferMade,
    BufferWanted,
    EraseBuffer,
    Instant,
    MakeSegments,
    Report,
    SaveBuffer,
    WakeOpeners,
)
from smb.coordinator.placement import (
    BufferPlacement,
    Pool,
    place,
    place_backups,
    place_copy,
    place_like,
    place_together,
)
from smb.coordinator.published import published_as
from smb.coordinator.quotas import check_quota
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord
from smb.coordinator.state import FIRST_EPOCH, State, Step, end_copies_beside, find_ready, put, remove
from smb.coordinator.validate import Creation, check_wire
from smb.drop_reasons import Ground
from smb.errors import (
    APPLIED,
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from smb.published import LOG, LOG_FORMAT
from smb.security.roles import namespace_of


class NotNowError(UnavailableError):
    """The creation cannot be done now, because the bundle that it joins is moving or a server was restarted. It left
    nothing behind, and may be tried again at once.
    """


def buffer_wanted(state: State, event: BufferWanted, now: Instant) -> Step:
    """Choose servers for a buffer. Changes nothing if an equal buffer exists already. Raises NotNowError."""
    creation = event.creation
    if made_before(state, creation) is not None:
        return state, ()
    if creation.model_id:
        find_ready(state, creation.mirror_of or creation.like, creation.model_id)
    if creation.mirror_of:
        creation = _mirroring(state, creation)
    if creation.joins:
        creation = _joining(state, creation)
    existing = state.buffers.get(creation.key)
    if existing is not None:
        _check_same(state, existing, creation)
        return state, ()
    if len(state.buffers) >= limits.BUFFERS_MAX:
        raise OutOfMemoryError(
            f'no place for "{creation.name}": a cluster has at most {limits.BUFFERS_MAX} buffers; delete some first'
        )
    if creation.metadata:
        check_room_for_metadata(state, creation.asked, len(creation.metadata))
    if creation.like:
        like = find_ready(state, creation.like)
        creation = _shaped_like(creation, like)
    try:
        pool = state.pool(now)
        free = {name: nbytes for name, nbytes in pool.free_bytes.items() if name not in event.avoid}
        pool = replace(pool, free_bytes=free)
        beside = state.buffers[creation.like] if creation.like else None
        backups: tuple[str, ...] = ()
        if creation.joins and beside is not None:
            placement, backups = _placed_together(state, beside, pool, now, waits=event.waits)
        else:
            placement = _placement(state, creation, pool)
        # If only one server is alive, a lock is made with one copy and gets the other one later. Otherwise no client
        # could return to buffers that have two copies already.
        if creation.replicas > 1 and not backups and (creation.kind is Kind.BUFFER or len(pool.free_bytes) > 1):
            backups = place_backups(pool, placement, beside)
    except Error as error:
        raise type(error)(f"{creation.asked}: {error}") from None
    record = _pending(creation, placement, backups, event.new_id, now)
    if creation.mirror_of:
        record = replace(record, mirror_of=find_ready(state, creation.mirror_of).id)
    saves: tuple[SaveBuffer, ...] = (SaveBuffer(record),)
    if creation.joins and beside is not None:
        record, first = _joined(record, beside)
        saves = (SaveBuffer(first), SaveBuffer(record))
        state = replace(state, buffers=state.buffers.changed((first,)))
    check_quota(state.quotas, state.buffers.values(), [record], creation.asked)
    return put(state, record), (*saves, MakeSegments(record))


def made_before(state: State, creation: Creation) -> BufferRecord | None:
    """Return what an earlier attempt of this creation made, whatever its name is now. Raises NotFoundError if it was
    deleted since.
    """
    if not creation.attempt_id:
        return None
    if creation.attempt_id in state.deleted_attempts:
        raise NotFoundError(
            f"{creation.asked}: the buffer was created, but another client deleted it before the answer came; create "
            f"it again if it is still wanted",
            outcome=APPLIED,
        )
    return next((record for record in state.buffers.values() if record.attempt_id == creation.attempt_id), None)


def _joining(state: State, creation: Creation) -> Creation:
    """Return the creation with as many copies as the buffer with which it is to move together. Buffers with
    one copy never move together. Raises InvalidArgumentError if the two cannot form a bundle.
    """
    like = find_ready(state, creation.like)
    if creation.replicas not in (0, like.replicas):
        raise InvalidArgumentError(
            f'{creation.asked} with state_of="{like.name}": replicas must be {like.replicas}, as for '
            f'"{like.name}", not {creation.replicas}; leave replicas= out'
        )
    if like.versions > 1:
        raise InvalidArgumentError(
            f'{creation.asked} with state_of="{like.name}": that buffer keeps {like.versions} versions, and no '
            f"optimizer's step can change it; create it with versions=1"
        )
    return replace(creation, replicas=like.replicas, joins=like.replicas > 1)


def _placed_together(
    state: State, like: BufferRecord, pool: Pool, now: Instant, *, waits: bool
) -> tuple[BufferPlacement, tuple[str, ...]]:
    """Place a buffer that joins the bundle of `like`. Raises NotNowError while `like` is moving, and NotFoundError if
    memory of the bundle is lost: no member gets a second copy until the lost one is deleted.
    """
    asked = f'to move together with "{like.name}"'
    # Else the bundle might be taken up from a server whose copy is newer than the records, and with it the new buffer,
    # away from its memory.
    if not state.every_server_was_heard(now) or (state.was_restored and not state.knows_all_memory(now)):
        raise NotNowError(f"{asked} it waits for memory servers that were not heard of yet; try again then")
    _check_records_are_right(state, like, asked)
    if any(segment.copying_to for segment in like.segments):
        raise NotNowError(
            f'{asked} it waits for the copy of "{like.name}" that is being made; try again once that is there'
        )
    leaves = sorted({name for each in like.segments for name in (each.server, each.backup)} & pool.draining)
    if leaves:
        raise NotNowError(
            f'{asked} it waits until "{like.name}" has left {", ".join(leaves)}, which is being drained; try again then'
        )
    bundles = Bundles(state.buffers.values())
    members = [each for segment in like.segments for each in bundles.members(like, segment)]
    if begun := sorted({of.name for of, _ in members if of.id in state.interrupted}):
        raise NotNowError(
            f'{asked} it waits until it is known whether "{begun[0]}", which an earlier run of the coordinator was '
            f"making, is there; try again then"
        )
    lost = {
        of.name: member.server
        for of, member in members
        if all(member.id in state.missing.get(name, ()) for name in {member.server, member.backup} - {""})
    }
    if lost:
        where = ", ".join(f'"{name}" (on {server})' for name, server in sorted(lost.items()))
        raise NotFoundError(
            f"{asked}: the memory of {where} was lost; delete that buffer (smb rm) and create it again first"
        )
    # Without this wait the lost copy might never begin: it needs a moment in which no member is being made.
    if waits and any(
        not segment.backup and place_copy(pool, segment.server, bundles.file_bytes(like, segment))
        for segment in like.segments
    ):
        raise NotNowError(
            f'{asked} it waits for the lost copy of "{like.name}" to be made anew; try again once it is there'
        )
    if len({of.key for of, _ in members}) >= limits.BUNDLE_BUFFERS_MAX:
        raise OutOfMemoryError(
            f"{asked}: at most {limits.BUNDLE_BUFFERS_MAX} buffers can move together, and as many do; delete some"
        )
    return place_together(pool, like)


def _check_records_are_right(state: State, record: BufferRecord, asked: str) -> None:
    """Raise NotNowError if a server has newer memory of this buffer, or of what moves with it, than the records say, or
    if a former primary of these may still answer reads: the present one would lead with the new buffer alone.
    """
    contested, not_led = state.contested(), state.not_led()
    if not contested and not not_led:
        return
    bundles = Bundles(state.buffers.values())
    members = {each.id for segment in record.segments for _, each in bundles.members(record, segment)}
    if members & contested:
        raise NotNowError(
            f"{asked} it waits until the records, which are older than its memory, follow that; try again then"
        )
    if members & not_led:
        raise NotNowError(f"{asked} it waits until its former primary has heard of the present one; try again then")


def _joined(record: BufferRecord, like: BufferRecord) -> tuple[BufferRecord, BufferRecord]:
    """Return the record with the bundles and epochs of `like`, and `like` with its bundles set."""
    first = replace(like, segments=tuple(replace(other, group=bundle_of(other)) for other in like.segments))
    segments = tuple(
        replace(segment, epoch=other.epoch, group=other.group)
        for segment, other in zip(record.segments, first.segments, strict=True)
    )
    return replace(record, segments=segments), first


def _check_roles(record: BufferRecord, event: BufferMade) -> None:
    """Raise NotNowError if segments were made for roles that the records no longer have. A server with such a role
    would take itself for the primary beside another one.
    """
    for segment, made in zip(record.segments, event.segments, strict=False):
        if segment.group and segment != made:
            raise NotNowError(f"the buffer with which {record.title} moves together has moved meanwhile; try again")
        if segment.server != made.server:
            raise NotNowError(f"{record.title}: a server of it was away meanwhile; try again")


def buffer_made(state: State, event: BufferMade, _: Instant) -> Step:
    """All segments of a pending buffer were made."""
    record = replace(state.buffers[event.key], ready=True)
    _check_roles(record, event)
    _check_records_are_right(state, record, f"{record.title}:")
    for name, instance_id in event.instances.items():
        if name not in state.servers or state.servers[name].instance_id != instance_id:
            raise NotNowError(f'{record.title}: memory server "{name}" was restarted meanwhile; try again')
    if record.mirror_of and state.source(record) is None:
        raise NotFoundError(f"{record.title}: the buffer that it was to mirror was deleted meanwhile")
    state = replace(state, buffers=state.buffers.changed((record,)))
    servers = ", ".join(segment.server for segment in record.segments)
    copies = f" in {record.replicas} copies" if record.replicas > 1 else ""
    report = Report(logging.INFO, f"made {record.title}, {record.nbytes} bytes on {servers}{copies}")
    return state, (SaveBuffer(record), WakeOpeners(record.key), report)


def buffer_failed(state: State, event: BufferFailed, _: Instant) -> Step:
    """A segment of a pending buffer could not be made: the others are dropped."""
    record = state.buffers[event.key]
    copies = {(copy.id, copy.server): copy for copy in (*event.copies, *record.copies)}
    effects = (
        EraseBuffer(record.key),
        dropped(copies.values(), Ground.NEVER_MADE, state.unexplained),
        WakeOpeners(record.key),
    )
    return end_copies_beside(remove(state, record), record), effects


def _mirroring(state: State, creation: Creation) -> Creation:
    """Return the creation of a mirror with the shape and dtype of its source. Raises InvalidArgumentError if the source
    is not published."""
    source = find_ready(state, creation.mirror_of)
    (server,) = creation.server_names
    if namespace_of(creation.name) != namespace_of(source.name):
        raise InvalidArgumentError(
            f'{creation.asked}, named "{creation.name}": a mirror must be in the namespace of its source, so that the '
            f"same clients may read it"
        )
    if source.mirror_of:
        raise InvalidArgumentError(f'{creation.asked}: "{source.name}" is a mirror itself; name its source')
    if source.versions < 2 and not _is_log(state, source):
        raise InvalidArgumentError(
            f'{creation.asked}: "{source.name}" is not published: it has one version; only buffers with '
            f"versions=2 or more, which a Publisher creates, can have mirrors"
        )
    if {segment.server for segment in source.segments} == {server}:
        raise InvalidArgumentError(
            f'{creation.asked}: "{source.name}" itself lies on "{server}"; choose another server'
        )
    return replace(
        creation,
        shape=source.shape,
        dtype=source.dtype,
        versions=source.versions,
        metadata=source.metadata,
        wire=source.wire,
    )


def _is_log(state: State, record: BufferRecord) -> bool:
    """Whether the buffer is the log of a published state. Mirrors of a log are filled generation by generation."""
    of = state.find(Kind.BUFFER, record.name.removesuffix(LOG)) if record.name.endswith(LOG) else None
    if of is None or of.versions < 2 or of.mirror_of:
        return False
    return (published_as(of.metadata) or {}).get("log") == LOG_FORMAT


def _check_same(state: State, existing: BufferRecord, creation: Creation) -> None:
    """Raise AlreadyExistsError unless `existing` is what an exist_ok creation describes."""
    if existing.kind is not Kind.BUFFER:
        return  # the coordinator decided its shape, maybe as an earlier release, and that shape stays
    if not creation.exist_ok:
        state.check_known(existing.kind, existing.name)
        doing = "exists" if existing.ready else "is being created by another client"
        raise AlreadyExistsError(
            f'a buffer "{existing.name}" {doing}; choose another name, delete it, or pass exist_ok=True'
        )
    wire = creation.wire
    if creation.like:
        like = find_ready(state, creation.like)
        creation = _shaped_like(creation, like)
        moves = existing.movable or like.movable
        differs = _difference("layout", _cut_of(existing, moves), _cut_of(like, moves))
    else:
        differs = _wishes_differ(existing, creation)
    if creation.joins and not move_together(existing, find_ready(state, creation.like)):
        differs = differs or f'it does not move together with "{creation.like}"'
    differs = (
        _difference("shape", existing.shape, creation.shape)
        or _difference("dtype", existing.dtype, creation.dtype)
        or _difference("versions", existing.versions, creation.versions)
        or _difference("replicas", existing.replicas, creation.replicas)
        or ("as a mirror" if existing.mirror_of and not creation.mirror_of else "")
        or ("not as a mirror" if creation.mirror_of and not existing.mirror_of else "")
        or (_difference("wire", existing.wire, wire) if wire else "")
        or differs
    )
    if differs:
        raise AlreadyExistsError(
            f'a buffer "{existing.name}" exists, but {differs}; delete it first, or take another name'
        )


def check_room_for_metadata(state: State, asked: str, wanted: int) -> None:
    """Raise OutOfMemoryError unless all buffers' metadata and file attributes may grow by so many bytes."""
    there = sum(len(record.metadata) + len(record.file_attributes) for record in state.buffers.values())
    if there + wanted > limits.METADATA_BYTES_MAX:
        raise OutOfMemoryError(
            f"{asked}: no room for {wanted} bytes of packed metadata: the existing buffers have {there} of at "
            f"most {limits.METADATA_BYTES_MAX} bytes; delete some, or keep the metadata in a buffer"
        )


def _wishes_differ(existing: BufferRecord, creation: Creation) -> str:
    segments = tuple(segment.server for segment in existing.segments)
    servers = tuple(dict.fromkeys(segments))
    stripes = -(-existing.nbytes // existing.stripe_bytes)
    differs = ""
    if creation.stripe_bytes:
        differs = differs or _difference("stripe", existing.stripe_bytes, creation.stripe_bytes)
    if existing.movable:
        return differs  # its segments may have moved to any servers since
    if creation.server_names:
        named = creation.server_names[:stripes]
        if len(servers) < len(segments) and set(named) == set(servers):
            named = servers  # weights have decided the order of its segments
        differs = differs or _difference("servers", servers, named)
    if creation.server_count:
        differs = differs or _difference("server count", len(servers), min(creation.server_count, stripes))
    return differs


def _cut_of(record: BufferRecord, moves: bool) -> tuple[object, ...]:
    """Return how the buffer is cut, and its servers unless it `moves`."""
    return (
        record.stripe_bytes,
        record.chunk_bytes,
        *("" if moves else segment.server for segment in record.segments),
    )


def _difference(what: str, there: object, asked: object) -> str:
    return "" if there == asked else f"with {what} {there}, not {asked}"


def _shaped_like(creation: Creation, like: BufferRecord) -> Creation:
    """Return the creation with the shape and dtype of `like`, which it must not contradict, and a default wire."""
    creation = replace(creation, wire=creation.wire or like.wire)
    check_wire(replace(creation, dtype=creation.dtype or like.dtype))
    if not creation.dtype and not creation.shape:
        return replace(creation, shape=like.shape, dtype=like.dtype)
    if (creation.shape, creation.dtype) != (like.shape, like.dtype):
        raise InvalidArgumentError(
            f'create of "{creation.name}" like "{like.name}": shape and dtype must be {like.shape} and {like.dtype}, '
            f"not {creation.shape} and {creation.dtype or 'not given'}"
        )
    return creation


def _placement(state: State, creation: Creation, pool: Pool) -> BufferPlacement:
    if creation.like:
        return place_like(pool, state.buffers[creation.like], versions=creation.versions)
    return place(
        pool,
        creation.nbytes,
        count=creation.server_count,
        names=creation.server_names,
        stripe_bytes=creation.stripe_bytes,
        versions=creation.versions,
    )


def _pending(
    creation: Creation, placement: BufferPlacement, backups: tuple[str, ...], new_id: Callable[[], int], now: Instant
) -> BufferRecord:
    epoch = FIRST_EPOCH if backups else 0
    segments = (
        SegmentRecord(new_id(), share.server, share.nbytes, share.file_bytes, backup, epoch)
        for share, backup in zip(placement.shares, backups or repeat(""), strict=False)
    )
    return BufferRecord(
        name=creation.name,
        id=new_id(),
        shape=creation.shape,
        dtype=creation.dtype,
        nbytes=creation.nbytes,
        epoch=FIRST_EPOCH,
        stripe_bytes=placement.stripe_bytes,
        chunk_bytes=placement.chunk_bytes,
        segments=tuple(segments),
        created_at=now.wall,
        ready=False,
        kind=creation.kind,
        versions=creation.versions,
        wire=creation.wire or "exact",
        metadata=creation.metadata,
        attempt_id=creation.attempt_id,
        replicas=creation.replicas,
    )
