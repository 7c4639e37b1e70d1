"""Clients: they create, open, write, read, rename, delete and lock, hold sessions, and remember what they were told.

Each has names of its own, so it knows what must be there; locks are shared. A call whose answer is missing leaves both
outcomes open. `Client.turn` draws what comes next: a new event is a method with @event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from smb.rpc import control_pb2 as pb
from smb.rpc.trailers import ANSWERED, OUTCOME, STANDBY, trailers_of
from tests.simulator.engine import BUSY, NOT_FOUND, OK
from tests.simulator.loop import Process

if TYPE_CHECKING:
    from tests.simulator.truth import Part
    from tests.simulator.world import World

CALL_S = 15.0  # a client's call, over all attempts
DATA_S = 40.0  # a change of data: as long as a buffer may be away
ANSWER_S = 5.0
LATER_S = 15.0  # how long a client keeps where a buffer is, at most
NAMES = 4  # of each client of which it knows whether a buffer is there
LOCKS = ("one", "two")
JOINS_MOST = 0.7  # the part of new buffers that are to move together with another one
PAUSE_S = 0.4  # between two events of a client, at most
ELEMENTS = 4096
QUIET_S = 25.0  # after which no call is under way any more whose answer was given up

EVENTS: list[tuple[int, Callable[[Client], Awaitable[None]]]] = []


def event(weight: int) -> Callable[[Callable[[Client], Awaitable[None]]], Callable[[Client], Awaitable[None]]]:
    """Have clients do this so often, beside the other events."""

    def take(method: Callable[[Client], Awaitable[None]]) -> Callable[[Client], Awaitable[None]]:
        EVENTS.append((weight, method))
        return method

    return take


class FailedError(Exception):
    """A call came to nothing. `unknown`: perhaps it was carried out."""

    def __init__(self, error: grpc.aio.AioRpcError | None, *, unknown: bool) -> None:
        super().__init__(str(error.details()) if error is not None else "nobody answers")
        self.code = error.code() if error is not None else None
        self.unknown = unknown


@dataclass
class Known:
    """A buffer as its client knows it."""

    name: str
    id: int
    replicas: int
    segments: list[pb.Segment] = field(default_factory=list)
    number: int = 0  # of this client's last write
    attributes: bytes | None = None  # of its file, as acknowledged; None: they may be any


class Client:
    """One client, in a process of its own."""

    def __init__(self, world: World, number: int) -> None:
        """Begin."""
        self.world, self.number = world, number
        self.name = f"w{number}"
        self._rng = Random(f"{world.plan.seed} client {number}")
        self._joins = self._rng.choice((0.1, JOINS_MOST))  # the part of its buffers that are to move together
        self.process = Process(world.loop, self.name, self.name)
        self._at = 0
        self._addresses = world.coordinator_addresses.split(",")
        # By name: what must be there, None for nothing. A name that is not in it may be anything.
        self.names: dict[str, Known | None] = {f"{self.name}-{at}": None for at in range(NAMES)}
        self.touched: dict[str, float] = dict.fromkeys(self.names, -1.0)  # when a change of it was acknowledged
        self._unsure: dict[str, float] = {}  # names that are not in `names`, and since when
        self._session = 0
        self.quiet = False  # begins nothing new
        self.doing = ""
        self.since = 0.0
        self.waits_for: tuple[Part, float] | None = None  # the segment, and since when
        self._cached: dict[int, Known] = {}  # buffers of others, as they were when they were opened
        self.work = self.process.begin(self._run())
        self.process.begin(self._renew())

    async def _run(self) -> None:
        acts, likelier = [act for _, act in EVENTS], dict(self.world.plan.likelier)
        weights = [weight * likelier.get(act.__name__, 1.0) for weight, act in EVENTS]
        while not self.quiet:
            await asyncio.sleep(self._rng.random() * PAUSE_S)
            prefers = self.world.prefers
            of_these = [weight * (act.__name__ in prefers) for weight, act in EVENTS] if prefers else weights
            (act,) = self._rng.choices(acts, of_these)
            self.doing, self.since = act.__name__, self.world.loop.time()
            try:
                await act(self)
            except FailedError as error:
                self.world.say(f"{self.name} {act.__name__}: {error}")
            self.doing = ""

    # ---- calls

    async def call(self, method: str, request: Any, timeout_s: float = CALL_S, *, again: bool = True) -> Any:
        """Make a call of the coordinator that leads, `again` where its answer was lost. Raises FailedError."""
        now = self.world.loop.time
        end, unknown, failed = now() + timeout_s, False, 0
        last: grpc.aio.AioRpcError | None = None
        while now() < end:
            address = self._addresses[self._at]
            try:
                return await getattr(self.world.stub(address), method)(request, timeout=min(ANSWER_S, end - now()))
            except grpc.aio.AioRpcError as error:
                last, trailers = error, trailers_of(error)
                answered = ANSWERED in trailers
                if answered and STANDBY not in trailers:
                    raise FailedError(error, unknown=unknown or trailers.get(OUTCOME) == "unknown") from None
                sent = not answered and "failed to connect" not in str(error.details())
                unknown = unknown or sent or (answered and trailers.get(OUTCOME) == "unknown")
                if unknown and not again:
                    raise FailedError(error, unknown=True) from None
            self._at = (self._at + 1) % len(self._addresses)
            failed += 1
            await asyncio.sleep(0.05 if failed < len(self._addresses) else 0.2)
        raise FailedError(last, unknown=unknown)

    async def _renew(self) -> None:
        while True:
            try:
                if not self._session:
                    reply = await self.call("OpenSession", pb.OpenSessionRequest(client_name=self.name))
                    self._session = reply.session_id
                else:
                    request = pb.RenewSessionRequest(session_id=self._session, client_name=self.name)
                    reply = await self.call("RenewSession", request, 3.0)
                await asyncio.sleep(reply.lease_ms / 3000)
            except FailedError as error:
                if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                    self._session = 0
                await asyncio.sleep(0.2)

    def forget(self, since: float) -> None:
        """The store is as it was then: names that were changed later may be anything, and are as the records say."""
        names = [name for name in self.names if self.touched[name] >= since]
        self._opened(*names)
        self._unsure |= dict.fromkeys(names, -QUIET_S)  # no call is under way that changes them

    def _some(self, *, there: bool) -> str:
        """Draw one of our names of which it is known that a buffer is there, or not; empty if there is none."""
        found = [name for name, known in self.names.items() if (known is not None) == there]
        return self._rng.choice(found) if found else ""

    def _new_name(self) -> str:
        """Return a name that was never used; empty if we know of enough buffers."""
        if len(self.names) >= NAMES:
            return ""
        name = f"{self.name}-{len(self.touched)}"
        self.names[name], self.touched[name] = None, -1.0
        return name

    def _opened(self, *names: str) -> None:
        """Nobody knows what these are, until a while after there is an answer."""
        for name in names:
            del self.names[name]
            self._unsure[name] = self.world.loop.time()

    def _refused(self, error: FailedError, names: dict[str, Known | None]) -> None:
        """A change of these names has failed: they are as they were, unless that is not known."""
        if not error.unknown and not self.world.put_back_since(self.since):
            self.names |= names
            # A backup that was made within the creation has its record, and a restore may count the buffer as made.
            self.touched |= dict.fromkeys(names, self.world.loop.time())

    def _settled(self, name: str, known: Known | None) -> None:
        if self.world.put_back_since(self.since):  # while it was asked
            self._unsure[name] = self.world.loop.time()
            return
        self.names[name] = known
        self.touched[name] = self.world.loop.time()

    # ---- names

    @event(4)
    async def create(self) -> None:
        """Create a buffer under a free name; under a new one if nothing is known of all others, as after a restore."""
        name, rng = self._some(there=False) or self._new_name(), self._rng
        replicas = rng.choice((1, 2, 2, 2))
        like = [each for each in self.names.values() if each is not None and each.replicas == 2]
        joins = bool(like) and rng.random() < (JOINS_MOST if self.world.prefers else self._joins)
        elements = rng.choice((ELEMENTS, ELEMENTS, rng.randrange(1 << 20, 6 << 20)))
        stripe = rng.choice((0, 0, 4096 * (elements // 1536)))
        attempt = rng.getrandbits(60) + 1
        if not name:
            return
        request = pb.CreateBufferRequest(
            name=name, shape=[elements], dtype="int64", replicas=replicas, stripe_bytes=stripe, attempt_id=attempt
        )
        if joins:
            request = pb.CreateBufferRequest(name=name, like=rng.choice(like).name, joins=True, attempt_id=attempt)
        self._opened(name)
        try:
            reply = await self.call("CreateBuffer", request)
        except FailedError as error:
            if error.code is grpc.StatusCode.ALREADY_EXISTS and not self.world.put_back_since(self.since):
                self.world.finds("name", f"{name} was free, and its creation is told that it exists: {error}")
            self._refused(error, {name: None})
            raise
        known = Known(name, reply.id, reply.replicas)
        self._learn(known, reply)
        self._settled(name, known)

    def _learn(self, known: Known, reply: pb.Buffer) -> None:
        known.segments = list(reply.layout.segments)
        ids, put_back = [segment.id for segment in known.segments], self.world.put_back_since(self.since)
        self.world.truth.told(known.name, known.replicas, ids, self.since, put_back=put_back)

    @event(3)
    async def delete(self) -> None:
        """Delete one of our buffers."""
        name = self._some(there=True)
        known = self.names.get(name)
        if known is None:
            return
        self._opened(name)
        for segment in known.segments:
            self.world.truth.parts[segment.id].may_go = True
        await self.call("DeleteBuffer", pb.DeleteBufferRequest(name=name, id=known.id, missing_ok=True))
        self._settled(name, None)

    @event(2)
    async def rename(self) -> None:
        """Give one of our buffers another name."""
        name, other = self._some(there=True), self._some(there=False)
        known = self.names.get(name)
        if known is None or not other:
            return
        self._opened(name, other)
        request = pb.RenameBufferRequest(name=name, new_name=other, id=known.id)
        try:
            await self.call("RenameBuffer", request, again=False)
        except FailedError as error:
            self._refused(error, {name: known, other: None})
            raise
        known.name = other
        self._settled(name, None)
        self._settled(other, known)

    @event(2)
    async def describe(self) -> None:
        """Store attributes of a file with one of our buffers, as a mount does after chmod."""
        name = self._some(there=True)
        known = self.names.get(name)
        if known is None:
            return
        self._opened(name)
        before, known.attributes = known.attributes, None
        wanted = self._rng.randbytes(4)
        request = pb.RenameBufferRequest(name=name, new_name=name, id=known.id, file_attributes=wanted)
        try:
            await self.call("RenameBuffer", request, again=False)
        except FailedError as error:
            known.attributes = None if error.unknown else before
            self._refused(error, {name: known})
            raise
        known.attributes = wanted
        self._settled(name, known)

    @event(2)
    async def find(self) -> None:
        """Open a name, also one of which nothing is known any more."""
        began = self.world.loop.time()
        unsure = [name for name in self._unsure if self._is_quiet(name, began)]
        name = self._rng.choice(unsure or list(self.touched))
        sure, expected = name in self.names, self.names.get(name)
        try:
            reply = await self.call("OpenBuffer", pb.OpenBufferRequest(name=name))
        except FailedError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            if sure and expected is not None and not self.world.put_back_since(began):
                self.world.finds("name", f"{self.name}: buffer {name} was created, and is not there")
            if not sure and self._is_quiet(name, began):
                self._settled(name, None)
            return
        if sure and not self.world.put_back_since(began):
            if expected is None:
                self.world.finds("name", f"{self.name}: {name} was deleted, or renamed, and a buffer is there")
            elif expected.id != reply.id:
                self.world.finds("name", f"{self.name}: {name} is another buffer")
        if expected is not None and expected.id == reply.id:
            self._learn(expected, reply)
        if not sure and self._is_quiet(name, began):
            known = Known(name, reply.id, reply.replicas)
            self._learn(known, reply)
            known.number = max(part.attempted.get(self.number, 0) for part in self._parts(known))
            self._settled(name, known)

    def _is_quiet(self, name: str, began: float) -> bool:
        """Whether no earlier attempt of ours can still change that name."""
        return name not in self.names and began - self._unsure[name] > QUIET_S

    def _parts(self, known: Known) -> list[Any]:
        return [self.world.truth.parts[segment.id] for segment in known.segments]

    @event(2)
    async def look(self) -> None:
        """List all that there is."""
        self.world.was_listed(await self.call("ListBuffers", pb.ListBuffersRequest()))

    # ---- data

    @event(12)
    async def write(self) -> None:
        """Write to one of our buffers."""
        known = self.names.get(self._some(there=True))
        if known is None:
            return
        known.number += 1
        parts = self._parts(known)
        for part in parts:
            part.attempted[self.number] = known.number
        at = self._rng.randrange(len(parts))  # of one segment at a time: others may be away
        part = parts[at]
        status, where = await self._data(known, at, "write", self.number, known.number)
        if status == OK:
            segment = known.segments[at]
            self.world.wrote(part, self.number, known.number, segment.epoch, where)

    @event(6)
    async def read(self) -> None:
        """Read one of our buffers."""
        known = self.names.get(self._some(there=True))
        if known is None:
            return
        at = self._rng.randrange(len(known.segments))
        part = self._parts(known)[at]
        least, loose = dict(part.acknowledged), part.loose
        reply, where = await self._data(known, at, "read")
        if reply[0] == OK and not loose:
            self.world.was_read(part, least, dict(reply[1]), where)

    @event(12)
    async def peek(self) -> None:
        """Read a buffer of another client: where it was when it was opened, as long as somebody answers there."""
        other = self._another()
        if other is None:
            return
        known = self._cached.get(other.id)
        if known is None:
            known = await self._as_it_is(other)
            if known is None:
                return
            self._cached[other.id] = known
        try:
            await self._look_at(known, self._data)
        except FailedError:
            del self._cached[other.id]
            raise

    @event(6)
    async def come_back_late(self) -> None:
        """Open a buffer of another client, and read it much later, where it was."""
        other = self._another()
        known = await self._as_it_is(other) if other is not None else None
        if known is not None:
            self.process.begin(self._look_later(known, self._rng.random() * LATER_S))

    async def _look_later(self, known: Known, later_s: float) -> None:
        await asyncio.sleep(later_s)
        try:
            await self._look_at(known, self._asked)
        except FailedError as error:
            self.world.say(f"{self.name} come_back_late: {error}")

    def _another(self) -> Known | None:
        others = [known for client in self.world.clients for known in client.names.values() if known is not None]
        return self._rng.choice(others) if others else None

    async def _as_it_is(self, other: Known) -> Known | None:
        reply = await self.call("OpenBuffer", pb.OpenBufferRequest(name=other.name, id=other.id))
        if reply.id != other.id:
            return None
        known = Known(reply.name, reply.id, reply.replicas, list(reply.layout.segments))
        self.world.truth.told(known.name, known.replicas, [each.id for each in known.segments], self.since)
        return known

    async def _look_at(self, known: Known, ask: Callable[..., Awaitable[tuple[Any, str]]]) -> None:
        at = self._rng.randrange(len(known.segments))
        part = self._parts(known)[at]
        least, loose = dict(part.acknowledged), part.loose
        reply, where = await ask(known, at, "read")
        if reply[0] == OK and not loose:
            self.world.was_read(part, least, dict(reply[1]), where)

    async def _data(self, known: Known, at: int, method: str, *args: Any) -> tuple[Any, str]:
        """Ask the segment's primary, wherever that is by now; return its answer, and the server."""
        self.waits_for = (self._parts(known)[at], self.world.loop.time())
        try:
            return await self._asked(known, at, method, *args)
        finally:
            self.waits_for = None

    async def _asked(self, known: Known, at: int, method: str, *args: Any) -> tuple[Any, str]:
        world, end = self.world, self.world.loop.time() + DATA_S
        while world.loop.time() < end:
            segment = known.segments[at]
            try:
                reply = await world.network.ask(segment.data_address, method, (segment.id, segment.epoch, *args), 2.0)
            except grpc.aio.AioRpcError:
                reply = ("away",)
            status = reply if isinstance(reply, str) else reply[0]
            if status in (OK, BUSY):
                return reply, segment.server
            await asyncio.sleep(0.1 + 0.1 * self._rng.random())
            try:
                opened = await self.call("OpenBuffer", pb.OpenBufferRequest(name=known.name, id=known.id), 5.0)
            except FailedError as error:
                if error.code is grpc.StatusCode.NOT_FOUND:
                    raise
                continue
            if opened.id != known.id:
                raise FailedError(None, unknown=True)
            known.segments = list(opened.layout.segments)
            if status == NOT_FOUND and opened.layout.segments[at].lost:
                raise FailedError(None, unknown=True)
        raise FailedError(None, unknown=True)

    # ---- locks

    @event(3)
    async def lock(self) -> None:
        """Take a lock, hold it for a while, give it back."""
        session, ours = self._session, f"{self.name}-{int(self.world.loop.time()) // 8}"  # that nobody has used
        name, held_s = self._rng.choice((*LOCKS, ours)), self._rng.random() * 3.0
        if not session:
            return
        request = pb.CreateBufferRequest(name=name, kind=pb.LOCK, exist_ok=True, replicas=2)
        asked = self.world.loop.time()
        reply = await self.call("CreateBuffer", request)
        if self.world.put_back_since(asked):
            return  # the store may have lost the lock of which this tells
        segment = reply.layout.segments[0]
        began, ids = self.world.loop.time(), (segment.id, segment.epoch or reply.layout.epoch)
        try:
            status, token = await self.world.network.ask(segment.data_address, "lock", (*ids, session), 2.0)
        except grpc.aio.AioRpcError:
            return
        if status != OK:
            return
        self.world.locked(name, self, session, token, began)
        await asyncio.sleep(held_s)
        self.world.unlocks(name, session, token)
        try:
            await self.world.network.ask(segment.data_address, "unlock", (*ids, session, token), 2.0)
        except grpc.aio.AioRpcError:
            return

    @event(1)
    async def end_session(self) -> None:
        """Close the session; another one is opened."""
        session, self._session = self._session, 0
        if session:
            self.world.session_ends(session)
            await self.call("CloseSession", pb.CloseSessionRequest(session_id=session))

    @event(1)
    async def kick(self) -> None:
        """An operator ends all sessions of this client; another one is opened once it hears of that."""
        self.world.session_ends(self._session)
        await self.call("KickClients", pb.KickClientsRequest(name=self.name))
