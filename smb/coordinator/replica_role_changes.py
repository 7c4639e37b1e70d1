"""Changes of segments' roles: checks and stores what servers report, and tells the servers at once."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from smb.coordinator.bundles import Bundles
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import (
    BackupsLost,
    CopiesEnded,
    EndQuarantine,
    Instant,
    LeadsLater,
    SaveBuffer,
    ServerDied,
    ServerReturned,
    Ticked,
)
from smb.coordinator.memserver_client import PROBE_S, Look, MemoryServers, RunLiveness
from smb.coordinator.messages import replica_messages
from smb.coordinator.records import ServerRecord
from smb.coordinator.replicas import CopyRole
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.steps.copies import survivors
from smb.errors import Error
from smb.rpc import control_pb2 as pb

_log = logging.getLogger("coordinator")
# After two live servers have not reached each other for this long, the primary goes on alone.
_BROKEN_MAX_MS = 3000
LOOK_COUNTS_S = 4.0  # how long the coordinator acts on what it saw of other servers; a look takes up to 1.5 s
LOOKS_AT_ONCE_MAX = 32


class RoleChanges:
    """Used in the coordinator's loop only."""

    def __init__(self, commit_log: CommitLog, servers: MemoryServers, endings: SessionEndNotifier) -> None:
        self._commit_log = commit_log
        self._servers = servers
        self._session_ends = endings
        self._looks_at_once = LOOKS_AT_ONCE_MAX  # fewer while they take too long
        self._looked_last = ""  # the last survivor that was looked at
        self.on_copies: Callable[[], None] = lambda: None  # copies have ended or are wanted
        self.on_apart: Callable[[str, Collection[str]], None] = lambda *_: None  # a server did not reach others

    async def look_after(self, server: str, broken: Iterable[pb.BrokenPair]) -> None:
        """Check the servers that this one cannot reach. If such a server is dead, the survivors go on alone before this
        method returns."""
        pairs = {pair.segment_id: pair for pair in broken}
        copies = [copy for copy in self._commit_log.state.copies(server) if copy.segment_id in pairs]
        led = [copy for copy in copies if copy.role is CopyRole.PRIMARY]
        if later := [copy for copy in led if pairs[copy.segment_id].epoch > copy.epoch]:
            not_led = {copy.segment_id: copy.epoch for copy in later}
            epochs = {number: pairs[number].epoch for number in not_led}
            await self.commit_all(LeadsLater(server, not_led, epochs, self._commit_log.changes_max))
            copies = [copy for copy in self._commit_log.state.copies(server) if copy.segment_id in pairs]
        copies = [copy for copy in copies if copy.peer]
        peers = sorted({copy.peer for copy in copies})
        servers = self._commit_log.state.servers
        runs = {peer: servers[peer].instance_id for peer in peers if peer in servers}
        known = [servers[peer] for peer in peers if peer in servers]
        found = await asyncio.gather(*map(self.end_if_dead, known))
        dead = {peer.name for peer, is_dead in zip(known, found, strict=True) if is_dead}
        if dead:
            most = self._commit_log.changes_max
            seen = await self.seen_survivors()
            await self.commit_all(Ticked(None if most is None else most // 4, seen))
        parted = [
            copy
            for copy in copies
            if copy.role is CopyRole.PRIMARY
            and copy.peer not in dead
            and pairs[copy.segment_id].instance_id in (0, runs.get(copy.peer))  # no report of an earlier run
            and pairs[copy.segment_id].for_ms >= _BROKEN_MAX_MS
        ]
        apart = {copy.peer for copy in parted if not pairs[copy.segment_id].refused}
        if apart:
            self.on_apart(server, apart)
        # Part all segments that the two servers share at once. Otherwise an idle segment would be noticed only at its
        # next change, which would have to wait as long again. A backup that answers and refuses some segments has the
        # others as before.
        refused = {copy.segment_id for copy in parted if copy.peer not in apart}
        ours = await self._confirmed(server, refused.union(*(self._primaries(server, other) for other in apart)))
        for other in sorted({copy.peer for copy in parted}):
            await self._part(server, other, ours)
        for other in sorted(apart):
            theirs = await self._confirmed(other, self._primaries(other, server))
            await self._part(other, server, theirs)
            await self.tell_roles(theirs, (other,))

    async def end_if_dead(self, server: ServerRecord) -> bool:
        """Record that this run of a server is dead, if it is. A run of a release that does not name itself counts as
        alive as long as its address answers.
        """
        return await self.look(server) is RunLiveness.DEAD

    async def look(self, server: ServerRecord) -> RunLiveness:
        """Look at this run of a server now. If it is dead, its lease has ended before this method returns."""
        return (await self._looked(server, ())).run

    async def _looked(self, server: ServerRecord, segment_ids: Collection[int]) -> Look:
        """As look, with what it answers of these segments.

        A run that this coordinator cannot reach counts as alive if it renews while this method looks. An earlier
        renewal shows nothing: the run may have died since.
        """
        asked_at = self._commit_log.now().monotonic
        look = await self._servers.look(server, segment_ids)
        if look.run is RunLiveness.DEAD:
            await self._commit_log.commit(ServerDied(server.name, server.instance_id))
        if look.run is not RunLiveness.MUTE:
            return look
        await asyncio.sleep(asked_at + PROBE_S - self._commit_log.now().monotonic)  # a refused network fails at once
        state = self._commit_log.state
        known = state.servers.get(server.name)
        same = known is not None and known.instance_id == server.instance_id
        leases = state.server_leases
        renewed = same and leases.ends.get(server.name, 0.0) > asked_at + leases.duration_s
        renewed = renewed and server.name not in state.overdue  # whose lease was prolonged without a renewal
        return Look(RunLiveness.ALIVE) if renewed else look

    async def seen_survivors(self) -> frozenset[str]:
        """Look at the servers that are to go on alone because the other copies' servers are gone. Return those that
        answer. Nobody can tell whether the others live: they wait for the end of their lease or for a renewal.

        If there are more than can be looked at in time, the rest has its turn at the next call: what was seen of all of
        them together would always be too old on a busy machine.
        """
        begun = self._commit_log.now()
        names = sorted(survivors(self._commit_log.state, begun))
        after = bisect_right(names, self._looked_last)
        names = names[after:] + names[:after]
        seen: dict[str, Instant] = {}
        while names and self._age_s(begun) <= LOOK_COUNTS_S / 2:
            some, names = names[: self._looks_at_once], names[self._looks_at_once :]
            servers = [known for each in some if (known := self._commit_log.state.servers.get(each)) is not None]
            looked_at = self._commit_log.now()
            looks = await self._looked_at_once([(server, ()) for server in servers])
            self._looked_last = some[-1]
            answered = (name for name, look in looks.items() if look.run is not RunLiveness.MUTE)
            seen |= dict.fromkeys(answered, looked_at)
        return frozenset(name for name, looked_at in seen.items() if not self.counts_no_more(looked_at))

    async def looked_in_turn(
        self, asked: Mapping[str, Collection[int]], *, all_needed: bool = False
    ) -> dict[str, Look]:
        """Look at these servers, and at these segments on each. Not at all of them at once: of 300 connections that a
        coordinator begins together, with TLS, some take longer than a look waits.

        Ends when the first look counts no more. `all_needed`: ends also when one server does not answer.
        """
        begun, places = self._commit_log.now(), asyncio.Semaphore(LOOKS_AT_ONCE_MAX)
        looks: dict[str, Look] = {}

        async def look_at(name: str) -> None:
            async with places:  # a server that does not answer holds one of them, and the others go on
                enough = all_needed and any(look.run is RunLiveness.MUTE for look in looks.values())
                server = self._commit_log.state.servers.get(name)
                if server is not None and not enough and not self.counts_no_more(begun):
                    looks[name] = await self._looked(server, asked[name])

        await asyncio.gather(*map(look_at, sorted(asked)))
        return looks

    async def _looked_at_once(self, asked: Sequence[tuple[ServerRecord, Collection[int]]]) -> dict[str, Look]:
        looked_at = self._commit_log.now()
        looks = await asyncio.gather(*(self._looked(server, ids) for server, ids in asked))
        if self.counts_no_more(looked_at):
            self._looks_at_once = max(1, self._looks_at_once // 2)
        else:
            self._looks_at_once = min(LOOKS_AT_ONCE_MAX, 2 * self._looks_at_once)
        return {server.name: look for (server, _), look in zip(asked, looks, strict=True)}

    def counts_no_more(self, looked_at: Instant) -> bool:
        """Whether what was seen at that moment is too old: this process stood still meanwhile."""
        return self._age_s(looked_at) > LOOK_COUNTS_S

    def _age_s(self, moment: Instant) -> float:
        return self._commit_log.now().monotonic - moment.monotonic

    async def unproven_copies(self, segment_ids: Collection[int], beside: str = "") -> frozenset[tuple[str, int]]:
        """Look at the servers of these segments' copies in the records, before others are told to drop theirs. Return
        (server, segment) for each copy of which its server does not say now that it is whole. Those on `beside` are
        left out.

        A server that a primary copied to may not know yet that it has everything: it would come back with half a copy.
        A lease that has run out may run anew, so its server's copies are among those returned.
        """
        state, now = self._commit_log.state, self._commit_log.now()
        where = state.where() if segment_ids else {}
        named: dict[str, set[int]] = {}
        for number in segment_ids:
            if number in where:
                for name in {where[number][1].server, where[number][1].backup} - {"", beside}:
                    named.setdefault(name, set()).add(number)
        alive = [name for name in sorted(named) if name in state.servers and state.alive(name, now)]
        looks = await self.looked_in_turn({name: sorted(named[name]) for name in alive})
        unproven = {(name, number) for name, numbers in named.items() for number in numbers}
        if not self.counts_no_more(now):
            for name, look in looks.items():
                whole = {number for number, held in look.held.items() if held.whole}
                unproven -= {(name, number) for number in (named[name] if look.run is RunLiveness.UNNAMED else whole)}
        return frozenset(unproven)

    async def mark_contested(self) -> None:
        """If some server has a newer copy of a segment than the records know, have all its holders mark it as
        quarantined.

        Then no copy of it is dropped, whichever server dies before the records follow. A mark ends with the role that
        its server gets. Raises UnavailableError if a holder does not answer.
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
        """Tell servers which marks to remove. A server that cannot be reached keeps its marks."""
        for effect in committed.effects:
            server = committed.state.servers.get(effect.server) if isinstance(effect, EndQuarantine) else None
            if isinstance(effect, EndQuarantine) and server is not None:
                with suppress(Error):
                    await self._servers.take_roles(server, (), (), effect.segment_ids)

    def _primaries(self, server: str, peer: str) -> frozenset[int]:
        """Return the segments whose primaries are at `server` and whose backups are at `peer`."""
        copies = self._commit_log.state.copies(server)
        return frozenset(copy.segment_id for copy in copies if copy.role is CopyRole.PRIMARY and copy.peer == peer)

    async def _confirmed(self, server: str, segment_ids: Collection[int]) -> frozenset[int]:
        """Return the segments that the server itself, in its registered run, now confirms to have whole, with all that
        move together with them. It goes on alone only with these. An empty server that took its name must not, nor one
        that reported the other server and has died since: to look at the other one takes seconds.
        """
        if not segment_ids or not self._commit_log.state.heard(server, self._commit_log.now()):
            return frozenset()
        state = self._commit_log.state
        together = Bundles(state.buffers.values()).named_by(segment_ids)
        look = await self._servers.look(state.servers[server], together)
        if look.run is RunLiveness.UNNAMED:
            return frozenset(segment_ids)
        state = self._commit_log.state
        whole = frozenset(number for number, held in look.held.items() if held.whole and held.primary)
        # A segment that is being made moves with the others, but an interrupted creation may be of a buffer in use.
        making = {
            segment.id
            for record in state.buffers.at(server)
            if not record.ready and record.id not in state.interrupted
            for segment in record.segments
        }
        return whole - Bundles(state.buffers.values()).named_by(together - whole - making)

    async def _part(self, server: str, peer: str, segment_ids: frozenset[int]) -> None:
        """Let a server go on alone with these segments, whose backups are at `peer`."""
        ids = segment_ids & self._primaries(server, peer)
        if ids:
            await self.commit_all(BackupsLost(server, ids, self._commit_log.changes_max))

    async def end_copies(self, server: str, epochs: dict[int, int], *, whole: bool) -> None:
        """Store a primary's report of copies. The answer tells the primary its roles; a new backup is told at once."""
        asked = self._commit_log.state.copies(server)
        targets = {copy.segment_id: copy.peer for copy in asked if copy.copying and copy.segment_id in epochs}
        if not whole:
            self.on_apart(server, set(targets.values()))
        await self.commit_all(CopiesEnded(server, epochs, whole, self._commit_log.changes_max))
        if whole and targets:
            await self.tell_roles(tuple(targets), tuple(sorted(set(targets.values()))))
        self.on_copies()

    async def tell_roles(self, segment_ids: Collection[int], names: Iterable[str]) -> None:
        """Tell servers at once their roles for these segments and the rest of their bundles. A server that does not
        answer hears of them when it renews, and one that has not registered in this term when it does.
        """
        state = self._commit_log.state
        together = Bundles(state.buffers.values()).named_by(segment_ids)
        await asyncio.gather(
            *(
                self._tell_roles_to(state.servers[name], together)
                for name in names
                if name in state.servers and state.obeys(name, self._commit_log.now())
            )
        )

    async def _tell_roles_to(self, server: ServerRecord, segment_ids: Collection[int]) -> None:
        state = self._commit_log.state
        copies = [copy for copy in state.copies(server.name) if copy.segment_id in segment_ids]
        try:
            if copies:
                await self._servers.take_roles(server, replica_messages(state, copies))
        except Error as error:
            _log.info("%s; it will hear of its roles when it renews", error)

    async def commit_all(self, event: ServerReturned | BackupsLost | LeadsLater | CopiesEnded | Ticked) -> None:
        """Commit the event until it changes no buffer's record any more, since one event changes a bounded number."""
        while True:
            committed = await self._commit_log.commit(event)
            self._session_ends.tell(committed)
            if not any(isinstance(effect, SaveBuffer) for effect in committed.effects):
                return
