"""Answers at the coordinator's port: with the service while this coordinator leads, else with the leader's address.

Only one of several coordinators answers calls. Leadership is checked before a call and again before its answer is sent,
since the answer may be out of date by then.
"""

# gRPC calls methods by the names of the .proto, always with request and context.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from smb.config.backoff import own_random
from smb.coordinator.store import DeposedError
from smb.errors import UNKNOWN, CallOutcome, PermissionDeniedError
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

OF_SESSIONS = frozenset({"RenewSession", "CloseSession", "OpenBuffer"})  # what the port for sessions answers
ASKED_OF_ALL = "Leader"  # the call that every coordinator answers
PATIENCE_S_MAX = 10.0
KEPT_MAX = 8192  # calls that wait until there is a leader
KEPT_BYTES_MAX = 4096  # of a request that waits
GO_ON_PER_S = 1000.0  # roughly the number of calls that a coordinator answers

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Handlers:
    """Stands in for a server when the generated code registers a service, and keeps the handlers that it registers."""

    def __init__(self, service: CoordinatorServicer) -> None:
        self.by_method: dict[str, Handler] = {}
        add_CoordinatorServicer_to_server(service, self)  # type: ignore[no-untyped-call]

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Ignore the generic handlers: the same methods are also registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        self.by_method = {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Nobody(CoordinatorServicer):
    """The service while another coordinator leads. `Front.check` refuses all of its methods except Leader."""

    def __init__(self, leader: Callable[[], pb.LeaderReply]) -> None:
        self._leader = leader

    async def Leader(self, request: pb.LeaderRequest, context: Any) -> pb.LeaderReply:
        return self._leader()


class Front(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The service behind the port. Used in the loop's thread only."""

    def __init__(self, uniform: Callable[[float, float], float] = own_random.uniform) -> None:
        """`uniform`: returns a random number between its two arguments."""
        self._uniform = uniform
        self.address = ""  # of this coordinator, as others reach it
        self.leader = ""  # the leader's address; empty if no leader is known
        self.term = 0  # grows with each leader
        self._holds: Callable[[], bool] | None = None
        self._kept = 0
        self._stops = False
        self._moved = asyncio.Event()  # set when another coordinator leads; then replaced by a new event
        self._nobody = _Handlers(_Nobody(self._leader)).by_method
        self._handlers = self._nobody

    def lead(self, service: CoordinatorServicer, holds: Callable[[], bool], term: int) -> None:
        """Answer with this service while `holds` returns True."""
        handlers = _Handlers(service).by_method
        leader = f"/smb.v1.Coordinator/{ASKED_OF_ALL}"
        self._handlers = {**handlers, leader: self._nobody[leader]}
        self._holds, self.leader, self.term = holds, self.address, term
        self._tell_moved()

    def stand_by(self, leader: str = "", term: int = 0) -> None:
        """Refuse all calls, and name the leader if it is known."""
        self._handlers, self._holds = self._nobody, None
        before = self.leader, self.term
        self.leader, self.term = leader, max(term, self.term)
        if before != (self.leader, self.term):
            self._tell_moved()

    async def wait_to_lead(self, request: Message, patience: str) -> None:
        """Wait until this coordinator leads or another leader is known, for as long as the caller is willing to wait.
        Without this wait, very many callers without a leader would ask very often. `patience`: milliseconds, and the
        term of the leader that the caller has heard of. Returns at once if a leader of another term is known here, if
        very many callers wait already, or if the request is large. It also returns at once if this coordinator does
        not know who led last, since it may not hear of the next leader.
        """
        found = re.fullmatch(r"(\d{1,6}) (\d{1,20})", patience)
        if found is None or self.leads or not self.leader or int(found[2]) != self.term:
            return
        if self._stops or self._kept >= KEPT_MAX or request.ByteSize() > KEPT_BYTES_MAX:
            return
        moved = self._moved
        self._kept += 1
        try:
            await asyncio.wait_for(moved.wait(), min(PATIENCE_S_MAX, int(found[1]) / 1000))
            # Let the waiting callers go on one after the other: a new leader also has to renew its own lease.
            if not self._stops:
                await asyncio.sleep(self._uniform(0, self._kept / GO_ON_PER_S))
        except asyncio.TimeoutError:
            pass
        finally:
            self._kept -= 1

    def stop_keeping(self) -> None:
        """Let all waiting callers go on: they are refused, and nothing was applied."""
        self._stops = True
        self._tell_moved()

    @property
    def leads(self) -> bool:
        return self._holds is not None and self._holds()

    def check(self, method: str, outcome: CallOutcome = "not applied") -> None:
        """Raise DeposedError if another coordinator may lead. `outcome`: the outcome of the call, if known."""
        if not self.leads and method != ASKED_OF_ALL:
            raise self.refusal(outcome)

    def refusal(self, outcome: CallOutcome = UNKNOWN) -> DeposedError:
        """Return the error for a caller of this coordinator."""
        leads = f"{self.leader} does" if self.leader and self.leader != self.address else "another one will, soon"
        return DeposedError(
            f"the coordinator at {self.address} does not lead now, {leads}; list all coordinators: "
            f"SMB_COORDINATOR=HOST:PORT,HOST:PORT",
            outcome=outcome,
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a method. It uses the service at the time of the answer, not of this lookup."""
        method = handler_call_details.method
        found = self._handlers.get(method)
        if found is None or found.unary_unary is None:
            return found

        async def answer(request: Any, context: Any) -> Any:
            self.check(method.rpartition("/")[2])  # again: the call may have waited for its turn since
            return await cast(Any, self._handlers[method].unary_unary)(request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=found.request_deserializer, response_serializer=found.response_serializer
        )

    def _tell_moved(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _leader(self) -> pb.LeaderReply:
        return pb.LeaderReply(leads=self.leads, address=self.leader, term=self.term)


class FrontForSessions(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The same service behind the port where clients renew sessions and tokens. Any other call is refused there, and so
    is one that waits, so that nothing but renewals holds a renewal up.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a method; one that refuses the call if this port is not for it."""
        found = self._front.service(handler_call_details)
        if found is None or found.unary_unary is None:
            return found
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(request: Any, context: Any) -> Any:
            if method not in OF_SESSIONS or getattr(request, "timeout_ms", None):
                raise PermissionDeniedError(
                    f"{method}: this port is for renewals of sessions and tokens alone, and for no call that waits; "
                    f"ask {self._front.address}"
                )
            return await cast(Any, found.unary_unary)(request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=found.request_deserializer, response_serializer=found.response_serializer
        )
