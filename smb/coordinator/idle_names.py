"""Frees idle locks and barriers. Each takes a segment, so a name that was used once would otherwise take it for good.

The order keeps everything safe wherever it is cut off: the server retires an idle segment and from then on answers no
requests about it; the name leaves the records; the segment is dropped. A segment that was retired but is still
recorded, for example after a crash, is found by the next round. A client that comes back places the name anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import NamesFreed
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.records import Kind
from smb.errors import Error
from smb.rpc.bounds import ITEMS_MAX

IDLE_S = 60.0  # the default of --idle-names
IDLE_S_MIN, IDLE_S_MAX = 1.0, 31_536_000.0
_ROUNDS = 4  # rounds of asking per idle time
_PAUSE_S_MAX = 60.0

_log = logging.getLogger("coordinator")


class IdleNames:
    """Asks all servers again and again for idle names, and frees them."""

    def __init__(
        self,
        commit_log: CommitLog,
        servers: MemoryServers,
        drop: Callable[[Committed], Awaitable[None]],
        idle_s: float,
    ) -> None:
        """`idle_s`: how long a name must have been unused. `drop` drops the segments that an event removed."""
        self._commit_log = commit_log
        self._servers = servers
        self._drop = drop
        self._idle_s = idle_s
        self._logged: dict[str, str] = {}  # by server: the last logged reason why its names stay

    async def run(self) -> None:
        """Free idle names until cancelled."""
        while True:
            await asyncio.sleep(min(self._idle_s / _ROUNDS, _PAUSE_S_MAX))
            await self.free()

    async def free(self) -> None:
        """Free the names that are idle now. A server that does not answer does not delay the others."""
        there: defaultdict[str, list[int]] = defaultdict(list)
        for record in self._commit_log.state.buffers.values():
            if record.kind is not Kind.BUFFER and record.ready:
                there[record.segments[0].server].append(record.segments[0].id)
        await asyncio.gather(*(self._free_on(name, ids) for name, ids in there.items()))

    async def _free_on(self, name: str, segment_ids: list[int]) -> None:
        try:
            # One change stores the names together with the last token of their locks.
            most = min(ITEMS_MAX, (self._commit_log.changes_max or ITEMS_MAX + 1) - 1)
            for begin in range(0, len(segment_ids), most):
                server = self._commit_log.state.servers.get(name)
                if server is None or not self._commit_log.state.obeys(name, self._commit_log.now()):
                    return
                some = segment_ids[begin : begin + most]
                # Sessions of very many clients have longer leases: keep the names of a client that is away.
                idle_s = max(self._idle_s, self._commit_log.state.session_leases.granted_s)
                tokens = await self._servers.retire(server, some, idle_s)
                if tokens:
                    await self._drop(await self._commit_log.commit(NamesFreed(name, tokens)))
            self._logged.pop(name, None)
        except Error as error:
            if self._logged.get(name) != str(error):
                self._logged[name] = str(error)
                _log.warning("idle locks and barriers stay for now: %s", error)
