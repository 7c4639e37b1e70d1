"""Tells the memory servers at once which sessions have ended, with one call at a time to each server.

This is best effort: a server that misses a call hears of the ends when it renews or registers. In a large cluster no
server is called, because each end would cost a call to each server.
"""

from __future__ import annotations

import asyncio
import logging

from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import TellEnded
from smb.coordinator.memserver_client import MemoryServers
from smb.daemon.failpoint import failpoint
from smb.errors import UnavailableError

NOTIFIED_MAX = 64  # servers in a cluster that is notified at once; in larger ones a renewal follows within 2 s
_log = logging.getLogger("coordinator")


class SessionEndNotifier:
    """The ended sessions that servers have not heard of yet. Call `close` at the end."""

    def __init__(self, commit_log: CommitLog, servers: MemoryServers) -> None:
        self._commit_log = commit_log
        self._servers = servers
        self._unsent: dict[str, list[int]] = {}  # by server, for servers with a call in progress
        self._calls: set[asyncio.Task[None]] = set()

    def tell(self, committed: Committed) -> None:
        """Begin to tell each living server which sessions this event ended. Returns at once."""
        ended = [i for effect in committed.effects if isinstance(effect, TellEnded) for i in effect.session_ids]
        if not ended:
            return
        failpoint("coordinator.session.end_stored")
        now = self._commit_log.now()
        alive = [name for name in committed.state.servers if committed.state.alive(name, now)]
        for name in alive if len(alive) <= NOTIFIED_MAX else ():
            if name in self._unsent:
                self._unsent[name] += ended
                continue
            self._unsent[name] = list(ended)
            call = asyncio.create_task(self._tell(name))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """Cancel the calls in progress."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _tell(self, name: str) -> None:
        try:
            while session_ids := self._unsent[name]:
                self._unsent[name] = []
                server = self._commit_log.state.servers.get(name)
                if server is None:
                    return
                await self._servers.end_sessions(server, session_ids)
                failpoint("coordinator.session.end_sent")
        except UnavailableError as error:
            _log.info("%s; it hears of them with its next renewal", error)
        finally:
            del self._unsent[name]
