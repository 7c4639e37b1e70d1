"""smb.coordinator.steps under any order of events, restarts included: what must always hold, checked after each one.

`SMB_LONG=1` runs twenty times as many examples. A failure prints the steps that lead to it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from smb import errors
from smb.coordinator.events import (
    AnswerDrops,
    BufferDeleted,
    BufferFailed,
    BufferMade,
    BufferRenamed,
    BufferWanted,
    DropSegments,
    Effect,
    EraseBuffer,
    EraseServer,
    EraseSession,
    Event,
    Instant,
    MakeSegments,
    Restarted,
    SaveBuffer,
    SaveServer,
    SaveSession,
    ServerCounted,
    ServerLeft,
    ServerRenewed,
    ServerSuspected,
    SessionClosed,
    SessionRenewed,
    TellEnded,
    Ticked,
)
from smb.coordinator.lineage import Lineage
from smb.coordinator.records import BufferRecord, Kind, ServerRecord, SessionRecord
from smb.coordinator.state import SERVER_LEASE_S, Allocation, State, load
from smb.coordinator.steps import step
from smb.coordinator.validate import Creation, check_creation, first_use
from smb.rpc.coordinator_client import SessionEndedError
from tests.fault.long import LIMIT_S, times
from tests.support.decisions import registration

pytestmark = pytest.mark.timeout(LIMIT_S)

SERVERS = st.sampled_from("abc")
NAMES = st.sampled_from(["v", "w", "lock:w", "lock:v"])
GOOD_NAMES = st.sampled_from(["v", "w"])
SESSION_LEASE_S = 4.0
KIB = 1 << 10


class CoordinatorMachine(RuleBasedStateMachine):
    """The state, the store as its effects made it, and what the servers and clients were told."""

    pending = Bundle("pending")  # keys of records whose segments are being made

    def __init__(self) -> None:
        super().__init__()
        self.ids = count(1)
        self.incarnations = count(1)
        self.seconds = 0.0
        self.state = State(lineage=Lineage().begun(1))
        self.buffers: dict[str, BufferRecord] = {}  # the store
        self.servers: dict[str, ServerRecord] = {}
        self.sessions: dict[int, SessionRecord] = {}
        self.dropped: set[int] = set()  # segments that some server was told to drop
        self.shown: dict[str, BufferRecord] = {}  # locks and barriers, as the first client was told
        self.asked: list[Creation] = []  # of which the answer may get lost
        self.made: defaultdict[int, set[int]] = defaultdict(set)  # ids of buffers, by the attempt that made them
        self.ended: list[int] = []
        self.seen: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self.heard: defaultdict[str, set[int]] = defaultdict(set)  # sessions' ends, by server
        self.restart()
        for name in ("a", "b"):
            self.register(name, 1, frozenset(), False, 4 << 20, 1.0)

    # What each event does

    @property
    def now(self) -> Instant:
        return Instant(self.seconds, 1.7e9 + self.seconds)

    def do(self, event: Event) -> tuple[Effect, ...]:
        before = self.state
        try:
            self.state, effects = step(self.state, event, self.now)
        except errors.Error:
            assert self.state is before
            return ()
        for effect in effects:
            self.store(effect)
            if isinstance(effect, DropSegments):
                self.dropped |= {segment.id for segment in effect.segments}
            if isinstance(effect, TellEnded):
                self.ended += effect.session_ids
        return effects

    def store(self, effect: Effect) -> None:
        match effect:
            case SaveBuffer(record):
                self.buffers[record.key] = record
            case EraseBuffer(key):
                del self.buffers[key]
            case SaveServer(server):
                self.servers[server.name] = server
            case EraseServer(name):
                del self.servers[name]
            case SaveSession(session):
                self.sessions[session.id] = session
            case EraseSession(session_id):
                del self.sessions[session_id]

    @rule()
    def restart(self) -> None:
        """kill -9 and a start: there is nothing but the store."""
        last = self.state
        stored = (record_text.to_json() for record_text in self.buffers.values())
        buffers = [BufferRecord.from_json(text) for text in stored]
        sessions = [SessionRecord.from_json(session.to_json()) for session in self.sessions.values()]
        self.state = load(buffers, self.servers.values(), sessions, SESSION_LEASE_S, lineage=last.lineage)
        before = last.ended_sessions.incarnation
        self.do(Restarted(next(self.incarnations)))
        assert self.state.ended_sessions.incarnation != before, "numbers of before would be taken for ours"
        interrupted = {record.id for record in self.buffers.values() if not record.ready}
        assert self.state.interrupted.keys() == interrupted
        assert not interrupted & {record.id for record in self.state.listed()}, "seen before a server was heard"
        # Of what was made and deleted before the stop nothing is known.
        there = {record.attempt_id for record in self.buffers.values()}
        self.asked = [asked for asked in self.asked if asked.attempt_id in there or not self.made[asked.attempt_id]]

    @rule(lost=st.integers(1, 3))
    def lose_power(self, lost: int) -> None:
        """The host stops, and with it go the last ends of sessions that the store had."""
        for session in sorted(self.sessions.values(), key=lambda session: session.ended)[-lost:]:
            if session.ended:
                del self.sessions[session.id]
                self.ended.remove(session.id)
        self.restart()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, SERVER_LEASE_S, 700.0]))
    def tick(self, seconds: float) -> None:
        self.seconds += seconds
        self.do(Ticked())

    @rule(
        name=SERVERS,
        instance_id=st.integers(1, 3),
        alien=st.sampled_from([frozenset(), frozenset(), frozenset({10**6}), frozenset({10**6, 10**6 + 1})]),
        lost=st.booleans(),
        capacity=st.sampled_from([64 * KIB, 4 << 20]),
        weight=st.sampled_from([1.0, 1.0, 2.5]),
    )
    def register(
        self, name: str, instance_id: int, alien: frozenset[int], lost: bool, capacity: int, weight: float
    ) -> None:
        """It holds anything: its own segments or none of them, and some that nobody knows."""
        mine = {s.id for r in self.state.buffers.values() for s in r.segments if s.server == name}
        held = alien if lost else alien | mine
        server = ServerRecord(name, instance_id, "h:1", "h:2", "", "", capacity, 0, 0.0, weight)
        known = name in self.state.servers
        effects = self.do(registration(self.state, server, held))
        drops = {i for effect in effects if isinstance(effect, AnswerDrops) for i in effect.segment_ids}
        assert drops.isdisjoint(mine), "a live buffer's segment is never dropped"
        if effects:
            assert drops == alien
            self.hear(name)
        else:
            assert not known, "only a stranger that holds something is refused"
            assert held

    @rule(name=SERVERS, instance_id=st.integers(1, 3), used=st.sampled_from([0, 4 * KIB, 1 << 40]))
    def renew(self, name: str, instance_id: int, used: int) -> None:
        before = self.state
        self.do(ServerRenewed(name, instance_id, used))
        if self.state is not before:
            assert used <= self.state.allocation(name).nbytes
            assert name not in self.state.suspected
            self.hear(name)

    def hear(self, name: str) -> None:
        """The server is answered which sessions ended."""
        ended = self.state.ended_sessions
        self.heard[name] |= set(ended.after(*self.seen[name]))
        self.seen[name] = (ended.incarnation, ended.last_number)
        assert self.heard[name] >= set(self.ended), "who asks knows all that ended"

    @rule(name=SERVERS, instance_id=st.integers(1, 3))
    def leave(self, name: str, instance_id: int) -> None:
        self.do(ServerLeft(name, instance_id))

    @rule(name=SERVERS, instance_id=st.integers(1, 3), used=st.integers(0, 1 << 20))
    def counted(self, name: str, instance_id: int, used: int) -> None:
        self.do(ServerCounted(name, instance_id, used))

    @rule(name=SERVERS)
    def doubt(self, name: str) -> None:
        self.do(ServerSuspected(name))

    # Buffers, locks and barriers

    @rule(
        target=pending,
        name=GOOD_NAMES,
        kibibytes=st.sampled_from([1, 30, 300, 3000, 1 << 30]),
        count=st.integers(0, 4),
        versions=st.sampled_from([1, 1, 2]),
        stripe=st.sampled_from([0, 4096, 300 * KIB, 1 << 50]),
        like=st.sampled_from(["", "", "v", "lock:w"]),
        exist_ok=st.booleans(),
    )
    def create(
        self, name: str, kibibytes: int, count: int, versions: int, stripe: int, like: str, exist_ok: bool
    ) -> object:
        if like:
            creation = Creation(name, (), "", like=like, exist_ok=exist_ok, versions=versions)
        else:
            creation = Creation(
                name, (kibibytes, KIB), "uint8", count, (), stripe, exist_ok=exist_ok, versions=versions
            )
        if not exist_ok:
            creation = replace(creation, attempt_id=next(self.ids))
            self.asked.append(creation)
        return self.want(check_creation(creation, replicas=1))

    @rule(target=pending, which=st.integers(0, 7))
    def create_again(self, which: int) -> object:
        """One of the last ones: its answer was lost."""
        return self.want(self.asked[-1 - which]) if which < len(self.asked) else multiple()

    @rule(target=pending, kind=st.sampled_from([Kind.LOCK, Kind.BARRIER]), name=GOOD_NAMES)
    def use(self, kind: Kind, name: str) -> object:
        creation = first_use(kind, name)
        known = self.state.buffers.get(creation.key)
        new = self.want(creation)
        found = self.state.find(kind, name)
        if found is not None:
            assert self.shown.setdefault(found.key, found) == found, "a second home"
        if known is not None:
            assert self.state.buffers[creation.key] == known
        return new

    def want(self, creation: Creation) -> object:
        """Return the key of the record that is to be made; none where there is one already, or it is refused."""
        effects = self.do(BufferWanted(creation, lambda: next(self.ids)))
        made = [effect.record for effect in effects if isinstance(effect, MakeSegments)]
        for record in made:
            assert self.buffers[record.key] == record, "stored before any segment is made"
            stored = sum(segment.nbytes for segment in record.segments)
            assert stored == (record.nbytes if record.versions == 1 else 2 * record.copy_stride_bytes)
        return multiple(*((record.key, record.id) for record in made))

    @rule(kind=st.sampled_from([Kind.LOCK, Kind.BARRIER]), name=GOOD_NAMES)
    def use_at_once(self, kind: Kind, name: str) -> None:
        """As `use`, and it is made before anything else happens."""
        creation = first_use(kind, name)
        if any(isinstance(effect, MakeSegments) for effect in self.do(BufferWanted(creation, lambda: next(self.ids)))):
            self.finish((creation.key, self.state.buffers[creation.key].id), True)

    @rule(made=consumes(pending), well=st.booleans())
    def finish(self, made: tuple[str, int], well: bool) -> None:
        key, record_id = made
        record = self.state.buffers.get(key)
        if record is None or record.id != record_id or record_id in self.state.interrupted:
            return  # its maker died with the process before: a restart took it back, or its servers say what they have
        assert not record.ready
        if well and record.mirror_of and self.state.source(record) is None:
            assert self.do(BufferMade(key)) == (), "a mirror of what was deleted meanwhile"
            well = False
        self.do(BufferMade(key) if well else BufferFailed(key))
        assert (key in self.state.buffers) == well
        if well and record.attempt_id:
            self.made[record.attempt_id].add(record_id)
            assert len(self.made[record.attempt_id]) == 1, "one create made two buffers"
        if well and record.kind is not Kind.BUFFER:
            assert key not in self.shown, "a second home"
            self.shown[key] = self.state.buffers[key]

    @rule(name=NAMES, missing_ok=st.booleans(), known_id=st.none() | st.integers(1, 40))
    def delete(self, name: str, missing_ok: bool, known_id: int | None) -> None:
        record = self.state.find(Kind.BUFFER, name)
        self.do(BufferDeleted(name, missing_ok, known_id or 0))
        kept = record is not None and known_id not in (None, record.id)
        assert self.state.find(Kind.BUFFER, name) == (record if kept else None)

    @rule(name=NAMES, new_name=GOOD_NAMES, replaces=st.booleans(), known_id=st.none() | st.integers(1, 40))
    def rename(self, name: str, new_name: str, replaces: bool, known_id: int | None) -> None:
        record = self.state.find(Kind.BUFFER, name)
        if self.do(BufferRenamed(name, new_name, replaces, "", folder=False, id=known_id or 0)):
            assert record is not None
            assert known_id in (None, record.id)
            assert self.state.buffers[new_name].id == record.id

    # Sessions

    @rule(session_id=st.integers(1, 6))
    def session(self, session_id: int) -> None:
        """Opened or renewed; also by a client that a restarted coordinator does not know."""
        over = session_id in self.ended
        try:
            self.state, effects = step(self.state, SessionRenewed(session_id, "client"), self.now)
        except SessionEndedError:
            assert over
            return
        assert not over, "an ended session never runs again"
        for effect in effects:
            self.store(effect)

    @rule(session_id=st.integers(1, 6))
    def close(self, session_id: int) -> None:
        self.do(SessionClosed(session_id))
        assert session_id in self.ended

    # What must always hold

    @invariant()
    def allocations_are_the_sums_over_all_records(self) -> None:
        sums: defaultdict[str, Allocation] = defaultdict(Allocation)
        for record in self.state.buffers.values():
            for segment in record.segments:
                before = sums[segment.server]
                sums[segment.server] = Allocation(before.nbytes + segment.file_bytes, before.segments + 1)
        assert {name: held for name, held in self.state.allocated.items() if held != Allocation()} == sums

    @invariant()
    def whoever_holds_something_is_known(self) -> None:
        for record in self.state.buffers.values():
            assert all(segment.server in self.state.servers for segment in record.segments)

    @invariant()
    def no_two_buffers_share_a_segment(self) -> None:
        ids = [segment.id for record in self.state.buffers.values() for segment in record.segments]
        assert len(ids) == len(set(ids))
        assert self.dropped.isdisjoint(ids), "what a server was told to drop is no buffer's"

    @invariant()
    def the_store_is_the_state(self) -> None:
        assert self.buffers == dict(self.state.buffers)
        assert self.servers.keys() == self.state.servers.keys()
        assert {i for i, session in self.sessions.items() if not session.ended} == self.state.sessions.keys()
        assert {i for i, session in self.sessions.items() if session.ended} == self.state.ended_sessions.numbers.keys()

    @invariant()
    def locks_are_where_they_were_and_not_listed(self) -> None:
        for key, record in self.shown.items():
            assert self.state.buffers[key] == record
        assert all(record.kind is Kind.BUFFER for record in self.state.listed())

    @invariant()
    def sessions_live_or_have_ended(self) -> None:
        living = set(self.state.sessions)
        assert living == set(self.state.session_leases.ends)
        assert living.isdisjoint(self.ended)
        assert len(self.ended) == len(set(self.ended)), "an end is told once"


CoordinatorMachine.TestCase.settings = settings(
    max_examples=times(50, 1000),
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
TestCoordinator = CoordinatorMachine.TestCase
