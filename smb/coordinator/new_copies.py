"""Has lost copies of segments made anew (docs/decisions/0025): chooses a server, has it make room, has it copied to.

In this order: the new backup has an empty segment, made for the next epoch; then the record says that it is being
copied to; then the primary is told. Wherever that is cut off, nobody takes the segment for a copy: a server is told to
drop what no record says is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import CopyBegun
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.messages import replica_message
from smb.coordinator.placement import Pool, place_copy
from smb.coordinator.records import BufferRecord, SegmentRecord
from smb.coordinator.replicas import Copy, CopyRole
from smb.errors import Error

LOOK_S = 0.5
PAUSE_S = 5.0  # a server that could not take a copy is not asked again for so long
# At once from one server, and to one: each is a wait for its clients, and one at a time fills a link.
FROM_ONE_MAX, TO_ONE_MAX = 2, 2

_log = logging.getLogger("coordinator")
# (segment, its server, its new copy's server): tell both what they are now.
TellRoles = Callable[[tuple[int, ...], tuple[str, ...]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Wish:
    """A copy that is to be made."""

    record: BufferRecord
    segment: SegmentRecord
    target: str


def wishes(records: list[BufferRecord], pool: Pool, avoid: frozenset[str] = frozenset()) -> list[Wish]:
    """Return what to begin now, a few for each server. `avoid`: servers not to be copied to. Pure."""
    under_way = [segment for record in records for segment in record.segments if segment.copying_to]
    sources = Counter(segment.server for segment in under_way)
    targets = Counter(segment.copying_to for segment in under_way)
    free = {name: nbytes for name, nbytes in pool.free_bytes.items() if name not in avoid}
    found = []
    for record in records:
        for segment in record.segments if record.degraded and record.ready else ():
            if segment.backup or segment.copying_to or segment.server not in pool.free_bytes:
                continue
            open_to = {name: nbytes for name, nbytes in free.items() if targets[name] < TO_ONE_MAX}
            target = place_copy(replace(pool, free_bytes=open_to), segment.server, segment.file_bytes)
            if not target or sources[segment.server] >= FROM_ONE_MAX:
                continue
            sources[segment.server] += 1
            targets[target] += 1
            free[target] -= segment.file_bytes
            found.append(Wish(record, segment, target))
    return found


class NewCopies:
    """Looks again and again."""

    def __init__(self, commit_log: CommitLog, servers: MemoryServers, tell_roles: TellRoles) -> None:
        """`tell_roles` tells servers at once what they are to segments."""
        self._commit_log = commit_log
        self._servers = servers
        self._tell_roles = tell_roles
        self._avoided_until: dict[str, float] = {}
        self._without_room: frozenset[str] = frozenset()  # buffers that were said to have no room, once

    async def run(self) -> None:
        """Begin what is missing, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.begin()

    async def begin(self) -> None:
        """Begin what can be begun now. A server that does not answer costs the others nothing but the wait."""
        state, now = self._commit_log.state, self._commit_log.now()
        records = [record for record in state.buffers.values() if record.replicas > 1]
        if not any(record.degraded for record in records):
            self._without_room = frozenset()
            return
        avoid = frozenset(name for name, until in self._avoided_until.items() if until > now.monotonic)
        pool = state.pool(now)
        self._say_without_room(records, pool)
        await asyncio.gather(*(self._begin(wish) for wish in wishes(records, pool, avoid)))

    async def _begin(self, wish: Wish) -> None:
        epoch = wish.segment.epoch + 1
        server = self._commit_log.state.servers[wish.target]
        made = replace(wish.segment, server=wish.target, epoch=epoch)
        copy = Copy(made.id, epoch, CopyRole.BACKUP, wish.segment.server, copying=True)
        begun = CopyBegun(wish.record.key, made.id, wish.target, server.instance_id, epoch)
        try:
            message = replica_message(self._commit_log.state, copy)
            await self._servers.create(server, replace(wish.record, epoch=epoch), made, 0, message)
            await self._commit_log.commit(begun)
        except Error as error:
            _log.warning("no copy of a segment of %s on %s for now: %s", wish.record.title, wish.target, error)
            self._avoided_until[wish.target] = self._commit_log.now().monotonic + PAUSE_S
            return
        await self._tell_roles((made.id,), (wish.segment.server,))

    def _say_without_room(self, records: list[BufferRecord], pool: Pool) -> None:
        found = frozenset(record.title for record in records if record.ready and without_room(record, pool))
        for title in sorted(found - self._without_room):
            _log.warning("%s stays degraded: no other server has room for a copy", title)
        self._without_room = found


def without_room(record: BufferRecord, pool: Pool) -> bool:
    """Whether some segment of it has one copy, and no other live server has room for a second one."""
    return any(
        not segment.backup
        and not segment.copying_to
        and segment.server in pool.free_bytes
        and not place_copy(pool, segment.server, segment.file_bytes)
        for segment in record.segments
    )
