"""Channels of gRPC that lead to whom we want, by the engine's judgement, and to nobody else.

gRPC for Python tells a client nothing of a server's certificate, and judges it by rules of its own: it knows no roles,
takes a common name where there is no other, and takes patterns. So before a channel connects the engine looks who is
there, by a connection of its own (Tls.meet), and gRPC is given that one certificate to trust. It believes the holder of
its key, and no other holder of one of the same authority. After a call that failed to connect the engine looks again: a
server's certificate may have been replaced. What it finds wrong is in the error: gRPC speaks of the network.
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

NOT_CONNECTED = "failed to connect"  # in gRPC's words, and in ours: nothing was sent
_LOOK_S = 5.0
_PINS_MAX = 8  # of one name there may be several hosts
_GENERATIONS_MAX = 3  # of channels: calls under way end over that with which they began
_BELIEFS_MAX = 1024


@dataclass(slots=True)
class Belief:
    """What is known of who serves at an address. Any thread may ask."""

    address: str
    role: str
    host: str  # the name that its certificate is for
    tls: Tls
    credentials: Credentials
    pins: tuple[bytes, ...] = ()  # certificates that were judged good, the oldest first
    why: str = ""  # what was wrong with the one found last, or with ours: the end of a sentence about the peer
    looks: int = 0
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def look(self, timeout: float) -> None:
        """Look who is there now. Blocks up to `timeout`. Who asks while another one looks takes what that one finds."""
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
        """With the files that it speaks of."""
        if "it does not accept us" in why:
            why = f"{why}: ours is {self.credentials.certificate_path}{self._own_fault()}"
        return why.replace("our ca.pem", str(self.credentials.ca_path))

    def _own_fault(self) -> str:
        try:
            self.tls.judge(self.credentials.certificate, ROLES)
        except PermissionDeniedError as error:
            return f", of which we think ourselves that {error}"
        return ""

    def failure(self, error: grpc.RpcError | None = None) -> grpc.aio.AioRpcError:
        """Return the error of a call that did not get there, or was cut off, with the reason that was found."""
        details = f"{NOT_CONNECTED} to {self.address}"
        none: Any = grpc.aio.Metadata()
        if error is not None:
            details = (error.details() or details) if not was_not_sent(error) else details
        details = f"{details}: {self.why or 'it does not answer'}"
        return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details, None)


def was_not_sent(error: Any) -> bool:
    """Whether gRPC says so of a call that failed."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and NOT_CONNECTED in (error.details() or "").lower()


_beliefs: dict[tuple[str, str, Credentials], Belief] = {}
_beliefs_lock = threading.Lock()


def belief_of(address: str, role: str, host: str, tls: Tls, credentials: Credentials) -> Belief:
    """Return what this process knows of who serves there: the next channel need not look."""
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
    """Channels for what is believed now, and those before."""

    belief: Belief
    make: Callable[[bytes], Any]
    channels: list[tuple[tuple[bytes, ...], Any]] = field(default_factory=list)
    failed_since: bool = False  # a call failed since somebody looked
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wants_look(self) -> bool:
        return self.failed_since or not self.belief.pins

    def look(self, timeout: float) -> None:
        self.belief.look(timeout)
        self.failed_since = False

    def now(self) -> tuple[Any, list[Any]]:
        """The channel of now, and those that nobody has used for long. Raises what says that none is believed."""
        belief = self.belief
        with self.lock:
            if self.closed:
                raise ValueError("Cannot invoke RPC on closed channel!")  # as gRPC's own channels say it
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
    """Whether nobody has answered the call: the coordinator's own answers have metadata."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata()


class _Later(grpc.Future):  # type: ignore[type-arg]
    """The answer to a call that is made on a thread of its own, because somebody has to be looked at before."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        threading.Thread(target=self._run, args=(call,), name="smb-look", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        if not self._answer.set_running_or_notify_cancel():
            return
        try:
            self._answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller's
            self._answer.set_exception(error)

    def cancel(self) -> bool:
        """Its call goes on, until its own timeout, if it has begun."""
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


class _Call:
    """A method, over the channel of now."""

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
        """Without waiting for anything."""
        if self._made.wants_look():
            return _Later(lambda: self(request, timeout, **words))
        answer = self._now().future(request, timeout=timeout, **words)
        answer.add_done_callback(self._note)
        return answer

    def _note(self, answer: Any) -> None:
        if answer.code() is grpc.StatusCode.UNAVAILABLE:
            self._made.failed_since = True


class _UnaryOnly:
    """Refuses calls that stream: no RPC of ours does, and no rule lets anybody make one."""

    def unary_stream(self, *_how: Any, **_words: Any) -> Any:
        raise NotImplementedError("calls that stream have no rules: nobody may make them")

    stream_unary = stream_stream = unary_stream


class BelievedChannel(_UnaryOnly, grpc.Channel):
    """A channel to whom is believed, for threads."""

    def __init__(self, belief: Belief, options: Options) -> None:
        given = _options(belief, options)
        self._made = _Made(
            belief, lambda pins: grpc.secure_channel(belief.address, _secured(belief, pins), options=given)
        )

    def unary_unary(self, *how: Any, **words: Any) -> Any:
        """See grpc. Its calls look who is there, where nobody has."""
        return _Call(self._made, how, words)

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        raise NotImplementedError("nobody watches it: a call says whether it leads anywhere")

    def unsubscribe(self, callback: Any) -> None:
        raise NotImplementedError("nobody watches it")

    def close(self) -> None:
        """Close what it has made; calls under way fail."""
        for each in self._made.close():
            each.close()

    def __enter__(self) -> BelievedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _AioCall:
    """A method, over the channel of now."""

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
        """See grpc. Its calls look who is there, where nobody has."""
        return _AioCall(self._made, how, words)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        raise NotImplementedError("a call says whether it leads anywhere")

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        raise NotImplementedError("nobody watches it")

    async def channel_ready(self) -> None:
        raise NotImplementedError("nobody waits for it")

    async def close(self, grace: float | None = None) -> None:
        """Close what it has made; calls under way fail."""
        for each in self._made.close():
            await each.close(grace)

    async def __aenter__(self) -> BelievedAioChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)
