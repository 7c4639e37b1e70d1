"""gRPC channels that lead only to the server that is wanted, as verified by the engine.

gRPC for Python shows a client nothing of a server's certificate, and verifies it by rules of its own: it knows no
roles, takes a common name if there is no other name, and accepts wildcards. So before a channel connects, the engine
looks at the server on a connection of its own (Tls.meet), and gRPC gets only that certificate to trust. gRPC then
accepts the holder of that certificate's key, and no other holder of a certificate of the same authority. After a call
that failed to connect, the engine looks again, because the server's certificate may have been replaced. The error
contains the fault that the engine found, because gRPC reports only a failure of the network.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from smb.config.host_address import addresses_of
from smb.config.parse import parse_address
from smb.engine import ROLES, Tls
from smb.errors import PermissionDeniedError

if TYPE_CHECKING:
    from smb.security.credentials import Credentials

Options = Sequence[tuple[str, Any]]

NOT_CONNECTED = "failed to connect"  # in gRPC's messages and in ours: nothing was sent
_LOOK_S = 5.0
_PINS_MAX = 8  # several hosts may have the same name
_GENERATIONS_MAX = 3  # of channels, because calls in progress end on the channel on which they began
_BELIEFS_MAX = 1024


@dataclass(slots=True)
class Belief:
    """What is known of the server at an address. For any thread."""

    address: str
    role: str
    host: str  # the name in the server's certificate
    tls: Tls
    credentials: Credentials
    pins: tuple[bytes, ...] = ()  # certificates that were accepted, the oldest first
    why: str = ""  # the fault of the certificate found last, or of ours, as the end of a sentence about the server
    looks: int = 0
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def look(self, timeout: float) -> None:
        """Look at the server now. Blocks up to `timeout`. If another thread is looking already, takes its result."""
        before = self.looks
        with self._looking:
            if self.looks == before:
                self._look(min(timeout, _LOOK_S))
                self.looks += 1

    def _look(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        host, port = parse_address(self.address)
        self.why = ""
        try:
            found = addresses_of(host, port)
        except OSError as error:
            self.why = error.strerror or str(error)
            return
        reasons: list[str] = []
        for _, where in found:
            left_ms = max(1, round(1000 * (end - time.monotonic()) / (len(found) - len(reasons))))
            pin, why = self.tls.meet(str(where[0]), port, self.role, self.host, left_ms)
            if pin:
                self.pins = (*(known for known in self.pins if known != pin), pin)[-_PINS_MAX:]
                self.why = self._named(why)
                return
            reasons.append(why)
        self.why = self._named(reasons[-1])

    def _named(self, why: str) -> str:
        """Return the fault with the paths of the files that it mentions."""
        if "it does not accept us" in why:
            why = f"{why}: ours is {self.credentials.certificate_path}{self._own_fault()}"
        return why.replace("our ca.pem", str(self.credentials.ca_path))

    def _own_fault(self) -> str:
        try:
            self.tls.judge(self.credentials.certificate, ROLES)
        except PermissionDeniedError as error:
            return f", in which this process itself finds a fault: {error}"
        return ""

    def failure(self, error: grpc.RpcError | None = None) -> grpc.aio.AioRpcError:
        """Return the error of a call that did not arrive or was cut off, with the fault that was found."""
        details = f"{NOT_CONNECTED} to {self.address}"
        none: Any = grpc.aio.Metadata()
        if error is not None:
            details = (error.details() or details) if not was_not_sent(error) else details
        details = f"{details}: {self.why or 'it does not answer'}"
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details, None)


def was_not_sent(error: Any) -> bool:
    """Whether gRPC reports for a failed call that it was not sent."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and NOT_CONNECTED in (error.details() or "").lower()


_beliefs: dict[tuple[str, str, Credentials], Belief] = {}
_beliefs_lock = threading.Lock()


def belief_of(address: str, role: str, host: str, tls: Tls, credentials: Credentials) -> Belief:
    """Return this process's knowledge of a server, so that a later channel need not look again."""
    key = address, host, credentials
    with _beliefs_lock:
        known = _beliefs.get(key)
        if known is None:
            if len(_beliefs) >= _BELIEFS_MAX:
                _beliefs.clear()
            known = _beliefs[key] = Belief(address, role, host, tls, credentials)
        return known


@dataclass(slots=True)
class _Made:
    """The channels for what is known now, and earlier ones."""

    belief: Belief
    make: Callable[[bytes], Any]
    channels: list[tuple[tuple[bytes, ...], Any]] = field(default_factory=list)
    failed_since: bool = False  # a call has failed since the last look
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wants_look(self) -> bool:
        return self.failed_since or not self.belief.pins

    def look(self, timeout: float) -> None:
        self.belief.look(timeout)
        self.failed_since = False

    def now(self) -> tuple[Any, list[Any]]:
        """Return the current channel, and channels to close because they have not been used for long. Raises the error
        of a failed look if no certificate was accepted."""
        belief = self.belief
        with self.lock:
            if self.closed:
                raise ValueError("Cannot invoke RPC on closed channel!")  # the text of gRPC's own channels
            if not belief.pins:
                raise belief.failure()
            if not self.channels or self.channels[-1][0] != belief.pins:
                self.channels.append((belief.pins, self.make(b"\n".join(belief.pins))))
            old = [channel for _, channel in self.channels[:-_GENERATIONS_MAX]]
            del self.channels[:-_GENERATIONS_MAX]
            return self.channels[-1][1], old

    def is_stale(self) -> bool:
        return not self.channels or self.channels[-1][0] != self.belief.pins

    def close(self) -> list[Any]:
        with self.lock:
            self.closed = True
            closed = [channel for _, channel in self.channels]
            self.channels.clear()
            return closed


def _options(belief: Belief, options: Options) -> Options:
    return (*options, ("grpc.ssl_target_name_override", belief.host), ("grpc.default_authority", belief.host))


def _secured(belief: Belief, pins: bytes) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pins, belief.credentials.key, belief.credentials.certificate)


def _left(timeout: float | None, begun: float) -> float | None:
    return None if timeout is None else max(0.0, begun + timeout - time.monotonic())


def _blames_the_network(error: Any) -> bool:
    """Whether the call got no answer from a server: the coordinator's own answers have metadata."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata()


class _Later(grpc.Future):  # type: ignore[type-arg]
    """The answer to a call that runs on a thread of its own, because the server must be looked at first."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        threading.Thread(target=self._run, args=(call,), name="smb-look", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        if not self._answer.set_running_or_notify_cancel():
            return
        try:
            self._answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller
            self._answer.set_exception(error)

    def cancel(self) -> bool:
        """Cancel the answer. If the call has begun, it goes on until its own timeout."""
        return self._answer.cancel()

    def cancelled(self) -> bool:
        return self._answer.cancelled()

    def running(self) -> bool:
        return self._answer.running()

    def done(self) -> bool:
        return self._answer.done()

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._answer.result()

    def exception(self, timeout: float | None = None) -> Any:
        try:
            return self._answer.exception(timeout)
        except concurrent.futures.CancelledError:
            raise grpc.FutureCancelledError from None
        except concurrent.futures.TimeoutError:
            raise grpc.FutureTimeoutError from None

    def traceback(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        return error.__traceback__ if error is not None else None

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        self._answer.add_done_callback(lambda _: fn(self))


class _ChannelMethod:
    """A method, called over the current channel."""

    def __init__(self, made: _Made, how: tuple[Any, ...], words: dict[str, Any]) -> None:
        self._made = made
        self._how, self._words = how, words
        self._over: tuple[Any, Any] | None = None

    def _now(self) -> Any:
        channel, old = self._made.now()
        for each in old:
            each.close()
        over = self._over
        if over is None or over[0] is not channel:
            over = self._over = channel, channel.unary_unary(*self._how, **self._words)
        return over[1]

    def __call__(self, request: Any, timeout: float | None = None, **words: Any) -> Any:
        begun, made = time.monotonic(), self._made
        if made.wants_look():
            made.look(_LOOK_S if timeout is None else timeout)
        for attempt in range(2):
            try:
                return self._now()(request, timeout=_left(timeout, begun), **words)
            except grpc.RpcError as error:
                if not _blames_the_network(error) or not made.channels:
                    raise
                made.look(_LOOK_S if timeout is None else _left(timeout, begun) or 0.0)
                again = attempt == 0 and was_not_sent(error) and made.is_stale()
                if not again and made.belief.why:
                    raise made.belief.failure(error) from None
                if not again:
                    raise
        raise AssertionError("the second attempt ends it")

    def with_call(self, request: Any, timeout: float | None = None, **words: Any) -> Any:
        if self._made.wants_look():
            self._made.look(_LOOK_S if timeout is None else timeout)
        return self._now().with_call(request, timeout=timeout, **words)

    def future(self, request: Any, timeout: float | None = None, **words: Any) -> Any:
        """Start the call without waiting."""
        if self._made.wants_look():
            return _Later(lambda: self(request, timeout, **words))
        answer = self._now().future(request, timeout=timeout, **words)
        answer.add_done_callback(self._note)
        return answer

    def _note(self, answer: Any) -> None:
        if answer.code() is grpc.StatusCode.UNAVAILABLE:
            self._made.failed_since = True


class _UnaryOnly:
    """Refuses streaming calls: no RPC of ours streams, and no rule allows one."""

    def unary_stream(self, *_how: Any, **_words: Any) -> Any:
        raise NotImplementedError("streaming calls are refused, because no rule allows them")

    stream_unary = stream_stream = unary_stream


class BelievedChannel(_UnaryOnly, grpc.Channel):
    """A channel to a verified server, for threads."""

    def __init__(self, belief: Belief, options: Options) -> None:
        given = _options(belief, options)
        self._made = _Made(
            belief, lambda pins: grpc.secure_channel(belief.address, _secured(belief, pins), options=given)
        )

    def unary_unary(self, *how: Any, **words: Any) -> Any:
        """See grpc. The calls look at the server if that was not done before."""
        return _ChannelMethod(self._made, how, words)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        raise NotImplementedError("this channel reports no connectivity: a call shows whether the server is reachable")

    def unsubscribe(self, callback: Any) -> None:
        raise NotImplementedError("this channel reports no connectivity")

    def close(self) -> None:
        """Close all channels made so far; calls in progress fail."""
        for each in self._made.close():
            each.close()

    def __enter__(self) -> BelievedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AioCall:
    """A method, called over the current channel."""

    def __init__(self, made: _Made, how: tuple[Any, ...], words: dict[str, Any]) -> None:
        self._made = made
        self._how, self._words = how, words

    async def _now(self) -> Any:
        channel, old = self._made.now()
        for each in old:
            await each.close(None)
        return channel.unary_unary(*self._how, **self._words)

    async def _look(self, timeout: float | None) -> None:
        await asyncio.to_thread(self._made.look, _LOOK_S if timeout is None else timeout)

    async def __call__(self, request: Any, *, timeout: float | None = None, **words: Any) -> Any:
        begun, made = time.monotonic(), self._made
        if made.wants_look():
            await self._look(timeout)
        for attempt in range(2):
            try:
                return await (await self._now())(request, timeout=_left(timeout, begun), **words)
            except grpc.aio.AioRpcError as error:
                if not _blames_the_network(error) or not made.channels:
                    raise
                await self._look(_left(timeout, begun))
                again = attempt == 0 and was_not_sent(error) and made.is_stale()
                if not again and made.belief.why:
                    raise made.belief.failure(error) from None
                if not again:
                    raise
        raise AssertionError("the second attempt ends it")


class BelievedAioChannel(_UnaryOnly, grpc.aio.Channel):
    """The same for asyncio."""

    def __init__(self, belief: Belief, options: Options) -> None:
        given = _options(belief, options)
        self._made = _Made(
            belief, lambda pins: grpc.aio.secure_channel(belief.address, _secured(belief, pins), options=given)
        )

    def unary_unary(self, *how: Any, **words: Any) -> Any:
        """See grpc. The calls look at the server if that was not done before."""
        return _AioCall(self._made, how, words)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        raise NotImplementedError("this channel reports no connectivity: a call shows whether the server is reachable")

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise NotImplementedError("this channel reports no connectivity")

    async def channel_ready(self) -> None:
        raise NotImplementedError("this channel reports no connectivity")

    async def close(self, grace: float | None = None) -> None:
        """Close all channels made so far; calls in progress fail."""
        for each in self._made.close():
            await each.close(grace)

    async def __aenter__(self) -> BelievedAioChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)
