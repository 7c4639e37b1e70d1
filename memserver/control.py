"""The gRPC service for the coordinator: make and drop segments, end sessions. Runs in a few threads of gRPC's pool."""

# gRPC calls methods by the names of the .proto.
# ruff: noqa: N802

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from memserver.engine import SegmentForm
from memserver.segments import Segments
from smb.access import Guard
from smb.config import format_address
from smb.credentials import Credentials, add_port
from smb.daemon import GRPC_SERVER_OPTIONS
from smb.dtypes import DTYPES
from smb.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    UnavailableError,
)
from smb.failpoint import failpoint
from smb.proto import control_pb2 as pb
from smb.proto.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server

THREADS = 4  # creations of large segments must not keep drops waiting
STOP_GRACE_S = 5.0  # a segment that is being made is finished

_log = logging.getLogger("memserver")
_CODES: dict[type[Error], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    OutOfMemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
Reply = TypeVar("Reply")


class ControlService(MemoryServerServicer):
    """control.proto's MemoryServer; its comments there are the reference."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def CreateSegment(self, request: pb.CreateSegmentRequest, context: grpc.ServicerContext) -> pb.CreateSegmentReply:
        """See control.proto."""

        def create() -> pb.CreateSegmentReply:
            failpoint("memserver.create.asked")
            dtype = DTYPES.get(request.dtype)
            if dtype is None or request.id == 0 or request.epoch == 0:
                raise InvalidArgumentError(f"segment {request.id:016x}, epoch {request.epoch}, dtype {request.dtype!r}")
            self._segments.create(
                SegmentForm(request.id, request.epoch, dtype.number, request.nbytes, request.chunk_bytes)
            )
            failpoint("memserver.create.done")
            return pb.CreateSegmentReply(used_bytes=self._segments.used_bytes())

        return _answer(context, create)

    def DeleteSegment(self, request: pb.DeleteSegmentRequest, context: grpc.ServicerContext) -> pb.DeleteSegmentReply:
        """See control.proto."""

        def drop() -> pb.DeleteSegmentReply:
            failpoint("memserver.delete.asked")
            self._segments.drop(request.id)
            failpoint("memserver.delete.done")
            return pb.DeleteSegmentReply(used_bytes=self._segments.used_bytes())

        return _answer(context, drop)

    def EndSessions(self, request: pb.EndSessionsRequest, context: grpc.ServicerContext) -> pb.EndSessionsReply:
        """See control.proto."""

        def end() -> pb.EndSessionsReply:
            self._segments.end_sessions(request.session_ids)
            return pb.EndSessionsReply()

        return _answer(context, end)


class ControlServer:
    """Serves the ControlService. `close` it."""

    def __init__(self, host: str, segments: Segments, credentials: Credentials | None = None) -> None:
        """Listen on a free port of the host and serve. Raises UnavailableError."""
        guards: list[grpc.ServerInterceptor[Any, Any]] = [] if credentials is None else [Guard()]
        pool = ThreadPoolExecutor(THREADS, "control")
        self._server = grpc.server(pool, interceptors=guards, options=GRPC_SERVER_OPTIONS)
        add_MemoryServerServicer_to_server(ControlService(segments), self._server)  # type: ignore[no-untyped-call]
        self.port = add_port(self._server, format_address(host, 0), credentials)
        if self.port == 0:
            raise UnavailableError(f"cannot listen on {host} for the coordinator")
        self._server.start()

    def close(self) -> None:
        """Take no more calls, finish those under way. Blocks for at most STOP_GRACE_S."""
        self._server.stop(STOP_GRACE_S).wait()


def _answer(context: grpc.ServicerContext, act: Callable[[], Reply]) -> Reply:
    if not context.is_active():
        # It waited in the queue until its deadline passed; the coordinator has given it up.
        context.abort(grpc.StatusCode.CANCELLED, "too late")
    try:
        return act()
    except Error as error:
        _log.warning("refused: %s", error)
        context.abort(_CODES.get(type(error), grpc.StatusCode.UNAVAILABLE), str(error))
    raise AssertionError("abort returns to nobody")
