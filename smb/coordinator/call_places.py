"""Places for calls in progress at the port for all: no certificate takes all of them, and some are for operators and
memory servers alone. A call without a place is refused at once, and its client tries again within its timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from smb.coordinator.limits import CALLS_MAX, CALLS_PER_CERTIFICATE_MAX
from smb.errors import NOT_APPLIED, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.security.roles import Caller, Role, caller

_TRUSTED = (Role.OPERATOR, Role.SERVER)
# The last quarter of a certificate's places is for these: a session's lease must not end because other processes with
# the same certificate ask for much.
_OF_SESSIONS = ("RenewSession", "CloseSession")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Call: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


class BusyError(UnavailableError):
    """Too many calls are in progress. This one was not applied, and can be repeated."""


class CallPlaces(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls in progress. It stands behind `AioGuard`, which says who the caller is. Used in the loop's
    thread only.
    """

    def __init__(self) -> None:
        self._count = 0
        self._by_certificate: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler, which takes a place for each call. An unknown method has no handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        call = cast(Call, handler.unary_unary)

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, pb.OpenBufferRequest) and request.timeout_ms:
                return await call(request, context)  # may wait for long; the service bounds how many do
            who = caller()
            self._take(who, method)
            try:
                return await call(request, context)
            finally:
                self._give_back(who)

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )

    def _take(self, who: Caller, method: str) -> None:
        of_all = CALLS_MAX if who.role in _TRUSTED else CALLS_MAX * 3 // 4
        own = CALLS_PER_CERTIFICATE_MAX if method in _OF_SESSIONS else CALLS_PER_CERTIFICATE_MAX * 3 // 4
        if who.role not in _TRUSTED and self._by_certificate[who.key] >= own:
            raise _busy(method, f"{own} calls of {who}")
        if self._count >= of_all:
            raise _busy(method, f"{self._count} calls")
        self._count += 1
        self._by_certificate[who.key] += 1

    def _give_back(self, who: Caller) -> None:
        self._count -= 1
        self._by_certificate[who.key] -= 1
        if not self._by_certificate[who.key]:
            del self._by_certificate[who.key]


def _busy(method: str, many: str) -> BusyError:
    return BusyError(
        f"{method}: the coordinator has {many} in progress already; nothing was changed, try again later",
        outcome=NOT_APPLIED,
    )
