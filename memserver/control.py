"""The gRPC service: segments and ended sessions, for the coordinator; queue pairs and keys of RDMA, for clients.

Runs in a few threads of gRPC's pool. With access control, a client proves a token with each call about RDMA, as on each
connection for data: its certificate alone gives it no access.
"""

# gRPC calls methods by the names of the .proto.
# ruff: noqa: N802

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc

from memserver.engine import NotReadyError, SegmentForm
from memserver.replication import Replication
from memserver.segments import FOR_GOOD, Segments
from memserver.stamps import Stamps
from memserver.store_messages import inventory_message, stamp_of
from memserver.terms import NotRegisteredError
from smb.arrays.dtypes import DTYPES
from smb.config.parse import format_address
from smb.config.request_ids import begin, end
from smb.daemon.failpoint import failpoint
from smb.daemon.process import grpc_server_options
from smb.drop_reasons import Ground
from smb.engine import Token
from smb.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    UnavailableError,
)
from smb.rpc import control_pb2 as pb
from smb.rpc.bounds import Bounds
from smb.rpc.client_tokens import RIGHT_WRITE
from smb.rpc.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server
from smb.security.bond import bond_of_caller
from smb.security.credentials import Credentials, Current, add_port
from smb.security.roles import Callers, RoleInterceptor, certificate_of

if TYPE_CHECKING:
    from memserver.rdma_target import RdmaTarget, ReachableMemory

THREADS = 4  # more than one, so that drops do not wait for creations of large segments
STOP_GRACE_S = 5.0  # so that a segment that is being made can be finished

_log = logging.getLogger("memserver")
_CODES: dict[type[Error], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    OutOfMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NotReadyError: grpc.StatusCode.FAILED_PRECONDITION,
    NotRegisteredError: grpc.StatusCode.ABORTED,
}
Reply = TypeVar("Reply")
# Arguments: session, token with its proof, and bond of the caller. Returns for how many seconds the token is valid;
# raises PermissionDeniedError.
CheckProof: TypeAlias = Callable[[int, Token, bytes], float]


class ControlService(MemoryServerServicer):
    """The service MemoryServer of control.proto, whose comments are the reference."""

    def __init__(
        self,
        segments: Segments,
        rdma: RdmaTarget,
        replication: Replication,
        stamps: Stamps,
        check_proof: CheckProof | None = None,
    ) -> None:
        """`check_proof` None: no tokens are required."""
        self._stamps = stamps
        self._replication = replication
        self._segments = segments
        self._rdma = rdma
        self._check_proof = check_proof

    def CreateSegment(self, request: pb.CreateSegmentRequest, context: grpc.ServicerContext) -> pb.CreateSegmentReply:

        def create() -> pb.CreateSegmentReply:
            failpoint("memserver.create.asked")
            self._check_run(request.instance_id)
            self._segments.terms.check_not_left(request.stamp.term)
            if request.HasField("stamp"):  # first, because that store has a record of the segment
                self._stamps.learn(stamp_of(request.stamp))
            dtype = DTYPES.get(request.dtype)
            if dtype is None or request.id == 0 or request.epoch == 0:
                raise InvalidArgumentError(
                    f"create segment: id {request.id:016x} and epoch {request.epoch} must not be 0, and dtype "
                    f"{request.dtype!r} must be a known one"
                )

            def take() -> None:  # making the memory takes time
                during = self._segments.terms.during(request.stamp.term, registered=False)
                self._replication.take((request.replica,), during)

            self._segments.create(
                SegmentForm(request.id, request.epoch, dtype.number, request.nbytes, request.chunk_bytes),
                request.token_floor,
                take if request.HasField("replica") else None,
                anew=request.replica.copying,
                bundle_id=request.group_id,
                term=request.stamp.term,
            )
            _log.info("made segment %016x of %d bytes", request.id, request.nbytes)
            failpoint("memserver.create.done")
            return pb.CreateSegmentReply(used_bytes=self._segments.used_bytes(), group_id=request.group_id)

        return _answer(context, create)

    def DeleteSegment(self, request: pb.DeleteSegmentRequest, context: grpc.ServicerContext) -> pb.DeleteSegmentReply:

        def drop() -> pb.DeleteSegmentReply:
            failpoint("memserver.delete.asked")
            self._check_run(request.instance_id)
            gone = True
            if not request.room:
                gone = self._segments.drop(request.id, request.epoch or FOR_GOOD, Ground(request.ground), request.term)
            elif (seen := self._segments.held().get(request.id)) is not None:
                gone = self._segments.give_up(seen, request.epoch, request.term)
            if gone:
                _log.info("dropped segment %016x: %s", request.id, Ground(request.ground).name.lower())
            failpoint("memserver.delete.done")
            return pb.DeleteSegmentReply(used_bytes=self._segments.used_bytes())

        return _answer(context, drop)

    def RetireSegments(
        self, request: pb.RetireSegmentsRequest, context: grpc.ServicerContext
    ) -> pb.RetireSegmentsReply:

        def retire() -> pb.RetireSegmentsReply:
            tokens = self._segments.retire(request.ids, request.idle_ms, request.term)
            return pb.RetireSegmentsReply(tokens=tokens)

        return _answer(context, retire)

    def EndSessions(self, request: pb.EndSessionsRequest, context: grpc.ServicerContext) -> pb.EndSessionsReply:

        def end() -> pb.EndSessionsReply:
            self._segments.sessions.end(request.session_ids)
            _log.debug("ended %d sessions", len(request.session_ids))
            return pb.EndSessionsReply()

        return _answer(context, end)

    def TakeRoles(self, request: pb.TakeRolesRequest, context: grpc.ServicerContext) -> pb.TakeRolesReply:

        def take() -> pb.TakeRolesReply:
            self._check_run(request.instance_id)
            for segment_id in request.quarantine_segment_ids:  # one by one: each writes a file
                with self._segments.terms.during(request.term):
                    self._segments.quarantine([segment_id])
            for segment_id in request.taken_up_segment_ids:
                with self._segments.terms.during(request.term):
                    self._segments.quarantined.take_up(segment_id)
            # A registration with another coordinator gives roles, too: none of this one's may come after those.
            taken = self._replication.take(request.replicas, self._segments.terms.during(request.term))
            return pb.TakeRolesReply(
                confirmed=[part.segment_id for part in request.replicas if part.confirm],
                bound=taken.bound,
                switchable=taken.switchable,
            )

        return _answer(context, take)

    def Inventory(self, request: pb.InventoryRequest, context: grpc.ServicerContext) -> pb.InventoryReply:

        def look() -> pb.InventoryReply:
            found = self._segments.inventory()
            held = [inventory_message(*found[each]) for each in request.ids if each in found]
            return pb.InventoryReply(instance_id=self._rdma.instance_id, held=held)

        return _answer(context, look)

    def ConnectVerbs(self, request: pb.ConnectVerbsRequest, context: grpc.ServicerContext) -> pb.ConnectVerbsReply:

        def connect() -> pb.ConnectVerbsReply:
            self._check_session(request.session_id)
            self._proved(request.session_id, request.token, context)
            end, slots = self._rdma.connect(request.session_id, request.client)
            # The session may have ended meanwhile, and the coordinator's message have come before the connection.
            if request.session_id in self._segments.sessions:
                self._rdma.end_session(request.session_id)
            return pb.ConnectVerbsReply(
                server=pb.VerbsEnd(
                    number=end.number, gid=end.gid, lid=end.lid, packet_sequence=end.packet_sequence, mtu=end.mtu,
                    reads=end.reads,
                ),
                slots=[_remote(slot) for slot in slots],
                instance_id=self._rdma.instance_id,
            )  # fmt: skip

        return _answer(context, connect)

    def OpenSegmentVerbs(
        self, request: pb.OpenSegmentVerbsRequest, context: grpc.ServicerContext
    ) -> pb.OpenSegmentVerbsReply:

        def open_segment() -> pb.OpenSegmentVerbsReply:
            self._check_session(request.session_id)
            refused = f"segment {request.segment_id:016x} has two copies, or may move: RDMA would change one only"
            if self._replication.has(request.segment_id):
                raise InvalidArgumentError(refused)
            if self._check_proof is not None and request.token.segment_id != request.segment_id:
                raise PermissionDeniedError(
                    f"RDMA keys for segment {request.segment_id:016x} need that segment's token, not one of another"
                )
            left_s = self._proved(request.session_id, request.token, context)
            epoch = request.epoch if self._check_proof is None else request.token.epoch
            writable = request.writable and (self._check_proof is None or bool(request.token.rights & RIGHT_WRITE))
            until = time.monotonic() + left_s
            opened = self._rdma.open_segment(request.session_id, request.segment_id, epoch, writable, until)
            # This comes last, because the segment then stays here for good. The keys have not been sent yet.
            if not self._segments.bind(request.segment_id):
                self._rdma.forget_segment(request.segment_id)
                raise InvalidArgumentError(refused)
            if request.segment_id not in self._segments.ids():  # dropped meanwhile
                self._rdma.forget_segment(request.segment_id)
                raise NotFoundError(f"segment {request.segment_id:016x} was dropped meanwhile; open the buffer again")
            return pb.OpenSegmentVerbsReply(
                data=_remote(opened.data),
                states=_remote(opened.states),
                sequence_at=opened.sequence_at,
                chunk_bytes=opened.chunk_bytes,
                dtype=opened.dtype,
                writable=opened.writable,
            )

        return _answer(context, open_segment)

    def CloseVerbs(self, request: pb.CloseVerbsRequest, context: grpc.ServicerContext) -> pb.CloseVerbsReply:

        def close() -> pb.CloseVerbsReply:
            if request.session_id == 0:
                raise InvalidArgumentError("a session's id must not be 0")
            self._proved(request.session_id, request.token, context)
            self._rdma.close_connection(request.session_id)
            return pb.CloseVerbsReply()

        return _answer(context, close)

    def _proved(self, session_id: int, shown: pb.TokenProof, context: grpc.ServicerContext) -> float:
        """Return for how many seconds the session may use its token. Raises as Engine.check_proof."""
        if self._check_proof is None:
            return math.inf
        return self._check_proof(
            session_id,
            Token(shown.segment_id, shown.epoch, shown.rights, shown.generation, shown.expires_at_ms, shown.proof),
            bond_of_caller(certificate_of(context)),
        )

    def _check_run(self, instance_id: int) -> None:
        if instance_id not in (0, self._rdma.instance_id):
            raise NotFoundError("this is for another run of this memory server; this one must register first")

    def _check_session(self, session_id: int) -> None:
        if session_id == 0:
            raise InvalidArgumentError("a session's id must not be 0")
        if session_id in self._segments.sessions:
            raise InvalidArgumentError(f"session {session_id:016x} has ended; connect again")


class _Requests(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Begins and ends the call in the thread that answers it, of a threaded server."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler inside its call. An unknown method has no handler, and gRPC refuses it."""
        handler = continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler

        def ask(request: Any, context: grpc.ServicerContext) -> Any:
            begin(context.invocation_metadata() or ())
            try:
                return handler.unary_unary(request, context)
            finally:
                end()

        return grpc.unary_unary_rpc_method_handler(
            ask, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )


class ControlServer:
    """Serves the ControlService. Call `close` at the end."""

    def __init__(
        self,
        host: str,
        port: int,
        segments: Segments,
        rdma: RdmaTarget,
        replication: Replication,
        stamps: Stamps,
        credentials: Credentials | None = None,
        check_proof: CheckProof | None = None,
    ) -> None:
        """Listen and serve. Port 0 picks a free one; `check_proof` is given with credentials. Raises
        UnavailableError."""
        guards: list[grpc.ServerInterceptor[Any, Any]] = [_Requests(), Bounds()]
        if credentials is not None:
            guards.append(RoleInterceptor(Callers(Current(credentials))))
        pool = ThreadPoolExecutor(THREADS, "control")
        self._server = grpc.server(pool, interceptors=guards, options=grpc_server_options())
        service = ControlService(segments, rdma, replication, stamps, check_proof)
        add_MemoryServerServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        self.port = add_port(self._server, format_address(host, port), credentials)
        if self.port == 0:
            raise UnavailableError(
                f"cannot listen on {host} port {port} for the coordinator; choose another address with --control"
            )
        self._server.start()

    def close(self) -> None:
        """Refuse new calls and finish those in progress. Blocks for at most STOP_GRACE_S."""
        self._server.stop(STOP_GRACE_S).wait()


def _remote(memory: ReachableMemory) -> pb.RemoteMemory:
    return pb.RemoteMemory(address=memory.address, key=memory.key, nbytes=memory.nbytes)


def _answer(context: grpc.ServicerContext, act: Callable[[], Reply]) -> Reply:
    if not context.is_active():
        # The call waited in the queue until its deadline; the coordinator has given it up.
        context.abort(grpc.StatusCode.CANCELLED, "too late")
    try:
        return act()
    except Error as error:
        # Each restart of the coordinator has some of the first kind, which it asks for again.
        _log.log(logging.INFO if isinstance(error, NotRegisteredError) else logging.WARNING, "refused: %s", error)
        context.abort(_CODES.get(type(error), grpc.StatusCode.UNAVAILABLE), str(error))
    raise AssertionError("abort returns to nobody")
