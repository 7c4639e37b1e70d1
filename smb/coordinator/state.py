"""The coordinator's state, and questions about it. Pure: no I/O, no clock, no randomness.

Invariant: `allocated` is the sum over all buffers, pending ones included, of what their segments take on each server.
It grows before any segment is made and shrinks when the record goes, so concurrent creates never promise the same
memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from smb.config.limits import RENEWALS_PER_LEASE
from smb.config.quotas import Quota
from smb.coordinator import limits
from smb.coordinator.buffers import Buffers
from smb.coordinator.drop_rules import is_newer
from smb.coordinator.ended_sessions import EndedSessions
from smb.coordinator.events import CopyProgress, Effect, Instant, ServerRegistered
from smb.coordinator.leases import Leases
from smb.coordinator.lineage import Lineage
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, Held, Kind, SegmentRecord, ServerRecord, SessionRecord, key_of
from smb.coordinator.replicas import Copy, CopyRole, copies_on
from smb.errors import NOT_APPLIED, UNKNOWN, NotFoundError, UnavailableError
from smb.published import LOG

SERVER_LEASE_S = 6.0  # the default; renewed at each third of it, so two renewals may get lost
SESSION_LEASE_S = 30.0  # the default; enough for a client that a page fault storm or a debugger holds up
SESSION_RENEWALS_PER_S = 300.0  # of all clients, a third of what one coordinator answers; beyond it leases grow
SESSION_LEASE_S_LONGEST = 120.0  # limit of that growth: one client's many sessions must not hide that others are dead
FIRST_EPOCH = 1
ALL_SERVERS = ""  # in the place of a server's name, for maintenance
ARRIVED = ".arrived"  # suffix of the buffer that says which bytes of a mirror are there (smb/relay/arrived.py)

Key = TypeVar("Key")
Value = TypeVar("Value")
Step = tuple["State", tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The use of one server by the buffers' records: bytes of capacity and number of segments."""

    nbytes: int = 0
    segments: int = 0


@dataclass(frozen=True, slots=True)
class Drops:
    """How many segments a server has dropped, and the ids of the last ones."""

    count: int = 0
    last: tuple[int, ...] = ()

    def with_one(self, segment_id: int) -> Drops:
        """Return these drops and one more."""
        return Drops(self.count + 1, (*self.last[1 - limits.DROPS_REMEMBERED_MAX :], segment_id))

    def since(self, count: int) -> frozenset[int] | None:
        """Return what was dropped after the first `count` ones; None if that is not known any more."""
        number = self.count - count
        return frozenset(self.last[len(self.last) - number :]) if 0 <= number <= len(self.last) else None


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Planned work: its end on the monotonic clock of this term, and in seconds since 1970."""

    until: float
    until_wall: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What is known of a creation that an earlier run of the coordinator began: see steps/interrupted.py."""

    runs: Mapping[str, int]  # the instance id of each of its servers then
    # By server that has registered in this term, of those that should have a part or have one: which it has, whole.
    held: Mapping[str, frozenset[int]] = field(default_factory=dict)
    leads: frozenset[str] = frozenset()  # of these, the ones that were primaries of a part when they registered
    used: bool = False  # some client has written to one of these segments
    newer: frozenset[int] = frozenset()  # segments of which some server has a later state than the record


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows. Immutable: a step returns a new state, so that a change which could not be stored
    is never visible.

    `buffers` includes locks and barriers, each under its record's key.
    """

    buffers: Buffers = field(default_factory=Buffers)
    servers: Mapping[str, ServerRecord] = field(default_factory=dict)
    allocated: Mapping[str, Allocation] = field(default_factory=dict)
    # Servers that must register again before they may renew, because their list of segments may be wrong.
    suspected: frozenset[str] = frozenset()
    server_leases: Leases[str] = field(default_factory=lambda: Leases(SERVER_LEASE_S))
    # Servers without a sign of life whose lease was prolonged (steps/ticks.py), and how often.
    overdue: Mapping[str, int] = field(default_factory=dict)
    former_lease_s: float = SERVER_LEASE_S  # of servers, the longest that may have been granted before this term
    maintenance: Mapping[str, Maintenance] = field(default_factory=dict)  # by server, or ALL_SERVERS
    session_leases: Leases[int] = field(default_factory=lambda: Leases(SESSION_LEASE_S))
    sessions: Mapping[int, SessionRecord] = field(default_factory=dict)  # that live
    kicked: Mapping[int, str] = field(default_factory=dict)  # ended sessions, and the operators who ended them
    ended_sessions: EndedSessions = field(default_factory=EndedSessions)
    stripe_bytes: int = 0  # of buffers created without a stripe; 0: the default of placement.py
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by namespace; a setting of this run
    # At least as high as each token of the freed locks. One number for all, so that no freed name needs a record.
    token_floor: int = 0
    # Attempts whose buffers were deleted last. A client that repeats such a creation because its answer was lost must
    # not make another buffer. Not stored: the answer would have to stay lost over creation, deletion and a new leader.
    deleted_attempts: tuple[int, ...] = ()
    interrupted: Mapping[int, Interrupted] = field(default_factory=dict)  # by id of the buffer, which is not ready
    # By segment: servers that may have been its primaries until another one took over, as was reported in this
    # term. They live, and answer reads until they have heard of that.
    former_primaries: Mapping[int, frozenset[str]] = field(default_factory=dict)
    # Progress of copies, by the server that makes them, from its last report.
    progress: Mapping[str, Mapping[int, CopyProgress]] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    began: float = -math.inf  # the start of this term, on the monotonic clock
    # By server, as of its last registration in this term. Not stored, since each term asks the servers anew.
    unexplained: Mapping[str, Mapping[int, Held]] = field(default_factory=dict)  # segments held beside the records
    missing: Mapping[str, frozenset[int]] = field(default_factory=dict)  # segments in the records that the server lacks
    others: Mapping[str, frozenset[int]] = field(default_factory=dict)  # those of `missing` held as another copy
    drops: Mapping[str, Drops] = field(default_factory=dict)  # that each server has answered in this term
    # Terms in the server's stamps that this store does not have: changes made in the same term can be compared.
    other_terms: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def alive(self, server: str, now: Instant) -> bool:
        """Whether the server's lease runs. A new leader begins with a lease for each known server."""
        return self.server_leases.runs(server, now.monotonic)

    @property
    def first_lease_s(self) -> float:
        """How long servers' leases run at the start of this term: a former leader may have granted longer ones."""
        return max(self.former_lease_s, self.server_leases.duration_s)

    def late(self, now: Instant) -> list[str]:
        """Return the servers that have a lease and missed all renewals but one in it: if one of several servers that
        were cut off at the same moment has lost its lease, the others have missed as many."""
        soon = now.monotonic + self.server_leases.duration_s / RENEWALS_PER_LEASE
        return [name for name, at in self.server_leases.ends.items() if at <= soon or name in self.overdue]

    def heard(self, server: str, now: Instant) -> bool:
        """Whether the server lives and has reported in this term what it holds."""
        return self.alive(server, now) and server not in self.suspected

    def obeys(self, server: str, now: Instant) -> bool:
        """Whether the server lives and has registered in this term: before, it drops nothing for this coordinator."""
        return self.alive(server, now) and server in self.missing

    def copies_held(self, now: Instant) -> bool:
        """Whether lost copies are not made anew for now: a server in maintenance is away, or all are in maintenance. A
        server that was forgotten held nothing: no copy is to wait for it.
        """
        return any(
            planned.until > now.monotonic
            and (name == ALL_SERVERS or (name in self.servers and not self.heard(name, now)))
            for name, planned in self.maintenance.items()
        )

    def maintenance_until(self, server: str, now: Instant) -> float:
        """Return when the maintenance of a server ends, in seconds since 1970; 0 if there is none."""
        found = (self.maintenance.get(name) for name in (server, ALL_SERVERS))
        return max((each.until_wall for each in found if each is not None and each.until > now.monotonic), default=0.0)

    def confirmed(self, server: str, segment_id: int, now: Instant) -> bool:
        """Whether the server was heard of in this term and holds its copy of a segment that the records place there."""
        return self.heard(server, now) and segment_id not in self.missing.get(server, ())

    def every_server_was_heard(self, now: Instant) -> bool:
        """Whether each server that may live has reported in this term what it holds."""
        return all(self.heard(name, now) or not self.alive(name, now) for name in self.servers)

    def knows_all_memory(self, now: Instant) -> bool:
        """Whether no server is left that may hold memory of which nothing is known: each that may live was heard of,
        and those that are not in the records had the term's first lease to register.
        """
        return now.monotonic >= self.began + self.first_lease_s and self.every_server_was_heard(now)

    @property
    def was_restored(self) -> bool:
        """Whether some server was told of changes that these records lack, because they are from a backup."""
        return any(self.other_terms.values())

    def lost_segments(self, now: Instant) -> frozenset[int]:
        """Return the segments whose only copy is lost: their server came back without it, and no other server has it.
        Empty until every server was heard of."""
        if not any(self.missing.values()) or not self.every_server_was_heard(now):
            return frozenset()
        lost = frozenset(
            segment.id
            for record in self.buffers.values()
            if record.ready
            for segment in record.segments
            if segment.id in self.missing.get(segment.server, ())
            and (not segment.backup or segment.id in self.missing.get(segment.backup, ()))
        )
        return lost - self.contested() if lost else lost

    def where(self) -> dict[int, tuple[BufferRecord, SegmentRecord]]:
        """Return each segment in the records, by id, with its buffer."""
        return {segment.id: (record, segment) for record in self.buffers.values() for segment in record.segments}

    def contested(self) -> frozenset[int]:
        """Return the segments of which some server has a newer whole copy than the records know. Their roles do not
        change until every server was heard of.
        """
        claims = {number for held in self.unexplained.values() for number, each in held.items() if each.whole}
        if not claims:
            return frozenset()
        where = self.where()
        return frozenset(
            number
            for held in self.unexplained.values()
            for number, each in held.items()
            if each.whole and number in where and is_newer(each, *where[number])
        )

    def allocation(self, server: str) -> Allocation:
        """Return what the buffers' records take on the server."""
        return self.allocated.get(server, Allocation())

    def taken_bytes(self, server: str) -> int:
        """Return how many bytes of a server's capacity are taken, by buffers and by segments beside the records."""
        return self.allocation(server).nbytes + sum(each.nbytes for each in self.unexplained.get(server, {}).values())

    def held_bytes_max(self, server: str) -> int:
        """Return how many bytes of a server's capacity are taken by segments that it has, as far as it reported."""
        lacking = self.missing.get(server, frozenset()) - self.others.get(server, frozenset())
        if not lacking:
            return self.taken_bytes(server)
        gone = (copy for record in self.buffers.at(server) for copy in record.copies if copy.server == server)
        return self.taken_bytes(server) - sum(copy.file_bytes for copy in gone if copy.id in lacking)

    def find(self, kind: Kind, name: str) -> BufferRecord | None:
        """Return the ready record of that kind and name."""
        record = self.buffers.get(key_of(kind, name))
        # A buffer's name is looked up unchecked: a name with a colon in it must not find a lock.
        return record if record is not None and record.ready and record.kind is kind else None

    def in_question(self, kind: Kind, name: str, known_id: int = 0) -> BufferRecord | None:
        """Return the record of that name (and id, unless that is 0) if the buffer may have been made, and its servers
        have not said so yet.
        """
        record = self.buffers.get(key_of(kind, name))
        if record is None or record.kind is not kind or record.id not in self.interrupted:
            return None
        return record if known_id in (0, record.id) else None

    def check_known(self, kind: Kind, name: str, known_id: int = 0, attempt_id: int = 0) -> None:
        """Raise UnavailableError if it is not known whether the buffer was made: see `in_question`. `attempt_id` is the
        caller's, if the caller creates the buffer.
        """
        record = self.in_question(kind, name, known_id)
        if record is None:
            return
        unheard = sorted({copy.server for copy in record.copies} - self.interrupted[record.id].held.keys())
        raise UnavailableError(
            f"{record.title}: the coordinator was stopped within its creation, or its records are older. It waits "
            f"until {' and '.join(unheard) or 'every server'} has said what it holds; try again"
            f"{', or delete the buffer (smb rm)' if kind is Kind.BUFFER else ''}",
            outcome=UNKNOWN if record.attempt_id == attempt_id != 0 else NOT_APPLIED,
        )

    def find_id(self, buffer_id: int) -> BufferRecord | None:
        """Return the ready buffer with that id, whatever its current name is."""
        record = self.buffers.with_id(buffer_id)
        return record if record is not None and record.ready and record.kind is Kind.BUFFER else None

    def source(self, record: BufferRecord) -> BufferRecord | None:
        """Return the buffer of which this record is a mirror."""
        return self.buffers.with_id(record.mirror_of) if record.mirror_of else None

    def mirrors(self, record: BufferRecord) -> list[BufferRecord]:
        """Return the ready mirrors of a published buffer, by name."""
        if record.mirror_of or (record.versions < 2 and not record.name.endswith(LOG)):
            return []
        found = [each for each in self.buffers.mirrors_of(record.id) if each.ready]
        return sorted(found, key=lambda each: each.name)

    def listed(self) -> tuple[BufferRecord, ...]:
        """Return the ready buffers, by name: what `smb ls` shows."""
        ready = (record for record in self.buffers.values() if record.ready and record.kind is Kind.BUFFER)
        return tuple(sorted(ready, key=lambda record: record.name))

    def segment_names(self, segment_ids: Iterable[int]) -> dict[int, str]:
        """Return the titles of the buffers to which these segments belong, where known, for operators."""
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
        """Return the client names of these sessions, where known."""
        return {number: self.sessions[number].client_name for number in session_ids if number in self.sessions}

    def client_name(self, session_id: int, default: str = "unknown") -> str:
        """Return the name of a session's client; `default` if no such session lives."""
        return self.sessions[session_id].client_name if session_id in self.sessions else default

    def pool(self, now: Instant) -> Pool:
        """Return the servers on which buffers can be placed now."""
        alive = {name for name in self.servers if self.alive(name, now)}
        draining = frozenset(name for name in alive if self.servers[name].draining)
        open_to = alive - draining
        free = {name: self.servers[name].capacity_bytes - self.taken_bytes(name) for name in open_to}
        weights = {name: self.servers[name].weight for name in alive}
        hosts = {name: self.servers[name].host_name for name in alive if self.servers[name].host_name}
        addresses = {name: self.servers[name].address_host for name in alive}
        zones = {name: self.servers[name].zone for name in alive if self.servers[name].zone}
        dead = frozenset(self.servers.keys() - alive)
        plain = frozenset(name for name in alive if not self.servers[name].data_tls)
        return Pool(free, dead, weights, self.stripe_bytes, hosts, addresses, zones, draining, plain)

    def copies(self, server: str) -> list[Copy]:
        """Return the server's roles in buffers with roles, including buffers that are still being made. It has none of
        a segment that it does not hold, or of which it has another copy: that would count as this one then.

        Two servers must never answer reads of a segment. So a server that was restarted is no primary of a buffer while
        it is not known whether that was made: its backup takes over once that is known. And nobody becomes the primary
        of a segment while its former one has not heard of that and its lease runs.
        """
        missing = self.missing.get(server, ())
        return [
            copy
            for record in self.buffers.at(server)
            for copy in copies_on(record, server)
            if copy.segment_id not in missing
            and (copy.role is not CopyRole.PRIMARY or self._may_lead(server, record, copy.segment_id))
        ]

    def _may_lead(self, server: str, record: BufferRecord, segment_id: int) -> bool:
        waiting = self.interrupted.get(record.id)
        if waiting is not None and server not in waiting.leads:
            return False
        return self.server_leases.ends.keys().isdisjoint(self.former_primaries.get(segment_id, ()))

    def not_led(self) -> frozenset[int]:
        """Return the segments whose primaries wait until the former ones have heard of them."""
        ends = self.server_leases.ends.keys()
        return frozenset(number for number, names in self.former_primaries.items() if not ends.isdisjoint(names))

    def with_former_primaries(self, former: Mapping[int, Collection[str]]) -> State:
        """Return the state with these former primaries, by segment, too. They must register again: then they hear of
        it.
        """
        named = frozenset(name for names in former.values() for name in names)
        more = {number: self.former_primaries.get(number, frozenset()).union(names) for number, names in former.items()}
        both = {**self.former_primaries, **more}
        return replace(self, former_primaries=both, suspected=self.suspected | (named & self.servers.keys()))

    def without_lease(self, server: str) -> State:
        """Return the state without the server's lease. It answers no reads any more."""
        state = self.without_former_primary(server)
        return replace(state, server_leases=self.server_leases.end(server), overdue=without(self.overdue, server))

    def without_former_primary(self, server: str) -> State:
        """Return the state in which nobody waits for this server to hear that others have taken over from it."""
        if not any(server in names for names in self.former_primaries.values()):
            return self
        left = {number: names - {server} for number, names in self.former_primaries.items()}
        return replace(self, former_primaries={number: names for number, names in left.items() if names})

    def rival(self, event: ServerRegistered, now: Instant) -> ServerRecord | None:
        """Return the other run that holds this server's name while its lease runs. It may be dead all the same."""
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
    lineage: Lineage | None = None,
    server_lease_s: float = SERVER_LEASE_S,
    former_lease_s: float = SERVER_LEASE_S,
    maintenance: Mapping[str, float] | None = None,
) -> State:
    """Return the state described by these records. Apply a Restarted event before anything else."""
    known = sorted(sessions, key=lambda session: session.ended)
    ended = {session.id: session.ended for session in known if session.ended}
    state = State(
        servers={server.name: server for server in servers},
        server_leases=Leases(server_lease_s),
        former_lease_s=former_lease_s,
        maintenance={name: Maintenance(math.inf, until) for name, until in (maintenance or {}).items()},
        session_leases=Leases(session_lease_s, most_per_s=SESSION_RENEWALS_PER_S, longest_s=SESSION_LEASE_S_LONGEST),
        quotas=quotas or {},
        sessions={session.id: session for session in known if not session.ended},
        kicked={session.id: session.kicked_by for session in known if session.ended and session.kicked_by},
        ended_sessions=EndedSessions(0, max(ended.values(), default=0), ended),
        stripe_bytes=stripe_bytes,
        token_floor=token_floor,
        lineage=lineage or Lineage(),
    )
    found = list(buffers)
    return replace(state, buffers=Buffers((record.key, record) for record in found), allocated=allocated_by(found))


def find_ready(state: State, name: str, known_id: int = 0) -> BufferRecord:
    """Return the ready buffer of that name, which must have the id `known_id` if that is not 0. Raises NotFoundError,
    and UnavailableError as `check_known` does."""
    record = state.find(Kind.BUFFER, name)
    if record is None:
        state.check_known(Kind.BUFFER, name, known_id)
        raise NotFoundError(f'no buffer "{name}" exists; `smb ls` lists the names')
    if known_id not in (0, record.id):
        raise NotFoundError(
            f'"{name}" is another buffer now: the buffer that was meant was renamed or deleted; open it again by name'
        )
    return record


def put(state: State, *records: BufferRecord) -> State:
    """Return the state with these records, each in the place of the one of its key. Segments count in `allocated`."""
    before = [state.buffers[record.key] for record in records if record.key in state.buffers]
    allocated = _counted(_counted(dict(state.allocated), before, -1), records, +1)
    return replace(state, buffers=state.buffers.changed(records), allocated=allocated)


def remove(state: State, record: BufferRecord) -> State:
    """Return the state without the record."""
    allocated = allocate(state.allocated, record, -1)
    return replace(state, buffers=state.buffers.changed(gone=(record.key,)), allocated=allocated)


def delete(state: State, record: BufferRecord) -> State:
    """Return the state without a buffer, and without its segments in `unexplained`."""
    state = end_copies_beside(remove(state, record), record)
    if record.id in state.interrupted:
        state = replace(state, interrupted=without(state.interrupted, record.id))
    if not record.attempt_id:
        return state
    attempts = (*state.deleted_attempts, record.attempt_id)[-limits.DELETED_ATTEMPTS_MAX :]
    return replace(state, deleted_attempts=attempts)


def end_copies_beside(state: State, *records: BufferRecord) -> State:
    """Return the state without these buffers' segments in `unexplained`: they are dropped with the buffers."""
    ids = [segment.id for record in records for segment in record.segments]
    return replace(state, unexplained={name: without(held, *ids) for name, held in state.unexplained.items()})


def allocate(allocated: Mapping[str, Allocation], record: BufferRecord, sign: int) -> dict[str, Allocation]:
    """Return the allocations with the record added (sign +1) or removed (-1)."""
    return _counted(dict(allocated), (record,), sign)


def allocated_by(records: Iterable[BufferRecord]) -> dict[str, Allocation]:
    """Return what these records take of each server."""
    return _counted({}, records, +1)


def _counted(allocated: dict[str, Allocation], records: Iterable[BufferRecord], sign: int) -> dict[str, Allocation]:
    """Change the allocations in place, and return them."""
    for record in records:
        for segment in record.segments:
            for server in (segment.server, segment.backup, segment.copying_to):
                if server:
                    before = allocated.get(server, Allocation())
                    allocated[server] = Allocation(before.nbytes + sign * segment.file_bytes, before.segments + sign)
    return allocated


def without(mapping: Mapping[Key, Value], *keys: Key) -> dict[Key, Value]:
    """Return the mapping without these keys."""
    gone = set(keys)
    return {other: value for other, value in mapping.items() if other not in gone}
