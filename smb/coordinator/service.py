"""The gRPC service: turns each call into an event. Runs in one event loop."""

# gRPC calls methods by the names of the .proto, always with request and context.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from smb.config.printable import printable
from smb.config.request_ids import audited
from smb.coordinator import relay_access
from smb.coordinator.beside_loop import BesideLoop
from smb.coordinator.buffer_pages import BufferPages
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.dashboard_interface import Overview, Watch
from smb.coordinator.events import (
    BufferDeleted,
    BufferRenamed,
    ClientsKicked,
    CopyProgress,
    DropSegments,
    MaintenanceEnded,
    MaintenancePlanned,
    NamesFreed,
    SegmentsForgotten,
    ServerDrained,
    ServerLeft,
    ServerRenewed,
    SessionClosed,
    SessionRenewed,
    TellEnded,
)
from smb.coordinator.memserver_client import MemoryServers
from smb.coordinator.messages import (
    add_quarantined,
    buffer_message,
    creation_of,
    ended_message,
    kind_of,
    replica_messages,
    server_message,
    stamp_message,
    without_session,
)
from smb.coordinator.moves.requests import drain_reply, rebalance
from smb.coordinator.options import OwnPorts
from smb.coordinator.outside import Outside
from smb.coordinator.placement import SERVERS_SHOWN_MAX
from smb.coordinator.records import BufferRecord, Kind, ShownCertificate
from smb.coordinator.registrations import Registrations
from smb.coordinator.replica_role_changes import RoleChanges
from smb.coordinator.segment_maker import OTHERS_CREATION_S, SegmentMaker
from smb.coordinator.session_end_notifier import SessionEndNotifier
from smb.coordinator.steps.creation import made_before
from smb.coordinator.store import StoreError
from smb.coordinator.token_issuer import TokenIssuer
from smb.coordinator.traffic import Traffic
from smb.coordinator.validate import Creation
from smb.coordinator.waiting_opens import WaitingOpens
from smb.daemon.failpoint import failpoint
from smb.errors import (
    APPLIED,
    NOT_APPLIED,
    CallOutcome,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer
from smb.security.roles import ANYBODY, Role, caller

if TYPE_CHECKING:
    from smb.coordinator.mirrors.filling import Mirrors
    from smb.coordinator.moves.copy_maker import CopyMaker

_log = logging.getLogger("coordinator")
_LAST_WORD_S = 0.5  # the time before a call's deadline that is left for an answer with a reason
KICKED_SHOWN_MAX = 256  # names in one answer
FORGOTTEN_SHOWN_MAX = 16  # segments in one audit line

_Opening: TypeAlias = pb.CreateBufferRequest | pb.OpenBufferRequest
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def _name_of(client_name: str) -> str:
    """Return the name of a client for people: the client's own name, and in brackets the name or role in its
    certificate. What could control a terminal is escaped, since each who lists clients shows it.
    """
    name, who = printable(client_name) or "a client without a name", caller()
    if who == ANYBODY or who.role is None:
        return name
    return f"{name} ({who.name or who.role.value})"


def _holder() -> ShownCertificate:
    """Return the contents of the caller's certificate."""
    who = caller()
    if who == ANYBODY or who.role is None:
        return ShownCertificate()
    return ShownCertificate(who.key, who.role.value, who.name, tuple(sorted(who.namespaces or ())))


def _mark_lost(message: pb.Buffer, lost: Collection[int]) -> None:
    for segment in message.layout.segments:
        segment.lost = segment.id in lost


def _left_s(context: Context) -> float:
    """Return how long a call may wait, so that its caller still gets an answer with a reason."""
    left_s = context.time_remaining()  # None: the caller set no deadline
    return min(OTHERS_CREATION_S, OTHERS_CREATION_S if left_s is None else left_s) - _LAST_WORD_S


def _renamed_away(name: str, outcome: CallOutcome = NOT_APPLIED) -> PermissionDeniedError:
    return PermissionDeniedError(
        f'buffer "{name}" was renamed to a namespace that your certificate does not open', outcome=outcome
    )


def _check_unlimited(method: str) -> None:
    """Raise PermissionDeniedError for a caller that is limited to namespaces."""
    if caller().namespaces is not None:
        raise PermissionDeniedError(
            f"{method} shows the whole cluster, and {caller()} is limited to namespaces; use a certificate of "
            f"role operator"
        )


class CoordinatorService(CoordinatorServicer):
    """The service Coordinator of control.proto, whose comments are the reference. Raises smb.errors, which
    `rpc_answers` turns into gRPC codes.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        servers: MemoryServers,
        segments: SegmentMaker,
        roles: RoleChanges,
        copy_maker: CopyMaker,
        endings: SessionEndNotifier,
        watch: Watch,
        overview: Overview,
        mirrors: Mirrors,
        shared: pb.SharedSettings | None = None,
        tokens: TokenIssuer | None = None,
        outside: Outside | None = None,
        ports: OwnPorts | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`tokens`: only with credentials. `outside`: None for the clocks and the network of this host.
        `ports`: the ports beside the one for all; None: there are none.
        """
        outside = outside or Outside()
        self._new_id = outside.new_id
        self._beside = BesideLoop(outside.in_thread)
        self._buffer_pages = BufferPages(self._beside)
        self._traffic = traffic or Traffic()
        self._tokens = tokens
        self._ports = ports or OwnPorts()
        self._commit_log = commit_log
        self._servers = servers
        self._segments = segments
        self._roles = roles
        self._copy_maker = copy_maker
        self._session_ends = endings
        self._watch = watch
        self._overview = overview
        self._shared = shared or pb.SharedSettings()
        self._opens = WaitingOpens(commit_log)
        self._registrations = Registrations(
            commit_log, servers, roles, lambda name: copy_maker.making(name), tokens, self._ports
        )
        self._mirrors = mirrors
        mirrors.pack_beside(self._beside)

    # Sessions

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionReply:
        session_id = self._new_id()
        name = _name_of(request.client_name)
        await self._commit_log.commit(SessionRenewed(session_id, name, _holder()))
        failpoint("coordinator.session.opened")
        reply = pb.OpenSessionReply(
            session_id=session_id,
            lease_ms=self._session_lease_ms(),
            shared=self._shared,
            sessions_port=self._ports.sessions,
        )
        if self._tokens is not None:
            reply.session_secret = self._tokens.session_secret(session_id)
            reply.token_lifetime_ms = self._tokens.lifetime_ms
        return reply

    async def RenewSession(self, request: pb.RenewSessionRequest, context: Context) -> pb.RenewSessionReply:
        self._check_session(request)
        name = _name_of(request.client_name)
        failpoint("coordinator.session.renewal_asked")
        await self._commit_log.commit(SessionRenewed(request.session_id, name, _holder()))
        failpoint("coordinator.session.renewed")
        self._record_reports(request)
        shown = request.states if caller().role is not Role.SERVER else ()
        states = [report for report in shown if caller().may_see(report.name)]
        self._watch.states.record_reports(request.session_id, states, self._commit_log.now())
        return pb.RenewSessionReply(lease_ms=self._session_lease_ms(), sessions_port=self._ports.sessions)

    def _session_lease_ms(self) -> int:
        return int(self._commit_log.state.session_leases.granted_s * 1000)

    def _server_lease_ms(self) -> int:
        return int(self._commit_log.state.server_leases.duration_s * 1000)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionReply:
        self._check_session(request)
        self._record_reports(request)
        self._session_ends.tell(await self._commit_log.commit(SessionClosed(request.session_id)))
        return pb.CloseSessionReply()

    def _record_reports(self, request: pb.RenewSessionRequest | pb.CloseSessionRequest) -> None:
        shown = request.trainings if caller().role is not Role.SERVER else ()
        reports = [report for report in shown if caller().may_see(report.name)]
        self._watch.trainings.record_reports(request.session_id, reports, self._commit_log.now())

    # Memory servers

    async def RegisterServer(self, request: pb.RegisterServerRequest, context: Context) -> pb.RegisterServerReply:
        """See control.proto."""
        return await self._registrations.register(request)

    async def RenewServer(self, request: pb.RenewServerRequest, context: Context) -> pb.RenewServerReply:
        failpoint("coordinator.renew.asked")
        copies = tuple(
            CopyProgress(copy.segment_id, copy.copied_bytes, copy.total_bytes, copy.bytes_per_s)
            for copy in request.copies
        )
        committed = await self._commit_log.commit(
            ServerRenewed(
                request.name,
                request.instance_id,
                request.used_bytes,
                copies,
                making=bool(self._copy_maker.making(request.name)),
            )
        )
        failpoint("coordinator.renew.granted")
        if request.HasField("load"):
            self._watch.record_load(request.name, request.instance_id, request.load, self._commit_log.now())
            self._traffic.record(request.name, request.load.segments, self._commit_log.now().monotonic)
        now = self._commit_log.now()
        self._mirrors.record(committed.state, request.name, request, now)
        # The lease is renewed even if the server's news cannot be stored: the next renewal brings the news again.
        with suppress(StoreError):
            await self._take_news(request)
        state = self._commit_log.state
        return pb.RenewServerReply(
            lease_ms=self._server_lease_ms(),
            ended_sessions=ended_message(committed.state.ended_sessions, request.sessions_seen),
            access=self._tokens.keys(request.name) if self._tokens else None,
            segment_names=committed.state.segment_names(request.unnamed_segments),
            session_names=committed.state.session_names(request.unnamed_sessions),
            replicas=replica_messages(state, state.copies(request.name)),
            mirrors=self._mirrors.tasks(state, request.name, now),
            quarantine_segment_ids=[
                number for number, held in state.unexplained.get(request.name, {}).items() if held.quarantined
            ],
            stamp=stamp_message(state.lineage.stamp),
            servers_port=self._ports.servers,
        )

    async def _take_news(self, request: pb.RenewServerRequest) -> None:
        if request.broken:
            await self._roles.look_after(request.name, request.broken)
        for whole in (True, False):
            ended = [copy for copy in request.copies if (copy.whole if whole else copy.failed)]
            if ended:
                await self._roles.end_copies(request.name, {copy.segment_id: copy.epoch for copy in ended}, whole=whole)

    async def LeaveServer(self, request: pb.LeaveServerRequest, context: Context) -> pb.LeaveServerReply:
        await self._commit_log.commit(ServerLeft(request.name, request.instance_id))
        return pb.LeaveServerReply()

    async def ListServers(self, request: pb.ListServersRequest, context: Context) -> pb.ListServersReply:
        """See control.proto. Sorted by name."""
        state, now = self._commit_log.state, self._commit_log.now()
        servers = sorted(state.servers.values(), key=lambda server: server.name)
        reply = pb.ListServersReply(servers=[server_message(state, server, now) for server in servers], now=now.wall)
        if caller().namespaces is None and any(state.unexplained.values()):
            where = state.where()
            for message in reply.servers:
                add_quarantined(message, state, where)
        return reply

    async def ForgetSegments(self, request: pb.ForgetSegmentsRequest, context: Context) -> pb.ForgetSegmentsReply:
        some = " ".join(f"{each:016x}" for each in request.segment_ids[:FORGOTTEN_SHOWN_MAX])
        audited("forget", f"{request.name}: {some or 'all'}")
        _check_unlimited("ForgetSegments")
        if request.all == bool(request.segment_ids):
            raise InvalidArgumentError(f'forget on "{request.name}": name the segments, or ask for all of them')
        committed = await self._commit_log.commit(SegmentsForgotten(request.name, frozenset(request.segment_ids)))
        await self._segments.drop(committed)
        freed = [each for effect in committed.effects if isinstance(effect, DropSegments) for each in effect.segments]
        return pb.ForgetSegmentsReply(segment_count=len(freed), nbytes=sum(each.file_bytes for each in freed))

    async def DrainServer(self, request: pb.DrainServerRequest, context: Context) -> pb.DrainServerReply:
        known = self._commit_log.state.servers.get(request.name)
        if known is None or known.draining == request.undo:  # otherwise somebody asks how far the drain is
            audited("undrain" if request.undo else "drain", request.name)
        _check_unlimited("DrainServer")
        await self._commit_log.commit(ServerDrained(request.name, request.undo))
        if known is None or known.draining == request.undo:
            self._copy_maker.audit.drain(request.name, undo=request.undo)
        failpoint("coordinator.drain.stored")
        self._roles.on_copies()
        return drain_reply(self._commit_log, self._copy_maker, request.name)

    async def Maintain(self, request: pb.MaintainRequest, context: Context) -> pb.MaintainReply:
        what = "end" if request.end else f"for {request.for_ms / 1000:g} s"
        audited("maintenance", f"{request.name or 'all servers'}, {what}")
        _check_unlimited("Maintain")
        if request.all == bool(request.name):
            raise InvalidArgumentError("maintenance: name one memory server, or ask for all of them")
        if request.end:
            await self._commit_log.commit(MaintenanceEnded(request.name))
            self._roles.on_copies()
            return pb.MaintainReply()
        committed = await self._commit_log.commit(MaintenancePlanned(request.name, request.for_ms / 1000))
        return pb.MaintainReply(until=committed.state.maintenance[request.name].until_wall)

    async def Rebalance(self, request: pb.RebalanceRequest, context: Context) -> pb.RebalanceReply:
        """See control.proto. Planned in a thread, since it takes long with very many buffers."""
        if not request.dry_run:
            audited("rebalance", "single copies, too" if request.single_copies else "two copies")
        _check_unlimited("Rebalance")
        traffic = self._traffic.of_primaries(self._commit_log.state)
        in_thread = partial(self._beside.run, caller().key)
        return await rebalance(request, self._commit_log, self._copy_maker, traffic, in_thread)

    async def Overview(self, request: pb.OverviewRequest, context: Context) -> pb.OverviewReply:
        """See control.proto. Made in a thread, since it takes long with very many buffers."""
        _check_unlimited("Overview")
        make = self._overview.all
        if request.server:
            make = partial(self._overview.server, request.server)
        elif request.buffer:
            make = partial(self._overview.buffer, request.buffer)
        elif request.training:
            make = partial(self._overview.training, request.training)
        elif request.clients:
            make = partial(self._overview.clients, request.after)
        text = await self._beside.run(caller().key, make)
        return pb.OverviewReply(json=text.decode())

    async def LockHolder(self, request: pb.LockHolderRequest, context: Context) -> pb.LockHolderReply:
        return pb.LockHolderReply(client_name=self._commit_log.state.client_name(request.session_id, ""))

    async def KickClients(self, request: pb.KickClientsRequest, context: Context) -> pb.KickClientsReply:
        audited("kick", request.name)
        _check_unlimited("KickClients")
        who = caller()
        by = "an operator" if who == ANYBODY or who.role is None else who.name or who.role.value
        most = self._commit_log.changes_max
        ends_max = None if most is None else most // 2  # the end of each may make room by forgetting another one
        names: list[str] = []
        while True:
            before = self._commit_log.state.sessions
            try:
                committed = await self._commit_log.commit(ClientsKicked(request.name, by, ends_max))
            except NotFoundError:
                if names:
                    break
                raise
            self._session_ends.tell(committed)
            ended = [i for effect in committed.effects if isinstance(effect, TellEnded) for i in effect.session_ids]
            names += [before[number].client_name if number in before else "" for number in ended]
            if ends_max is None or len(ended) < ends_max:
                break
        self._commit_log.look_again()
        return pb.KickClientsReply(session_count=len(names), clients=sorted(names)[:KICKED_SHOWN_MAX])

    # Buffers

    async def CreateBuffer(self, request: pb.CreateBufferRequest, context: Context) -> pb.Buffer:
        self._check_given_session(request)
        if request.kind == pb.BUFFER:
            audited("create", request.name)
        failpoint("coordinator.create.asked")
        # No local variable names the task: its error's traceback has this frame, and the cycle would keep the request.
        creation = await self._checked(request)
        left_s = partial(_left_s, context)
        await self._opens.until_known(creation.kind, creation.name, 0, left_s, creation.attempt_id)
        if creation.like:
            await self._opens.until_known(Kind.BUFFER, creation.like, creation.model_id, left_s)
        self._check_two_copies(creation)
        if creation.kind is Kind.BARRIER:
            await self._free_if_lost(creation.name)
        patience_s = min(OTHERS_CREATION_S, left_s())
        waiting = partial(self._opens.counted_if_room, creation.kind, creation.name)
        record = await asyncio.shield(self._segments.create(creation, patience_s, waiting))
        if record.name != request.name and not caller().may_see(record.name):  # a repeated request: made, then renamed
            raise _renamed_away(request.name, APPLIED)
        return self._opened(request, record)

    def _check_two_copies(self, creation: Creation) -> None:
        """Raise InvalidArgumentError if servers would have to forward changes to each other without TLS."""
        if creation.replicas < 2 or self._tokens is None:
            return
        state = self._commit_log.state
        plain = sorted(state.pool(self._commit_log.now()).plain)
        # A repeated request, and a lock that exists, are not checked: these find what was made before.
        if plain and made_before(state, creation) is None and state.find(creation.kind, creation.name) is None:
            raise InvalidArgumentError(
                f'create of "{creation.name}" with replicas={creation.replicas}: in a cluster with credentials, '
                f"servers forward changes only inside TLS, and these servers serve data without it (--data-tls off): "
                f"{', '.join(plain[:SERVERS_SHOWN_MAX])}. Restart them without that option, or use "
                f"replicas=1"
            )

    async def _free_if_lost(self, name: str) -> None:
        """Free a barrier whose memory was lost, since no client can be waiting in it. A lock is not freed: its next
        token must be above its last one, which was lost too.
        """
        there = self._commit_log.state.find(Kind.BARRIER, name)
        if there is not None and there.segments[0].id in self._commit_log.state.lost_segments(self._commit_log.now()):
            await self._commit_log.commit(NamesFreed(there.segments[0].server, {there.segments[0].id: 0}))

    async def _checked(self, request: pb.CreateBufferRequest) -> Creation:
        """Return the checked creation. Metadata is parsed in another thread, because servers would lose their leases
        if the loop stood still. One parse runs at a time, because parsing takes many times the size in memory.
        """
        asked = without_session(request)
        if caller().role is Role.SERVER:
            relay_access.check_create(self._commit_log.state, caller().name, asked)
        if not asked.packed_metadata:
            return creation_of(asked)
        return await self._beside.run(caller().key, partial(creation_of, asked))

    async def OpenBuffer(self, request: pb.OpenBufferRequest, context: Context) -> pb.Buffer:
        self._check_given_session(request)
        timeout_s = request.timeout_ms / 1000
        kind = kind_of(request.kind)
        self._may_write(kind, request.name)
        await self._opens.until_known(kind, request.name, request.id, partial(_left_s, context))
        if request.id and kind is Kind.BUFFER:
            known = self._commit_log.state.find(kind, request.name)
            if known is None or known.id != request.id:
                renamed = self._commit_log.state.find_id(request.id)
                if renamed is not None:
                    if not caller().may_see(renamed.name):
                        raise _renamed_away(request.name)
                    return self._opened(request, renamed)
        record = await self._opens.until_there(kind, request.name, timeout_s, request.session_id)
        if record is None:
            lacks = f"appeared within {timeout_s:g} s" if timeout_s else "exists"
            advice = (
                "`smb ls` lists the names; a timeout waits for a buffer that another process creates: open(name, "
                "timeout=60)"
            )
            if kind is not Kind.BUFFER:
                advice = "no client has used it yet"
            raise NotFoundError(f'no {kind.value} "{request.name}" {lacks}; {advice}')
        return self._opened(request, record)

    async def ListBuffers(self, request: pb.ListBuffersRequest, context: Context) -> pb.ListBuffersReply:
        """See control.proto. Sorted by name."""
        state = self._commit_log.state
        lost = state.lost_segments(self._commit_log.now())
        if request.names or request.folder:
            return await self._buffer_pages.look_up(state, lost, caller(), request.names, request.folder)
        return await self._buffer_pages.page(state, lost, caller(), request.after)

    async def DeleteBuffer(self, request: pb.DeleteBufferRequest, context: Context) -> pb.DeleteBufferReply:
        audited("delete", request.name)
        if caller().role is Role.SERVER:
            relay_access.check_delete(self._commit_log.state, caller().name, request.name)
        failpoint("coordinator.delete.asked")
        committed = await self._commit_log.commit(BufferDeleted(request.name, request.missing_ok, request.id))
        failpoint("coordinator.delete.erased")
        await self._segments.drop(committed)
        failpoint("coordinator.delete.dropped")
        return pb.DeleteBufferReply()

    async def RenameBuffer(self, request: pb.RenameBufferRequest, context: Context) -> pb.RenameBufferReply:
        audited("rename", f"{request.name} -> {request.new_name}")
        failpoint("coordinator.rename.asked")
        await self._opens.until_known(Kind.BUFFER, request.name, request.id, partial(_left_s, context))
        event = BufferRenamed(
            request.name, request.new_name, request.replace, request.displaced_name, request.folder, request.id,
            request.file_attributes if request.HasField("file_attributes") else None,
            request.attributes_before if request.HasField("attributes_before") else None,
        )  # fmt: skip
        committed = await self._commit_log.commit(event)
        failpoint("coordinator.rename.stored")
        await self._segments.drop(committed)
        return pb.RenameBufferReply(attributes_stored=event.file_attributes is not None)

    def _check_session(self, request: pb.RenewSessionRequest | pb.CloseSessionRequest | _Opening) -> None:
        if self._tokens is not None:
            self._tokens.check_session(request.session_id, request.session_secret)

    def _check_given_session(self, request: _Opening) -> None:
        if request.session_id:
            self._check_session(request)

    def _opened(self, request: _Opening, record: BufferRecord) -> pb.Buffer:
        """Return the answer, with tokens if a session asks."""
        message = buffer_message(self._commit_log.state, record)
        _mark_lost(message, self._commit_log.state.lost_segments(self._commit_log.now()))
        message.mirrors.extend(self._mirrors.messages(self._commit_log.state, record, self._commit_log.now()))
        if self._tokens is not None and request.session_id:
            may_write = self._may_write(record.kind, record.name)
            self._tokens.add_to(message, request.session_id, may_write=may_write)
        return message

    def _may_write(self, kind: Kind, name: str) -> bool:
        """Return whether the caller may also write to a buffer. Raises PermissionDeniedError for a memory server whose
        relay may not even read it.
        """
        if caller().role is not Role.SERVER:
            return caller().role is not Role.READER
        if kind is not Kind.BUFFER:
            raise PermissionDeniedError(
                f'memory server "{caller().name}" may not open {kind.value} "{name}": a relay opens only buffers'
            )
        return relay_access.check_open(self._commit_log.state, caller().name, name)
