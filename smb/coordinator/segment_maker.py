"""Has memory servers make the segments of new buffers, and drop segments.

A creation is a task of its own: once begun it ends with a whole buffer or with nothing, even if the client that asked
for it goes away meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from smb.config.backoff import Backoff, own_random
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import (
    BufferFailed,
    BufferMade,
    BufferWanted,
    DropSegments,
    MakeSegments,
    ServerCounted,
    ServerSuspected,
)
from smb.coordinator.memserver_client import AnotherRunError, MemoryServers
from smb.coordinator.messages import replica_messages
from smb.coordinator.outside import new_id
from smb.coordinator.records import BufferRecord, Kind, SegmentRecord, ServerRecord
from smb.coordinator.replicas import copies_on
from smb.coordinator.state import State
from smb.coordinator.steps.creation import NotNowError, made_before
from smb.coordinator.store import StoreError
from smb.coordinator.validate import Creation
from smb.daemon.failpoint import failpoint
from smb.errors import NOT_APPLIED, UNKNOWN, Error, OutOfMemoryError, UnavailableError

_log = logging.getLogger("coordinator")
OTHERS_CREATION_S = 30.0  # how long a create with exist_ok waits for another client's creation of the same name
_MOVING_FIRST_S, _MOVING_MAX_S = 0.1, 0.2  # pauses between tries to create a buffer in a bundle that is moving
_LOST_COPY_S = 2.0  # wait for a lost copy of the bundle; by then the copy maker has begun it
_FINISH_S = 5.0

Waiting = Callable[[], AbstractContextManager[None]]


class _MuteServersError(UnavailableError):
    """Servers that count as alive did not answer when they were asked to make segments."""

    def __init__(self, text: str, servers: frozenset[str]) -> None:
        super().__init__(text)
        self.servers = servers


class SegmentMaker:
    """Used in the coordinator's loop only."""

    def __init__(
        self,
        commit_log: CommitLog,
        servers: MemoryServers,
        new_id: Callable[[], int] = new_id,
        draw: Callable[[], float] = own_random.random,
    ) -> None:
        """`new_id` returns a random id for a segment or a buffer. `draw` returns numbers from 0 to 1, which spread the
        pauses between tries.
        """
        self._new_id, self._draw = new_id, draw
        self._commit_log = commit_log
        self._servers = servers
        self._creations: set[asyncio.Task[BufferRecord]] = set()

    async def finish(self) -> None:
        """Wait a while for the creations in progress. The next start rolls back those that take longer."""
        if self._creations:
            await asyncio.wait(self._creations, timeout=_FINISH_S)

    def create(
        self, creation: Creation, patience_s: float, waiting: Waiting = nullcontext
    ) -> asyncio.Task[BufferRecord]:
        """Begin to make a buffer. `patience_s`: how long to wait while the bundle that it joins is moving. `waiting` is
        entered while another creation of that name is under way.
        """
        task = asyncio.create_task(self._create(creation, patience_s, waiting))
        self._creations.add(task)
        task.add_done_callback(self._forget_creation)
        return task

    def _now(self) -> float:
        return self._commit_log.now().monotonic

    async def _create(self, creation: Creation, patience_s: float, waiting: Waiting) -> BufferRecord:
        begun = self._now()
        backoff = Backoff(_MOVING_FIRST_S, _MOVING_MAX_S, lambda: begun + patience_s - self._now(), self._draw)
        while True:
            try:
                return await self._create_now(creation, waiting, waits=self._now() - begun < _LOST_COPY_S)
            except NotNowError:
                if backoff.over():
                    raise
            await asyncio.sleep(backoff.next_s())

    async def _create_now(self, creation: Creation, waiting: Waiting, *, waits: bool) -> BufferRecord:
        deadline = self._now() + OTHERS_CREATION_S
        # These are of the first attempt. Keeping the error itself would keep this frame, and with it the request.
        mute: frozenset[str] = frozenset()
        said = ""
        while True:
            try:
                committed = await self._commit_log.commit(BufferWanted(creation, self._new_id, mute, waits))
            except (UnavailableError, OutOfMemoryError):
                if mute:  # no other server can take the buffer, so report the servers that did not answer
                    raise _MuteServersError(said, mute) from None
                raise
            wanted = next((effect.record for effect in committed.effects if isinstance(effect, MakeSegments)), None)
            if wanted is not None:
                failpoint("coordinator.create.pending_stored")
                try:
                    return await self._make(committed, wanted, creation.asked)
                except _MuteServersError as error:
                    if mute or creation.like or creation.server_names or creation.mirror_of:
                        raise
                    mute, said = error.servers, str(error)
                    continue  # look again: another client may have created a buffer of that name meanwhile
            decided = made_before(committed.state, creation) or committed.state.buffers[creation.key]
            # Look at the current record: a record that became ready meanwhile no longer wakes a wait.
            record = self._commit_log.state.buffers.get(decided.key)
            if record is None or record.id != decided.id:
                continue
            if record.ready:
                return record
            # Another client, or an earlier attempt of this one, is creating it: wait for the result.
            with waiting():
                ended = await self._commit_log.wait(record.key, deadline - self._now())
            if not ended:
                raise UnavailableError(
                    f"{creation.asked}: another client is creating it and has not finished within "
                    f"{OTHERS_CREATION_S:.0f} s; try again",
                    outcome=UNKNOWN if record.attempt_id == creation.attempt_id != 0 else NOT_APPLIED,
                )

    async def _make(self, committed: Committed, record: BufferRecord, asked: str) -> BufferRecord:
        try:
            await self._make_segments(committed, record, asked)
            failpoint("coordinator.create.segments_made")
            instances = {copy.server: committed.state.servers[copy.server].instance_id for copy in record.copies}
            event = BufferMade(record.key, record.segments, instances)
            made = (await self._commit_log.commit(event)).state.buffers[record.key]
        except BaseException:
            try:
                failed = await self._commit_log.commit(BufferFailed(record.key, record.copies))
                failpoint("coordinator.create.taken_back")
                await self.drop(failed)
            except Error as error:  # the caller hears the original reason instead
                _log.warning("%s: the failed creation is rolled back at the coordinator's next start: %s", asked, error)
            raise
        failpoint("coordinator.create.ready_stored")
        return made

    async def _make_segments(self, committed: Committed, record: BufferRecord, asked: str) -> None:
        servers = [committed.state.servers[segment.server] for segment in record.copies]
        calls = (
            self._make_segment(committed.state, server, record, segment)
            for server, segment in zip(servers, record.copies, strict=True)
        )
        # Wait for all answers even after a failure: a drop must not overtake the segment's creation.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, int):
                await self._commit_log.commit(ServerCounted(server.name, server.instance_id, answer))
        mute = frozenset(
            server.name for server, answer in zip(servers, answers, strict=True) if isinstance(answer, UnavailableError)
        )
        for answer in answers:
            if isinstance(answer, AnotherRunError):
                raise NotNowError(f"{asked}: {answer}; nothing was created; try again") from answer
        for answer in answers:
            if isinstance(answer, UnavailableError):
                left_s = self._alive_for(mute)
                raise _MuteServersError(
                    f"{asked}: {answer}; nothing was created. That server counts as alive for {left_s:.0f} s more, "
                    f"unless it renews: try again then, or name other servers",
                    mute,
                ) from answer
            if isinstance(answer, Error):
                raise type(answer)(f"{asked}: {answer}; nothing was created") from answer
            if isinstance(answer, BaseException):
                raise answer

    def _alive_for(self, servers: Iterable[str]) -> float:
        """Return in how many seconds the last of these servers' leases ends."""
        leases, now = self._commit_log.state.server_leases, self._commit_log.now()
        return max((leases.ends.get(name, now.monotonic) - now.monotonic for name in servers), default=0.0)

    async def _make_segment(
        self, state: State, server: ServerRecord, record: BufferRecord, segment: SegmentRecord
    ) -> int:
        floor = state.token_floor if record.kind is Kind.LOCK else 0
        ours = [copy for copy in copies_on(record, server.name) if copy.segment_id == segment.id]
        replica = next(iter(replica_messages(state, ours)), None)

        def alive() -> bool:
            return self._commit_log.state.alive(server.name, self._commit_log.now())

        used_bytes = await self._servers.create(server, record, segment, floor, replica, state.lineage.stamp, alive)
        failpoint("coordinator.create.segment_made")
        return used_bytes

    async def drop(self, committed: Committed) -> None:
        """Have the servers drop the segments that this event removed. A server that misses it must register again."""
        drops = [effect for effect in committed.effects if isinstance(effect, DropSegments)]
        each = [(segment, effect) for effect in drops for segment in effect.segments]
        # In a bundle the primary's segment comes first, because the primary makes sure that the backup has what the
        # segment names. A backup whose primary could not be told hears of it when it registers again.
        first: list[tuple[SegmentRecord, DropSegments]] = []
        later: list[tuple[SegmentRecord, DropSegments]] = []
        for segment, effect in each:
            follows = segment.group and segment.server in (segment.backup, segment.copying_to)
            (later if follows else first).append((segment, effect))
        dropped = await asyncio.gather(*(self._drop_segment(committed, *one) for one in first))
        missed = {segment.id for (segment, _), done in zip(first, dropped, strict=True) if not done}
        await asyncio.gather(*(self._drop_segment(committed, *one) for one in later if one[0].id not in missed))

    async def _drop_segment(self, committed: Committed, segment: SegmentRecord, effect: DropSegments) -> bool:
        """Return whether the server dropped the segment."""
        server = committed.state.servers.get(segment.server)
        # A server without a lease must register first, and hears of it then.
        if server is None or not committed.state.alive(server.name, self._commit_log.now()):
            return False
        try:
            used_bytes = await self._servers.drop(server, segment.id, effect.epoch, effect.ground, room=effect.room)
            failpoint("coordinator.delete.segment_dropped")
            counted = ServerCounted(server.name, server.instance_id, used_bytes, segment.id)
            await self._commit_log.commit(counted)
        except UnavailableError as error:
            _log.warning("%s; it will be told to drop it when it registers again", error)
            await self._commit_log.commit(ServerSuspected(server.name))
            return False
        return True

    def _forget_creation(self, creation: asyncio.Task[BufferRecord]) -> None:
        self._creations.discard(creation)
        # Mark the exception as retrieved, and note a failure of the store, even if no caller waits for the answer.
        if not creation.cancelled() and isinstance(creation.exception(), StoreError):
            _log.error("%s", creation.exception())
