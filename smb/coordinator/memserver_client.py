"""The coordinator's calls to memory servers, over gRPC. Each call has a deadline. A call is retried here only while a
server refuses it because it is about to register.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import grpc
import grpc.aio

from smb.config.backoff import Backoff, own_random
from smb.config.request_ids import passed_on
from smb.coordinator.lineage import Stamp
from smb.coordinator.messages import held_of, stamp_message
from smb.coordinator.outside import Connections, GrpcConnections
from smb.coordinator.records import BufferRecord, Held, SegmentRecord, ServerRecord
from smb.drop_reasons import Ground
from smb.errors import Error, InvalidArgumentError, OutOfMemoryError, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerStub
from smb.security.credentials import Credentials, Current, server_name

ANSWER_S = 3.0  # an idle server answers within a millisecond; a busy host may hold it up
_LAST_CALLS_S = 24 * 3600.0  # longer than any deadline in this file
# A new segment's pages are allocated and zeroed: at several GB/s if memory is free, and far slower if the kernel must
# reclaim it first or the host is busy. The wait also ends with the server's lease.
CREATE_BYTES_PER_S_MIN = 20 << 20
_LEASE_LOOK_S = 0.5
PROBE_S = 1.0
# How long a call is repeated that a server refuses because its registration with this coordinator is not complete, and
# the pauses between two tries.
_REGISTERS_S = 2.5
_REGISTERS_SOON_S = 0.35  # while renewals of other servers wait
_REGISTERS_AGAIN_FIRST_S, _REGISTERS_AGAIN_MAX_S = 0.05, 1.0


Reply = TypeVar("Reply")


class AnotherRunError(UnavailableError):
    """Another process of the memory server answered than the one that was meant. It did nothing."""


class NotYetError(UnavailableError):
    """A memory server did nothing, as it has not heard yet of this coordinator, or of the role that it was asked about.
    It may be asked in a moment, and can do other things meanwhile.
    """


class RunLiveness(Enum):
    """What a look at a memory server's address showed about one run of it."""

    ALIVE = "alive"
    DEAD = "dead"  # another run answers at the address, or the port is closed
    MUTE = "mute"  # no answer: the run may be stopped, cut off or dead
    UNNAMED = "unnamed"  # an answer from a release that does not say which run it is


@dataclass(frozen=True, slots=True)
class Look:
    """The answer to a look at a server, with the segments that it holds if that run is alive."""

    run: RunLiveness
    held: Mapping[int, Held] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ServerChannel:
    address: str
    credentials: Credentials | None
    channel: grpc.aio.Channel
    stub: MemoryServerStub


async def _while_alive(call: Awaitable[Reply], alive: Callable[[], bool]) -> Reply | None:
    """Return what a call to a server returns; None once the server is not alive."""

    async def answer() -> Reply:
        return await call

    asked = asyncio.create_task(answer())
    try:
        while not asked.done():
            await asyncio.wait((asked,), timeout=_LEASE_LOOK_S)
            if not asked.done() and not alive():
                return None
        return asked.result()
    finally:
        asked.cancel()


class MemoryServers:
    """Channels to memory servers by name. A channel is made at first use, and again when the server's address or our
    certificate changes.
    """

    def __init__(
        self,
        credentials: Credentials | None = None,
        connections: Connections | None = None,
        term: int = 0,
        draw: Callable[[], float] = own_random.random,
    ) -> None:
        """`connections`: how servers are reached; None: over the network. `term`: this coordinator's, as in stamps. A
        server that is registered with another one takes no roles and drops nothing for it. 0: it is not said. `draw`
        returns numbers from 0 to 1, which spread the pauses between tries.
        """
        self._term = term
        self._draw = draw
        self._connections = connections or GrpcConnections()
        self._current = Current(credentials) if credentials is not None else None
        self._peers: dict[str, _ServerChannel] = {}
        self._replaced: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    async def create(
        self,
        server: ServerRecord,
        record: BufferRecord,
        segment: SegmentRecord,
        token_floor: int = 0,
        replica: pb.Replica | None = None,
        stamp: Stamp | None = None,
        alive: Callable[[], bool] = lambda: True,
    ) -> int:
        """Have the server make the segment, and return the server's used bytes. Waits while the server is `alive`, for
        as long as the segment's size allows. Raises OutOfMemoryError, UnavailableError (outcome unknown), and
        InvalidArgumentError if the server's version has no bundles. AnotherRunError, if another process has taken the
        place of the one that is meant, is an UnavailableError: nothing was made.
        """
        bundle_id = 0 if segment.group == segment.id else segment.group  # a bundle of one needs no support for bundles
        request = pb.CreateSegmentRequest(
            id=segment.id,
            epoch=segment.epoch or record.epoch,
            dtype=record.dtype,
            nbytes=segment.nbytes,
            chunk_bytes=record.chunk_bytes,
            token_floor=token_floor,
            replica=replica,
            group_id=bundle_id,
            stamp=stamp_message(stamp) if stamp is not None else None,
            instance_id=server.instance_id,
        )
        deadline_s = ANSWER_S + segment.file_bytes / CREATE_BYTES_PER_S_MIN
        try:
            peer = self._peer(server)
            reply = await _while_alive(
                peer.stub.CreateSegment(request, timeout=deadline_s, metadata=passed_on()), alive
            )
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.ABORTED:
                raise NotYetError(
                    f'memory server "{server.name}" at {server.control_address} is registering: {error.details()}'
                ) from error
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise AnotherRunError(f'memory server "{server.name}" was restarted meanwhile') from error
            raise self._failure(server, "make a segment", error) from error
        if reply is None:
            raise UnavailableError(
                f'memory server "{server.name}" at {server.control_address} made no segment before its lease ended'
            )
        if reply.group_id != bundle_id:
            raise InvalidArgumentError(
                f'memory server "{server.name}" is too old to move segments together with others: upgrade it'
            )
        return int(reply.used_bytes)

    async def take_roles(
        self,
        server: ServerRecord,
        replicas: Sequence[pb.Replica],
        quarantine: Sequence[int] = (),
        taken_up: Sequence[int] = (),
    ) -> frozenset[int]:
        """Tell this run of the server its roles for these segments, or ask about them; add and remove marks of
        quarantine. Another run at its address takes nothing: what it holds may be older.

        Returns the segments that cannot move, out of those for which `let_move` was asked. Raises NotYetError if the
        server has not registered with this coordinator, or does not have a role that it was asked about, and
        UnavailableError (outcome unknown).
        """
        return frozenset((await self._take_roles(server, replicas, quarantine, taken_up)).bound)

    async def can_switch(self, server: ServerRecord, replicas: Sequence[pb.Replica]) -> bool:
        """Ask this run of the server whether the copies of these segments can switch their roles now. Raises as
        take_roles.
        """
        reply = await self._take_roles(server, replicas)
        return {part.segment_id for part in replicas} <= set(reply.switchable)

    async def _take_roles(
        self,
        server: ServerRecord,
        replicas: Sequence[pb.Replica],
        quarantine: Sequence[int] = (),
        taken_up: Sequence[int] = (),
    ) -> pb.TakeRolesReply:
        try:
            peer = self._peer(server)
            request = pb.TakeRolesRequest(
                replicas=replicas,
                quarantine_segment_ids=quarantine,
                taken_up_segment_ids=taken_up,
                instance_id=server.instance_id,
                term=self._term,
            )
            # Renewals of other servers wait for this, so not for long: a registration brings all roles, too.
            reply: pb.TakeRolesReply = await self._once_registered(
                lambda: peer.stub.TakeRoles(request, timeout=ANSWER_S, metadata=passed_on()), _REGISTERS_SOON_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND):
                raise NotYetError(
                    f'memory server "{server.name}" at {server.control_address} takes no roles yet: {error.details()}'
                ) from error
            raise self._failure(server, "take roles", error) from error
        if not {part.segment_id for part in replicas if part.confirm} <= set(reply.confirmed):
            raise UnavailableError(f'memory server "{server.name}" is too old to be drained: upgrade it')
        return reply

    async def drop(
        self, server: ServerRecord, segment_id: int, epoch: int, ground: Ground, *, room: bool = False
    ) -> int:
        """Have the server drop the segment, unless it has a later epoch than `epoch` (0: whatever its epoch). `room`:
        only if it is no whole copy; it may be made again in the same epoch.

        Returns the server's used bytes. Raises UnavailableError (outcome unknown).
        """
        try:
            peer = self._peer(server)
            request = pb.DeleteSegmentRequest(
                id=segment_id,
                epoch=epoch,
                ground=ground.name,
                room=room,
                instance_id=server.instance_id,
                term=self._term,
            )
            reply = await self._once_registered(
                lambda: peer.stub.DeleteSegment(request, timeout=ANSWER_S, metadata=passed_on()), _REGISTERS_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._failure(server, "drop a segment", error) from error
        return int(reply.used_bytes)

    async def retire(self, server: ServerRecord, segment_ids: Sequence[int], idle_s: float) -> dict[int, int]:
        """Retire the locks and barriers that were idle for that long: they answer no more requests. Returns their last
        tokens by segment id. Raises UnavailableError (outcome unknown).
        """
        request = pb.RetireSegmentsRequest(ids=segment_ids, idle_ms=round(idle_s * 1000), term=self._term)
        try:
            peer = self._peer(server)
            reply = await peer.stub.RetireSegments(request, timeout=ANSWER_S, metadata=passed_on())
        except grpc.aio.AioRpcError as error:
            raise self._failure(server, "retire locks and barriers", error) from error
        return dict(reply.tokens)

    async def end_sessions(self, server: ServerRecord, session_ids: Sequence[int]) -> None:
        """Tell the server that these sessions have ended. Raises UnavailableError (outcome unknown)."""
        try:
            peer = self._peer(server)
            request = pb.EndSessionsRequest(session_ids=session_ids)
            await peer.stub.EndSessions(request, timeout=ANSWER_S, metadata=passed_on())
        except grpc.aio.AioRpcError as error:
            raise self._failure(server, "end sessions", error) from error

    async def look(self, server: ServerRecord, segment_ids: Collection[int] = ()) -> Look:
        """Find out whether this run of the server lives, and which of these segments it holds. A run is known by its
        instance id: another run at its address, or a closed port there, shows that it is dead; silence shows nothing.
        """
        try:
            await asyncio.wait_for(self._connections.knock(server.control_address), PROBE_S / 2)
        except ConnectionRefusedError:
            return Look(RunLiveness.DEAD)
        except (OSError, asyncio.TimeoutError):
            return Look(RunLiveness.MUTE)
        async with self._channel(server) as channel:
            stub = MemoryServerStub(channel)  # type: ignore[no-untyped-call]
            try:
                reply = await stub.Inventory(pb.InventoryRequest(ids=segment_ids), timeout=PROBE_S)
            except grpc.aio.AioRpcError as error:
                return Look(RunLiveness.UNNAMED if error.code() is grpc.StatusCode.UNIMPLEMENTED else RunLiveness.MUTE)
        if reply.instance_id != server.instance_id:
            return Look(RunLiveness.DEAD)
        return Look(RunLiveness.ALIVE, {each.id: held_of(each) for each in reply.held})

    async def close(self) -> None:
        for task in self._replaced:
            task.cancel()
        for channel in (*self._replaced.values(), *(peer.channel for peer in self._peers.values())):
            await channel.close(None)
        self._peers.clear()

    def _channel(self, server: ServerRecord) -> grpc.aio.Channel:
        return self._connections.channel(server.control_address, server_name(server.name), self._credentials())

    def _credentials(self) -> Credentials | None:
        return self._current.now() if self._current is not None else None

    async def _once_registered(self, call: Callable[[], Awaitable[Reply]], patience_s: float) -> Reply:
        """Return what a call returns, repeated while the server is not registered with this coordinator. The last try
        begins when `patience_s` is over.
        """
        now = asyncio.get_running_loop().time
        end = now() + patience_s
        backoff = Backoff(_REGISTERS_AGAIN_FIRST_S, _REGISTERS_AGAIN_MAX_S, lambda: end - now(), self._draw)
        while True:
            last = now() >= end
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if last or error.code() is not grpc.StatusCode.ABORTED:
                    raise
            await asyncio.sleep(backoff.next_s())

    def _peer(self, server: ServerRecord) -> _ServerChannel:
        known = self._peers.get(server.name)
        credentials = self._credentials()
        if known is not None and known.address == server.control_address and known.credentials is credentials:
            return known
        channel = self._channel(server)
        peer = _ServerChannel(server.control_address, credentials, channel, MemoryServerStub(channel))  # type: ignore[no-untyped-call]
        self._peers[server.name] = peer
        if known is not None:
            # Closed at once, its calls would end as if their callers had cancelled them. Each call has a deadline.
            task = asyncio.create_task(known.channel.close(_LAST_CALLS_S))
            self._replaced[task] = known.channel
            task.add_done_callback(lambda ended: self._replaced.pop(ended, None))
        return peer

    def _failure(self, server: ServerRecord, what: str, error: grpc.aio.AioRpcError) -> Error:
        memserver = f'memory server "{server.name}" at {server.control_address}'
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OutOfMemoryError(f"{memserver}: {error.details()}")
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(f"{memserver} did not {what} in time")
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"{memserver} cannot be reached to {what}: {error.details()}")
        return UnavailableError(f"{memserver} could not {what}: {error.details()}")
