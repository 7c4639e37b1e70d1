"""Places for calls in progress at the port for all: no certificate takes all of them, and some are for operators and
memory servers alone. A call without a place is refused, and its client tries again within its timeout. A call that
waits for others does no work, and gives its place back meanwhile. What a large request takes is memory, whether its
call works or waits, so large requests have places of their own, from their arrival to their end, and are refused at
once: one that waited to be refused would take its memory meanwhile.

A call of a certificate that asks for too much begins later (`CallRates`). It is not refused for that: who floods would
ask again at once, but has a bounded number of calls in flight. So these wait here, and gRPC's own queue, which knows no
certificates, stays short. For the same reason the refusal of a small one waits for the call's turn, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from smb.coordinator.call_rates import CallRates, LoopTime
from smb.coordinator.limits import CALLS_MAX, LARGE_REQUESTS_MAX, has_room
from smb.errors import NOT_APPLIED, UnavailableError
from smb.rpc import control_pb2 as pb
from smb.security.roles import Caller, Role, behind, caller

_TRUSTED = (Role.OPERATOR, Role.SERVER)
# An eighth of all places is for these: a session's lease must not end because others ask for much, with the same
# certificate or with many.
_OF_SESSIONS = ("RenewSession", "CloseSession")
_SMALL_BYTES = 4096  # of a request: what its call takes anyway
_SAID_FROM_S, _SAID_AGAIN_S = 1.0, 60.0  # a call's wait that the log names, and the pause between two lines
_SAID_MAX = 1024  # certificates whose last line is remembered

_log = logging.getLogger("coordinator")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Call: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


class BusyError(UnavailableError):
    """Too many calls are in progress. This one was not applied, and can be repeated."""


class _Places:
    """Counts the places that are taken, in all and by certificate."""

    def __init__(self, most: int, of: str) -> None:
        """`of`: what has a place."""
        self._most, self._of = most, of
        self._count = 0
        self._by_certificate: Counter[str] = Counter()

    def take(self, who: Caller, method: str) -> _Place:
        """Give a call a place. Raises BusyError if there is none for it."""
        trusted, session = who.role in _TRUSTED, method in _OF_SESSIONS
        of_all = self._most if trusted else self._most * (7 if session else 6) // 8
        free, own = of_all - self._count, self._by_certificate[who.key]
        if free > 0 and (trusted or has_room(own, free) or (session and own < self._most // 4)):
            return _Place(self, who)
        raise BusyError(
            f"{method}: the coordinator has {self._count} {self._of} in progress already, {own} of them of {who}, and "
            f"leaves the rest for others; nothing was changed, try again later",
            outcome=NOT_APPLIED,
        )

    def add(self, who: Caller) -> None:
        """Count one more of this caller."""
        self._count += 1
        self._by_certificate[who.key] += 1

    def give_back(self, who: Caller) -> None:
        """Count one less of this caller."""
        self._count -= 1
        self._by_certificate[who.key] -= 1
        if not self._by_certificate[who.key]:
            del self._by_certificate[who.key]


class _Place:
    """The place of one call. Its call may have ended before what works for it."""

    def __init__(self, places: _Places, who: Caller) -> None:
        self._places, self._who = places, who
        self._held, self._ended = True, False
        places.add(who)

    def give_back(self) -> bool:
        """Return False if the place is not held."""
        if not self._held:
            return False
        self._held = False
        self._places.give_back(self._who)
        return True

    def take_again(self) -> None:
        """Take a place also beyond the limit: the call has begun, and others are refused until there are fewer."""
        if not self._ended:
            self._held = True
            self._places.add(self._who)

    def end(self) -> None:
        self.give_back()
        self._ended = True


_place: ContextVar[_Place | None] = ContextVar("place", default=None)


@contextmanager
def without_place() -> Iterator[None]:
    """Give the place of the call in progress back during the block, which waits for others. The caller bounds how many
    calls wait so. Does nothing where calls have no places.
    """
    place = _place.get()
    was_given = place is not None and place.give_back()
    try:
        yield
    finally:
        if place is not None and was_given:
            place.take_again()


class CallPlaces(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Counts the calls in progress. It stands behind `AioGuard`, which says who the caller is. Used in the loop's
    thread only.
    """

    def __init__(self, rates: CallRates | None = None) -> None:
        """`rates`: which calls begin later; None: none do."""
        self._rates = rates
        self._said_at: dict[str, float] = {}  # by certificate: when the log last said that its calls wait
        self._calls = _Places(CALLS_MAX, "calls")
        self._large = _Places(LARGE_REQUESTS_MAX, f"requests of more than {_SMALL_BYTES} bytes")

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
            who, charged_s, loop_time, places = caller(), None, LoopTime(), list[_Place]()
            try:
                if isinstance(request, Message) and request.ByteSize() > _SMALL_BYTES:
                    try:
                        places.append(self._large.take(who, method))
                    except BusyError:
                        if self._rates is not None and who.role not in _TRUSTED:
                            self._rates.refused(who.key, _kind(method))
                        raise
                charged_s = await self._begin(who, method)
                if isinstance(request, pb.OpenBufferRequest) and request.timeout_ms:
                    # It may wait for long; the service bounds how many do.
                    return await loop_time.of(call(request, context))
                places.append(place := self._calls.take(who, method))
                _place.set(place)
                return await loop_time.of(call(request, context))
            finally:
                for place in places:
                    place.end()
                if charged_s is not None and self._rates is not None:
                    self._rates.took(who.key, _kind(method), charged_s, loop_time.seconds)

        return behind(handler, answer)

    async def _begin(self, who: Caller, method: str) -> float | None:
        """Wait until this call may begin, and return what it was charged; None: such callers are charged nothing.
        Renewals of sessions are counted apart from the certificate's other calls.
        """
        if self._rates is None or who.role in _TRUSTED:
            return None
        try:
            turn = self._rates.begin(who.key, _kind(method))
        except asyncio.QueueFull as full:
            raise BusyError(
                f"{method} of {who}: {full}; nothing was changed, try again later", outcome=NOT_APPLIED
            ) from None
        if turn.done():
            return turn.result()
        arrived = time.monotonic()
        try:
            return await turn
        finally:
            self._say_waited(who, time.monotonic() - arrived)

    def _say_waited(self, who: Caller, seconds: float) -> None:
        now = time.monotonic()
        if seconds < _SAID_FROM_S or now < self._said_at.get(who.key, -_SAID_AGAIN_S) + _SAID_AGAIN_S:
            return
        if len(self._said_at) >= _SAID_MAX:
            self._said_at.clear()
        self._said_at[who.key] = now
        _log.warning("calls of %s ask for too much of the coordinator's time: one waited %.0f s", who, seconds)


def _kind(method: str) -> str:
    return "sessions" if method in _OF_SESSIONS else ""
