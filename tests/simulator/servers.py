"""A memory server: the daemon's deciding parts (memserver/), around the engine's model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import grpc

from memserver.control import ControlService
from memserver.copier import Copier
from memserver.registrant import Identity, MissingNames, Registrant
from memserver.replication import LOOK_S, Replication, ServerOutside
from memserver.segments import Segments
from memserver.stamps import ServerStamp, Stamps
from memserver.usage_by_client import Names
from smb.errors import Error
from smb.rpc import control_pb2 as pb
from smb.rpc.control_pb2_grpc import MemoryServerServicer, add_MemoryServerServicer_to_server
from tests.simulator.engine import Engine, Host
from tests.simulator.loop import Process
from tests.simulator.network import RefusedError

if TYPE_CHECKING:
    from tests.simulator.world import World

CAPACITY_BYTES = 4 << 30
COPY_BYTES_PER_S = 32 << 20
DATA_PORT, CONTROL_PORT = 9000, 9001
TRAFFIC_S = 15.0
TRAFFIC = (0, 0, 1 << 20, 1 << 30)  # bytes of a segment between two renewals


class Place:
    """As memserver.memory_dir.MemoryDirectory: where marks of quarantine are."""

    directory = Path("memory")

    def __init__(self, host: Host) -> None:
        self._host = host

    def quarantined(self) -> set[int]:
        """Return the segments that are marked; a mark without a segment goes."""
        self._host.quarantined &= self._host.segments.keys()
        return set(self._host.quarantined)

    def quarantine(self, segment_id: int, *, ends: bool = False) -> None:
        """Mark a segment, or take the mark away."""
        (self._host.quarantined.discard if ends else self._host.quarantined.add)(segment_id)

    def segment_path(self, segment_id: int) -> Path:
        """Segments are known by their ids."""
        return Path(f"{segment_id:016x}")


class _KeptStamps:
    def __init__(self, host: Host) -> None:
        self._host = host

    def read(self) -> tuple[ServerStamp, ...]:
        return self._host.stamps

    def keep(self, stamps: tuple[ServerStamp, ...]) -> None:
        self._host.stamps = stamps


class _Handlers:
    """Takes the place of a gRPC server where generated code registers a service."""

    def __init__(self, service: MemoryServerServicer) -> None:
        self.by_method: dict[str, Any] = {}
        add_MemoryServerServicer_to_server(service, cast(Any, self))  # type: ignore[no-untyped-call]

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same once more."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take them."""
        self.by_method = {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Context:
    """As grpc.ServicerContext."""

    def is_active(self) -> bool:
        """A call that is served has not been given up yet."""
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Answer with an error."""
        raise RefusedError(code, details)


class _Rdma:
    """As memserver.rdma_target.Rdma, where there is no RDMA."""

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id

    def end_session(self, session_id: int) -> None:
        """It has none."""


class _Data:
    """The data plane's port."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def __call__(
        self, method: str, request: tuple[Any, ...], metadata: Sequence[tuple[str, str]], left_s: float | None
    ) -> Any:
        return await getattr(self.engine, method)(*request)


class Server:
    """One run of a memory server."""

    def __init__(self, world: World, name: str, host: Host) -> None:
        """Start it with what is in the host's memory."""
        self.world, self.name, self.host = world, name, host
        self.process = Process(world.loop, name, name)
        self.instance_id = world.new_id()
        self.ended: Error | None = None
        self.process.context.run(self._start)

    def _start(self) -> None:
        world, name = self.world, self.name
        self.engine = Engine(
            world.loop, world.network, self.process, self.host, self.instance_id, CAPACITY_BYTES, world.destroys
        )
        engine = cast(Any, self.engine)
        self.segments = Segments(engine, cast(Any, Place(self.host)), CAPACITY_BYTES)
        for number in sorted(self.host.segments):
            self.segments.adopt(self.engine.adopt_segment(number))
        outside = ServerOutside(world.loop.time, world.loop.time, cast(Any, self._begin), self.engine.dial)
        self.replication = Replication(
            engine, COPY_BYTES_PER_S, on_role=self.segments.quarantined.role_taken, outside=outside
        )
        self.segments.on_drop = self.replication.forget
        self._hurry = asyncio.Event()
        self.replication.on_news = self._hurry.set
        stamps = Stamps(_KeptStamps(self.host))
        service = ControlService(self.segments, cast(Any, _Rdma(self.instance_id)), self.replication, stamps)
        self._handlers = _Handlers(service).by_method
        identity = Identity(
            name, self.instance_id, f"{name}:{DATA_PORT}", f"{name}:{CONTROL_PORT}", "", "", CAPACITY_BYTES,
            zone=world.plan.zone_of(name),
        )  # fmt: skip
        self.registrant = Registrant(
            world.coordinator_addresses, identity, self.segments, self._load, MissingNames(engine, Names(), Names()),
            self._decided, None, self.replication, None, stamps, world.loop.time,
            world.rng_delays.random,
        )  # fmt: skip
        world.network.listen(f"{name}:{CONTROL_PORT}", self.process, self._serve)
        world.network.listen(f"{name}:{DATA_PORT}", self.process, _Data(self.engine))
        self.process.begin(self._register())

    def _load(self) -> pb.ServerLoad:
        """Report some traffic, which changes now and then, so that roles are balanced anew."""
        moment = int(self.world.loop.time() / TRAFFIC_S)
        segments = [
            pb.BusyLoad(id=number, count=1, bytes=Random(f"{self.world.plan.seed} {number} {moment}").choice(TRAFFIC))
            for number in self.host.segments
        ]
        return pb.ServerLoad(segments=segments)

    def _decided(self, outcome: Error | None) -> None:
        """A server that can never register ends, as its daemon does."""
        self.ended = outcome

    async def _serve(
        self, method: str, request: bytes, metadata: Sequence[tuple[str, str]], left_s: float | None
    ) -> bytes:
        handler = self._handlers[method]
        await asyncio.sleep(self.world.rng_delays.random() * 0.002)
        reply = handler.unary_unary(handler.request_deserializer(request), _Context())
        return bytes(handler.response_serializer(reply))

    async def _register(self) -> None:
        """As memserver.registration_thread."""
        while self.ended is None:
            pause_s = await self._turn()
            if pause_s > 0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause_s)
            self._hurry.clear()
        self.world.server_ended(self)

    async def _turn(self) -> float:
        turn, answered = self.registrant.turn(), False
        try:
            call = next(turn)
            while True:
                stub = self.world.stub(self.registrant.coordinator)
                try:
                    reply = await getattr(stub, call.method)(call.request, **call.options)
                except grpc.RpcError as error:
                    answered = False
                    call = turn.throw(error)
                else:
                    answered = True
                    call = turn.send(reply)
        except StopIteration as ended:
            if answered:
                self.world.was_answered(self.name)
            return float(ended.value)

    def _begin(self, run: Callable[[], None], name: str) -> object:
        """The threads of replication and of the copier, as tasks."""
        return _Joined(self.process.begin(self._look() if name == "replication" else self._copy(run)))

    async def _look(self) -> None:
        while True:
            works = self.replication.look()
            self.engine.changed.clear()
            if works:
                await self.engine.changed.wait()
            else:
                await asyncio.sleep(LOOK_S)

    async def _copy(self, run: Callable[[], None]) -> None:
        copier: Copier = cast(Any, run).__self__
        while True:
            pause_s = copier.turn()
            await asyncio.sleep(LOOK_S if pause_s is None else max(pause_s, 0.001))


class _Joined:
    """As a thread, to whom nobody waits for."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def join(self) -> None:
        """It ends with its process."""
