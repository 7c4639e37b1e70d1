"""The one place where state and store change: together, one event after the other.

An event is decided on the current state, stored, and only then shown. So every reply survives the coordinator, and an
event that could not be stored never happened. All of it runs in the event loop of one thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
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
    Instant,
    Report,
    Restarted,
    SaveBuffer,
    SaveLineage,
    SaveSequence,
    SaveServer,
    SaveSession,
    SaveTokenFloor,
    Ticked,
    WakeOpeners,
)
from smb.coordinator.lineage import Lineage
from smb.coordinator.outside import read_clocks
from smb.coordinator.records import BufferRecord, ServerRecord, SessionRecord
from smb.coordinator.state import SESSION_LEASE_S, State, load
from smb.coordinator.steps import step
from smb.coordinator.store import MIGRATION, SEQUENCE, Store, StoreError
from smb.errors import UnavailableError

_log = logging.getLogger("coordinator")
_BUFFER, _SERVER, _SESSION = "buffer/", "server/", "session/"
_FLOOR = "lock/floor"
_PROBE = "probe"  # of no meaning
_TERMS = "lineage/terms"
# Events that take room for something new. All others go on on a full disk, from what the store keeps for them: what
# frees room, and what keeps the data that is there, as servers are lost and come back.
_CREATIONS = (BufferWanted, BufferMade)
_SAID_AGAIN_S = 600.0  # between two lines of the log about one trouble of the store
_LASTS_S = 5.0  # trouble that comes and goes is not told each time, but if it stays so long


@dataclass(frozen=True, slots=True)
class Committed:
    """The state right after an event, and the effects that its caller must execute."""

    state: State
    effects: tuple[Effect, ...]


class CommitLog:
    """State and store. `commit` is the only way to change them."""

    def __init__(self, store: Store, state: State, clock: Callable[[], Instant]) -> None:
        self._store = store
        self._clock = clock
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[Committed]] = set()
        # By key; in the order in which they came.
        self._openers: defaultdict[str, dict[asyncio.Future[None], None]] = defaultdict(dict)
        self._stopping = False
        self._owed: dict[str, str | None] = {}  # changes that were shown, but could not be stored yet
        self._store_error = ""
        self._failing_since = 0.0
        self._said, self._said_at = "", -math.inf  # what the log has about it
        self.state = state
        # Called with every event after it was stored, and the state before it. In the loop's thread; must not raise.
        self.on_commit: Callable[[Event, State, Committed, Instant], None] | None = None

    @staticmethod
    async def open(
        store: Store,
        incarnation: int,
        *,
        session_lease_s: float = SESSION_LEASE_S,
        stripe_bytes: int = 0,
        quotas: Mapping[str, Quota] | None = None,
        clock: Callable[[], Instant] = read_clocks,
    ) -> CommitLog:
        """Read the store and take back what was half done. `incarnation` is random, for this run of the coordinator.

        Raises StoreError for records that cannot be read.
        """
        texts = await store.load()
        restarted = Restarted(incarnation, store.changes_max, store.may_lack_its_end)
        commit_log = CommitLog(store, _read(texts, session_lease_s, stripe_bytes, quotas or {}), clock)
        while any(not record.ready for record in (await commit_log.commit(restarted)).state.buffers.values()):
            pass
        return commit_log

    def now(self) -> Instant:
        """Return this moment, on the commit log's clocks."""
        return self._clock()

    async def commit(self, event: Event) -> Committed:
        """Decide, store, then show. Raises smb.errors.Error where the event is refused or could not be stored.

        A caller that is cancelled before it is the event's turn has changed nothing. Later the event comes to its end
        all the same: of what the store carries out the state has to hear.
        """
        await self._turn.acquire()
        # No local of ours names the task: its error's traceback has this frame.
        return await asyncio.shield(self._begun(event))

    def _begun(self, event: Event) -> asyncio.Task[Committed]:
        task = asyncio.create_task(self._commit(event))
        self._under_way.add(task)  # the loop itself would let it go
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Committed]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # if nobody waits for it any more it is still no fault of ours

    async def _commit(self, event: Event) -> Committed:
        try:
            before, now = self.state, self.now()
            state, effects = step(before, event, now)
            await self._put(event, effects)
            self.state = state
        finally:
            self._turn.release()
        committed = Committed(state, effects)
        if self.on_commit is not None:
            self.on_commit(event, before, committed, now)
        for effect in effects:
            if isinstance(effect, Report):
                _log.log(effect.level, effect.text)
            elif isinstance(effect, WakeOpeners):
                self._wake(effect.key)
        return committed

    @property
    def changes_max(self) -> int | None:
        """How many records one event may change; None: any number."""
        return self._store.changes_max

    @property
    def store_error(self) -> str:
        """Why the store cannot be written, as of the last half a second; empty if it can."""
        return self._store_error

    async def _put(self, event: Event, effects: Sequence[Effect]) -> None:
        """Store what an event changes, with what is owed.

        Of a creation that failed the record need not go at once: a restart takes back what is pending. So it is owed
        where it cannot be stored, and a name is free again however full the disk is. Raises StoreError for the others.
        """
        changes = _changes(effects)
        if not changes and isinstance(event, Ticked) and self._store_error:
            changes[_PROBE] = ""  # whether it can be written again
        elif not changes and not (self._owed and isinstance(event, Ticked)):
            return
        urgent = not isinstance(event, (*_CREATIONS, BufferFailed)) and _PROBE not in changes
        wanted = {**self._owed, **changes}
        try:
            await self._pay(len(changes))
            await self._store.change({**self._owed, **changes}, urgent=urgent)
        except StoreError as error:
            self._note_error(str(error))
            # A term that is not stored is one that no server's stamp is in: these then only prove less.
            if isinstance(event, BufferFailed) or (
                isinstance(event, Restarted) and not any(isinstance(effect, EraseBuffer) for effect in effects)
            ):
                self._owed = wanted
            elif _changes(effects):
                raise
        else:
            self._owed = {}
            # Out of its reserve a full disk takes what is urgent; a full etcd takes what only deletes.
            if self._store_error and not urgent and any(text is not None for text in wanted.values()):
                self._store_error = ""
                if self._said_at >= self._failing_since:
                    _log.info("the store can be written again")

    def _note_error(self, text: str) -> None:
        """Keep why the store cannot be written. The log has it once; again if it stays so for long, or comes back."""
        now = self.now().monotonic
        if not self._store_error:
            self._failing_since = now
        self._store_error = text
        stays = self._said_at < self._failing_since <= now - _LASTS_S
        if text != self._said or now - self._said_at >= _SAID_AGAIN_S or stays:
            _log.error("%s", text)
            self._said, self._said_at = text, now

    async def _pay(self, room: int) -> None:
        """Store what is owed, by parts, until the rest goes along with so many changes."""
        most = self._store.changes_max
        while most is not None and self._owed and len(self._owed) + room > most:
            part = dict(islice(self._owed.items(), most))
            await self._store.change(part, urgent=True)
            self._owed = {key: text for key, text in self._owed.items() if key not in part}

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until something becomes of the record (it may be gone again); False after timeout_s. Holds no thread.

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

    def stop_waiting(self) -> None:
        """Fail every wait, also those that are yet to come: a stop must not last as long as they would."""
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
    return UnavailableError("the coordinator is stopping; try again once it runs")


def _changes(effects: Sequence[Effect]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for effect in effects:
        match effect:
            case SaveBuffer(record):
                changes[_BUFFER + record.key] = record.to_json()
            case EraseBuffer(key):
                changes[_BUFFER + key] = None
            case SaveServer(server):
                changes[_SERVER + server.name] = server.to_json()
            case EraseServer(name):
                changes[_SERVER + name] = None
            case SaveSession(session):
                changes[f"{_SESSION}{session.id:016x}"] = session.to_json()
            case EraseSession(session_id):
                changes[f"{_SESSION}{session_id:016x}"] = None
            case SaveTokenFloor(token):
                changes[_FLOOR] = str(token)
            case SaveLineage(terms):
                changes[_TERMS] = terms
            case SaveSequence(sequence):
                changes[SEQUENCE] = str(sequence)
    return changes


def _read(texts: dict[str, str], session_lease_s: float, stripe_bytes: int, quotas: Mapping[str, Quota]) -> State:
    if MIGRATION in texts:
        raise StoreError(
            f"these records are not the current ones: {texts[MIGRATION]}; see `smb coordinator migrate --help`"
        )
    try:
        buffers = [BufferRecord.from_json(text) for key, text in texts.items() if key.startswith(_BUFFER)]
        servers = [ServerRecord.from_json(text) for key, text in texts.items() if key.startswith(_SERVER)]
        sessions = [SessionRecord.from_json(text) for key, text in texts.items() if key.startswith(_SESSION)]
        token_floor = int(texts.get(_FLOOR, "0"))
        lineage = Lineage.of(texts.get(_TERMS, ""), texts.get(SEQUENCE, ""))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"the store holds a record that cannot be read: {error!r}") from error
    return load(buffers, servers, sessions, session_lease_s, stripe_bytes, quotas, token_floor, lineage)
