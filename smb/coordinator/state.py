"""The coordinator's decisions: step(state, event, now) -> (state, effects). Pure: no I/O, no clock, no randomness.

Invariant: `allocated` is the sum over all buffers, pending ones included, of what their segments take on each server.
It grows before any segment is made and shrinks when the record goes, so concurrent creates never promise the same
memory twice. An event that is refused raises one of smb.errors and changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar

from smb.config.parse import check_weight
from smb.config.quotas import Quota
from smb.coordinator.draining import check_room
from smb.coordinator.ended_sessions import EndedSessions
from smb.coordinator.events import (
    AnswerDrops,
    BackupsLost,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    CopiesEnded,
    CopyBegun,
    CopyProgress,
    DropSegments,
    Effect,
    EraseBuffer,
    EraseServer,
    EraseSession,
    Event,
    Instant,
    MakeSegments,
    NamesFreed,
    Report,
    Restarted,
    SaveBuffer,
    SaveServer,
    SaveSession,
    SaveTokenFloor,
    ServerCounted,
    ServerDied,
    ServerDrained,
    ServerLeft,
    ServerRegistered,
    ServerRenewed,
    ServerReturned,
    ServerSuspected,
    SessionClosed,
    SessionRenewed,
    TellEnded,
    Ticked,
    WakeOpeners,
)
from smb.coordinator.leases import Leases
from smb.coordinator.placement import Placement, Pool, place, place_backups, place_like
from smb.coordinator.quotas import check_quota
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord, ServerRecord, SessionRecord, key_of
from smb.coordinator.replicas import Copy, begin_copy, come_back, copies_on, end_copies, fail_over, lose_backups
from smb.coordinator.validate import Creation, check_address, check_name, check_server_name, check_wire, check_zone
from smb.errors import AlreadyExistsError, Error, InvalidArgumentError, NotFoundError, OutOfMemoryError
from smb.published import ABOUT, DELTAS
from smb.rpc.coordinator_client import SessionEndedError
from smb.rpc.metadata import unpack
from smb.security.roles import namespace_of

SERVER_LEASE_S = 6.0  # renewed every third: two renewals may get lost
SESSION_LEASE_S = 30.0  # by default; long enough for a client that a page fault storm or a debugger holds up
SESSION_RENEWALS_PER_S = 300.0  # of all clients, a third of what one coordinator answers: else leases grow
SESSION_LEASE_S_LONGEST = 120.0  # to which they grow: one client's many sessions must not hide that others are dead
SERVER_FORGOTTEN_AFTER_S = 600.0  # a dead server that holds nothing is shown this long
BUFFERS_MAX = 65_536  # each is a record in memory and in one ListBuffers reply
SERVERS_MAX = 1024  # each is probed, listed and sorted at every create
SESSIONS_MAX = 65_536
SESSIONS_PER_CERTIFICATE_MAX = 32_768  # so that the holder of one leaves places for others
METADATA_BYTES_MAX = 16 << 20  # of all buffers, packed: it is held in memory, and read whole at every start
FIRST_EPOCH = 1
ARRIVED = ".arrived"  # after a mirror's name: the buffer that says which bytes are there (smb/relay/arrived.py)

Key = TypeVar("Key")
Value = TypeVar("Value")
Step = tuple["State", tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class Allocation:
    """One server's use by the buffers' records: bytes of capacity and number of segments."""

    nbytes: int = 0
    segments: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows. Immutable: a step makes a new one, so what cannot be stored never was.

    `buffers` has locks and barriers too, each under its record's key.
    """

    buffers: Mapping[str, BufferRecord] = field(default_factory=dict)
    servers: Mapping[str, ServerRecord] = field(default_factory=dict)
    allocated: Mapping[str, Allocation] = field(default_factory=dict)
    # Servers that must register again before they may renew: their list of segments is not known to be right.
    suspected: frozenset[str] = frozenset()
    server_leases: Leases[str] = field(default_factory=lambda: Leases(SERVER_LEASE_S))
    session_leases: Leases[int] = field(default_factory=lambda: Leases(SESSION_LEASE_S))
    client_names: Mapping[int, str] = field(default_factory=dict)
    session_owners: Mapping[int, str] = field(default_factory=dict)  # those that have one: Caller.key
    ended_sessions: EndedSessions = field(default_factory=EndedSessions)
    stripe_bytes: int = 0  # of buffers that are created without one; 0: placement's default
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by namespace; a setting of this run
    # No token of a lock that was freed is higher. One for all, so that nothing is kept of names that are gone.
    token_floor: int = 0
    # Of copies that are being made, by the server that makes them, as it told last.
    progress: Mapping[str, Mapping[int, CopyProgress]] = field(default_factory=dict)

    def alive(self, server: str, now: Instant) -> bool:
        """Whether the server's lease runs."""
        return self.server_leases.runs(server, now.monotonic)

    def allocation(self, server: str) -> Allocation:
        """Return what buffers take on the server."""
        return self.allocated.get(server, Allocation())

    def find(self, kind: Kind, name: str) -> BufferRecord | None:
        """Return what is ready under that name."""
        record = self.buffers.get(key_of(kind, name))
        # A buffer's name is looked up as it came: one with a colon in it must not find a lock.
        return record if record is not None and record.ready and record.kind is kind else None

    def find_id(self, buffer_id: int) -> BufferRecord | None:
        """Return the ready buffer of that id, whatever its name is now."""
        return next((record for record in self.listed() if record.id == buffer_id), None)

    def source(self, record: BufferRecord) -> BufferRecord | None:
        """Return what it is a mirror of."""
        found = (each for each in self.buffers.values() if record.mirror_of and each.id == record.mirror_of)
        return next(found, None)

    def mirrors(self, record: BufferRecord) -> list[BufferRecord]:
        """Return the mirrors of a published buffer, those that are ready, by name."""
        if record.mirror_of or (record.versions < 2 and not record.name.endswith(DELTAS)):
            return []
        found = [each for each in self.buffers.values() if each.mirror_of == record.id and each.ready]
        return sorted(found, key=lambda each: each.name)

    def listed(self) -> tuple[BufferRecord, ...]:
        """Return the buffers, by name, that are shown to everybody."""
        ready = (record for record in self.buffers.values() if record.ready and record.kind is Kind.BUFFER)
        return tuple(sorted(ready, key=lambda record: record.name))

    def segment_names(self, segment_ids: Iterable[int]) -> dict[int, str]:
        """Return what these segments belong to, those that are known, for people."""
        asked = set(segment_ids)
        if not asked:
            return {}
        return {
            segment.id: record.name if record.kind is Kind.BUFFER else f"({record.kind.value}s)"
            for record in self.buffers.values()
            for segment in record.segments
            if segment.id in asked
        }

    def session_names(self, session_ids: Iterable[int]) -> dict[int, str]:
        """Return whose sessions these are, those that are known."""
        return {number: self.client_names[number] for number in session_ids if number in self.client_names}

    def pool(self, now: Instant) -> Pool:
        """Return what there is to place on now."""
        alive = {name for name in self.servers if self.alive(name, now)}
        draining = frozenset(name for name in alive if self.servers[name].draining)
        open_to = alive - draining
        free = {name: self.servers[name].capacity_bytes - self.allocation(name).nbytes for name in open_to}
        weights = {name: self.servers[name].weight for name in alive}
        hosts = {name: self.servers[name].data_address.rpartition(":")[0] for name in alive}
        dead = frozenset(self.servers.keys() - alive)
        plain = frozenset(name for name in alive if not self.servers[name].data_tls)
        return Pool(free, dead, weights, self.stripe_bytes, hosts, draining, plain)

    def copies(self, server: str) -> list[Copy]:
        """Return the server's parts in buffers of two copies, pending ones included."""
        return [copy for record in self.buffers.values() for copy in copies_on(record, server)]

    def rival(self, event: ServerRegistered, now: Instant) -> ServerRecord | None:
        """Return the other run of this server that holds the name, if its lease runs: it may be dead all the same."""
        known = self.servers.get(event.server.name)
        if known is None or known.instance_id == event.server.instance_id or not self.alive(known.name, now):
            return None
        return known


def load(
    buffers: Iterable[BufferRecord],
    servers: Iterable[ServerRecord],
    sessions: Iterable[SessionRecord] = (),
    session_lease_s: float = SESSION_LEASE_S,
    stripe_bytes: int = 0,
    quotas: Mapping[str, Quota] | None = None,
    token_floor: int = 0,
) -> State:
    """Return the state that these records describe. Step it with Restarted before anything else."""
    known = sorted(sessions, key=lambda session: session.ended)
    ended = {session.id: session.ended for session in known if session.ended}
    state = State(
        servers={server.name: server for server in servers},
        session_leases=Leases(session_lease_s, most_per_s=SESSION_RENEWALS_PER_S, longest_s=SESSION_LEASE_S_LONGEST),
        quotas=quotas or {},
        client_names={session.id: session.client_name for session in known if not session.ended},
        session_owners={session.id: session.owner for session in known if not session.ended and session.owner},
        ended_sessions=EndedSessions(0, max(ended.values(), default=0), ended),
        stripe_bytes=stripe_bytes,
        token_floor=token_floor,
    )
    for record in buffers:
        state = _add(state, record)
    return state


def step(state: State, event: Event, now: Instant) -> Step:
    """Return the state after the event, and what must be done. Raises smb.errors.Error where the event is refused."""
    return _STEPS[type(event)](state, event, now)


def _restarted(state: State, event: Restarted, now: Instant) -> Step:
    effects: list[Effect] = []
    for record in [record for record in state.buffers.values() if not record.ready]:
        state = _remove(state, record)
        effects += [
            EraseBuffer(record.key),
            Report(logging.WARNING, f"took back {record.title}: half made at the stop"),
        ]
    # Alive for one lease, so that creates go on; suspected, so that each tells again what it holds.
    state = replace(
        state,
        server_leases=state.server_leases.grant_all(state.servers, now.monotonic),
        suspected=frozenset(state.servers),
        session_leases=state.session_leases.grant_all(state.client_names, now.monotonic),
        ended_sessions=replace(state.ended_sessions, incarnation=event.incarnation),
    )
    return state, tuple(effects)


def _ticked(state: State, event: Ticked, now: Instant) -> Step:
    effects: list[Effect] = []

    def alive(name: str) -> bool:
        return state.server_leases.runs(name, now.monotonic)

    for name in state.server_leases.run_out(now.monotonic):
        state = replace(state, server_leases=state.server_leases.end(name))
        held = state.allocation(name).segments
        effects.append(Report(logging.WARNING, f'memory server "{name}" is gone: no renewal; it holds {held} segments'))
    gone = state.session_leases.run_out(now.monotonic)[: event.ends_max]
    for session_id in gone:
        effects.append(Report(logging.INFO, f"session of {state.client_names[session_id]} is gone: no renewal"))
    state, ends = _end_sessions(state, gone)
    effects += ends
    state, saves = _judge_copies(state, lambda record: fail_over(record, alive), event.ends_max)
    effects += saves
    forgotten = [
        server.name
        for server in state.servers.values()
        if now.wall - server.last_seen_at > SERVER_FORGOTTEN_AFTER_S and _forgettable(state, server.name, now)
    ][: event.ends_max]
    state = replace(state, servers=_without(state.servers, *forgotten), progress=_without(state.progress, *forgotten))
    effects += map(EraseServer, forgotten)
    return state, tuple(effects)


def _server_registered(state: State, event: ServerRegistered, now: Instant) -> Step:
    server = event.server
    _check_registration(server)
    if len(state.servers) >= SERVERS_MAX and server.name not in state.servers:
        raise OutOfMemoryError(f'no place for memory server "{server.name}": a cluster has at most {SERVERS_MAX}')
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
    effects: list[Effect] = [AnswerDrops(drops, tuple(epochs.get(each, 0) for each in drops))]
    # All come back after a change of leader, and each would be a write. Whether it holds something is kept: one that
    # does is not forgotten while it is away.
    as_it_was = known is not None and server == replace(
        known, last_seen_at=server.last_seen_at, used_bytes=server.used_bytes
    )
    if known is None or not as_it_was or bool(server.used_bytes) != bool(known.used_bytes):
        effects.append(SaveServer(server))
    effects.append(Report(logging.INFO, f'memory server "{server.name}" at {server.data_address} registered'))
    if drops:
        text = f'memory server "{server.name}" holds {len(drops)} segments that no buffer has; it is told to drop them'
        effects.append(Report(logging.WARNING, text))
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


def _server_renewed(state: State, event: ServerRenewed, now: Instant) -> Step:
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
        progress = {**state.progress, event.name: told} if told else _without(state.progress, event.name)
        state = replace(state, progress=progress)
    return state, ()


def _server_left(state: State, event: ServerLeft, now: Instant) -> Step:
    server = _registered(state, event.name, event.instance_id)
    state = replace(state, server_leases=state.server_leases.end(event.name))
    report = Report(logging.INFO, f'memory server "{event.name}" left')
    if _forgettable(state, event.name, now):
        return replace(state, servers=_without(state.servers, event.name)), (EraseServer(event.name), report)
    server = replace(server, last_seen_at=now.wall)
    return replace(state, servers={**state.servers, event.name: server}), (SaveServer(server), report)


def _server_died(state: State, event: ServerDied, _: Instant) -> Step:
    known = state.servers.get(event.name)
    if known is None or known.instance_id != event.instance_id:
        return state, ()
    report = Report(logging.WARNING, f'memory server "{event.name}" is dead: its process is gone')
    return replace(state, server_leases=state.server_leases.end(event.name)), (report,)


def _server_returned(state: State, event: ServerReturned, now: Instant) -> Step:
    known = state.servers.get(event.name)
    restarted = known is None or known.instance_id != event.instance_id

    def alive(name: str) -> bool:
        return name != event.name and state.server_leases.runs(name, now.monotonic)

    def judge(record: BufferRecord) -> BufferRecord:
        return come_back(record, event.name, event.segment_ids, alive, restarted=restarted)

    return _judge_copies(state, judge, event.changes_max)


def _backups_lost(state: State, event: BackupsLost, _: Instant) -> Step:
    def judge(record: BufferRecord) -> BufferRecord:
        if not any(copy.segment_id in event.segment_ids for copy in copies_on(record, event.name)):
            return record
        ours = {segment.id for segment in record.segments if segment.server == event.name} & event.segment_ids
        return lose_backups(record, ours)

    return _judge_copies(state, judge, event.changes_max)


def _server_drained(state: State, event: ServerDrained, now: Instant) -> Step:
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


def _copy_begun(state: State, event: CopyBegun, now: Instant) -> Step:
    record, target = state.buffers.get(event.key), state.servers.get(event.target)
    known = target is not None and target.instance_id == event.instance_id and state.alive(event.target, now)
    judged = record
    if record is not None and target is not None and known and not target.draining:
        judged = begin_copy(record, event.segment_id, event.target, event.epoch, event.leaving)
    if record is None or judged is None or judged is record:
        raise NotFoundError(f"segment {event.segment_id:016x} wants no copy on {event.target} any more")
    (segment,) = (each for each in judged.segments if each.id == event.segment_id)
    if event.leaving and not state.alive(segment.server, now):
        raise NotFoundError(f'memory server "{segment.server}", which has the other copy, is not alive')
    text = f"a segment of {record.title} is being copied to {event.target}"
    effects: list[Effect] = [SaveBuffer(judged)]
    if event.leaving:
        text += f", and leaves {event.leaving}"
        effects.append(DropSegments((replace(segment, server=event.leaving),), event.epoch))
    return _add(_remove(state, record), judged), (*effects, Report(logging.INFO, text))


def _copies_ended(state: State, event: CopiesEnded, _: Instant) -> Step:
    def judge(record: BufferRecord) -> BufferRecord:
        return end_copies(record, event.name, event.epochs, whole=event.whole)

    text = "has a new copy" if event.whole else "could not be copied"
    return _judge_copies(state, judge, event.changes_max, text, logging.INFO if event.whole else logging.WARNING)


def _judge_copies(
    state: State,
    judge: Callable[[BufferRecord], BufferRecord],
    changes_max: int | None,
    what: str = "has lost a copy",
    level: int = logging.WARNING,
) -> Step:
    """Give at most so many buffers of two copies the roles that `judge` says."""
    effects: list[Effect] = []
    changed = [
        (record, judged)
        for record in state.buffers.values()
        if record.replicas > 1 and (judged := judge(record)) is not record
    ][:changes_max]
    for record, judged in changed:
        state = _add(_remove(state, record), judged)
        servers = ", ".join(segment.server for segment in judged.segments)
        effects += [SaveBuffer(judged), Report(level, f"{record.title} {what}: it goes on with those on {servers}")]
    return state, tuple(effects)


def _server_counted(state: State, event: ServerCounted, _: Instant) -> Step:
    known = state.servers.get(event.name)
    if known is None or known.instance_id != event.instance_id:
        return state, ()
    server = replace(known, used_bytes=event.used_bytes)
    return replace(state, servers={**state.servers, event.name: server}), ()


def _server_suspected(state: State, event: ServerSuspected, _: Instant) -> Step:
    return replace(state, suspected=state.suspected | {event.name}), ()


def _buffer_wanted(state: State, event: BufferWanted, now: Instant) -> Step:
    creation = event.creation
    if creation.mirror_of:
        creation = _mirroring(state, creation)
    existing = state.buffers.get(creation.key)
    if existing is not None:
        _check_same(state, existing, creation)
        return state, ()
    if len(state.buffers) >= BUFFERS_MAX:
        raise OutOfMemoryError(f'no place for "{creation.name}": a cluster has at most {BUFFERS_MAX} buffers')
    if creation.metadata:
        _check_room_for_metadata(state, creation)
    if creation.like:
        like = _find_ready(state, creation.like)
        creation = _shaped_like(creation, like)
    try:
        pool = state.pool(now)
        free = {name: nbytes for name, nbytes in pool.free_bytes.items() if name not in event.avoid}
        pool = replace(pool, free_bytes=free)
        placement = _placement(state, creation, pool)
        beside = state.buffers[creation.like] if creation.like else None
        backups: tuple[str, ...] = ()
        # A lock is made with one copy where there is no second server, and gets the other one later: else nobody could
        # come back to what has two copies already.
        if creation.replicas > 1 and (creation.kind is Kind.BUFFER or len(pool.free_bytes) > 1):
            backups = place_backups(pool, placement, beside)
    except Error as error:
        raise type(error)(f"{creation.asked}: {error}") from None
    record = _pending(creation, placement, backups, event.new_id, now)
    if creation.mirror_of:
        record = replace(record, mirror_of=_find_ready(state, creation.mirror_of).id)
    _check_quota(state, state.buffers.values(), record, creation.asked)
    return _add(state, record), (SaveBuffer(record), MakeSegments(record))


def _buffer_made(state: State, event: BufferMade, _: Instant) -> Step:
    record = replace(state.buffers[event.key], ready=True)
    if record.mirror_of and state.source(record) is None:
        raise NotFoundError(f"{record.title}: the buffer that it was to mirror was deleted meanwhile")
    state = replace(state, buffers={**state.buffers, record.key: record})
    servers = ", ".join(segment.server for segment in record.segments)
    copies = f" in {record.replicas} copies" if record.replicas > 1 else ""
    report = Report(logging.INFO, f"made {record.title}, {record.nbytes} bytes on {servers}{copies}")
    return state, (SaveBuffer(record), WakeOpeners(record.key), report)


def _buffer_failed(state: State, event: BufferFailed, _: Instant) -> Step:
    record = state.buffers[event.key]
    effects = (EraseBuffer(record.key), DropSegments(record.copies), WakeOpeners(record.key))
    return _remove(state, record), effects


def _buffer_deleted(state: State, event: BufferDeleted, _: Instant) -> Step:
    record = state.find(Kind.BUFFER, event.name)
    if record is None:
        if event.missing_ok:
            return state, ()
        raise NotFoundError(f'no buffer "{event.name}" to delete')
    effects: list[Effect] = []
    for each in (record, *state.mirrors(record)):
        beside = state.buffers.get(each.name + ARRIVED) if each.mirror_of else None
        for gone in (each, *([beside] if beside is not None and beside.ready else [])):
            state = _remove(state, gone)
            effects += [EraseBuffer(gone.key), DropSegments(gone.copies)]
            effects.append(Report(logging.INFO, f"deleted {gone.title}"))
    return state, tuple(effects)


def _buffer_renamed(state: State, event: BufferRenamed, _: Instant) -> Step:
    asked = f'rename of "{event.name}" to "{event.new_name}"'
    check_name(Kind.BUFFER, event.new_name)
    if event.folder:
        return _folder_renamed(state, event, asked)
    record = state.find(Kind.BUFFER, event.name)
    if record is None:
        raise NotFoundError(f'{asked}: no buffer "{event.name}"')
    if event.new_name == event.name:
        return state, ()
    effects: tuple[Effect, ...] = ()
    there = state.buffers.get(event.new_name)
    for each in (record, *([there] if there is not None else [])):
        _check_without_mirrors(state, each, asked)
        if (published_as(each.metadata) or {}).get("deltas"):
            raise InvalidArgumentError(
                f'{asked}: "{each.name}" is published with deltas=, which lie beside it under its name; publish under '
                f"another name, or rename its folder"
            )
    if there is not None and event.displaced_name and event.replace and there.ready:
        check_name(Kind.BUFFER, event.displaced_name)
        if event.displaced_name in state.buffers:
            raise AlreadyExistsError(
                f'{asked}: a buffer "{event.displaced_name}" exists, so none can be put aside there'
            )
        state, effects = _called(state, there, event.displaced_name, asked)
    elif there is not None:
        if not event.replace or not there.ready:
            raise AlreadyExistsError(f'{asked}: a buffer "{event.new_name}" exists; delete it, or have it replaced')
        state, effects = _remove(state, there), (DropSegments(there.copies),)
    state, renamed = _called(state, record, event.new_name, asked)
    return state, (*effects, *renamed, Report(logging.INFO, f'renamed {record.title} to "{event.new_name}"'))


def _folder_renamed(state: State, event: BufferRenamed, asked: str) -> Step:
    folder, new_folder = event.name + "/", event.new_name + "/"
    records = [record for record in state.listed() if record.name.startswith(folder)]
    if not records:
        raise NotFoundError(f'{asked}: no buffer "{folder}..."')
    if new_folder.startswith(folder):
        raise InvalidArgumentError(f"{asked}: a folder can't go into itself")
    for record in state.buffers.values():
        if record.kind is Kind.BUFFER and (record.name == event.new_name or record.name.startswith(new_folder)):
            raise AlreadyExistsError(f'{asked}: a buffer "{record.name}" exists')
    effects: list[Effect] = []
    for record in records:
        _check_without_mirrors(state, record, asked)
        new_name = new_folder + record.name[len(folder) :]
        check_name(Kind.BUFFER, new_name)
        state, renamed = _called(state, record, new_name, asked)
        effects += renamed
    effects.append(Report(logging.INFO, f'renamed {len(records)} buffers "{folder}..." to "{new_folder}..."'))
    return state, tuple(effects)


def _called(state: State, record: BufferRecord, name: str, asked: str) -> Step:
    """Give a record another name: what it takes of its servers stays as it is; it must fit the quota of a namespace
    that it comes to.
    """
    named = replace(record, name=name)
    others = _without(state.buffers, record.key)
    if namespace_of(name) != namespace_of(record.name):
        _check_quota(state, others.values(), named, asked)
    buffers = {**others, named.key: named}
    # In this order: where one record takes the name that another one leaves, its save is the later change of that key.
    return replace(state, buffers=buffers), (EraseBuffer(record.key), SaveBuffer(named), WakeOpeners(named.key))


def _check_without_mirrors(state: State, record: BufferRecord, asked: str) -> None:
    if record.mirror_of or state.mirrors(record):
        what = "is a mirror" if record.mirror_of else "has mirrors"
        raise InvalidArgumentError(f'{asked}: "{record.name}" {what}; stop its relays first: smb relay NAME --stop')


def _names_freed(state: State, event: NamesFreed, _: Instant) -> Step:
    freed = [
        record
        for record in state.buffers.values()
        if record.kind is not Kind.BUFFER
        and record.ready
        and record.segments[0].id in event.tokens
        and record.segments[0].server == event.server
    ]
    if not freed:
        return state, ()
    allocated = state.allocated
    for record in freed:
        allocated = _allocate(allocated, record, -1)
    floor = max(state.token_floor, *(event.tokens[record.segments[0].id] for record in freed))
    state = replace(
        state,
        buffers=_without(state.buffers, *(record.key for record in freed)),
        allocated=allocated,
        token_floor=floor,
    )
    report = Report(logging.INFO, f"freed {len(freed)} locks and barriers that nobody used any more")
    erased = (EraseBuffer(record.key) for record in freed)
    copies = tuple(copy for record in freed for copy in record.copies)
    return state, (*erased, SaveTokenFloor(floor), DropSegments(copies), report)


def _session_renewed(state: State, event: SessionRenewed, now: Instant) -> Step:
    if event.session_id == 0:
        raise InvalidArgumentError("a session's id is not 0")
    if event.session_id in state.ended_sessions:
        raise SessionEndedError(
            f"the session of {event.client_name} is over: it was closed, or its lease ran out before it was renewed; "
            f"what it held was given up, so connect again"
        )
    if len(state.client_names) >= SESSIONS_MAX and event.session_id not in state.client_names:
        raise OutOfMemoryError(f"no place for a session of {event.client_name}: there are {SESSIONS_MAX} already")
    if event.session_id not in state.client_names:
        _check_room_of_certificate(state, event)
    leases = state.session_leases.grant(event.session_id, now.monotonic)
    if event.session_id in state.client_names:
        return replace(state, session_leases=leases), ()
    names = {**state.client_names, event.session_id: event.client_name}
    owners = {**state.session_owners, event.session_id: event.owner} if event.owner else state.session_owners
    session = SessionRecord(event.session_id, event.client_name, owner=event.owner)
    state = replace(state, session_leases=leases, client_names=names, session_owners=owners)
    return state, (SaveSession(session),)


def _session_closed(state: State, event: SessionClosed, _: Instant) -> Step:
    # One that is not known may be of before the loss of our records: its servers still know it.
    if event.session_id == 0 or event.session_id in state.ended_sessions:
        return state, ()
    return _end_sessions(state, (event.session_id,))


_STEPS: dict[type, Callable[[State, Any, Instant], Step]] = {
    Restarted: _restarted,
    Ticked: _ticked,
    ServerRegistered: _server_registered,
    ServerRenewed: _server_renewed,
    ServerLeft: _server_left,
    ServerDied: _server_died,
    ServerDrained: _server_drained,
    ServerReturned: _server_returned,
    BackupsLost: _backups_lost,
    CopyBegun: _copy_begun,
    CopiesEnded: _copies_ended,
    ServerCounted: _server_counted,
    ServerSuspected: _server_suspected,
    BufferWanted: _buffer_wanted,
    BufferMade: _buffer_made,
    BufferFailed: _buffer_failed,
    BufferDeleted: _buffer_deleted,
    BufferRenamed: _buffer_renamed,
    NamesFreed: _names_freed,
    SessionRenewed: _session_renewed,
    SessionClosed: _session_closed,
}


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


def _forgettable(state: State, name: str, now: Instant) -> bool:
    # Its last report counts too: a server whose buffers were deleted while it was away has their segments to drop.
    holds = state.allocation(name).segments > 0 or state.servers[name].used_bytes > 0
    return not holds and not state.alive(name, now)


def _find_ready(state: State, name: str) -> BufferRecord:
    record = state.find(Kind.BUFFER, name)
    if record is None:
        raise NotFoundError(f'no buffer "{name}"')
    return record


def _mirroring(state: State, creation: Creation) -> Creation:
    """Return the creation of a mirror with the form of what it is one of, which has to be published."""
    source = _find_ready(state, creation.mirror_of)
    (server,) = creation.server_names
    if namespace_of(creation.name) != namespace_of(source.name):
        raise InvalidArgumentError(
            f'{creation.asked}, named "{creation.name}": a mirror is in the namespace of its source, so that the same '
            f"clients may read it"
        )
    if source.mirror_of:
        raise InvalidArgumentError(f'{creation.asked}: "{source.name}" is a mirror itself; name what it is one of')
    if source.versions < 2 and not _is_ring(state, source):
        raise InvalidArgumentError(
            f'{creation.asked}: "{source.name}" is not published: it has one copy; only what was created with '
            f"versions=2 or more, as a Publisher does, can have mirrors"
        )
    if {segment.server for segment in source.segments} == {server}:
        raise InvalidArgumentError(f'{creation.asked}: "{source.name}" itself lies on "{server}"')
    return replace(
        creation,
        shape=source.shape,
        dtype=source.dtype,
        versions=source.versions,
        metadata=source.metadata,
        wire=source.wire,
    )


def _is_ring(state: State, record: BufferRecord) -> bool:
    """Whether it has the deltas of a published state: its mirrors are filled generation by generation."""
    of = state.find(Kind.BUFFER, record.name.removesuffix(DELTAS)) if record.name.endswith(DELTAS) else None
    if of is None or of.versions < 2 or of.mirror_of:
        return False
    return bool((published_as(of.metadata) or {}).get("deltas"))


@lru_cache(maxsize=64)  # its keys are metadata, at most 1 MiB each
def published_as(packed: bytes) -> dict[str, object] | None:
    """Return how a state is published (smb/torch/publish.py), from its metadata; None if it is no published state. The
    event loop asks, and metadata may be megabytes: each is parsed once.
    """
    text = unpack(packed)
    about = json.loads(text).get(ABOUT) if f'"{ABOUT}"' in text else None
    return about if isinstance(about, dict) else None


def _check_same(state: State, existing: BufferRecord, creation: Creation) -> None:
    """Raise AlreadyExistsError unless `existing` is what an exist_ok creation describes."""
    if creation.attempt_id and creation.attempt_id == existing.attempt_id:
        return  # the answer was lost on the way
    if existing.kind is not Kind.BUFFER:
        return  # its form was decided here, perhaps by an earlier version of ours, and stays
    if not creation.exist_ok:
        doing = "exists" if existing.ready else "is being created by another client"
        raise AlreadyExistsError(
            f'a buffer "{existing.name}" {doing}; choose another name, delete it, or pass exist_ok=True'
        )
    wire = creation.wire
    if creation.like:
        like = _find_ready(state, creation.like)
        creation = _shaped_like(creation, like)
        moves = existing.replicas > 1 or like.replicas > 1
        differs = _difference("layout", _cut_of(existing, moves), _cut_of(like, moves))
    else:
        differs = _wishes_differ(existing, creation)
    differs = (
        _difference("shape", existing.shape, creation.shape)
        or _difference("dtype", existing.dtype, creation.dtype)
        or _difference("versions", existing.versions, creation.versions)
        or _difference("replicas", existing.replicas, creation.replicas)
        or ("it is a mirror" if existing.mirror_of and not creation.mirror_of else "")
        or ("it is no mirror" if creation.mirror_of and not existing.mirror_of else "")
        or (_difference("wire", existing.wire, wire) if wire else "")
        or differs
    )
    if differs:
        raise AlreadyExistsError(
            f'a buffer "{existing.name}" exists, but {differs}; delete it first, or take another name'
        )


def _check_quota(state: State, there: Iterable[BufferRecord], wanted: BufferRecord, asked: str) -> None:
    try:
        check_quota(state.quotas, there, wanted)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{asked}: {error}") from None


def _check_room_for_metadata(state: State, creation: Creation) -> None:
    there = sum(len(record.metadata) for record in state.buffers.values())
    wanted = len(creation.metadata)
    if there + wanted > METADATA_BYTES_MAX:
        raise OutOfMemoryError(
            f"{creation.asked}: no room for {wanted} bytes of metadata, packed: the buffers that are there "
            f"have {there} of {METADATA_BYTES_MAX} bytes; delete some, or keep it in a buffer"
        )


def _check_room_of_certificate(state: State, event: SessionRenewed) -> None:
    if not event.owner or len(state.session_owners) < SESSIONS_PER_CERTIFICATE_MAX:
        return
    if sum(owner == event.owner for owner in state.session_owners.values()) >= SESSIONS_PER_CERTIFICATE_MAX:
        raise OutOfMemoryError(
            f"no place for a session of {event.client_name}: its certificate has {SESSIONS_PER_CERTIFICATE_MAX} "
            f"already; close clients, or give some of them a certificate of another name"
        )


def _wishes_differ(existing: BufferRecord, creation: Creation) -> str:
    segments = tuple(segment.server for segment in existing.segments)
    servers = tuple(dict.fromkeys(segments))
    stripes = -(-existing.nbytes // existing.stripe_bytes)
    differs = ""
    if creation.stripe_bytes:
        differs = differs or _difference("stripe", existing.stripe_bytes, creation.stripe_bytes)
    if existing.replicas > 1:
        return differs  # its segments may have gone to any servers since
    if creation.server_names:
        named = creation.server_names[:stripes]
        if len(servers) < len(segments) and set(named) == set(servers):
            named = servers  # weights decided their order
        differs = differs or _difference("servers", servers, named)
    if creation.server_count:
        differs = differs or _difference("server count", len(servers), min(creation.server_count, stripes))
    return differs


def _cut_of(record: BufferRecord, moves: bool) -> tuple[object, ...]:
    """Return how it is cut, and where it lies unless it `moves`."""
    return (
        record.stripe_bytes,
        record.chunk_bytes,
        *("" if moves else segment.server for segment in record.segments),
    )


def _difference(what: str, there: object, asked: object) -> str:
    return "" if there == asked else f"with {what} {there}, not {asked}"


def _shaped_like(creation: Creation, like: BufferRecord) -> Creation:
    """Return the creation with the shape and dtype of `like`, which it must not contradict; its wire if it has none."""
    creation = replace(creation, wire=creation.wire or like.wire)
    check_wire(replace(creation, dtype=creation.dtype or like.dtype))
    if not creation.dtype and not creation.shape:
        return replace(creation, shape=like.shape, dtype=like.dtype)
    if (creation.shape, creation.dtype) != (like.shape, like.dtype):
        raise InvalidArgumentError(
            f'create of "{creation.name}" with shape {creation.shape} and dtype {creation.dtype or "not given"}: '
            f'like="{like.name}" needs shape {like.shape} and dtype {like.dtype}'
        )
    return creation


def _placement(state: State, creation: Creation, pool: Pool) -> Placement:
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
    creation: Creation, placement: Placement, backups: tuple[str, ...], new_id: Callable[[], int], now: Instant
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


def _add(state: State, record: BufferRecord) -> State:
    allocated = _allocate(state.allocated, record, +1)
    return replace(state, buffers={**state.buffers, record.key: record}, allocated=allocated)


def _remove(state: State, record: BufferRecord) -> State:
    allocated = _allocate(state.allocated, record, -1)
    return replace(state, buffers=_without(state.buffers, record.key), allocated=allocated)


def _allocate(allocated: Mapping[str, Allocation], record: BufferRecord, sign: int) -> dict[str, Allocation]:
    changed = dict(allocated)
    for segment in record.copies:
        before = changed.get(segment.server, Allocation())
        changed[segment.server] = Allocation(before.nbytes + sign * segment.file_bytes, before.segments + sign)
    return changed


def _end_sessions(state: State, session_ids: tuple[int, ...]) -> Step:
    if not session_ids:
        return state, ()
    ended, forgotten = state.ended_sessions.end(session_ids)
    saves = [
        SaveSession(SessionRecord(session_id, "", ended.numbers[session_id]))
        for session_id in session_ids
        if session_id in ended
    ]
    state = replace(
        state,
        session_leases=state.session_leases.end(*session_ids),
        client_names=_without(state.client_names, *session_ids),
        session_owners=_without(state.session_owners, *session_ids),
        ended_sessions=ended,
    )
    return state, (*saves, *map(EraseSession, forgotten), TellEnded(session_ids))


def _without(mapping: Mapping[Key, Value], *keys: Key) -> dict[Key, Value]:
    gone = set(keys)
    return {other: value for other, value in mapping.items() if other not in gone}
