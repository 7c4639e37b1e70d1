"""Memory servers that register, renew, leave, die and are drained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from smb.config.parse import check_weight
from smb.coordinator import limits
from smb.coordinator.drop_rules import Where, epoch_of, ground_to_drop, is_newer
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
from smb.coordinator.records import Held, ServerRecord
from smb.coordinator.room_to_drain import check_room
from smb.coordinator.state import Drops, State, Step, without
from smb.coordinator.steps.copies import NotAskedError, check_all_asked, not_those_copies
from smb.coordinator.steps.interrupted import heard_from
from smb.coordinator.validate import check_address, check_host_name, check_server_name, check_zone
from smb.drop_reasons import Ground
from smb.errors import Error, InvalidArgumentError, NotFoundError, OutOfMemoryError


def server_registered(state: State, event: ServerRegistered, now: Instant) -> Step:
    """Record a server and the segments that it holds. The answer says which of them it must drop."""
    server = event.server
    _check_registration(server)
    if len(state.servers) >= limits.SERVERS_MAX and server.name not in state.servers:
        raise OutOfMemoryError(
            f'no place for memory server "{server.name}": a cluster has at most {limits.SERVERS_MAX}; stop one first'
        )
    dropped = state.drops.get(server.name, Drops()).since(event.drops)
    if dropped is None:
        raise NotAskedError(
            f'memory server "{server.name}" dropped too many segments while it registered; it must register again'
        )
    event = replace(event, held=without(event.held, *dropped))
    where = state.where()
    _check_cluster(state, event, where)
    check_all_asked(state, server.name, event.held, event.missing)
    known = state.servers.get(server.name)
    server = replace(server, last_seen_at=now.wall, draining=known is not None and known.draining)
    here = {
        segment.id: record.name
        for record in state.buffers.at(server.name)
        for segment in record.copies
        if segment.server == server.name and (record.ready or segment.id in event.held)
    }
    missing = event.missing & here.keys()
    others = not_those_copies(state, server.name, event.held)
    missing |= others
    # This comes before the judgement: whether others hold a copy depends on who was heard of, this server included.
    state = replace(
        state,
        servers={**state.servers, server.name: server},
        server_leases=state.server_leases.grant(server.name, now.monotonic),
        suspected=state.suspected - {server.name},
        overdue=without(state.overdue, server.name),
        missing={**state.missing, server.name: missing},
        others={**state.others, server.name: others},
        other_terms={
            **state.other_terms,
            server.name: state.other_terms.get(server.name, frozenset()).union(
                stamp[:2] for stamp in event.stamps if not state.lineage.covers(stamp)
            ),
        },
    )
    answer, unexplained = _judged(state, event, here, others, where, now)
    state = replace(state, unexplained={**state.unexplained, server.name: unexplained})
    lost = sorted({here[segment_id] for segment_id in missing & state.lost_segments(now)})
    state = heard_from(state, event)
    effects: list[Effect] = [answer]
    # After a change of leader all servers come back, and each changed record would be a write. Whether a server holds
    # something is stored, because a server that does is not forgotten while it is away.
    as_it_was = known is not None and server == replace(
        known, last_seen_at=server.last_seen_at, used_bytes=server.used_bytes
    )
    if known is None or not as_it_was or bool(server.used_bytes) != bool(known.used_bytes):
        effects.append(SaveServer(server))
    effects.append(Report(logging.INFO, f'memory server "{server.name}" at {server.data_address} registered'))
    effects += _said(server.name, answer, unexplained, lost)
    return state, tuple(effects)


def _check_cluster(state: State, event: ServerRegistered, where: Where) -> None:
    """Raise InvalidArgumentError for a server with memory of another cluster, or of this cluster before its --state was
    lost: then no record says what its segments are.
    """
    name = event.server.name
    clusters = {stamp.cluster for stamp in event.stamps}
    of_others = clusters and state.lineage.cluster not in clusters
    if (
        event.held
        and (of_others or (name not in state.servers and not clusters))
        and event.held.keys().isdisjoint(where)
    ):
        raise InvalidArgumentError(
            f'memory server "{name}" is not known here but holds {len(event.held)} segments; start the coordinator '
            f"with the --state that knows them, or remove the server's segment files to give that data up"
        )


def _judged(
    state: State,
    event: ServerRegistered,
    here: Mapping[int, str],
    others: frozenset[int],
    where: Where,
    now: Instant,
) -> tuple[AnswerDrops, dict[int, Held]]:
    """Return the server's instructions about its segments, and the segments that it keeps beside the records."""
    name = event.server.name

    def confirmed(other: str, number: int) -> bool:
        return (other, number) not in event.unproven and state.confirmed(other, number, now)

    covered = bool(event.stamps) and all(map(state.lineage.covers, event.stamps))
    grounds: dict[int, Ground] = {}
    kept: dict[int, Held] = {}
    for segment_id, held in sorted(event.held.items()):
        if segment_id in here:
            if held.whole and is_newer(held, *where[segment_id]):
                kept[segment_id] = replace(held, nbytes=0, quarantined=held.quarantined or not covered)
            continue
        if segment_id in event.making:
            continue
        ground = ground_to_drop(name, segment_id, held, where, confirmed, covered=covered)
        if ground is None:
            kept[segment_id] = replace(held, quarantined=held.quarantined or not covered)
        else:
            grounds[segment_id] = ground
    drops = tuple(grounds)
    epochs = {segment_id: epoch_of(*where[segment_id]) for segment_id in drops if segment_id in where}
    answer = AnswerDrops(
        drops,
        tuple(epochs.get(each, 0) for each in drops),
        # Also drop room for a copy that never began: it was made for the next epoch, and no other rule would drop it.
        tuple(each for each in drops if each in epochs),
        tuple(grounds.values()),
        tuple(each for each, held in kept.items() if held.quarantined and not event.held[each].quarantined),
        tuple(each for each, held in event.held.items() if held.quarantined and each in here and each not in kept),
        tuple(
            (each, held.epoch)
            for each, held in sorted(event.held.items())
            if held.primary
            and each in where
            and (each not in here or each in others)  # it has no role of another copy than the record's
            and each not in grounds
            and held.epoch <= epoch_of(*where[each])
        ),
    )
    return answer, kept


def _said(name: str, answer: AnswerDrops, kept: Mapping[int, Held], lost: Sequence[str]) -> Iterator[Effect]:
    if answer.segment_ids:
        text = f'memory server "{name}" drops {len(answer.segment_ids)} segments, of buffers that were deleted or moved'
        yield Report(logging.INFO, text)
    beside = sum(each not in answer.taken_up for each in kept)
    if beside:
        text = f'memory server "{name}" keeps {beside} segments that no record accounts for: see smb status'
        yield Report(logging.WARNING, text)
    if lost:
        text = f'memory server "{name}" came back without the memory of {len(lost)} buffers: {", ".join(lost[:8])}'
        yield Report(logging.ERROR, text)


def server_renewed(state: State, event: ServerRenewed, now: Instant) -> Step:
    """Renew a server's lease. Raises NotFoundError if the server must register again."""
    server = _registered(state, event.name, event.instance_id)
    if event.name in state.suspected or not state.alive(event.name, now):
        raise NotFoundError(f'memory server "{event.name}" must register again')
    if event.used_bytes > state.held_bytes_max(event.name) and not event.making:
        # It holds more than the records, e.g. a segment that was made after its creation was given up.
        raise NotFoundError(f'memory server "{event.name}" must register again: it holds more than the records say')
    server = replace(server, used_bytes=event.used_bytes, last_seen_at=now.wall)
    leases = state.server_leases.grant(event.name, now.monotonic)
    state = replace(state, servers={**state.servers, event.name: server}, server_leases=leases)
    if event.name in state.overdue:
        state = replace(state, overdue=without(state.overdue, event.name))
    state = state.without_former_primary(event.name)  # it has registered, and got the answer
    if event.copies or event.name in state.progress:
        reported = {copy.segment_id: copy for copy in event.copies}
        progress = {**state.progress, event.name: reported} if reported else without(state.progress, event.name)
        state = replace(state, progress=progress)
    return state, ()


def server_left(state: State, event: ServerLeft, now: Instant) -> Step:
    """A server has stopped cleanly."""
    server = _registered(state, event.name, event.instance_id)
    state = state.without_lease(event.name)
    report = Report(logging.INFO, f'memory server "{event.name}" left')
    if forgettable(state, event.name, now):
        return replace(state, servers=without(state.servers, event.name)), (EraseServer(event.name), report)
    server = replace(server, last_seen_at=now.wall)
    return replace(state, servers={**state.servers, event.name: server}), (SaveServer(server), report)


def server_died(state: State, event: ServerDied, _: Instant) -> Step:
    """A server's process has ended before its lease. Changes nothing if that was known."""
    known = state.servers.get(event.name)
    if known is None or known.instance_id != event.instance_id or event.name not in state.server_leases.ends:
        return state, ()
    report = Report(logging.WARNING, f'memory server "{event.name}" is dead: its process is gone')
    return state.without_lease(event.name), (report,)


def server_drained(state: State, event: ServerDrained, now: Instant) -> Step:
    """Stop giving new segments to a server, or start again. Raises if the other servers lack room for its copies."""
    server = state.servers.get(event.name)
    asked = f'{"undrain" if event.undo else "drain"} of "{event.name}"'
    if server is None:
        raise NotFoundError(
            f"{asked}: no memory server has that name; there are: {', '.join(sorted(state.servers)) or 'none'}"
        )
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


def server_counted(state: State, event: ServerCounted, now: Instant) -> Step:
    """Record how much memory of a server is used, and which segment it dropped. That segment is also removed from its
    list, because the server may have registered with it meanwhile, and from the list of a registration in progress.
    """
    if event.dropped:
        drops = state.drops.get(event.name, Drops()).with_one(event.dropped)
        state = replace(state, drops={**state.drops, event.name: drops})
    known = state.servers.get(event.name)
    if known is None:
        return state, ()
    beside = state.unexplained.get(event.name, {})
    if known.instance_id != event.instance_id:
        # A process of a release that does not read `instance_id` takes a drop that is meant for the process before it,
        # perhaps after it listed the segment. Another list tells whether it is still there.
        return server_suspected(state, ServerSuspected(event.name), now) if event.dropped in beside else (state, ())
    if event.dropped in beside:
        state = replace(state, unexplained={**state.unexplained, event.name: without(beside, event.dropped)})
    server = replace(known, used_bytes=event.used_bytes)
    return replace(state, servers={**state.servers, event.name: server}), ()


def server_suspected(state: State, event: ServerSuspected, _: Instant) -> Step:
    """A server must register before it may renew again."""
    return replace(state, suspected=state.suspected | {event.name}), ()


def _registered(state: State, name: str, instance_id: int) -> ServerRecord:
    server = state.servers.get(name)
    if server is None:
        raise NotFoundError(f'memory server "{name}" is not known; it must register')
    if server.instance_id != instance_id:
        raise NotFoundError(f'another run of memory server "{name}" is registered; this one must register')
    return server


def _check_registration(server: ServerRecord) -> None:
    check_server_name(server.name)
    check_address("data address", server.data_address)
    check_address("control address", server.control_address)
    if server.instance_id == 0 or server.capacity_bytes == 0:
        raise InvalidArgumentError(f'memory server "{server.name}": instance_id and capacity_bytes must not be 0')
    check_weight(f'memory server "{server.name}": weight', server.weight)
    check_zone(server.zone)
    check_host_name(server.host_name)


def forgettable(state: State, name: str, now: Instant) -> bool:
    """Return whether a server is away and holds no segment."""
    # Its last report counts, too: if its buffers were deleted while it was away, it still has their segments to drop.
    holds = state.allocation(name).segments > 0 or state.servers[name].used_bytes > 0
    return not holds and not state.alive(name, now)
