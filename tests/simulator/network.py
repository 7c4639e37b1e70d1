"""The network between hosts: calls of gRPC and of clients, and connections from primaries to backups.

A message takes a random time, so those of different calls overtake each other; those of one Pipe do not. A link that is
cut, one way or both, delivers nothing until it is mended, as TCP sends again. A connection that breaks ends its call
before the effect, or after it. What crosses the network is bytes or tuples of numbers and texts: nobody shares objects.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio

from tests.simulator.loop import WIRE, Loop, Process, this_process

AGAIN_S = 0.25  # after which a message is sent again over a link that was cut
SILENT_S = 2.0  # TCP_USER_TIMEOUT of memserver/replication.py
REQUEST_LOST = 0.25  # of the calls whose connection breaks, the part that has no effect
OUTSIDE = "outside"  # the host of whoever has no process

# method, request, metadata, seconds that are left -> the reply; raises RefusedError.
Serve = Callable[[str, Any, Sequence[tuple[str, str]], float | None], Awaitable[Any]]
Trace = Callable[[str, str, str, Any], None]


class RefusedError(Exception):
    """A status that a server answers with."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(details)
        self.code, self.details, self.trailers = code, details, trailers


def rpc_error(code: grpc.StatusCode, details: str, trailers: Sequence[tuple[str, str]] = ()) -> grpc.aio.AioRpcError:
    """Return the error that a stub raises."""
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, grpc.aio.Metadata(*trailers), details=details)


class Network:
    """All links. Times are seconds."""

    def __init__(self, loop: Loop, rng: Random, trace: Trace) -> None:
        self.loop, self._rng, self.trace = loop, rng, trace
        self.listeners: dict[str, tuple[Process, Serve]] = {}
        self.cuts: set[tuple[str, str]] = set()  # from a host, to a host
        self.slow: dict[str, float] = {}  # by host: what its messages take at most
        self.breaks = 0.0  # the part of calls whose connection breaks
        self.breaks_of = ""  # only of calls of this method; empty: of all
        self._exchanges: dict[_Exchange, None] = {}
        self.pipes: dict[Pipe, None] = {}

    def listen(self, address: str, process: Process, serve: Serve) -> None:
        """Have a process answer there, as long as it lives."""
        self.listeners[address] = (process, serve)

    def listener(self, address: str) -> tuple[Process, Serve] | None:
        """Return who listens there."""
        found = self.listeners.get(address)
        return found if found is not None and found[0].alive else None

    def delay(self, source: str, target: str) -> float:
        """Draw how long a message takes."""
        most = max(self.slow.get(source, 0.0), self.slow.get(target, 0.0))
        if most:
            return self._rng.random() * most
        drawn = self._rng.random()
        return 0.0001 + 0.002 * drawn if drawn < 0.98 else 0.05 * self._rng.random()

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from there to there."""
        return (source, target) in self.cuts

    def breaks_at(self, method: str) -> str:
        """Draw whether the connection of a call breaks: "request", before the effect, "answer", after it, or ""."""
        if self.breaks == 0.0 or not method.endswith(self.breaks_of) or self._rng.random() >= self.breaks:
            return ""
        return "request" if self._rng.random() < REQUEST_LOST else "answer"

    async def ask(self, address: str, method: str, request: Any, timeout: float | None, metadata: Any = None) -> Any:
        """Make a call; return its reply. Raises grpc.aio.AioRpcError."""
        exchange = _Exchange(self, address, method, request, timeout, tuple(metadata or ()))
        self._exchanges[exchange] = None
        try:
            return await exchange.answer
        except asyncio.CancelledError:
            exchange.give_up()
            raise
        finally:
            self._exchanges.pop(exchange, None)

    async def knock(self, address: str) -> None:
        """As smb.coordinator.outside.Connections."""
        source = _host()
        while True:
            found = self.listener(address)
            target = host_of(address)
            if not self.is_cut(source, target) and not self.is_cut(target, source):
                await asyncio.sleep(self.delay(source, target))
                if found is None:
                    raise ConnectionRefusedError(f"nobody listens at {address}")
                return
            await asyncio.sleep(AGAIN_S)

    def died(self, process: Process) -> None:
        """The kernel closes all connections of a process."""
        for exchange in list(self._exchanges):
            exchange.died(process)
        for pipe in list(self.pipes):
            if process in (pipe.near, pipe.far):
                pipe.died(process)


def host_of(address: str) -> str:
    """Return the host of host:port."""
    return address.rpartition(":")[0]


def _host() -> str:
    process = this_process()
    return process.host if process is not None else OUTSIDE


class _Exchange:
    """One call under way."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        request: Any,
        timeout: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._network, self._loop = network, network.loop
        self._address, self._method, self._request, self._metadata = address, method, request, metadata
        self._caller, self._server = this_process(), None
        self._source, self._target = _host(), host_of(address)
        self._task: asyncio.Task[None] | None = None
        self._breaks_at = ""
        self._outlives = False  # its caller is gone, and it is on its way
        self.answer = network.loop.create_future()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else self._loop.call_later(timeout, self._expire)
        network.trace(self._source, self._target, method, request)
        self._loop.call_later(network.delay(self._source, self._target), self._arrive, context=WIRE)

    def _arrive(self) -> None:
        if self.answer.done() and not self._outlives:
            return
        if self._network.is_cut(self._source, self._target):
            self._loop.call_later(AGAIN_S, self._arrive, context=WIRE)
            return
        found = self._network.listener(self._address)
        if found is None:
            text = f"failed to connect to all addresses; last error: {self._address}: Connection refused"
            self._back(self._fail, grpc.StatusCode.UNAVAILABLE, text)
            return
        self._breaks_at = self._network.breaks_at(self._method)
        if self._breaks_at == "request":
            self._back(self._fail, grpc.StatusCode.UNAVAILABLE, "Socket closed")
            return
        self._server, serve = found
        self._loop.call_soon(self._begin, serve, context=self._server.context)

    def _begin(self, serve: Serve) -> None:
        self._task = asyncio.ensure_future(self._serve(serve))

    async def _serve(self, serve: Serve) -> None:
        left_s = None if self._deadline is None else self._deadline - self._loop.time()
        try:
            reply = await serve(self._method, self._request, self._metadata, left_s)
        except RefusedError as error:
            self._back(self._fail, error.code, error.details, error.trailers)
            return
        if self._breaks_at == "answer":
            self._back(self._fail, grpc.StatusCode.UNAVAILABLE, "Socket closed")
            return
        self._back(self._succeed, reply)

    def _back(self, act: Callable[..., None], *args: Any) -> None:
        """Have the caller hear of it."""
        self._loop.call_later(self._network.delay(self._target, self._source), self._hear, act, args, context=WIRE)

    def _hear(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.answer.done():
            return
        if self._network.is_cut(self._target, self._source):
            self._loop.call_later(AGAIN_S, self._hear, act, args, context=WIRE)
            return
        act(*args)

    def _succeed(self, reply: Any) -> None:
        self._end()
        self._network.trace(self._target, self._source, self._method, reply)
        self.answer.set_result(reply)

    def _fail(self, code: grpc.StatusCode, details: str, trailers: Sequence[tuple[str, str]] = ()) -> None:
        self._end()
        self._network.trace(self._target, self._source, self._method, code.name)
        self.answer.set_exception(rpc_error(code, details, trailers))

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        if not self.answer.done():
            self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._cancel_there()

    def give_up(self) -> None:
        """The caller waits no longer."""
        self._end()
        self._cancel_there()

    def _cancel_there(self) -> None:
        if self._server is not None and not self._network.is_cut(self._source, self._target):
            delay = self._network.delay(self._source, self._target)
            self._loop.call_later(delay, self._cancel, context=self._server.context)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def died(self, process: Process) -> None:
        """A process was killed: perhaps one of the two."""
        if self._server is process:
            self._back(self._fail, grpc.StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer")
        elif self._caller is process:
            self._outlives = self._server is None  # the kernel sends on what a process has sent
            self.give_up()
            self.answer.cancel()
            self._network._exchanges.pop(self, None)


class Channel:
    """As grpc.aio.Channel, as far as stubs use it."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Callable[..., Awaitable[Any]]:
        """Return what makes calls of a method."""

        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            reply = await self._network.ask(self._address, method, request_serializer(request), timeout, metadata)
            return response_deserializer(reply)

        return call

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Callable[..., AsyncIterator[Any]]:
        """Return what makes calls of a method of which one request is sent, and one reply comes."""

        async def call(requests: Iterator[Any], timeout: float | None = None, metadata: Any = None) -> Any:
            request = request_serializer(next(requests))
            yield response_deserializer(await self._network.ask(self._address, method, request, timeout, metadata))

        return call

    async def close(self, grace: float | None = None) -> None:
        """Calls under way go on: each has a deadline."""

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        """As close."""


class Connections:
    """As smb.coordinator.outside.Connections."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.knock = network.knock

    def channel(self, address: str, peer: str, credentials: object) -> Any:
        """Return a channel."""
        return Channel(self._network, address)

    def etcd_channel(self, address: str, credentials: object) -> Any:
        """Return a channel."""
        return Channel(self._network, address)


class Pipe:
    """A connection of which messages arrive in their order, both ways, until it breaks. `near` has dialled `far`.

    `receive` gets a message, and `broken` is called once, each with the process at the other end: (process, message).
    """

    def __init__(
        self,
        network: Network,
        near: Process,
        far: Process,
        receive: Callable[[Process, Any], None],
        broken: Callable[[Process], None],
    ) -> None:
        self._network, self._loop = network, network.loop
        self.near, self.far, self._receive, self._broken = near, far, receive, broken
        self._open = {near: True, far: True}  # as each end knows it
        # On their way to that end, in their order: when each is there at the earliest, when it was sent, what it is.
        self._queued: dict[Process, deque[tuple[float, float, Any]]] = {near: deque(), far: deque()}
        self._again: dict[Process, bool] = {near: False, far: False}  # the link was cut: it is looked at again
        network.pipes[self] = None

    def is_open(self, end: Process) -> bool:
        """Whether that end has not heard that it is broken."""
        return self._open[end]

    def send(self, sender: Process, message: Any) -> None:
        """Send from one end."""
        target = self.far if sender is self.near else self.near
        if not self._open[sender]:
            return
        queue, now = self._queued[target], self._loop.time()
        due = max(now + self._network.delay(sender.host, target.host), queue[-1][0] if queue else 0.0)
        queue.append((due, now, message))
        self._loop.call_at(due, self._arrive, sender, target, context=WIRE)

    def _arrive(self, sender: Process, target: Process) -> None:
        """Have all arrive that is due."""
        self._again[target] = False
        queue, now = self._queued[target], self._loop.time()
        if not self._open[sender] or not self._open[target] or not queue:
            return
        if self._network.is_cut(sender.host, target.host) or self._network.is_cut(target.host, sender.host):
            if now - queue[0][1] > SILENT_S:
                self._break(sender)
            elif not self._again[target]:
                self._again[target] = True
                self._loop.call_later(AGAIN_S, self._arrive, sender, target, context=WIRE)
            return
        while queue and queue[0][0] <= now:
            message = queue.popleft()[2]
            self._network.trace(sender.host, target.host, "feed", message)
            self._loop.call_soon(self._deliver, target, message, context=target.context)

    def _deliver(self, target: Process, message: Any) -> None:
        if self._open[target]:
            self._receive(target, message)

    def close(self, end: Process) -> None:
        """Hang up; the other end hears of it, unless nothing gets there."""
        if self._open[end]:
            self._open[end] = False
            other = self.far if end is self.near else self.near
            delay = self._network.delay(end.host, other.host)
            self._loop.call_later(delay, self._hang_up, end, other, self._loop.time(), context=WIRE)
        self._forget()

    def _hang_up(self, end: Process, other: Process, since: float) -> None:
        if self._network.is_cut(end.host, other.host):
            self._loop.call_later(AGAIN_S, self._hang_up, end, other, since, context=WIRE)
            return
        self._break(other)

    def _break(self, end: Process) -> None:
        """That end hears that it is broken."""
        if self._open[end]:
            self._open[end] = False
            self._loop.call_soon(self._broken, end, context=end.context)
            other = self.far if end is self.near else self.near
            if self._open[other]:
                self._hang_up(end, other, self._loop.time())
        self._forget()

    def _forget(self) -> None:
        if not any(self._open.values()):
            self._network.pipes.pop(self, None)

    def died(self, process: Process) -> None:
        """One end's process is gone."""
        self._open[process] = False
        other = self.far if process is self.near else self.near
        self._hang_up(process, other, self._loop.time())
        self._forget()


def checksum(message: Any, seed: int) -> int:
    """Return a number that depends on all of a message and on `seed`."""
    data = message if isinstance(message, bytes) else repr(message).encode()
    return zlib.crc32(data, seed)
