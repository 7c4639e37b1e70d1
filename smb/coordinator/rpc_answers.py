"""Wraps each call: checks the request's bounds, turns smb.errors into gRPC codes, counts and times the answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from smb import errors
from smb.config.request_ids import REQUEST, CallInfo, begin
from smb.coordinator.call_places import BusyError
from smb.coordinator.front import ASKED_OF_ALL, Front
from smb.coordinator.store import DeposedError
from smb.daemon.log import AUDIT
from smb.rpc.bounds import check_bounds
from smb.rpc.coordinator_client import SessionEndedError
from smb.rpc.peers import PATIENCE
from smb.rpc.trailers import ANSWERED, BUSY, OUTCOME, STANDBY
from smb.security.roles import ANYBODY, behind, caller

_log, _access, _audit_log = logging.getLogger("coordinator"), logging.getLogger("access"), logging.getLogger(AUDIT)
# Others are part of usual work, as a look for a buffer that is not there yet, or come from very many clients at once.
_LOGGED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL)

# The pairs in control.proto's head. The first pair that fits counts, so subclasses come before smb.Error itself.
CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.OutOfMemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (SessionEndedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Error, grpc.StatusCode.INTERNAL),
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Call: TypeAlias = Callable[[Any, "Context"], Awaitable[Any]]


def code_of(error: errors.Error) -> grpc.StatusCode:
    """Return the gRPC code that stands for the error's class."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def _audit(info: CallInfo, code: grpc.StatusCode, why: str, context: Context) -> None:
    """Write the audit line of a call that has ended."""
    who, address = caller(), str(context.peer() or "")
    role = "" if who == ANYBODY or who.role is None else who.role.value
    result = "ok" if code is grpc.StatusCode.OK else code.name.lower()
    shown = f'role {role}, certificate "{who.name}"' if role else "no certificate"
    _audit_log.info(
        '%s "%s": %s%s; by %s, client %s at %s',
        info.action, info.target, result, f" ({why})" if why else "", shown, info.client or "unknown", address,
        extra={
            "action": info.action, "target": info.target, "result": result, "why": why, "role": role,
            "certificate": who.name if role else "", "client": info.client, "address": address,
        },
    )  # fmt: skip


class Answers(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps each unary call of the service."""

    def __init__(self, answered: Callable[[str, grpc.StatusCode, float], None], front: Front) -> None:
        """`answered` is called after each call: method, code, seconds. `front` knows whether this coordinator leads."""
        self._answered = answered
        self._front = front

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler, wrapped. An unknown method has no handler, and gRPC refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method.rsplit("/", 1)[-1]
        return behind(handler, self._wrap(method, cast(Call, handler.unary_unary)))

    def _wrap(self, method: str, call: Call) -> Call:
        async def answer(request: Any, context: Context) -> Any:
            info = begin(tuple(context.invocation_metadata() or ()))
            if not self._front.leads and method != ASKED_OF_ALL:
                patience = dict(context.invocation_metadata() or ()).get(PATIENCE, "")
                await self._front.wait_to_lead(request, patience)
            begun = time.perf_counter()
            code, text = grpc.StatusCode.OK, ""
            outcome, standby, busy = errors.UNKNOWN, False, False
            try:
                self._front.check(method)
                check_bounds(request)
                reply = await call(request, context)
                self._front.check(method, errors.UNKNOWN)
                return reply
            except errors.Error as error:
                # A deposed leader's answer may be out of date, so the caller hears that this one does not lead.
                if not isinstance(error, DeposedError) and method != ASKED_OF_ALL and not self._front.leads:
                    error = self._front.refusal(error.outcome)
                code, text, outcome = code_of(error), str(error), error.outcome
                standby, busy = isinstance(error, DeposedError), isinstance(error, BusyError)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception:  # noqa: BLE001 - a bug of ours: the client hears that, and the log gets the traceback
                _log.exception("%s failed", method)
                code, text = grpc.StatusCode.INTERNAL, f"{method} failed inside the coordinator; see its log"
            finally:
                self._answered(method, code, time.perf_counter() - begun)
                if info.action:
                    try:
                        _audit(info, code, text, context)
                    except Exception:  # noqa: BLE001 - the answer says whether the change was made, whatever the log does
                        _log.exception("the audit line of %s was not written", method)
            # gRPC's context keeps the error that abort raises, whose traceback has this frame and so the context. This
            # cycle lives until the garbage collector runs, and must not keep a large request.
            del request
            trailers = [(ANSWERED, "1"), (OUTCOME, outcome)]
            if standby:
                trailers.append((STANDBY, str(self._front.term)))
            elif busy:
                trailers.append((BUSY, "1"))
            elif info.action or code in _LOGGED:
                # The log has a line with this id, so the client's error names it.
                trailers.append((REQUEST, info.request))
                if code is grpc.StatusCode.PERMISSION_DENIED:
                    _access.warning("refused: %s", text)
            await context.abort(code, text, trailing_metadata=tuple(trailers))
            raise AssertionError("abort returns to nobody")

        return answer
