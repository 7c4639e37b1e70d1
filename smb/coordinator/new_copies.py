"""Has lost copies of segments made anew (docs/decisions/0025): chooses a server, has it make room, has it copied to.

In this order: the new backup has an empty segment, made for the next epoch; then the record says that it is being
copied to; then the primary is told. Wherever that is cut off, nobody takes the segment for a copy: a server is told to
drop what no record says is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import CopyBegun
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.messages import replica_message
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord
from smb.coordinator.replicas import Copy, CopyRole
from smb.coordinator.wanted_copies import Wish, wishes, without_room
from smb.errors import Error

LOOK_S = 0.5
PAUSE_S = 5.0  # a server that could not take a copy is not asked again for so long

_log = logging.getLogger("coordinator")
# (segment, its server, its new copy's server): tell both what they are now.
TellRoles = Callable[[tuple[int, ...], tuple[str, ...]], Awaitable[None]]


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
        server = self._commit_log.state.servers.get(wish.target)
        if server is None:
            return
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
