"""Memory servers that register, renew, leave, die and are drained."""

from __future__ import annotations

import logging
from dataclasses import replace

from smb.config.parse import check_weight
from smb.coordinator import limits
from smb.coordinator.draining import check_room
from smb.coordinator.events import (
    AnswerDrops,
    Effect,
    EraseServer,
    Instant,
    Report,
    SaveServer,
    ServerCounted,
    ServerDied,
    ServerDrained,
    ServerLeft,
    ServerRegistered,
    ServerRenewed,
    ServerSuspected,
)
from smb.coordinator.records import ServerRecord
from smb.coordinator.state import State, Step, without
from smb.coordinator.validate import check_address, check_server_name, check_zone
from smb.errors import Error, InvalidArgumentError, NotFoundError, OutOfMemoryError


def server_registered(state: State, event: ServerRegistered, now: Instant) -> Step:
    """Take note of a server and of the segments that it holds. The answer says which to drop."""
    server = event.server
    _check_registration(server)
    if len(state.servers) >= limits.SERVERS_MAX and server.name not in state.servers:
        raise OutOfMemoryError(
            f'no place for memory server "{server.name}": a cluster has at most {limits.SERVERS_MAX}'
        )
    if server.name not in state.servers and event.segment_ids:
        # Dropping them could cost the data of another cluster, or of this one after a wrong --state.
        raise InvalidArgumentError(
            f'memory server "{server.name}" is not known here but holds {len(event.segment_ids)} segments; start the '
            f"coordinator with the --state that knows them, or remove the server's segment files to give that data up"
        )
    known = state.servers.get(server.name)
    server = replace(server, last_seen_at=now.wall, draining=known is not None and known.draining)
    here = {
        segment.id: record.name
        for record in state.buffers.values()
        for segment in record.copies
        if segment.server == server.name and (record.ready or segment.id in event.segment_ids)
    }
    drops = tuple(sorted(event.segment_ids - here.keys()))
    lost = sorted({here[segment_id] for segment_id in here.keys() - event.segment_ids})
    epochs = {segment.id: segment.epoch for record in state.buffers.values() for segment in record.segments}
    # Nobody else would ever drop room for a copy that never began: it was made for the next epoch.
    rooms = tuple(each for each in drops if epochs.get(each) and each not in event.making)
    effects: list[Effect] = [AnswerDrops(drops, tuple(epochs.get(each, 0) for each in drops), rooms)]
    # All come back after a change of leader, and each would be a write. Whether it holds something is kept: one that
    # does is not forgotten while it is away.
    as_it_was = known is not None and server == replace(
        known, last_seen_at=server.last_seen_at, used_bytes=server.used_bytes
    )
    if known is None or not as_it_was or bool(server.used_bytes) != bool(known.used_bytes):
        effects.append(SaveServer(server))
    effects.append(Report(logging.INFO, f'memory server "{server.name}" at {server.data_address} registered'))
    if drops:
        text = f'memory server "{server.name}" drops {len(drops)} segments, of buffers that were deleted or moved'
        effects.append(Report(logging.INFO, text))
    if lost:
        text = (
            f'memory server "{server.name}" came back without the memory of {len(lost)} buffers: {", ".join(lost[:8])}'
        )
        effects.append(Report(logging.ERROR, text))
    state = replace(
        state,
        servers={**state.servers, server.name: server},
        server_leases=state.server_leases.grant(server.name, now.monotonic),
        suspected=state.suspected - {server.name},
    )
    return state, tuple(effects)


def server_renewed(state: State, event: ServerRenewed, now: Instant) -> Step:
    """Renew the lease of a server. Raises NotFoundError if the server must register again."""
    server = _registered(state, event.name, event.instance_id)
    if event.name in state.suspected or not state.alive(event.name, now):
        raise NotFoundError(f'memory server "{event.name}" must register again')
    if event.used_bytes > state.allocation(event.name).nbytes:
        # It holds what no buffer has, e.g. a segment that was made after its creation was given up.
        raise NotFoundError(f'memory server "{event.name}" must register again: it holds more than the buffers do')
    server = replace(server, used_bytes=event.used_bytes, last_seen_at=now.wall)
    leases = state.server_leases.grant(event.name, now.monotonic)
    state = replace(state, servers={**state.servers, event.name: server}, server_leases=leases)
    if event.copies or event.name in state.progress:
        told = {copy.segment_id: copy for copy in event.copies}
        progress = {**state.progress, event.name: told} if told else without(state.progress, event.name)
        state = replace(state, progress=progress)
    return state, ()


def server_left(state: State, event: ServerLeft, now: Instant) -> Step:
    """A server has stopped as it was asked to."""
    server = _registered(state, event.name, event.instance_id)
    state = replace(state, server_leases=state.server_leases.end(event.name))
    report = Report(logging.INFO, f'memory server "{event.name}" left')
    if forgettable(state, event.name, now):
        return replace(state, servers=without(state.servers, event.name)), (EraseServer(event.name), report)
    server = replace(server, last_seen_at=now.wall)
    return replace(state, servers={**state.servers, event.name: server}), (SaveServer(server), report)


def server_died(state: State, event: ServerDied, _: Instant) -> Step:
    """A server's process is known to be gone, before the lease is out."""
    known = state.servers.get(event.name)
    if known is None or known.instance_id != event.instance_id:
        return state, ()
    report = Report(logging.WARNING, f'memory server "{event.name}" is dead: its process is gone')
    return replace(state, server_leases=state.server_leases.end(event.name)), (report,)


def server_drained(state: State, event: ServerDrained, now: Instant) -> Step:
    """Give a server no new segments, or again. Raises if its copies have no place on the others."""
    server = state.servers.get(event.name)
    asked = f'{"undrain" if event.undo else "drain"} of "{event.name}"'
    if server is None:
        raise NotFoundError(f"{asked}: no such memory server is known; there are: {', '.join(sorted(state.servers))}")
    if server.draining != event.undo:
        return state, ()
    if not event.undo:
        try:
            check_room(state.buffers.values(), state.pool(now), event.name)
        except Error as error:
            raise type(error)(f"{asked}: {error}") from None
    server = replace(server, draining=not event.undo)
    text = "gets new segments again" if event.undo else "is being drained"
    report = Report(logging.INFO, f'memory server "{event.name}" {text}')
    return replace(state, servers={**state.servers, event.name: server}), (SaveServer(server), report)


def server_counted(state: State, event: ServerCounted, _: Instant) -> Step:
    """Take note of how much memory of a server is used."""
    known = state.servers.get(event.name)
    if known is None or known.instance_id != event.instance_id:
        return state, ()
    server = replace(known, used_bytes=event.used_bytes)
    return replace(state, servers={**state.servers, event.name: server}), ()


def server_suspected(state: State, event: ServerSuspected, _: Instant) -> Step:
    """A server must register before it may renew."""
    return replace(state, suspected=state.suspected | {event.name}), ()


def _registered(state: State, name: str, instance_id: int) -> ServerRecord:
    server = state.servers.get(name)
    if server is None:
        raise NotFoundError(f'memory server "{name}" is not known; it must register')
    if server.instance_id != instance_id:
        raise NotFoundError(f'memory server "{name}" is known with another run; it must register')
    return server


def _check_registration(server: ServerRecord) -> None:
    check_server_name(server.name)
    check_address("data address", server.data_address)
    check_address("control address", server.control_address)
    if server.instance_id == 0 or server.capacity_bytes == 0:
        raise InvalidArgumentError(f'memory server "{server.name}": instance_id and capacity_bytes must not be 0')
    check_weight(f'memory server "{server.name}": weight', server.weight)
    check_zone(server.zone)


def forgettable(state: State, name: str, now: Instant) -> bool:
    """Return whether a server is away and holds nothing."""
    # Its last report counts too: a server whose buffers were deleted while it was away has their segments to drop.
    holds = state.allocation(name).segments > 0 or state.servers[name].used_bytes > 0
    return not holds and not state.alive(name, now)
