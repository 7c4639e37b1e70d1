"""The segments that this server holds, and rules about who may make or drop one when.

Threads: the control service's. `_lock` guards only the books; making a segment (zeroing memory) and deleting one happen
outside of it. One operation at a time runs on each segment: a drop waits for the making to end, so that no part of the
segment stays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from memserver.drop_rules import why_not
from memserver.engine import Engine, FoundSegment, SegmentForm
from memserver.memory_dir import MemoryDirectory
from memserver.quarantine import Quarantine
from memserver.refused_sessions import RefusedSessions
from memserver.segment_room import SegmentRoom
from memserver.terms import CoordinatorTerms
from smb.daemon.failpoint import failpoint
from smb.daemon.host_memory import MemoryLimit
from smb.drop_reasons import Ground
from smb.engine import segment_file_bytes
from smb.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

# Ids are never reused, so a creation after its drop is a late request of a creation that was given up. This many drops
# are remembered.
DROPPED_MAX = 4096
FOR_GOOD = 2**32 - 1

_log = logging.getLogger("memserver")


class Segments:
    """The segments that this server holds, by id."""

    def __init__(
        self, engine: Engine, memory_dir: MemoryDirectory, capacity_bytes: int, limit: MemoryLimit | None = None
    ) -> None:
        """`limit` None: there is no limit, or the directory's pages do not count against it."""
        self._engine = engine
        self._memory_dir = memory_dir
        self._lock = threading.Condition()
        self._room = SegmentRoom(engine, memory_dir, capacity_bytes, limit)
        self.terms = CoordinatorTerms(self._lock)
        self.quarantined = Quarantine(engine, memory_dir, self._lock)
        self.sessions = RefusedSessions(engine)
        self._held: dict[int, SegmentForm] = {}
        self._busy: set[int] = set()
        self._dropped: dict[int, int] = {}  # dropped segments with the highest dropped epoch, oldest first
        self.on_drop: Callable[[int], None] = lambda _id: None  # called once a segment is not served any more

    def adopt(self, form: SegmentForm) -> None:
        """Add a segment that the engine serves already."""
        with self._lock:
            self._held[form.id] = form

    def create(
        self,
        form: SegmentForm,
        token_floor: int = 0,
        replicate: Callable[[], object] | None = None,
        *,
        anew: bool = False,
        bundle_id: int = 0,
        term: int = 0,
    ) -> None:
        """Make the segment; a repetition is not an error. Blocks while its memory is zeroed. Tokens of its lock are
        above `token_floor`. `replicate`, for a segment with two copies, gives it its role; such a segment may be made
        again in a later epoch. `bundle_id`: the bundle with which it moves; 0: it moves alone. `anew`: an earlier copy
        that is here is destroyed, for a coordinator of this `term` as in drop.

        Raises OutOfMemoryError, InvalidArgumentError, AlreadyExistsError (a different one is here), NotFoundError (it
        was dropped).
        """
        with self._lock:
            self._lock.wait_for(lambda: form.id not in self._busy)
            if anew:
                self.terms.check(term, destroys=True)
            held = self._held.get(form.id)
            known = max(self._dropped.get(form.id, 0), held.epoch if anew and held is not None else 0)
            if form.epoch <= known and held != form:
                raise NotFoundError(f"segment {form.id:016x} was dropped before and cannot be made again")
            if held == form:
                self._held[form.id] = form  # a new object, so that give_up() sees the repetition
                if token_floor:
                    self._engine.raise_token(form.id, token_floor)
                return
            if held is not None and not anew:
                raise AlreadyExistsError(
                    f"segment {form.id:016x} is here already, and differs: it has {held}, the request {form}"
                )
            # The source of the copy has a whole one of the epoch before: the coordinator has just checked that.
            why = self._why_not(form.id, Ground.SUPERSEDED, form.epoch - 1) if held is not None else ""
            if why or form.id in self.quarantined:
                raise AlreadyExistsError(f"segment {form.id:016x} cannot be made anew: {why or 'it is in quarantine'}")
            self._busy.add(form.id)
            self._held.pop(form.id, None)
        try:
            if held is not None:
                self._destroy(form.id)
            self._make(form, None if replicate is None else bundle_id)
            try:
                if token_floor:  # before any client can reach it
                    self._engine.raise_token(form.id, token_floor)
                if replicate is not None:
                    replicate()
            except BaseException:  # it is empty and in no books, so nobody else would drop it
                self._destroy(form.id)
                raise
            failpoint("memserver.create.made")
            with self._lock:
                self._held[form.id] = form
        finally:
            self._end(form.id)

    def list_for_coordinator(self) -> tuple[dict[int, SegmentForm], list[int]]:
        """Return held() and ids() for a registration. Until it is answered no coordinator's call drops a segment: what
        is listed stays there until a coordinator that knows the list says otherwise.
        """
        with self._lock:
            self.terms.listed()
            return dict(self._held), self._ids()

    def registered(self, term: int) -> None:
        """Take note that this server has registered with that term of a coordinator (0: it does not say).

        With another term than before, dropped segments may be made again, in any epoch. They were refused because a
        creation may come late. A coordinator whose records were restored may have them again, and counts epochs from
        those records. A late creation of its predecessor has no data. For the same reason segments without a role take
        roles of earlier epochs than the one in which theirs was ended.
        """
        with self._lock:
            if self.terms.registered(term):
                self._engine.copies.forget_ends()
                self._dropped.clear()

    def drop(self, segment_id: int, epoch: int = FOR_GOOD, ground: Ground = Ground.UNKNOWN, term: int = 0) -> bool:
        """Drop a segment and its file; a missing one is not an error. A copy that was made in a later epoch stays, and
        so does one that memserver/drop_rules.py protects. Returns whether the segment is gone. `term`: of the
        coordinator that asks: if this server is not registered with it, NotRegisteredError. 0: this server's own
        decision, or not said.
        """
        with self._lock:
            self._lock.wait_for(lambda: segment_id not in self._busy)
            self.terms.check(term, destroys=True)
            held = self._held.get(segment_id)
            if held is not None and held.epoch > epoch:
                return False
            if held is not None and (why := self._why_not(segment_id, ground, epoch)):
                _log.warning("segment %016x is kept: %s", segment_id, why)
                if ground is Ground.NEVER_MADE:  # the next registration must not count it as deleted
                    self.quarantine([segment_id])
                return False
            if ground is not Ground.FORGOTTEN:  # a forgotten segment may get a copy here again
                self._dropped[segment_id] = max(epoch, self._dropped.pop(segment_id, 0))
            if len(self._dropped) > DROPPED_MAX:
                del self._dropped[next(iter(self._dropped))]
            if held is None:
                return True
            self._take(segment_id)
        self._delete(segment_id)
        return True

    def give_up(self, seen: SegmentForm, epoch: int, term: int = 0) -> bool:
        """Drop a copy that held() has returned, unless it was made in a later epoch, or made or requested again since.
        It may be made again, also in the same epoch. Returns whether it was dropped. `term`: as in drop.
        """
        with self._lock:
            self.terms.check(term, destroys=True)
            if self._held.get(seen.id) is not seen or seen.epoch > epoch:
                return False
            if why := self._why_not(seen.id, Ground.SUPERSEDED, epoch - 1):
                _log.warning("segment %016x is kept: %s", seen.id, why)
                return False
            self._take(seen.id)
        self._delete(seen.id)
        return True

    def _take(self, segment_id: int) -> None:
        """Remove it from the books, for _delete. The caller holds the lock."""
        del self._held[segment_id]
        self._busy.add(segment_id)

    def _delete(self, segment_id: int) -> None:
        failpoint("memserver.delete.booked")
        try:
            self._destroy(segment_id)
        finally:
            self._end(segment_id)

    def _why_not(self, segment_id: int, ground: Ground, epoch: int) -> str:
        """Return why the segment must stay. The caller holds the lock."""
        held = self._engine.holds(segment_id)
        if held is None:
            return ""
        return why_not(held, ground, epoch, quarantined=segment_id in self.quarantined)

    def _destroy(self, segment_id: int) -> None:
        """Release a segment's memory. No other code of this daemon does; `_why_not` was asked, or it was never used."""
        self._engine.delete_segment(segment_id)
        self.on_drop(segment_id)
        self.quarantined.take_up(segment_id)

    def quarantine(self, segment_ids: Iterable[int]) -> None:
        """Keep these segments, also over restarts, until they are taken up, or dropped for a reason."""
        for segment_id in segment_ids:
            with self._lock:
                if segment_id in self._held:
                    self.quarantined.begin(segment_id)

    def inventory(self) -> dict[int, tuple[FoundSegment, bool]]:
        """Return the segments that are here now, by id, each with whether it is quarantined."""
        found = self._engine.held()
        with self._lock:
            return {
                number: (held, number in self.quarantined) for number, held in found.items() if number in self._held
            }

    def bind(self, segment_id: int) -> bool:
        """Bind a segment to this server. False if it may move already; True also if it is not here."""
        with suppress(NotFoundError):
            return self._engine.bind(segment_id)
        return True

    def retire(self, segment_ids: Iterable[int], idle_ms: int, term: int = 0) -> dict[int, int]:
        """Retire the idle ones of these segments: they answer no more requests. Return their locks' last tokens by
        id. `term`: as in drop."""
        with self._lock:
            self.terms.check(term, destroys=True)
            there = [segment_id for segment_id in segment_ids if segment_id in self._held]
        tokens: dict[int, int] = {}
        for segment_id in there:
            with suppress(NotFoundError):  # the segment was dropped meanwhile
                token = self._engine.retire_segment(segment_id, idle_ms)
                if token is not None:
                    tokens[segment_id] = token
        return tokens

    def held(self) -> dict[int, SegmentForm]:
        """Return the segments by id. A segment that is made or requested again has a new object from then on."""
        with self._lock:
            return dict(self._held)

    def ids(self) -> list[int]:
        """Return the ids of all segments here, including those being made."""
        with self._lock:
            return self._ids()

    def _ids(self) -> list[int]:
        return sorted(self._held.keys() | self._busy)

    def file_bytes(self) -> dict[int, int]:
        """Return how many bytes of capacity each segment takes, by id."""
        forms = self.held().values()
        return {form.id: segment_file_bytes(form.nbytes, form.chunk_bytes) for form in forms}

    def used_bytes(self) -> int:
        """Return how many bytes of capacity are taken."""
        return self._engine.used_bytes()

    def _make(self, form: SegmentForm, bundle_id: int | None) -> None:
        file_bytes = segment_file_bytes(form.nbytes, form.chunk_bytes)
        if file_bytes == 0:
            raise InvalidArgumentError(f"a segment cannot have {form.nbytes} bytes in chunks of {form.chunk_bytes}")
        with self._room.making(file_bytes):
            self._engine.create_segment(self._memory_dir.segment_path(form.id), form, bundle_id=bundle_id)

    def _end(self, segment_id: int) -> None:
        with self._lock:
            self._busy.discard(segment_id)
            self._lock.notify_all()
