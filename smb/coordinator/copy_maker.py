"""Has copies of segments made (docs/decisions/0025), where one is lost or is to leave its server: chooses a server, has
it make room, has it copied to.

In this order: the new backup has an empty segment, made for the next epoch; where a primary leaves, it yields; where a
copy leaves, the server of the other one says that it has that; then the record says what is being copied to where; then
the primary is told, and the copy that leaves is dropped. Wherever that is cut off, nobody takes the segment for a copy:
a server is told to drop what no record says is there. A primary that has yielded goes on as before, and asks its backup
at each read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.draining import BOUND
from smb.coordinator.events import CopyBegun, CopyDropped, MoveAllowed, ServerCounted
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.messages import replica_message
from smb.coordinator.placement import Pool
from smb.coordinator.rebalance import Move
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.replicas import Copy, CopyRole
from smb.coordinator.wanted_copies import Wish, still_wanted, wishes, without_room
from smb.daemon.failpoint import failpoint
from smb.drop_reasons import Ground
from smb.errors import Error, NotFoundError

LOOK_S = 0.5
PAUSE_S = 5.0  # a server that could not take a copy is not asked again for so long
APART_S = 10.0  # nor is one server's copy made on another that it did not reach: users wait for each attempt
BOUND_S = 60.0  # a segment that can't move is not asked about again for so long
CONFIRM_PAUSE_S = 0.2  # nor one that did not confirm its own: it hears of its role by the answer to its renewal

_log = logging.getLogger("coordinator")
# Segments, and servers: tell these at once what they are to those.
TellRoles = Callable[[tuple[int, ...], tuple[str, ...]], Awaitable[None]]
Drop = Callable[[Committed], Awaitable[None]]


class CopyMaker:
    def __init__(self, commit_log: CommitLog, servers: MemoryServers, tell_roles: TellRoles, drop: Drop) -> None:
        """`drop` has servers drop what an event has left without a name."""
        self._commit_log = commit_log
        self._servers = servers
        self._tell_roles = tell_roles
        self._drop = drop
        self._hurry = asyncio.Event()
        self._moves: dict[int, Move] = {}  # by segment; forgotten with this run: they can be asked for again
        self._avoided_until: dict[str, float] = {}
        self._apart_until: dict[frozenset[str], float] = {}  # two servers that did not reach each other
        self._said: dict[int, str] = {}  # by bundle: the last warning
        self._bound: dict[int, float] = {}  # segments of which their servers said that they can't move; until when
        self._without_room: frozenset[str] = frozenset()  # buffers that were said to have no room, once
        self._making: set[tuple[str, int]] = set()  # servers, and segments of copies that have not begun

    def bound(self) -> Collection[int]:
        """Segments of which their servers have said that they can't move."""
        return self._bound.keys()

    def resting(self) -> Collection[int]:
        """Bundles of which no copy is begun: their source has told that it lacks one of their segments."""
        state = self._commit_log.state
        if not any(state.missing.values()):
            return frozenset()
        return frozenset(
            bundle_of(segment)
            for record in state.buffers.values()
            for segment in record.segments
            if not segment.backup and segment.id in state.missing.get(segment.server, ())
        )

    def making_anywhere(self) -> frozenset[tuple[str, int]]:
        """Servers, and the segments that each is being asked to make, for copies that have not begun."""
        return frozenset(self._making)

    def making(self, server: str) -> Collection[int]:
        """Segments that a server is being asked to make, for copies that have not begun."""
        return [segment_id for name, segment_id in self._making if name == server]

    def move(self, moves: Iterable[Move]) -> None:
        """Make these, in place of those that were asked for before and have not begun."""
        begun = {
            segment.id
            for record in self._commit_log.state.buffers.values()
            if record.moves_alone
            for segment in record.segments
            if segment.copying_to or segment.backup
        }
        kept = {number: move for number, move in self._moves.items() if number in begun}
        self._moves = {move.segment_id: move for move in moves} | kept
        self.look_now()

    def keep_apart(self, server: str, others: Collection[str]) -> None:
        """A server did not reach these: its copies are made elsewhere for now."""
        now = self._commit_log.now().monotonic
        self._apart_until = {pair: until for pair, until in self._apart_until.items() if until > now}
        self._apart_until |= {frozenset((server, other)): now + APART_S for other in others}

    def look_now(self) -> None:
        """A copy has ended, or others are wanted."""
        self._hurry.set()

    async def run(self) -> None:
        """Begin what is missing, until cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LOOK_S)
            self._hurry.clear()
            await self.begin()

    async def begin(self) -> None:
        """Begin what can be begun now. A server that does not answer costs the others nothing but the wait."""
        state, now = self._commit_log.state, self._commit_log.now()
        drained = any(server.draining and state.allocation(server.name).segments for server in state.servers.values())
        records = [record for record in state.buffers.values() if drained or self._moves or record.movable]
        if not drained and not self._moves and not any(map(_wants, records)):
            self._without_room, self._bound = frozenset(), {}
            self._said = {}
            return
        self._bound = {number: until for number, until in self._bound.items() if until > now.monotonic}
        avoid = frozenset(name for name, until in self._avoided_until.items() if until > now.monotonic)
        avoid |= {name for name in state.servers if not state.heard(name, now)}
        apart = frozenset(pair for pair, until in self._apart_until.items() if until > now.monotonic)
        kept = frozenset(
            (name, number)
            for name, held in state.unexplained.items()
            for number, each in held.items()
            if each.quarantined
        )
        pool = state.pool(now)
        self._moves = still_wanted(self._moves, records, pool, self._bound)
        self._say_without_room(records, pool)
        self._say_lacking(records)
        await asyncio.gather(
            *(
                self._begin(wish)
                for wish in wishes(records, pool, avoid, self._moves, apart, self._bound, self.resting(), kept)
            )
        )

    async def _begin(self, wish: Wish) -> None:
        if not wish.target:
            await self._drop_surplus(wish)
        elif not wish.segment.epoch:
            await self._let_move(wish)
        else:
            await self._copy(wish)

    async def _let_move(self, wish: Wish) -> None:
        """Have the server of the one copy take a role: clients reach the segment through it from here on."""
        state, segment = self._commit_log.state, wish.segment
        message = replica_message(state, Copy(segment.id, segment.epoch, CopyRole.PRIMARY, ""))
        # A server of before does not know this question, and answers that it has no such role to confirm.
        message.confirm = message.let_move = True
        server = state.servers.get(segment.server)
        if server is None:
            return
        try:
            if segment.id in await self._servers.take_roles(server, (message,)):
                self._bound[segment.id] = self._commit_log.now().monotonic + BOUND_S
                if segment.id in self._moves:
                    _log.info("a segment of %s stays on %s: %s", wish.record.title, segment.server, BOUND)
                return
            failpoint("coordinator.move.allowed")
            await self._commit_log.commit(MoveAllowed(wish.record.key, segment.id))
        except Error as error:
            self._pause(wish, segment.server, CONFIRM_PAUSE_S, error)
            return
        failpoint("coordinator.move.stored")
        await self._tell_roles((segment.id,), (segment.server,))
        self.look_now()

    async def _drop_surplus(self, wish: Wish) -> None:
        """End a move: the copy on the server that it leaves goes."""
        segment, asked = wish.segment, wish.leaving
        dropped = CopyDropped(wish.record.key, segment.id, wish.leaving, segment.epoch + 1)
        try:
            if wish.leaving == segment.server:
                await self._confirm(wish, wish.leaving, yields=True)
                failpoint("coordinator.move.yielded")
            asked = wish.source
            await self._confirm(wish, wish.source)
            committed = await self._commit_log.commit(dropped)
        except Error as error:
            self._pause(wish, asked, CONFIRM_PAUSE_S, error)
            return
        failpoint("coordinator.move.dropped")
        await self._tell_roles((segment.id,), (wish.source,))
        await self._drop(committed)
        self.look_now()

    def _pause(self, wish: Wish, asked: str, pause_s: float, error: Error) -> None:
        """Ask this server for nothing, for a while."""
        doing = f"copy on {wish.target}" if wish.target else f"move to {wish.source}"
        text = f"no {doing} of a segment of {wish.record.title} for now: {error}"
        bundle = bundle_of(wish.segment)
        _log.log(logging.DEBUG if self._said.get(bundle) == text else logging.WARNING, "%s", text)
        self._said[bundle] = text
        self._avoided_until[asked] = self._commit_log.now().monotonic + pause_s
        asyncio.get_running_loop().call_later(pause_s, self.look_now)

    async def _copy(self, wish: Wish) -> None:
        epoch = wish.segment.epoch + 1
        server = self._commit_log.state.servers.get(wish.target)
        if server is None:
            return
        begun = CopyBegun(
            wish.record.key,
            wish.segment.id,
            wish.target,
            server.instance_id,
            epoch,
            wish.leaving,
            frozenset(member.id for _, member in wish.members),
        )
        asked, making = wish.source, {(wish.target, member.id) for _, member in wish.members}
        self._making |= making
        try:
            # First: what the target has of an earlier copy goes, as the source has a whole one.
            await self._confirm(wish, wish.source)
            asked = wish.target
            for record, member in wish.members:
                made = replace(member, server=wish.target, epoch=epoch)
                copy = Copy(made.id, epoch, CopyRole.BACKUP, wish.source, copying=True)
                message = replica_message(self._commit_log.state, copy)
                stamp = self._commit_log.state.lineage.stamp
                await self._servers.create(server, record, made, 0, message, stamp)
            failpoint("coordinator.copy.made")
            if wish.leaving == wish.segment.server:
                asked = wish.leaving
                await self._confirm(wish, wish.leaving, yields=True)
                failpoint("coordinator.copy.yielded")
            # Of several that move together one may be lost there meanwhile: it would be copied as zeros.
            if wish.leaving or len(wish.members) > 1:
                asked = wish.source
                await self._confirm(wish, wish.source)
            committed = await self._commit_log.commit(begun)
        except Error as error:
            self._pause(wish, asked, PAUSE_S if asked == wish.target else CONFIRM_PAUSE_S, error)
            await self._give_room_back(wish, server, epoch)
            return
        finally:
            self._making -= making
        failpoint("coordinator.copy.begun")
        await self._tell_roles((wish.segment.id,), (wish.source,))
        await self._drop(committed)

    async def _give_room_back(self, wish: Wish, target: ServerRecord, epoch: int) -> None:
        """Have room for a copy that did not begin dropped. A server that cannot be reached tells of it later."""
        for _, member in wish.members:
            with suppress(Error):
                used_bytes = await self._servers.drop(target, member.id, epoch, Ground.NEVER_MADE, room=True)
                # What was there before the room was made is gone, too.
                await self._commit_log.commit(ServerCounted(target.name, target.instance_id, used_bytes, member.id))

    async def _confirm(self, wish: Wish, name: str, *, yields: bool = False) -> None:
        """Check that the server has its copy now: it may be dead, or back without its memory, and its lease run still.
        One that yields answers nothing any more that its backup does not confirm: that may be promoted then.
        """
        state, segment = self._commit_log.state, wish.segment
        role, peer = CopyRole.PRIMARY, segment.backup
        if name != segment.server:
            role, peer = CopyRole.BACKUP, segment.server
        messages = [replica_message(state, Copy(member.id, segment.epoch, role, peer)) for _, member in wish.members]
        for message in messages:
            message.confirm, message.yields = True, yields
        server = state.servers.get(name)
        if server is None:
            raise NotFoundError(f'memory server "{name}" is not known any more')
        await self._servers.take_roles(server, messages)

    def _say_lacking(self, records: list[BufferRecord]) -> None:
        """Say what keeps buffers from a second copy whose memory is there: they move together with one that is lost."""
        missing = self._commit_log.state.missing
        lacking: dict[int, list[str]] = {}  # by bundle: the titles of what is lost
        for record in records:
            for segment in record.segments if record.ready else ():
                if not segment.backup and segment.id in missing.get(segment.server, ()):
                    lacking.setdefault(bundle_of(segment), []).append(record.title)
        if not lacking:
            return
        bundles = Bundles(records)
        for record in records:
            for segment in record.segments:
                lost = lacking.pop(bundle_of(segment), [])
                members = bundles.members(record, segment) if lost else ()
                if len(members) <= len(lost):  # nothing is lost, or nothing is there
                    continue
                titles = ", ".join(sorted(of.title for of, _ in members))
                text = (
                    f"{titles} move together, and have one copy as long as {segment.server} lacks "
                    f"{', '.join(sorted(lost))}: delete what is lost"
                )
                if self._said.get(bundle_of(segment)) != text:
                    _log.warning("%s", text)
                    self._said[bundle_of(segment)] = text

    def _say_without_room(self, records: list[BufferRecord], pool: Pool) -> None:
        bundles = Bundles(records)
        found = frozenset(
            record.title
            for record in records
            if record.degraded and record.ready and without_room(record, pool, bundles)
        )
        for title in sorted(found - self._without_room):
            _log.warning("%s stays degraded: no other server has room for a copy", title)
        self._without_room = found


def _wants(record: BufferRecord) -> bool:
    """Whether it has a copy too few, or too many."""
    return record.degraded or (record.replicas == 1 and any(each.backup for each in record.segments))
