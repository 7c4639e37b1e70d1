"""Changes of who has the primary of a segment: what servers report is checked and stored, and they are told at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import BackupsLost, CopiesEnded, SaveBuffer, ServerDied, ServerReturned, Ticked
from smb.coordinator.groups import Groups
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.messages import replica_messages
from smb.coordinator.records import ServerRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.errors import Error
from smb.rpc import control_pb2 as pb

_log = logging.getLogger("coordinator")
# Two live servers that have not reached each other for so long go on as one: the one that has the primary.
_BROKEN_MAX_MS = 3000


class RoleChanges:
    """In the coordinator's loop alone."""

    def __init__(self, commit_log: CommitLog, servers: MemoryServers, endings: SessionEndNotifier) -> None:
        self._commit_log = commit_log
        self._servers = servers
        self._session_ends = endings
        self.on_copies: Callable[[], None] = lambda: None  # copies have ended, or are wanted
        self.on_apart: Callable[[str, Collection[str]], None] = lambda *_: None  # a server did not reach these

    async def look_after(self, server: str, broken: Iterable[pb.BrokenPair]) -> None:
        """Check the servers that this one cannot reach. If such a server is dead, the survivors go on alone before this
        returns."""
        for_ms = {pair.segment_id: pair.for_ms for pair in broken}
        copies = [copy for copy in self._commit_log.state.copies(server) if copy.segment_id in for_ms and copy.peer]
        peers = sorted({copy.peer for copy in copies})
        servers = self._commit_log.state.servers
        known = [servers[peer] for peer in peers if peer in servers]
        answers = await asyncio.gather(*map(self._servers.is_dead, known))
        dead = {server.name for server, is_dead in zip(known, answers, strict=True) if is_dead}
        for peer in known:
            if peer.name in dead:
                await self._commit_log.commit(ServerDied(peer.name, peer.instance_id))
        if dead:
            most = self._commit_log.changes_max
            await self.settle(Ticked(None if most is None else most // 4))
        apart = {
            copy.peer
            for copy in copies
            if copy.role is CopyRole.PRIMARY and copy.peer not in dead and for_ms[copy.segment_id] >= _BROKEN_MAX_MS
        }
        if apart:
            self.on_apart(server, apart)
        # All that the two have of each other, at once: of a segment that nobody changes now nobody would know it yet,
        # and who changes it next would wait as long again.
        for other in sorted(apart):
            await self._part(server, other)
            await self.tell_roles(await self._part(other, server), (other,))

    async def _part(self, server: str, peer: str) -> frozenset[int]:
        """Let a server go on alone with the segments whose other copies are at a peer; return these segments."""
        copies = self._commit_log.state.copies(server)
        ids = frozenset(copy.segment_id for copy in copies if copy.role is CopyRole.PRIMARY and copy.peer == peer)
        await self.settle(BackupsLost(server, ids, self._commit_log.changes_max))
        return ids

    async def end_copies(self, server: str, epochs: dict[int, int], *, whole: bool) -> None:
        """Take what a primary says of copies. The same answer tells it its roles; the new backup is told at once."""
        asked = self._commit_log.state.copies(server)
        targets = {copy.segment_id: copy.peer for copy in asked if copy.copying and copy.segment_id in epochs}
        if not whole:
            self.on_apart(server, set(targets.values()))
        await self.settle(CopiesEnded(server, epochs, whole, self._commit_log.changes_max))
        if whole and targets:
            await self.tell_roles(tuple(targets), tuple(sorted(set(targets.values()))))
        self.on_copies()

    async def tell_roles(self, segment_ids: Collection[int], names: Iterable[str]) -> None:
        """Tell servers at once what they are to these segments, and to what moves together with them. A server that
        does not answer hears of it when it renews.
        """
        state = self._commit_log.state
        together = Groups(state.buffers.values()).named_by(segment_ids)
        await asyncio.gather(
            *(self._tell_roles_to(state.servers[name], together) for name in names if name in state.servers)
        )

    async def _tell_roles_to(self, server: ServerRecord, segment_ids: Collection[int]) -> None:
        state = self._commit_log.state
        copies = [copy for copy in state.copies(server.name) if copy.segment_id in segment_ids]
        try:
            if copies:
                await self._servers.take_roles(server, replica_messages(state, copies))
        except Error as error:
            _log.info("%s; it will hear of its roles when it renews", error)

    async def settle(self, event: ServerReturned | BackupsLost | CopiesEnded | Ticked) -> None:
        """Commit it until it changes no record of a buffer any more: each time it changes a bounded number."""
        while True:
            committed = await self._commit_log.commit(event)
            self._session_ends.tell(committed)
            if not any(isinstance(effect, SaveBuffer) for effect in committed.effects):
                return
