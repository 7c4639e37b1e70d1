"""A process of the experiment `size`: memory servers and clients that speak the control plane and have no memory.

It takes a request a line on stdin, {"do": NAME, ARGUMENT: ...} as JSON, and answers each by a line on stdout. Each
member has a connection of its own, renews as the daemon and the library do, and goes on to the next coordinator where
one does not answer. Threads: one, with asyncio.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Coroutine
from typing import Any

import grpc

from smb.config.backoff import Backoff
from smb.config.limits import RENEWALS_PER_LEASE
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import (
    CoordinatorStub,
    MemoryServerServicer,
    add_MemoryServerServicer_to_server,
)
from smb.rpc.peers import patience
from smb.rpc.trailers import STANDBY, trailers_of

ANSWER_S = 10.0
PATIENCE_S = 2.0
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0
AT_ONCE = 64  # members that begin, or open a buffer, at the same time
ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
CAPACITY_BYTES = 1 << 40
WHOLE = 1  # a segment's flag: its copy is complete
REPORT_S = 2.0  # as often as a client in a training renews (smb/call/cluster_session.py)


class Calls:
    """The calls of this process since the last report: seconds of each that was answered, by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.errors: dict[str, int] = {}
        self.marked_at = 0.0  # time.monotonic(): the last kill

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Count an error by its code."""
        name = error.code().name
        self.errors[name] = self.errors.get(name, 0) + 1

    def take(self) -> dict[str, Any]:
        """Return all of it, and begin anew."""
        found = {"seconds": self.seconds, "errors": self.errors}
        self.seconds, self.errors = {}, {}
        return found


class Member:
    """A memory server or a client: its connection, and when it was answered for the first time after the last kill."""

    def __init__(self, coordinators: list[str], calls: Calls) -> None:
        self._coordinators = coordinators
        self._calls = calls
        self._at = 0
        self.again_at = 0.0  # time.monotonic(); 0: not yet
        self.lost = 0  # times that the coordinator had given it up
        self._connect()

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._coordinators[self._at], options=OWN_CONNECTION)
        self._stub: Any = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    async def ask(self, kind: str, request: Any, timeout_s: float = ANSWER_S) -> Any:
        """Return the answer, of the coordinator that leads. Raises AioRpcError where another is of no help."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        begun, turns, named = time.monotonic(), 0, ""
        while True:
            # As clients and memory servers are.
            metadata = patience(PATIENCE_S, named if turns >= len(self._coordinators) else "")
            try:
                reply = await getattr(self._stub, kind)(request, timeout=timeout_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                self._calls.failed(error)
                turns += 1
                named = trailers_of(error).get(STANDBY, named)
                if error.code() not in ELSEWHERE:
                    raise
                if len(self._coordinators) > 1:
                    self._at = (self._at + 1) % len(self._coordinators)
                    await self._channel.close(None)
                    self._connect()
                await asyncio.sleep(backoff.next_s())
            else:
                now = time.monotonic()
                self.again_at = self.again_at or (now if now > self._calls.marked_at else 0.0)
                self._calls.seconds.setdefault(kind, []).append(now - begun)
                return reply


class Server(Member):
    """A memory server without memory. It has a control service of its own, which says yes."""

    def __init__(self, name: str, coordinators: list[str], calls: Calls) -> None:
        super().__init__(coordinators, calls)
        self._name = name
        self._instance = random.getrandbits(63) | 1
        self._segments = Segments(self._instance)
        self._service = grpc.aio.server()
        add_MemoryServerServicer_to_server(self._segments, self._service)  # type: ignore[no-untyped-call]
        self._control = f"127.0.0.1:{self._service.add_insecure_port('127.0.0.1:0')}"
        self._seen = pb.SessionsSeen()

    async def begin(self) -> None:
        """Register, with all segments that it was asked to make."""
        await self._service.start()
        held = self._segments.held
        reply = await self.ask(
            "RegisterServer",
            pb.RegisterServerRequest(
                name=self._name,
                instance_id=self._instance,
                data_address="127.0.0.1:9",  # nobody connects
                control_address=self._control,
                capacity_bytes=CAPACITY_BYTES,
                sessions_seen=self._seen,
                segment_ids=held.keys(),
                segment_epochs=held.values(),
                segment_flags=[WHOLE] * len(held),
                stamps=self._segments.stamps(),
            ),
        )
        self._take(reply.ended_sessions)
        self.every_s = reply.lease_ms / 1000 / RENEWALS_PER_LEASE

    async def live(self) -> None:
        """Renew for ever."""
        await asyncio.sleep(random.uniform(0, self.every_s))
        while True:
            request = pb.RenewServerRequest(
                name=self._name, instance_id=self._instance, sessions_seen=self._seen, load=pb.ServerLoad()
            )
            try:
                self._take((await self.ask("RenewServer", request)).ended_sessions)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                self.lost += 1
                await self.begin()
            await asyncio.sleep(self.every_s)

    def _take(self, ended: pb.EndedSessions) -> None:
        self._seen = pb.SessionsSeen(incarnation=ended.incarnation, last_number=ended.last_number)


class Client(Member):
    """A client with a session, of which nobody asks anything. It reports its part in a training, if it has one."""

    def __init__(self, coordinators: list[str], calls: Calls, training: str = "", slot: int = 0) -> None:
        super().__init__(coordinators, calls)
        self._training, self._slot, self._clock = training, slot, 0

    async def begin(self) -> None:
        """Open the session."""
        reply = await self.ask("OpenSession", pb.OpenSessionRequest(client_name="one of many"))
        self.session_id = reply.session_id
        self.every_s = reply.lease_ms / 1000 / RENEWALS_PER_LEASE

    async def live(self) -> None:
        """Renew for ever."""
        await asyncio.sleep(random.uniform(0, self.every_s))
        while True:
            request = pb.RenewSessionRequest(session_id=self.session_id, client_name="one of many")
            if self._training:
                self._clock += 1
                request.trainings.add(name=self._training, slot=self._slot, clock=self._clock, samples=self._clock)
            try:
                self.every_s = (await self.ask("RenewSession", request)).lease_ms / 1000 / RENEWALS_PER_LEASE
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                self.lost += 1
                await self.begin()
            await asyncio.sleep(min(self.every_s, REPORT_S) if self._training else self.every_s)

    async def open(self, name: str) -> None:
        """Open a buffer, as a training process does when it starts."""
        await self.ask("OpenBuffer", pb.OpenBufferRequest(name=name, session_id=self.session_id))


class Segments(MemoryServerServicer):
    """The control service of one server: it says yes, and remembers which segments it has."""

    def __init__(self, instance_id: int) -> None:
        self._instance = instance_id
        self.held: dict[int, int] = {}  # the epoch of each segment
        self._stamp: pb.StoreStamp | None = None

    def stamps(self) -> list[pb.StoreStamp]:
        """Return how new the coordinator's records were."""
        return [self._stamp] if self._stamp is not None else []

    async def CreateSegment(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say yes."""
        self.held[request.id] = request.replica.epoch or request.epoch
        if request.HasField("stamp"):
            self._stamp = request.stamp
        return pb.CreateSegmentReply(group_id=request.group_id)

    async def DeleteSegment(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say yes."""
        self.held.pop(request.id, None)
        return pb.DeleteSegmentReply()

    async def TakeRoles(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say yes."""
        return pb.TakeRolesReply(confirmed=[each.segment_id for each in request.replicas])

    async def RetireSegments(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say that all are in use."""
        return pb.RetireSegmentsReply()

    async def Inventory(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say which of these it has."""
        here = [each for each in request.ids if each in self.held]
        held = [pb.HeldSegment(id=each, epoch=self.held[each], flags=WHOLE) for each in here]
        return pb.InventoryReply(instance_id=self._instance, held=held)

    async def EndSessions(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        """Say yes."""
        return pb.EndSessionsReply()


class Worker:
    """The members of this process."""

    def __init__(self) -> None:
        self._calls = Calls()
        self._members: list[Server | Client] = []
        self._lives: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._creating: asyncio.Task[None] | None = None
        self._created: list[tuple[float, float]] = []  # begun and ended, time.monotonic()

    async def servers(self, first: int, count: int, coordinators: list[str]) -> dict[str, Any]:
        """Register that many, named from `first` on."""
        names = (f"server-{first + index:04d}" for index in range(count))
        return await self._begin([Server(name, coordinators, self._calls) for name in names])

    async def clients(self, count: int, coordinators: list[str], trainings: int = 0) -> dict[str, Any]:
        """Open that many sessions, each in one of so many trainings."""
        names = [f"training-{index % trainings}" if trainings else "" for index in range(count)]
        members = [Client(coordinators, self._calls, name, index) for index, name in enumerate(names)]
        return await self._begin(members)

    async def fill(self, coordinators: list[str], kind: str, first: int, count: int) -> dict[str, Any]:
        """Create so many buffers of two copies, or locks, that stay."""
        member = Member(coordinators, self._calls)
        await _at_most(AT_ONCE, [_make(member, kind, f"{kind}-{first + index}") for index in range(count)])
        return {}

    async def use(self, coordinators: list[str], pause_s: float, buffers: int, locks: int) -> dict[str, Any]:
        """From now on create and delete a buffer, open one of those that stay, and use one of the locks, in turn."""
        member = Member(coordinators, self._calls)

        async def timed(kind: str, work: Coroutine[Any, Any, None]) -> None:
            begun = time.monotonic()
            await work
            self._calls.seconds.setdefault(kind, []).append(time.monotonic() - begun)
            if kind == "create":
                self._created.append((begun, time.monotonic()))
            await asyncio.sleep(pause_s)

        async def go_on() -> None:
            for number in itertools.count():
                name = f"made-{number}"
                await timed("create", _make(member, "buffer", name))
                await member.ask("DeleteBuffer", pb.DeleteBufferRequest(name=name))
                known = pb.OpenBufferRequest(name=f"buffer-{random.randrange(buffers)}")
                await timed("open", _asked(member, "OpenBuffer", known))
                await timed("lock", _make(member, "lock", f"lock-{random.randrange(locks)}"))

        self._creating = asyncio.create_task(go_on())
        return {}

    async def _begin(self, members: list[Any]) -> dict[str, Any]:
        async def begin(member: Any) -> None:
            await member.begin()
            self._lives.append(asyncio.create_task(member.live()))

        begun = time.monotonic()
        await _at_most(AT_ONCE, [begin(member) for member in members])
        self._members += members
        return {"seconds": time.monotonic() - begun}

    async def open(self, buffer: str) -> dict[str, Any]:
        """Open it by every client, as many at once as their processes would."""
        begun = time.monotonic()
        clients = [member for member in self._members if isinstance(member, Client)]
        await _at_most(AT_ONCE, [client.open(buffer) for client in clients])
        return {"seconds": time.monotonic() - begun}

    async def create(self, coordinators: list[str], pause_s: float) -> dict[str, Any]:
        """Create and delete buffers from now on, one after the other."""
        member = Member(coordinators, self._calls)

        async def go_on() -> None:
            for number in itertools.count():
                begun = time.monotonic()
                name = f"made-{number}"
                request = pb.CreateBufferRequest(
                    name=name, shape=[1000], dtype="float32", exist_ok=True, attempt_id=random.getrandbits(63) | 1
                )
                await member.ask("CreateBuffer", request)
                self._created.append((begun, time.monotonic()))
                await member.ask("DeleteBuffer", pb.DeleteBufferRequest(name=name))
                await asyncio.sleep(pause_s)

        self._creating = asyncio.create_task(go_on())
        return {}

    async def make(self, coordinators: list[str]) -> dict[str, Any]:
        """Create the buffer that all will open."""
        request = pb.CreateBufferRequest(name="weights", shape=[1 << 20], dtype="float32", server_count=8)
        await Member(coordinators, self._calls).ask("CreateBuffer", request)
        return {"name": request.name}

    async def mark(self, at: float) -> dict[str, Any]:
        """Take note of a kill."""
        self._calls.marked_at = at
        for member in self._members:
            member.again_at = 0.0
        return {}

    async def report(self) -> dict[str, Any]:
        """Return the calls since the last report, creations, and how it is with the members."""
        for task in [*self._lives, *([self._creating] if self._creating else [])]:
            if task.done():
                task.result()
        created, self._created = self._created, []
        return {
            **self._calls.take(),
            "created": created,
            "again_at": [member.again_at for member in self._members],
            "ended": sum(member.lost for member in self._members if isinstance(member, Client)),
            "registered_again": sum(member.lost for member in self._members if isinstance(member, Server)),
        }


async def _make(member: Member, kind: str, name: str) -> None:
    """Create a buffer of two copies, or use a lock, which makes it if needed."""
    request = pb.CreateBufferRequest(
        name=name, shape=[1000], dtype="float32", exist_ok=True, server_count=1, replicas=2
    )
    if kind == "lock":
        request = pb.CreateBufferRequest(name=name, kind=pb.LOCK, exist_ok=True)
    await member.ask("CreateBuffer", request)


async def _asked(member: Member, kind: str, request: Any) -> None:
    await member.ask(kind, request)


async def _at_most(count: int, works: list[Coroutine[Any, Any, None]]) -> None:
    turns = asyncio.Semaphore(count)

    async def one(work: Coroutine[Any, Any, None]) -> None:
        async with turns:
            await work

    await asyncio.gather(*(one(work) for work in works))


async def main() -> None:
    """Take requests until stdin ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    worker = Worker()
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        request = json.loads(line)
        answer = await getattr(worker, request.pop("do"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
