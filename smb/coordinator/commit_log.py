"""The one place where state and store change: together, one event after the other.

An event is decided on the current state, then stored, and only then shown. So each reply survives a crash of the
coordinator, and an event that could not be stored had no effect. All of it runs in the event loop of one thread.

A change of etcd takes milliseconds, in which other events arrive. Those are decided one after the other, each on the
state that the one before leaves, and stored together in the next change. If that change is refused, each of them is
decided and stored alone. A refusal may rest on an event of the same change, so it is told once that is stored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from smb.config.quotas import Quota
from smb.coordinator.events import (
    BufferFailed,
    BufferMade,
    BufferWanted,
    Effect,
    EraseBuffer,
    EraseServer,
    EraseSession,
    Event,
    HeldUp,
    Instant,
    Report,
    Restarted,
    SaveBuffer,
    SaveLineage,
    SaveMaintenance,
    SaveSequence,
    SaveServer,
    SaveServerLease,
    SaveSession,
    SaveTokenFloor,
    Ticked,
    WakeOpeners,
)
from smb.coordinator.lineage import Lineage
from smb.coordinator.outside import read_clocks
from smb.coordinator.records import BufferRecord, ServerRecord, SessionRecord
from smb.coordinator.state import SERVER_LEASE_S, SESSION_LEASE_S, State, load
from smb.coordinator.steps import step
from smb.coordinator.store import MIGRATION, SEQUENCE, Store, StoreError
from smb.errors import OutOfMemoryError, UnavailableError

_log = logging.getLogger("coordinator")
_BUFFER, SERVER, _SESSION = "buffer/", "server/", "session/"
_FLOOR = "lock/floor"
_MAINTENANCE = "maintenance"  # JSON: by server, "" for all, its end in seconds since 1970
_PROBE = "probe"  # a key without meaning, written to find out whether the store works
_TERMS = "lineage/terms"
_SERVER_LEASE = "lease/server"  # the key of how long servers' leases run, if it is not the default
# Events that need room for something new. On a full disk all other events go on, from the reserve that the store keeps
# for them: these events free room, or keep existing data safe when servers are lost and come back.
_CREATIONS = (BufferWanted, BufferMade)
# What follows a failure of the store differs for each of these (`_put`).
_STORED_ALONE = (Restarted, BufferFailed)
_TOGETHER_MAX = 256  # events that are stored together: those without changes are not bounded by the store
_TOGETHER_BYTES = 1 << 20  # of the changes that are stored together: etcd takes 1.5 MB
_SAID_AGAIN_S = 600.0  # between two log lines about the same failure of the store
HELD_UP_S = 1.0  # without a sign that this process runs, or for one change of the store
_LASTS_S = 5.0  # a failure that comes and goes is logged again only if it lasts this long


@dataclass(frozen=True, slots=True)
class Committed:
    """The state right after an event, and the effects that its caller must execute."""

    state: State
    effects: tuple[Effect, ...]


class _Waiting:
    """An event whose caller waits for its result. Once it is decided with others, it has a refusal, or `before`,
    `committed` and `now`.
    """

    def __init__(self, event: Event, result: asyncio.Future[Committed]) -> None:
        self.event, self.result = event, result
        self.refusal: Exception | None = None
        self.before: State
        self.committed: Committed
        self.now: Instant

    def end(self, committed: Committed) -> None:
        if not self.result.done():  # else its caller was cancelled meanwhile
            self.result.set_result(committed)

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class CommitLog:
    """State and store. `commit` is the only way to change either."""

    def __init__(self, store: Store, state: State, clock: Callable[[], Instant]) -> None:
        self._store = store
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._committing: asyncio.Task[None] | None = None  # runs as long as events wait
        # By key. The futures are in the order of arrival.
        self._openers: defaultdict[str, dict[asyncio.Future[None], None]] = defaultdict(dict)
        self._stopping = False
        self._owed: dict[str, str | None] = {}  # changes that were shown, but not stored yet
        self._store_error = ""
        self._failing_since = 0.0
        self._said, self._said_at = "", -math.inf  # the last logged failure of the store, and when
        self._ran_at = clock().monotonic  # when this process was last seen to run
        self._held_up_s = 0.0  # how long it was held up since the last event
        self.state = state
        # Called after each stored event, with the event and the state before it, in the loop's thread. Must not raise.
        self.on_commit: Callable[[Event, State, Committed, Instant], None] | None = None

    @staticmethod
    async def open(
        store: Store,
        incarnation: int,
        *,
        session_lease_s: float = SESSION_LEASE_S,
        server_lease_s: float = SERVER_LEASE_S,
        stripe_bytes: int = 0,
        quotas: Mapping[str, Quota] | None = None,
        clock: Callable[[], Instant] = read_clocks,
    ) -> CommitLog:
        """Read the store and roll back unfinished mirrors. `incarnation` is a random id of this run.

        Raises StoreError for records that cannot be read.
        """
        texts = await store.load()
        restarted = Restarted(incarnation, store.changes_max)
        state = _read(texts, session_lease_s, server_lease_s, stripe_bytes, quotas or {})
        commit_log = CommitLog(store, state, clock)
        while True:
            buffers = (await commit_log.commit(restarted)).state.buffers.values()
            if not any(record.mirror_of and not record.ready for record in buffers):
                return commit_log

    def now(self) -> Instant:
        """Return this moment, on the commit log's clocks."""
        return self._clock()

    def runs(self) -> None:
        """Take note that this process runs. Called at least twice a second, so that a longer pause is noticed."""
        now_s = self.now().monotonic
        self._held_up(now_s - self._ran_at)
        self._ran_at = now_s

    def _held_up(self, seconds: float) -> None:
        if seconds > HELD_UP_S:
            self._held_up_s = max(self._held_up_s, seconds)

    async def commit(self, event: Event) -> Committed:
        """Decide the event, store it, then show it. Raises smb.errors.Error if it is refused or could not be stored.

        If the caller is cancelled before the event's turn, nothing has changed. If it is cancelled later, the event is
        still completed, because the state must follow what the store carries out.
        """
        waiting = _Waiting(event, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        try:
            return await waiting.result
        finally:
            del waiting  # its error's traceback has this frame, which would make a cycle that keeps a request

    async def _commit_all(self) -> None:
        """Commit the events that wait, until none does."""
        while self._waiting:
            first = self._waiting.popleft()
            if first.result.done():  # its caller was cancelled before its turn
                continue
            self.runs()
            self._note_hold_up()
            together = self._decided_together(first)
            if len(together) < 2 or not await self._stored_together(together):
                for each in together or [first]:
                    await self._commit(each)

    def _decided_together(self, first: _Waiting) -> list[_Waiting]:
        """Take the events that can be stored together with the first one out of the queue, each decided on the state
        that the one before leaves, or refused there. Empty: the first one has to be stored alone.
        """
        most = self._store.changes_max
        if most is None or not self._waiting or self._owed or self._store_error:
            return []
        together: list[_Waiting] = []
        state, now, changes = self.state, self.now(), dict[str, str | None]()
        each: _Waiting | None = first
        while each is not None:
            if isinstance(each.event, _STORED_ALONE):
                break
            try:
                after, effects = step(state, each.event, now)
            except Exception as error:  # noqa: BLE001 - refused, or a bug of ours: its caller hears of both
                each.refusal = error
                together.append(each)
            else:
                more = {**changes, **_changes(effects)}
                if together and (len(more) > most or sum(len(text or "") for text in more.values()) > _TOGETHER_BYTES):
                    break
                each.before, each.committed, each.now, each.refusal = state, Committed(after, effects), now, None
                together.append(each)
                state, changes = after, more
            if each is not first:
                self._waiting.popleft()
            while self._waiting and self._waiting[0].result.done():
                self._waiting.popleft()
            each = self._waiting[0] if self._waiting and len(together) < _TOGETHER_MAX else None
        return together

    async def _stored_together(self, together: Sequence[_Waiting]) -> bool:
        """Store and show these decided events. Returns False if the store has refused that, and changed nothing."""
        changes: dict[str, str | None] = {}
        decided = [each for each in together if each.refusal is None]
        for each in decided:
            changes |= _changes(each.committed.effects)
        begun_s = self.now().monotonic
        try:
            if changes:
                urgent = not any(isinstance(each.event, _CREATIONS) for each in decided)
                await self._store.change(changes, urgent=urgent)
        except (StoreError, OutOfMemoryError):  # the latter: one event alone is too large
            return False
        except Exception as error:  # noqa: BLE001 - this coordinator does not lead any more, or a bug of ours
            for each in together:
                each.fail(error)
            return True
        finally:
            self._held_up(self.now().monotonic - begun_s)  # renewals waited for their turn meanwhile
        if decided:
            self.state = decided[-1].committed.state
        for each in together:
            if each.refusal is None:
                each.end(self._shown(each.event, each.before, each.committed, each.now))
            else:
                each.fail(each.refusal)
        return True

    async def _commit(self, waiting: _Waiting) -> None:
        """Decide, store and show one event."""
        if waiting.result.done():
            return
        event, before, now = waiting.event, self.state, self.now()
        try:
            state, effects = step(before, event, now)
            await self._put(event, effects)
        except Exception as error:  # noqa: BLE001 - refused, not stored, or a bug of ours: its caller hears of it
            waiting.fail(error)
            return
        self.state = state
        waiting.end(self._shown(event, before, Committed(state, effects), now))

    def _note_hold_up(self) -> None:
        """Let leases run anew if this process was held up. This comes before any event that asks which leases run."""
        if self._held_up_s:
            event, before, now = HeldUp(self._held_up_s), self.state, self.now()
            self._held_up_s = 0.0
            self.state, effects = step(before, event, now)  # stores nothing
            self._shown(event, before, Committed(self.state, effects), now)

    def _shown(self, event: Event, before: State, committed: Committed, now: Instant) -> Committed:
        if self.on_commit is not None:
            self.on_commit(event, before, committed, now)
        for effect in committed.effects:
            if isinstance(effect, Report):
                _log.log(effect.level, effect.text)
            elif isinstance(effect, WakeOpeners):
                self._wake(effect.key)
        return committed

    @property
    def changes_max(self) -> int | None:
        """How many records one event may change; None: unlimited."""
        return self._store.changes_max

    @property
    def store_error(self) -> str:
        """Why the store cannot be written, at most half a second old; empty if it can."""
        return self._store_error

    async def _put(self, event: Event, effects: Sequence[Effect]) -> None:
        """Store what an event changes, together with the owed changes.

        If a failed creation's record cannot be erased, the erasure is owed: a restart rolls back pending creations
        anyway, and so the name is free again even on a full disk. For other events, raises StoreError.
        """
        changes = _changes(effects)
        if not changes and isinstance(event, Ticked) and self._store_error:
            changes[_PROBE] = ""  # finds out whether the store can be written again
        elif not changes and not (self._owed and isinstance(event, Ticked)):
            return
        urgent = not isinstance(event, (*_CREATIONS, BufferFailed)) and _PROBE not in changes
        wanted, begun_s = {**self._owed, **changes}, self.now().monotonic
        try:
            try:
                await self._pay(len(changes))
                await self._store.change({**self._owed, **changes}, urgent=urgent)
            finally:
                self._held_up(self.now().monotonic - begun_s)  # renewals waited for their turn meanwhile
        except StoreError as error:
            self._note_error(str(error))
            # A term may stay unstored: no server's stamp names it then, so the stamps only prove less.
            if isinstance(event, BufferFailed) or (
                isinstance(event, Restarted)
                and not any(isinstance(effect, EraseBuffer | SaveServerLease) for effect in effects)
            ):
                self._owed = wanted
            elif _changes(effects):
                raise
        else:
            self._owed = {}
            # A full disk takes urgent changes out of its reserve; a full etcd takes only deletions.
            if self._store_error and not urgent and any(text is not None for text in wanted.values()):
                self._store_error = ""
                if self._said_at >= self._failing_since:
                    _log.info("the store can be written again")

    def _note_error(self, text: str) -> None:
        """Remember why the store cannot be written. It is logged once, and again if it lasts or comes back."""
        now = self.now().monotonic
        if not self._store_error:
            self._failing_since = now
        self._store_error = text
        stays = self._said_at < self._failing_since <= now - _LASTS_S
        if text != self._said or now - self._said_at >= _SAID_AGAIN_S or stays:
            _log.error("%s", text)
            self._said, self._said_at = text, now

    async def _pay(self, room: int) -> None:
        """Store owed changes in parts, until the rest fits into one change of the store beside `room` others."""
        most = self._store.changes_max
        while most is not None and self._owed and len(self._owed) + room > most:
            part = dict(islice(self._owed.items(), most))
            await self._store.change(part, urgent=True)
            self._owed = {key: text for key, text in self._owed.items() if key not in part}

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the record is ready or gone; False after timeout_s. Holds no thread.

        Raises UnavailableError once the coordinator stops.
        """
        if self._stopping:
            raise _stopped()
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._openers[key][change] = None
        try:
            changed, _ = await asyncio.wait({change}, timeout=timeout_s)
            if changed:
                change.result()
            return bool(changed)
        finally:
            self._openers[key].pop(change)
            if not self._openers[key]:
                del self._openers[key]

    def look_again(self) -> None:
        """Wake all waits, because the session of one of them may have ended."""
        for key in list(self._openers):
            self._wake(key)

    def stop_waiting(self) -> None:
        """Fail all waits, present and future, so that a stop does not last as long as they would."""
        self._stopping = True
        for changes in self._openers.values():
            for change in changes:
                if not change.done():
                    change.set_exception(_stopped())

    def _wake(self, key: str) -> None:
        for change in self._openers.get(key, ()):
            if not change.done():
                change.set_result(None)


def _stopped() -> UnavailableError:
    return UnavailableError("the coordinator is stopping; try again once it runs again")


def _changes(effects: Sequence[Effect]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for effect in effects:
        match effect:
            case SaveBuffer(record):
                changes[_BUFFER + record.key] = record.to_json()
            case EraseBuffer(key):
                changes[_BUFFER + key] = None
            case SaveServer(server):
                changes[SERVER + server.name] = server.to_json()
            case EraseServer(name):
                changes[SERVER + name] = None
            case SaveSession(session):
                changes[f"{_SESSION}{session.id:016x}"] = session.to_json()
            case EraseSession(session_id):
                changes[f"{_SESSION}{session_id:016x}"] = None
            case SaveTokenFloor(token):
                changes[_FLOOR] = str(token)
            case SaveLineage(terms):
                changes[_TERMS] = terms
            case SaveMaintenance(until):
                changes[_MAINTENANCE] = json.dumps(dict(until)) if until else None
            case SaveServerLease(seconds):
                changes[_SERVER_LEASE] = f"{seconds:g}"
            case SaveSequence(sequence):
                changes[SEQUENCE] = str(sequence)
    return changes


def _read(
    texts: dict[str, str],
    session_lease_s: float,
    server_lease_s: float,
    stripe_bytes: int,
    quotas: Mapping[str, Quota],
) -> State:
    if MIGRATION in texts:
        raise StoreError(
            f"these records are not the current ones: {texts[MIGRATION]}; see `smb coordinator migrate --help`"
        )
    try:
        buffers = [BufferRecord.from_json(text) for key, text in texts.items() if key.startswith(_BUFFER)]
        servers = [ServerRecord.from_json(text) for key, text in texts.items() if key.startswith(SERVER)]
        sessions = [SessionRecord.from_json(text) for key, text in texts.items() if key.startswith(_SESSION)]
        token_floor = int(texts.get(_FLOOR, "0"))
        lineage = Lineage.of(texts.get(_TERMS, ""), texts.get(SEQUENCE, ""))
        maintenance = {str(name): float(until) for name, until in json.loads(texts.get(_MAINTENANCE, "{}")).items()}
        former_lease_s = float(texts.get(_SERVER_LEASE, SERVER_LEASE_S))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"a record in the store cannot be read: {error!r}; restore the store from a backup") from error
    return load(
        buffers,
        servers,
        sessions,
        session_lease_s,
        stripe_bytes,
        quotas,
        token_floor,
        lineage,
        server_lease_s=server_lease_s,
        former_lease_s=former_lease_s,
        maintenance=maintenance,
    )
