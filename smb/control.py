"""The client's side of the control plane: one coordinator, gRPC status codes turned into smb errors."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import grpc

from smb import errors
from smb.config import parse_address
from smb.proto import control_pb2 as pb
from smb.proto.control_pb2_grpc import CoordinatorStub


class SessionEndedError(errors.UnavailableError):
    """The session's lease ran out, or it was closed. It never comes back: a new one is needed."""


# As control.proto's head says.
_CLASSES: dict[grpc.StatusCode, type[errors.Error]] = {
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OutOfMemoryError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.TimeoutError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: SessionEndedError,
}
# No proxy between daemons; no connection shared with other channels of the process, which in a child of fork would be
# its parent's and fail; and quick reconnection: a restarted coordinator is found within a second.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 256 << 20),
)
# Metadata with every error that the coordinator itself answers: without it, "unavailable" means that nobody answered.
ANSWERED = "smb-answered"

_COMES_BACK_S = 2.0
_PROBE_S = 1.0
_NO_COORDINATOR = "something listens there that does not answer as a coordinator does: a memory server's port?"


def _was_not_sent(error: Any) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or "").lower()


def _why_not(address: str) -> str:
    """Return why no coordinator could be reached, as a bare connection finds it."""
    try:
        socket.create_connection(parse_address(address), _PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return _NO_COORDINATOR


class Coordinator:
    """A coordinator at "host:port". Every method blocks up to its timeout (seconds) and raises smb errors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the channel; calls in progress fail."""
        self._channel.close()

    def open_session(self, client_name: str, timeout: float) -> tuple[int, float]:
        """Return (session id, lease in seconds)."""
        reply: pb.OpenSessionReply = self._call(
            self._stub.OpenSession, pb.OpenSessionRequest(client_name=client_name), timeout
        )
        return reply.session_id, reply.lease_ms / 1000

    def renew_session(self, session_id: int, client_name: str, timeout: float) -> float:
        """Return the lease in seconds. Raises SessionEndedError where there is nothing left to renew."""
        request = pb.RenewSessionRequest(session_id=session_id, client_name=client_name)
        reply: pb.RenewSessionReply = self._call(self._stub.RenewSession, request, timeout)
        return reply.lease_ms / 1000

    def close_session(self, session_id: int, timeout: float) -> None:
        """End it at once instead of letting its lease run out."""
        self._call(self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id), timeout)

    def create_buffer(self, request: pb.CreateBufferRequest, timeout: float) -> pb.Buffer:
        """See control.proto."""
        buffer: pb.Buffer = self._call(self._stub.CreateBuffer, request, timeout)
        return buffer

    def open_buffer(self, name: str, wait: float, timeout: float, known_id: int = 0) -> pb.Buffer:
        """Wait up to `wait` seconds for the name to appear. With `known_id` the buffer of that id, renamed or not."""
        request = pb.OpenBufferRequest(name=name, timeout_ms=round(wait * 1000), id=known_id)
        buffer: pb.Buffer = self._call(self._stub.OpenBuffer, request, wait + timeout)
        return buffer

    def place(self, kind: pb.Kind, name: str, timeout: float) -> pb.Buffer:
        """Return where the lock or barrier of that name lies; whoever asks first gives it its place, for good."""
        return self.create_buffer(pb.CreateBufferRequest(name=name, kind=kind, exist_ok=True), timeout)

    def list_buffers(self, timeout: float) -> list[pb.Buffer]:
        """Return all of them, by name."""
        reply: pb.ListBuffersReply = self._call(self._stub.ListBuffers, pb.ListBuffersRequest(), timeout)
        return list(reply.buffers)

    def delete_buffer(self, name: str, missing_ok: bool, timeout: float) -> None:
        """See control.proto."""
        request = pb.DeleteBufferRequest(name=name, missing_ok=missing_ok)
        self._call(self._stub.DeleteBuffer, request, timeout)

    def rename_buffer(self, request: pb.RenameBufferRequest, timeout: float) -> None:
        """See control.proto."""
        self._call(self._stub.RenameBuffer, request, timeout)

    def list_servers(self, timeout: float) -> list[pb.Server]:
        """Return all that ever registered, dead ones too."""
        reply: pb.ListServersReply = self._call(self._stub.ListServers, pb.ListServersRequest(), timeout)
        return list(reply.servers)

    def _call(self, method: Callable[..., Any], request: Any, timeout: float) -> Any:
        try:
            try:
                return method(request, timeout=timeout)
            except grpc.RpcError as error:
                if not _was_not_sent(error):
                    raise
            # Perhaps it is just being started, or started again: gRPC would go on failing until its next attempt.
            grpc.channel_ready_future(self._channel).result(timeout=min(timeout, _COMES_BACK_S))
            return method(request, timeout=timeout)
        # gRPC's own tracebacks, chained, are 30 lines that say no more.
        except grpc.FutureTimeoutError:
            raise self._nobody(_why_not(self.address)) from None
        except grpc.RpcError as error:
            raise self._error(error, timeout) from None
        except ValueError as error:  # grpc's answer to a call on a closed channel
            raise errors.UnavailableError("the client is closed; call smb.connect again") from error

    def _nobody(self, why: str) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"no coordinator answers at {self.address} ({why}); check that it runs (smb coordinator, or smb up)"
        )

    def _error(self, error: Any, timeout: float) -> errors.Error:
        code, details = error.code(), error.details() or ""
        ours = any(key == ANSWERED for key, _ in error.trailing_metadata() or ())
        if code is grpc.StatusCode.UNAVAILABLE and not ours:
            return self._nobody(details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and not ours:
            return errors.TimeoutError(
                f"the coordinator at {self.address} did not answer within {timeout:g} s; check that it runs"
            )
        if code is grpc.StatusCode.CANCELLED:  # only closing the channel cancels our calls
            return errors.UnavailableError("the client was closed meanwhile; call smb.connect again")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return self._nobody(_NO_COORDINATOR)
        if code in _CLASSES:
            return _CLASSES[code](details)
        return errors.Error(f"the coordinator at {self.address} failed with {code.name}: {details}")
