"""A memory server registers: is its name free, what does it hold, and what becomes of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from weakref import WeakValueDictionary

from smb.coordinator.commit_log import CommitLog, Committed
from smb.coordinator.events import (
    AnswerDrops,
    ServerRegistered,
    ServerReturned,
)
from smb.coordinator.memserver_client import MemoryServers, RunLiveness
from smb.coordinator.messages import (
    ended_message,
    registration_of,
    replica_messages,
    stamp_message,
)
from smb.coordinator.options import OwnPorts
from smb.coordinator.replica_role_changes import RoleChanges
from smb.coordinator.state import Drops
from smb.coordinator.steps.copies import NotAskedError, deciding_peers, may_be_dropped
from smb.coordinator.token_issuer import TokenIssuer
from smb.daemon.failpoint import failpoint
from smb.errors import (
    AlreadyExistsError,
    UnavailableError,
)
from smb.rpc import control_pb2 as pb

_ASKS_MAX = 4  # how often a registration asks a server what it holds, while buffers are being made on it


class Registrations:
    def __init__(
        self,
        commit_log: CommitLog,
        servers: MemoryServers,
        roles: RoleChanges,
        making: Callable[[str], Collection[int]],
        tokens: TokenIssuer | None,
        ports: OwnPorts,
    ) -> None:
        """`making` returns the segments that a server is being asked to make, for copies not begun yet. `tokens`: only
        with credentials. `ports`: the ports beside the one for all.
        """
        self._commit_log = commit_log
        self._servers = servers
        self._roles = roles
        self._making = making
        self._tokens = tokens
        self._ports = ports
        self._registering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by the server's name

    async def register(self, request: pb.RegisterServerRequest) -> pb.RegisterServerReply:
        """See control.proto. If another run of this name has a lease, it is asked, and keeps the name if it answers."""
        failpoint("coordinator.register.asked")
        event = registration_of(request)
        # Registrations of a name run one at a time: if two find a former run dead, the second has to ask the first.
        async with self._registering.setdefault(event.server.name, asyncio.Lock()):
            return await self._registered(request, event)

    async def _registered(self, request: pb.RegisterServerRequest, event: ServerRegistered) -> pb.RegisterServerReply:
        await self._end_rival(event)
        looked_at = self._commit_log.now()
        seen = await self._look_at_others(event)
        event = replace(event, unproven=await self._unproven_copies(event))
        for left in reversed(range(_ASKS_MAX)):
            try:
                asked = await self._asked_back(event)
                if self._roles.counts_no_more(looked_at):
                    raise UnavailableError(
                        f'looking at servers took too long while memory server "{request.name}" registered; '
                        f"it must register again"
                    )
                committed = await self._judged(asked, seen)
                break
            except NotAskedError:  # buffers are being made on it, or very many deleted: the answer was too old
                if left == 0:
                    raise
        answer = next(effect for effect in committed.effects if isinstance(effect, AnswerDrops))
        failpoint("coordinator.register.stored")
        return pb.RegisterServerReply(
            lease_ms=int(self._commit_log.state.server_leases.duration_s * 1000),
            drop_segment_ids=answer.segment_ids,
            drop_epochs=answer.epochs,
            room_segment_ids=answer.rooms,
            ended_sessions=ended_message(committed.state.ended_sessions, request.sessions_seen),
            access=self._tokens.keys(request.name) if self._tokens else None,
            replicas=[
                *(pb.Replica(segment_id=each, epoch=epoch) for each, epoch in answer.superseded),
                *replica_messages(committed.state, committed.state.copies(request.name)),
            ],
            drop_grounds=[ground.name for ground in answer.grounds],
            quarantine_segment_ids=answer.quarantined,
            taken_up_segment_ids=answer.taken_up,
            stamp=stamp_message(committed.state.lineage.stamp),
            servers_port=self._ports.servers,
        )

    async def _judged(self, event: ServerRegistered, seen: frozenset[str]) -> Committed:
        name, most = event.server.name, self._commit_log.changes_max
        returned = ServerReturned(name, event.server.instance_id, event.missing, most, event.held, seen)
        await self._roles.commit_all(returned)
        return await self._commit_log.commit(replace(event, making=frozenset(self._making(name))))

    async def _end_rival(self, event: ServerRegistered) -> None:
        """Check that the former run of this name is dead, if its lease still runs. Raises AlreadyExistsError if it
        lives, and UnavailableError if that cannot be found out now; then the server may register again.
        """
        rival = self._commit_log.state.rival(event, self._commit_log.now())
        if rival is None:
            return
        look = await self._servers.look(rival)
        # Servers of older releases do not say which run they are. At the same address it is the one that registers.
        same_address = rival.control_address == event.server.control_address
        if look.run is RunLiveness.ALIVE or (look.run is RunLiveness.UNNAMED and not same_address):
            raise AlreadyExistsError(
                f'a memory server "{rival.name}" runs already at {rival.data_address}; '
                f"give this one another --name, or stop that one"
            )
        if look.run is RunLiveness.MUTE:
            raise UnavailableError(
                f'the former run of memory server "{rival.name}", at {rival.data_address}, does not answer, and its '
                f"lease runs on for now; it must register again"
            )

    async def _asked_back(self, event: ServerRegistered) -> ServerRegistered:
        """Return the registration with the server's answer about segments that only its list or only the records have.

        The list may be older than the records, since copies were made meanwhile: a segment counts as missing only if
        the server says so now. Segments that are being made now do not count as missing either, because the server
        may make them after it has answered. Raises UnavailableError if the server does not answer.
        """
        state, name = self._commit_log.state, event.server.name
        event = replace(event, drops=state.drops.get(name, Drops()).count)
        copies = [(record, copy) for record in state.buffers.at(name) for copy in record.copies if copy.server == name]
        here = {copy.id for _, copy in copies}
        due = {copy.id for record, copy in copies if record.ready}
        asked = here ^ event.held.keys()
        known = state.servers.get(name)
        restarted = known is None or known.instance_id != event.server.instance_id
        if restarted or not here <= event.held.keys():
            asked |= event.held.keys()  # roles may have changed by then, so ask for the sizes of all that it holds
        if not asked:
            return event
        look = await self._servers.look(event.server, asked)
        if look.run is RunLiveness.UNNAMED:  # a server of an older release: its list has to do
            # Such a server does not say how large segments beyond the records are either; they count in one sum.
            beside = max(0, event.server.used_bytes - state.allocation(name).nbytes)
            first = min(event.held.keys() - here, default=None)
            held = {number: replace(each, nbytes=beside * (number == first)) for number, each in event.held.items()}
            return replace(event, held=held, missing=frozenset(due - held.keys()))
        if look.run is not RunLiveness.ALIVE:
            raise UnavailableError(
                f'memory server "{name}" at {event.server.control_address} did not answer which segments it holds; '
                f"it must register again"
            )
        held = {**{number: each for number, each in event.held.items() if number not in asked}, **look.held}
        return replace(event, held=held, missing=frozenset(asked & due - held.keys()))

    async def _look_at_others(self, event: ServerRegistered) -> frozenset[str]:
        """Look now at the servers whose state decides what happens to this server's copies. A lease is seconds old.

        Returns those that answer. If a primary was restarted, a live backup takes over; raises UnavailableError while
        it is unknown whether the backup lives.
        """
        state, now, name = self._commit_log.state, self._commit_log.now(), event.server.name
        known = state.servers.get(name)
        if known is not None and known.instance_id == event.server.instance_id:
            return frozenset()
        peers = [peer for peer in deciding_peers(state, name, event.held) if state.alive(peer, now)]
        looks = await self._roles.looked_in_turn(dict.fromkeys(peers, ()), all_needed=True)
        for peer, look in looks.items():
            if look.run is RunLiveness.MUTE:
                raise UnavailableError(
                    f'memory server "{name}" was restarted, and "{peer}", which has other copies of its segments, '
                    f"does not answer; it must register again"
                )
        return frozenset(looks)

    async def _unproven_copies(self, event: ServerRegistered) -> frozenset[tuple[str, int]]:
        """Return the other copies of what this server may be told to drop that their servers do not confirm now."""
        name, state = event.server.name, self._commit_log.state
        known = state.servers.get(name)
        restarted = known is None or known.instance_id != event.server.instance_id
        return await self._roles.unproven_copies(may_be_dropped(state, name, event.held, restarted=restarted), name)
