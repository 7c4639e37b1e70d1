"""The coordinator's recent observations for people: loads that servers report, and events. In memory, bounded.

Nothing is decided by it, and it is lost with the process. Threads: the event loop writes, the pages' threads read; one
lock guards all of it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from smb.coordinator.commit_log import Committed
from smb.coordinator.dashboard.states import ClientReport, ReportedStates
from smb.coordinator.dashboard.trainings import Trainings, WorkerSeen
from smb.coordinator.events import (
    BufferDeleted,
    BufferMade,
    ClientsKicked,
    Event,
    Instant,
    Report,
    ServerLeft,
    ServerRegistered,
    SessionClosed,
    Ticked,
)
from smb.coordinator.state import State
from smb.rpc import control_pb2 as pb

STEP_S = 2.0  # servers renew every 2 s, so finer steps would show nothing more
SPAN_S = 300.0
LAG_S = 2.5  # some servers may not have reported these last seconds yet
RECENT_S = 60.0  # the time over which errors are counted
LOST_CLIENTS_S = 300.0
EVENTS_MAX = 200
LOST_CLIENTS_MAX = 1000
FAILED_MAX = 1000

# Operations that move bytes to servers (IN), from them (OUT), and within them (WITHIN). Others are handshakes and
# waits.
IN = frozenset({"write", "accumulate", "fetch_add", "compare_swap"})
OUT = frozenset({"read"})
WITHIN = frozenset({"fill", "accumulate_from", "apply"})


HeldKey: TypeAlias = tuple[int, str, int, int]  # segment, kind, token, session


def held_key(wait: pb.Wait) -> HeldKey:
    """Return what tells a holding from others, in all reports of it."""
    return wait.segment_id, wait.kind, wait.token if wait.session_id else 0, wait.session_id


@dataclass(frozen=True, slots=True)
class Amounts:
    """Operations on data, and bytes to servers, from them and within them: since a server's start, or per second."""

    operations: float = 0.0
    in_bytes: float = 0.0
    out_bytes: float = 0.0
    within_bytes: float = 0.0

    def minus(self, other: Amounts) -> Amounts:
        """Return the difference, at least 0. Counts of local clients lie in memory that these clients may change."""
        return Amounts(
            max(0, self.operations - other.operations),
            max(0, self.in_bytes - other.in_bytes),
            max(0, self.out_bytes - other.out_bytes),
            max(0, self.within_bytes - other.within_bytes),
        )

    def times(self, factor: float) -> Amounts:
        return Amounts(
            self.operations * factor, self.in_bytes * factor, self.out_bytes * factor, self.within_bytes * factor
        )


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Operations and bytes per second."""

    operations: float = 0.0
    bytes: float = 0.0

    def plus(self, other: LoadRates) -> LoadRates:
        return LoadRates(self.operations + other.operations, self.bytes + other.bytes)


def amounts_of(load: pb.ServerLoad) -> Amounts:
    """Return the sum of what a server did since its start."""
    operations = moved_in = moved_out = within = 0
    for done in load.operations:
        if done.kind in IN:
            moved_in += done.bytes
        elif done.kind in OUT:
            moved_out += done.bytes
        elif done.kind in WITHIN:
            within += done.bytes
        else:
            continue
        operations += done.count
    return Amounts(operations, moved_in, moved_out, within)


@dataclass(frozen=True, slots=True)
class History:
    """Rates per step, oldest first; the last step ends at `end` (seconds since 1970)."""

    step_s: float
    end: float
    operations: Sequence[float]
    in_bytes: Sequence[float]
    out_bytes: Sequence[float]


class Bins:
    """Amounts in steps of time, for the last SPAN_S."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, list[float]]] = deque(maxlen=int(SPAN_S / STEP_S) + 4)

    def add(self, since: float, until: float, amounts: Amounts) -> None:
        """Spread amounts evenly over the steps between two moments of the monotonic clock."""
        if until <= since:
            return
        since = max(since, until - SPAN_S)
        for number in range(math.floor(since / STEP_S), math.floor(until / STEP_S) + 1):
            share = (min(until, (number + 1) * STEP_S) - max(since, number * STEP_S)) / (until - since)
            if share > 0:
                values = self._bin(number)
                for i, amount in enumerate((amounts.operations, amounts.in_bytes, amounts.out_bytes)):
                    values[i] += share * amount

    def history(self, now: Instant) -> History:
        """Return the rates of the complete steps."""
        end = math.floor((now.monotonic - LAG_S) / STEP_S)  # the first step that is not shown
        count = int(SPAN_S / STEP_S)
        rates: list[list[float]] = [[0.0] * count for _ in range(3)]
        for number, values in self._bins:
            at = number - (end - count)
            if 0 <= at < count:
                for series, value in zip(rates, values, strict=True):
                    series[at] = value / STEP_S
        return History(STEP_S, now.wall - (now.monotonic - end * STEP_S), *rates)

    def _bin(self, number: int) -> list[float]:
        for known, values in reversed(self._bins):
            if known == number:
                return values
            if known < number:
                break
        else:
            if len(self._bins) == self._bins.maxlen:
                return [0.0] * 3  # older than the oldest step that is kept
        fresh = [0.0] * 3
        if self._bins and self._bins[-1][0] > number:
            self._insert(number, fresh)
        else:
            self._bins.append((number, fresh))
        return fresh

    def _insert(self, number: int, fresh: list[float]) -> None:
        """Insert a step in order. A server that was silent reports late, for steps that other servers had left out."""
        later = []
        while self._bins and self._bins[-1][0] > number:
            later.append(self._bins.pop())
        self._bins.append((number, fresh))
        self._bins.extend(reversed(later))


@dataclass(frozen=True, slots=True)
class ServerWatch:
    """The last report of one run of a server. `rates` are per second, between its last two renewals; None after the
    first. `errors_recently` counts the last minute's errors by reason. `deferred_since` is monotonic; 0: no request is
    deferred.
    """

    instance_id: int
    load: pb.ServerLoad
    at: float
    amounts: Amounts
    rates: Amounts | None = None
    errors_recently: Mapping[str, int] = field(default_factory=dict)
    deferred_since: float = 0.0
    segments: Mapping[int, LoadRates] = field(default_factory=dict)  # busy segments only
    sessions: Mapping[int, LoadRates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """All observations at one moment. The mappings belong to the reader."""

    started_at: float
    servers: Mapping[str, ServerWatch]
    left: Mapping[str, float]  # when each server stopped cleanly
    lost_clients: Sequence[tuple[float, str]]  # (when, client name), of the last minutes
    held_since: Mapping[HeldKey, float]  # when each holding was first seen, monotonic
    events: Sequence[tuple[float, int, str]]  # (when, level of the logging module, text), newest last
    history: History
    failed_calls: Mapping[str, int] = field(default_factory=dict)  # calls by method that met a bug, in the last minute
    store_error: str = ""  # why the store cannot be written
    state_free_bytes: int | None = None  # of the store's disk; None: unknown
    workers: Mapping[str, Sequence[WorkerSeen]] = field(default_factory=dict)  # by training
    furthest: Mapping[str, int] = field(default_factory=dict)  # the last known round, by training
    states: Mapping[str, Sequence[ClientReport]] = field(default_factory=dict)  # publishers and readers, by state


class EventWatch:
    """Records all events and load reports. `seen` returns them."""

    def __init__(self, now: Instant) -> None:
        self._started_at = now.wall
        self._lock = threading.Lock()
        self._servers: dict[str, ServerWatch] = {}
        self._errors: dict[str, deque[tuple[float, dict[str, int]]]] = {}
        self._bins: dict[str, Bins] = {}
        self._all = Bins()
        self._left: dict[str, float] = {}
        self._lost_clients: deque[tuple[float, str]] = deque(maxlen=LOST_CLIENTS_MAX)
        self._held: dict[str, dict[HeldKey, float]] = {}
        self._events: deque[tuple[float, int, str]] = deque(maxlen=EVENTS_MAX)
        self._failed: deque[tuple[float, str]] = deque(maxlen=FAILED_MAX)
        self.trainings = Trainings()
        self.states = ReportedStates()
        # Returns why the store cannot be written, and the free bytes of its disk.
        self.look_at_store: Callable[[], tuple[str, int | None]] = lambda: ("", None)

    def failed(self, method: str, now: Instant) -> None:
        """Record a call that met a bug inside the coordinator."""
        with self._lock:
            self._failed.append((now.monotonic, method))

    def record_load(self, name: str, instance_id: int, load: pb.ServerLoad, now: Instant) -> None:
        """Record a server's load, from a renewal that was granted."""
        with self._lock:
            known = self._servers.get(name)
            fresh = ServerWatch(instance_id, load, now.monotonic, amounts_of(load))
            if known is not None and known.instance_id == instance_id and now.monotonic > known.at:
                fresh = self._continue(name, known, fresh)
            else:
                self._errors[name] = deque([(now.monotonic, dict(load.errors))], maxlen=int(RECENT_S / STEP_S) + 2)
            if load.deferred_requests:
                fresh = replace(fresh, deferred_since=(known.deferred_since if known else 0.0) or now.monotonic)
            held = self._held.get(name, {})
            self._held[name] = {key: held.get(key, now.monotonic) for key in map(held_key, load.waits)}
            self._servers[name] = fresh

    def saw(self, event: Event, before: State, committed: Committed, now: Instant) -> None:
        """Record an event that was stored."""
        with self._lock:
            match event:
                case SessionClosed(session_id):
                    self.trainings.ended([session_id])
                    self.states.ended([session_id])
                case Ticked() | ClientsKicked() if before.sessions is not committed.state.sessions:
                    over = before.sessions.keys() - committed.state.sessions.keys()
                    self.trainings.ended(over)
                    self.states.ended(over)
                    for session_id in over:
                        if isinstance(event, Ticked):
                            self._lost_clients.append((now.wall, before.client_name(session_id)))
                # Workers of a deleted training may still report it until they leave.
                case BufferDeleted(name) | BufferMade(name):
                    self.trainings.deleted(name)
                case ServerRegistered(server):
                    self._left.pop(server.name, None)
                case ServerLeft(name, _):
                    self._left[name] = now.wall
            for effect in committed.effects:
                if isinstance(effect, Report) and effect.level >= logging.INFO:
                    self._events.append((now.wall, effect.level, effect.text))
            if before.servers.keys() != committed.state.servers.keys():
                self._forget(before.servers.keys() - committed.state.servers.keys())

    def seen(self, now: Instant) -> Seen:
        store_error, state_free_bytes = self.look_at_store()
        with self._lock:
            failed = Counter(method for at, method in self._failed if now.monotonic - at <= RECENT_S)
            return Seen(
                started_at=self._started_at,
                servers=dict(self._servers),
                left=dict(self._left),
                lost_clients=[lost for lost in self._lost_clients if now.wall - lost[0] <= LOST_CLIENTS_S],
                held_since={key: since for held in self._held.values() for key, since in held.items()},
                events=list(self._events),
                history=self._all.history(now),
                failed_calls=failed,
                store_error=store_error,
                state_free_bytes=state_free_bytes,
                workers=self.trainings.workers(),
                furthest=self.trainings.furthest(),
                states=self.states.by_name(),
            )

    def history_of(self, server: str, now: Instant) -> History:
        with self._lock:
            return self._bins.get(server, Bins()).history(now)

    def _continue(self, name: str, known: ServerWatch, fresh: ServerWatch) -> ServerWatch:
        done = fresh.amounts.minus(known.amounts)
        self._all.add(known.at, fresh.at, done)
        self._bins.setdefault(name, Bins()).add(known.at, fresh.at, done)
        counts = self._errors[name]
        counts.append((fresh.at, dict(fresh.load.errors)))
        while len(counts) > 2 and counts[1][0] <= fresh.at - RECENT_S:
            counts.popleft()
        first = counts[0][1]
        recently = {why: n - first.get(why, 0) for why, n in fresh.load.errors.items() if n > first.get(why, 0)}
        per_s = 1 / (fresh.at - known.at)
        segments, sessions = (
            {each.id: LoadRates(each.count * per_s, each.bytes * per_s) for each in busy}
            for busy in (fresh.load.segments, fresh.load.sessions)
        )
        return replace(fresh, rates=done.times(per_s), errors_recently=recently, segments=segments, sessions=sessions)

    def _forget(self, names: set[str]) -> None:
        for name in names:
            for kept in (self._servers, self._errors, self._bins, self._left, self._held):
                kept.pop(name, None)
