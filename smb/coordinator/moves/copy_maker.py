"""Has copies of segments made (docs/decisions/0025) where a copy is lost or must leave its server. It chooses a server,
has it make room, and has the segment copied there.

The steps are in this order: the new backup gets an empty segment, made for the next epoch. If a primary leaves, it
yields. If a copy leaves, the server of the other copy confirms that it has it. Then the record says what is copied to
where. Then the primary is told, and the leaving copy is dropped. Wherever this is cut off, no unfinished segment is
taken for a copy: a server is told to drop segments that no record places there. A primary that has yielded goes on
serving, and asks its backup at each read.

Two copies can also switch their roles. The server of the backup confirms that it could take over. The primary hands
over: it begins no change until its backup has everything. Then the record says so, and both are told. Each try holds up
those who write, so a switch that failed is not tried again by itself for minutes. One that was refused because a server
does not have its role yet, as one that has just registered, held up nobody, and is tried again within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from smb.coordinator.bundles import Bundles, bundle_of
from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import CopyBegun, CopyDropped, MoveAllowed, RolesSwitched, ServerCounted, ServerSuspected
from smb.coordinator.memserver_client import MemoryServers, NotYetError
from smb.coordinator.messages import replica_message, replica_messages
from smb.coordinator.moves.audit import MoveAudit
from smb.coordinator.moves.copy_pace import CopyPace
from smb.coordinator.moves.move import Move
from smb.coordinator.moves.wanted_copies import Wish, still_wanted, wishes
from smb.coordinator.placement import Pool
from smb.coordinator.records import BufferRecord, ServerRecord
from smb.coordinator.replicas import Copy, CopyRole
from smb.coordinator.room_to_drain import BOUND, without_room
from smb.daemon.failpoint import failpoint
from smb.drop_reasons import Ground
from smb.errors import Error, NotFoundError, UnavailableError
from smb.rpc import control_pb2 as pb

LOOK_S = 0.5
PAUSE_S = 5.0  # until a server that could not take a copy is asked again
APART_S = 10.0  # until a copy is tried again between two servers that did not reach each other: each try delays users
BOUND_S = 60.0  # until a segment that cannot move is asked about again
CONFIRM_PAUSE_S = 0.2  # until a server that did not confirm its copy is asked again; it may not know its role yet

HAND_OVER_TRIES = 10
HAND_OVER_PAUSE_S = 0.03  # until a primary is asked again whether its backup has everything
HANDS_OVER_S = 0.5  # half of the time for which a primary that hands over begins no change (csrc/server/roles.c)
SWITCH_AGAIN_S = 300.0  # until the coordinator tries a switch again that failed
SWITCH_SOON_S = 5.0  # likewise, if a server was only not ready yet

_log = logging.getLogger("coordinator")
# Arguments: segments and servers. Tells these servers at once their roles for these segments.
TellRoles = Callable[[tuple[int, ...], tuple[str, ...]], Awaitable[None]]
Drop = Callable[[Committed], Awaitable[None]]


class _LastingError(UnavailableError):
    """Why two copies cannot switch their roles, now and probably for a while."""


class CopyMaker:
    def __init__(self, commit_log: CommitLog, servers: MemoryServers, tell_roles: TellRoles, drop: Drop) -> None:
        """`drop` has servers drop the segments that an event removed from the records."""
        self._commit_log = commit_log
        self._servers = servers
        self._tell_roles = tell_roles
        self._drop = drop
        self._hurry = asyncio.Event()
        self._moves: dict[int, Move] = {}  # by segment; lost when this run ends, since they can be requested again
        self._switches: dict[int, Move] = {}  # likewise; begun by the coordinator itself
        self._unswitchable_until: dict[int, float] = {}  # by bundle: its last switch failed
        self._avoided_until: dict[str, float] = {}
        self._unready_until: dict[str, float] = {}  # servers that have not heard of a role, or register: no sources
        self._target_awaited_until: dict[int, float] = {}  # by bundle: its target registers
        self._apart_until: dict[frozenset[str], float] = {}  # two servers that did not reach each other
        self._said: dict[int, str] = {}  # by bundle: the last warning
        self._bound: dict[int, float] = {}  # segments that their servers reported as unable to move; until when
        self._without_room: frozenset[str] = frozenset()  # titles of buffers that were logged as having no room
        self._pace = CopyPace()
        self.audit = MoveAudit()
        self._making: set[tuple[str, int]] = set()  # (server, segment) of copies that have not begun
        # Called with the segments whose roles have switched, the former primary's server and the present one's.
        self.on_switched: Callable[[Collection[int], str, str], None] = lambda *_: None

    def bound(self) -> Collection[int]:
        """Return the segments that their servers reported as unable to move."""
        return self._bound.keys()

    def unswitchable(self) -> Collection[int]:
        """Return the bundles whose last switch of roles failed, so that the next one has to wait."""
        now = self._commit_log.now().monotonic
        self._unswitchable_until = {number: at for number, at in self._unswitchable_until.items() if at > now}
        return self._unswitchable_until.keys()

    def resting(self) -> Collection[int]:
        """Return the bundles whose copies wait because their source reported that it lacks one of their segments."""
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
        """Return (server, segment) for each segment that a server is being asked to make, for copies not begun yet."""
        return frozenset(self._making)

    def making(self, server: str) -> Collection[int]:
        """Return the segments that this server is being asked to make, for copies not begun yet."""
        return [segment_id for name, segment_id in self._making if name == server]

    def move(self, moves: Iterable[Move]) -> None:
        """Make these moves, which an operator asked for. They replace earlier moves that have not begun."""
        begun = {
            segment.id
            for record in self._commit_log.state.buffers.values()
            if record.moves_alone
            for segment in record.segments
            if segment.copying_to or segment.backup
        }
        kept = {number: move for number, move in self._moves.items() if number in begun}
        self._moves, self._switches = {move.segment_id: move for move in moves} | kept, {}
        self.look_now()

    def switch(self, moves: Iterable[Move]) -> None:
        """Make these switches of roles, in place of earlier ones, beside the moves that an operator asked for."""
        self._switches = {move.segment_id: move for move in moves}
        self.look_now()

    def keep_apart(self, server: str, others: Collection[str]) -> None:
        """Record that a server did not reach these others: its copies are made elsewhere for now."""
        now = self._commit_log.now().monotonic
        self._apart_until = {pair: until for pair, until in self._apart_until.items() if until > now}
        self._apart_until |= {frozenset((server, other)): now + APART_S for other in others}

    def look_now(self) -> None:
        """Look at once for copies to begin: one has ended, or others are wanted."""
        self._hurry.set()

    async def run(self) -> None:
        """Begin missing copies until cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LOOK_S)
            self._hurry.clear()
            await self.begin()

    async def begin(self) -> None:
        """Begin the copies that can begin now. A server that does not answer delays only its own copies."""
        state, now = self._commit_log.state, self._commit_log.now()
        drained = any(server.draining and state.allocation(server.name).segments for server in state.servers.values())
        moves = self._switches | self._moves
        if not drained and not moves and not state.buffers.copies_wrong:
            self._without_room, self._bound = frozenset(), {}
            self._said = {}
            self._pace.rest()
            return
        records = [record for record in state.buffers.values() if drained or moves or record.movable]
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
        moves = still_wanted(moves, records, pool, self._bound)
        self._moves = {number: move for number, move in moves.items() if number in self._moves}
        self._switches = {number: move for number, move in moves.items() if number in self._switches}
        self._say_without_room(records, pool)
        self._say_lacking(records)
        most = self._pace.most(now.monotonic, strained=bool(state.late(now)))
        unready = frozenset(name for name, until in self._unready_until.items() if until > now.monotonic)
        awaited = {bundle: until for bundle, until in self._target_awaited_until.items() if until > now.monotonic}
        self._target_awaited_until = awaited
        resting, held = {*self.resting(), *awaited}, state.copies_held(now)
        found = wishes(records, pool, avoid, moves, apart, self._bound, resting, kept, most, held, unready)
        await asyncio.gather(*map(self._begin, found))

    async def _begin(self, wish: Wish) -> None:
        if wish.switches:
            await self._switch(wish)
        elif not wish.target:
            await self._drop_surplus(wish)
        elif not wish.segment.epoch:
            await self._let_move(wish)
        else:
            await self._copy(wish)

    async def _let_move(self, wish: Wish) -> None:
        """Give a role to the server of the only copy: from then on clients reach the segment through that server."""
        state, segment = self._commit_log.state, wish.segment
        message = replica_message(state, Copy(segment.id, segment.epoch, CopyRole.PRIMARY, ""))
        # A server of an older release does not know this question, and its answer confirms no such role.
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

    async def _switch(self, wish: Wish) -> None:
        """Let the two copies switch their roles. A primary that has begun to hand over begins changes again by itself
        if the switch is not stored.
        """
        segment, handed_over_at = wish.segment, 0.0
        try:
            if not await self._can_switch(wish, wish.target):
                raise _LastingError(f'memory server "{wish.target}" is too old to switch roles: upgrade it')
            handed_over_at = await self._hand_over(wish)
            failpoint("coordinator.switch.handed")
            await self._commit_log.commit(RolesSwitched(wish.record.key, segment.id, segment.epoch + 1))
        except Error as error:
            # NotFoundError: a server that has just registered has not confirmed its copy.
            lasts = isinstance(error, _LastingError) or (handed_over_at and not isinstance(error, NotFoundError))
            self._give_switch_up(wish, error, SWITCH_AGAIN_S if lasts else SWITCH_SOON_S)
            return
        self.audit.moved(wish, wish.target, self._commit_log.state, self._moves)
        failpoint("coordinator.switch.stored")
        self.on_switched([member.id for _, member in wish.members], wish.leaving, wish.target)
        if self._commit_log.now().monotonic - handed_over_at > HANDS_OVER_S:
            # Storing took so long that the former primary may have begun changes again. If they are on their way when
            # it is told its new role, its copy has to be made anew. Asking it is safe: nobody acts on the new roles
            # because of the answer, and what it holds up would be refused anyway once the other one has its role.
            with suppress(Error, asyncio.TimeoutError):
                await asyncio.wait_for(self._hand_over(wish), HANDS_OVER_S)
        await self._tell_roles((segment.id,), (wish.leaving, wish.target))
        self.look_now()

    async def _hand_over(self, wish: Wish) -> float:
        """Ask the primary to hand over until its backup has everything. Return when it was asked last, on the monotonic
        clock. Raises UnavailableError if that takes too long.
        """
        for _ in range(HAND_OVER_TRIES):
            asked_at = self._commit_log.now().monotonic
            if await self._can_switch(wish, wish.leaving):
                return asked_at
            await asyncio.sleep(HAND_OVER_PAUSE_S)
        raise _LastingError(f'the backup does not get all changes of memory server "{wish.leaving}" now')

    def _give_switch_up(self, wish: Wish, error: Error, seconds: float) -> None:
        """Leave the roles of this bundle as they are for a while. Its servers go on making copies."""
        bundle = bundle_of(wish.segment)
        self._say_once(bundle, f"the two copies of a segment of {wish.record.title} keep their roles for now: {error}")
        self._unswitchable_until[bundle] = self._commit_log.now().monotonic + seconds
        for moves in (self._moves, self._switches):
            if wish.segment.id in moves and moves[wish.segment.id].switches:
                del moves[wish.segment.id]

    async def _can_switch(self, wish: Wish, name: str) -> bool:
        messages = self._questions(wish, name)
        for message in messages:
            message.switches = True
        return await self._servers.can_switch(self._known(name), messages)

    async def _drop_surplus(self, wish: Wish) -> None:
        """End a move: drop the copy on the server that it leaves."""
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
        self.audit.moved(wish, wish.source, committed.state, self._moves)
        failpoint("coordinator.move.dropped")
        await self._drop_left(wish, committed)
        self.look_now()

    async def _drop_left(self, wish: Wish, committed: Committed) -> None:
        """Tell the source its new roles, and drop the copies that leave once the source has confirmed these roles. It
        may have been lost while the change was stored. Then the copies stay where they are, and that server registers
        again.
        """
        state, members = committed.state, {member.id for _, member in wish.members} | {wish.segment.id}
        copies = [each for each in state.copies(wish.source) if each.segment_id in members]
        roles, asked = replica_messages(state, copies), replica_messages(state, copies)
        for message in asked:
            message.confirm = True  # which changes no role: the server takes the roles first, in this order
        try:
            await self._servers.take_roles(state.servers[wish.source], [*roles, *asked])
        except Error as error:
            _log.warning("a segment of %s stays on %s for now: %s", wish.record.title, wish.leaving, error)
            await self._commit_log.commit(ServerSuspected(wish.leaving))
        else:
            await self._drop(committed)

    def _pause(self, wish: Wish, asked: str, pause_s: float, error: Error) -> None:
        """Ask this server for no copies for a while. One that has not heard yet of its role, or is registering, takes
        copies of others meanwhile, which would otherwise go to a server that shares more with their source. A copy on
        one that is registering waits for it.
        """
        doing, bundle = f"copy on {wish.target}" if wish.target else f"move to {wish.source}", bundle_of(wish.segment)
        self._say_once(bundle, f"no {doing} of a segment of {wish.record.title} for now: {error}")
        waits = isinstance(error, NotYetError | NotFoundError)  # or it is not registered any more
        pause_s = CONFIRM_PAUSE_S if waits else pause_s
        until = self._commit_log.now().monotonic + pause_s
        if not waits:
            self._avoided_until[asked] = until
        elif asked == wish.target:
            self._target_awaited_until[bundle] = until
        else:
            self._unready_until[asked] = until
        asyncio.get_running_loop().call_later(pause_s, self.look_now)

    def _say_once(self, bundle: int, text: str) -> None:
        _log.log(logging.DEBUG if self._said.get(bundle) == text else logging.WARNING, "%s", text)
        self._said[bundle] = text

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
            # First, drop what the target has of an earlier copy. That is safe, as the source has a whole copy.
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
            # A member of the bundle may have been lost on the source meanwhile, and would be copied as zeros.
            if wish.leaving or len(wish.members) > 1:
                asked = wish.source
                await self._confirm(wish, wish.source)
            try:
                committed = await self._commit_log.commit(begun)
            except NotFoundError:  # the copy is not wanted any more: no server is to be avoided for that
                await self._give_room_back(wish, server, epoch)
                return
        except Error as error:
            self._pause(wish, asked, PAUSE_S if asked == wish.target else CONFIRM_PAUSE_S, error)
            await self._give_room_back(wish, server, epoch)
            return
        finally:
            self._making -= making
        failpoint("coordinator.copy.begun")
        if wish.leaving:
            self.audit.moved(wish, wish.target, committed.state, self._moves)
            await self._drop_left(wish, committed)
        else:
            await self._tell_roles((wish.segment.id,), (wish.source,))

    async def _give_room_back(self, wish: Wish, target: ServerRecord, epoch: int) -> None:
        """Drop the room for a copy that did not begin. A server that cannot be reached reports it later."""
        for _, member in wish.members:
            with suppress(Error):
                used_bytes = await self._servers.drop(target, member.id, epoch, Ground.NEVER_MADE, room=True)
                # An earlier copy that was there before the room was made is gone, too.
                await self._commit_log.commit(ServerCounted(target.name, target.instance_id, used_bytes, member.id))

    async def _confirm(self, wish: Wish, name: str, *, yields: bool = False) -> None:
        """Check that the server has its copy now: it may be dead or back without its memory while its lease still runs.
        A server that yields answers nothing more that its backup does not confirm, as the backup may be promoted.
        """
        messages = self._questions(wish, name)
        for message in messages:
            message.yields = yields
        await self._servers.take_roles(self._known(name), messages)

    def _questions(self, wish: Wish, name: str) -> list[pb.Replica]:
        """Return the question whether a server has its role in the bundle, as the records say."""
        state, segment = self._commit_log.state, wish.segment
        role, peer = CopyRole.PRIMARY, segment.backup
        if name != segment.server:
            role, peer = CopyRole.BACKUP, segment.server
        messages = [replica_message(state, Copy(member.id, segment.epoch, role, peer)) for _, member in wish.members]
        for message in messages:
            message.confirm = True
        return messages

    def _known(self, name: str) -> ServerRecord:
        server = self._commit_log.state.servers.get(name)
        if server is None:
            raise NotFoundError(f'memory server "{name}" is not registered any more')
        return server

    def _say_lacking(self, records: list[BufferRecord]) -> None:
        """Log which bundles get no second copy because their server lacks one of their members."""
        missing = self._commit_log.state.missing
        lacking: dict[int, list[tuple[str, str]]] = {}  # by bundle: title and name of the lost buffers
        for record in records:
            for segment in record.segments if record.ready else ():
                if not segment.backup and segment.id in missing.get(segment.server, ()):
                    lacking.setdefault(bundle_of(segment), []).append((record.title, record.name))
        if not lacking:
            return
        bundles = Bundles(records)
        for record in records:
            for segment in record.segments:
                lost = lacking.pop(bundle_of(segment), [])
                members = bundles.members(record, segment) if lost else ()
                if len(members) <= len(lost):  # nothing is lost, or all members are
                    continue
                titles = ", ".join(sorted(of.title for of, _ in members))
                lacks = ", ".join(title for title, _ in sorted(lost))
                text = (
                    f"{titles} move together, and have one copy as long as {segment.server} lacks {lacks}: delete "
                    f"what is lost (smb rm {' '.join(name for _, name in sorted(lost))}) and create it again"
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
            _log.warning("%s stays degraded: no other server has room for a copy; start one or delete buffers", title)
        self._without_room = found
