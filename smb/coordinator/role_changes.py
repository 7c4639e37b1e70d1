"""Changes of who has the primary of a segment: what servers report is checked and stored, and they are told at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from smb.coordinator.bundles import Bundles
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import (
    BackupsLost,
    CopiesEnded,
    EndQuarantine,
    SaveBuffer,
    ServerDied,
    ServerReturned,
    Ticked,
)
from smb.coordinator.memserver_client import MemoryServers, RunLiveness
from smb.coordinator.messages import replica_messages
from smb.coordinator.records import ServerRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.state import SERVER_LEASE_S
from smb.coordinator.steps.copies import survivors
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
        self._silent_since: dict[str, tuple[int, float]] = {}  # by server: the run, and when it did not answer first
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
        found = await asyncio.gather(*map(self.end_if_dead, known))
        dead = {peer.name for peer, is_dead in zip(known, found, strict=True) if is_dead}
        if dead:
            most = self._commit_log.changes_max
            silent = await self.silent_survivors()
            await self.commit_all(Ticked(None if most is None else most // 4, silent))
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
            await self._part(server, other, self._primaries(server, other))
            theirs = await self._confirmed(other, self._primaries(other, server))
            await self._part(other, server, theirs)
            await self.tell_roles(theirs, (other,))

    async def end_if_dead(self, server: ServerRecord) -> bool:
        """Take note that this run of a server is dead, if it is. A run of a version that does not name itself is taken
        for alive as long as somebody answers at its address.
        """
        return await self.look(server) is RunLiveness.DEAD

    async def look(self, server: ServerRecord) -> RunLiveness:
        """Look at this run of a server now. If it is dead, its lease has ended before this returns.

        One that this coordinator does not reach counts as alive once it has renewed since that was seen first.
        """
        run = (await self._servers.look(server)).run
        if run is RunLiveness.DEAD:
            await self._commit_log.commit(ServerDied(server.name, server.instance_id))
        if run is not RunLiveness.MUTE:
            self._silent_since.pop(server.name, None)
            return run
        now = self._commit_log.now().monotonic
        instance_id, since = self._silent_since.setdefault(server.name, (server.instance_id, now))
        if instance_id != server.instance_id:
            since = now
            self._silent_since[server.name] = (server.instance_id, since)
        renewed = self._commit_log.state.server_leases.ends.get(server.name, 0.0) > since + SERVER_LEASE_S
        return RunLiveness.ALIVE if renewed else RunLiveness.MUTE

    async def silent_survivors(self) -> frozenset[str]:
        """Look at the servers that are to go on alone, as those of the other copies are gone; return those of which
        nobody can tell now whether they live. They wait for the end of their lease, or for its renewal.
        """
        state, now = self._commit_log.state, self._commit_log.now()
        names = sorted(survivors(state, now))
        runs = await asyncio.gather(*(self.look(state.servers[name]) for name in names))
        return frozenset(name for name, run in zip(names, runs, strict=True) if run is RunLiveness.MUTE)

    async def look_at_holders(self, segment_ids: Collection[int]) -> frozenset[str]:
        """Look at the servers that the records name for these segments, before others are told to drop theirs. Return
        those that do not answer.
        """
        state, now = self._commit_log.state, self._commit_log.now()
        where = state.where() if segment_ids else {}
        named = {
            name for each in segment_ids if each in where for name in (where[each][1].server, where[each][1].backup)
        }
        alive = [state.servers[name] for name in sorted(named) if name in state.servers and state.alive(name, now)]
        runs = await asyncio.gather(*map(self.look, alive))
        return frozenset(server.name for server, run in zip(alive, runs, strict=True) if run is RunLiveness.MUTE)

    async def mark_contested(self) -> None:
        """Have all who hold a segment mark it as quarantined, if some server has a newer copy than the records know.

        None of its copies goes then, no matter which server dies before the records follow. A mark ends with the role
        that its server gets. Raises UnavailableError if one of them does not answer.
        """
        state, now = self._commit_log.state, self._commit_log.now()
        contested, where = state.contested(), state.where()
        ids: dict[str, set[int]] = {}
        for number in contested:
            claimants = [name for name, held in state.unexplained.items() if number in held]
            for name in {where[number][1].server, where[number][1].backup, *claimants} - {""}:
                ids.setdefault(name, set()).add(number)
        calls = (
            self._servers.take_roles(state.servers[name], (), sorted(numbers))
            for name, numbers in sorted(ids.items())
            if name in state.servers and state.heard(name, now)
        )
        await asyncio.gather(*calls)

    async def end_quarantine(self, committed: Committed) -> None:
        """Tell servers what they need not mark any more. A server that is not reached keeps its marks."""
        for effect in committed.effects:
            server = committed.state.servers.get(effect.server) if isinstance(effect, EndQuarantine) else None
            if isinstance(effect, EndQuarantine) and server is not None:
                with suppress(Error):
                    await self._servers.take_roles(server, (), (), effect.segment_ids)

    def _primaries(self, server: str, peer: str) -> frozenset[int]:
        """Return the segments whose primaries are at a server and whose other copies are at a peer."""
        copies = self._commit_log.state.copies(server)
        return frozenset(copy.segment_id for copy in copies if copy.role is CopyRole.PRIMARY and copy.peer == peer)

    async def _confirmed(self, server: str, segment_ids: frozenset[int]) -> frozenset[int]:
        """Return those of which the server itself says, now and in the run that is registered, that it has them whole.
        It goes on alone with no others: an empty one that took its name must not.
        """
        state = self._commit_log.state
        if not segment_ids or not state.heard(server, self._commit_log.now()):
            return frozenset()
        look = await self._servers.look(state.servers[server], segment_ids)
        if look.run is RunLiveness.UNNAMED:
            return segment_ids
        return frozenset(number for number, held in look.held.items() if held.whole and held.primary)

    async def _part(self, server: str, peer: str, segment_ids: frozenset[int]) -> None:
        """Let a server go on alone with these segments, whose other copies are at a peer."""
        ids = segment_ids & self._primaries(server, peer)
        if ids:
            await self.commit_all(BackupsLost(server, ids, self._commit_log.changes_max))

    async def end_copies(self, server: str, epochs: dict[int, int], *, whole: bool) -> None:
        """Take what a primary says of copies. The same answer tells it its roles; the new backup is told at once."""
        asked = self._commit_log.state.copies(server)
        targets = {copy.segment_id: copy.peer for copy in asked if copy.copying and copy.segment_id in epochs}
        if not whole:
            self.on_apart(server, set(targets.values()))
        await self.commit_all(CopiesEnded(server, epochs, whole, self._commit_log.changes_max))
        if whole and targets:
            await self.tell_roles(tuple(targets), tuple(sorted(set(targets.values()))))
        self.on_copies()

    async def tell_roles(self, segment_ids: Collection[int], names: Iterable[str]) -> None:
        """Tell servers at once what they are to these segments, and to what moves together with them. A server that
        does not answer hears of it when it renews.
        """
        state = self._commit_log.state
        together = Bundles(state.buffers.values()).named_by(segment_ids)
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

    async def commit_all(self, event: ServerReturned | BackupsLost | CopiesEnded | Ticked) -> None:
        """Commit it until it changes no record of a buffer any more: each time it changes a bounded number."""
        while True:
            committed = await self._commit_log.commit(event)
            self._session_ends.tell(committed)
            if not any(isinstance(effect, SaveBuffer) for effect in committed.effects):
                return
