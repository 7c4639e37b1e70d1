"""A coordinator: smb/coordinator from its port to its store, with what it has from outside simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from prometheus_client import CollectorRegistry

from smb.coordinator.commit_log import Committed
from smb.coordinator.etcd.connection import Access, EtcdLocation
from smb.coordinator.etcd.contender import Contender
from smb.coordinator.events import Event, Instant
from smb.coordinator.front import Front
from smb.coordinator.health import Health
from smb.coordinator.leader import Around, Leading, ShownLeader, end_if_failed
from smb.coordinator.options import CoordinatorOptions
from smb.coordinator.outside import Outside
from smb.coordinator.rpc_answers import Answers
from smb.coordinator.state import State
from tests.simulator.loop import Process
from tests.simulator.network import Connections, RefusedError
from tests.simulator.stores import Directory

if TYPE_CHECKING:
    from tests.simulator.world import World

PORT = 7070
BALANCE_AFTER_S = 1.0
LEADER_LEASE_S = 4
SESSION_LEASE_S = 6.0
IDLE_NAMES_S = 9.0
_PLACE = EtcdLocation(("etcd:2379", "etcd:2380"), "smb")


class _Details:
    """As grpc.HandlerCallDetails."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Context:
    """As grpc.aio.ServicerContext."""

    def __init__(self, metadata: Sequence[tuple[str, str]], until: float | None, now: Any) -> None:
        self._metadata, self._until, self._now = metadata, until, now

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The caller's."""
        return self._metadata

    def peer(self) -> str:
        """The caller's address."""
        return "simulated"

    def time_remaining(self) -> float | None:
        """Seconds."""
        return None if self._until is None else self._until - self._now()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Answer with an error."""
        raise RefusedError(code, details, trailing_metadata)


class CoordinatorProcess:
    """One run of a coordinator."""

    def __init__(self, world: World, name: str) -> None:
        """Start it."""
        self.world, self.name = world, name
        self.process = Process(world.loop, name, name)
        self.address = f"{name}:{PORT}"
        self.shown = ShownLeader()
        self._handlers: dict[str, Any] = {}
        self._leaving = AsyncExitStack()
        self.process.context.run(self._start)

    def _start(self) -> None:
        world = self.world
        outside = Outside(
            now=self.now,
            boot_s=world.loop.time,
            new_id=world.new_id,
            uniform=world.rng_delays.uniform,
            in_thread=_at_once,
            connections=Connections(world.network),
            end_process=lambda status: world.finds("fault", f"coordinator {self.name} ends: a task of it failed"),
        )
        self.front = Front(outside.uniform)
        self.front.address = self.address
        self._answers = Answers(self._answered, self.front)
        health = Health(self.address, world.loop.time)
        registry = CollectorRegistry()
        options = CoordinatorOptions(
            listen=self.address, state="", metrics="", session_lease_s=SESSION_LEASE_S, idle_names_s=IDLE_NAMES_S,
            leader_lease_s=LEADER_LEASE_S, balance_after_s=BALANCE_AFTER_S,
        )  # fmt: skip
        around = Around(options, self.front, health, registry, cast(Any, self), lambda: f"{self.name}:9470", outside)
        self.process.begin(self._run(around))
        world.network.listen(self.address, self.process, self._serve)

    def now(self) -> Instant:
        """Return this moment, on its clocks."""
        return Instant(self.world.loop.time(), 1.7e9 + self.world.loop.time() + self.world.wall_ahead_s)

    async def _run(self, around: Around) -> None:
        store = self.world.store
        if isinstance(store, Directory):
            self.shown.leading = await Leading.open(around, store, lambda: True, 1, self._leaving)
        else:
            contender = Contender(_PLACE, Access(), LEADER_LEASE_S, around, self.shown)
            task = asyncio.create_task(contender.run())
            task.add_done_callback(partial(end_if_failed, around.outside))

    @property
    def state(self) -> State | None:
        """Return what it knows, if it leads."""
        leading = self.shown.leading
        if leading is None or not self.process.alive or not self.front.leads:
            return None
        return leading.commit_log.state

    def saw(self, event: Event, before: State, committed: Committed, now: Instant) -> None:
        """In the place of LeaseMetrics: hear of each event."""
        leading = self.shown.leading
        # One that stood still hears late that its change was stored, and another one may have changed the store since.
        alone = self.state is not None and sum(bool(each.state) for each in self.world.coordinators.values()) == 1
        owes = leading is None or bool(leading.commit_log._owed) or not alone
        # Of events that were stored together, the last one shows what the store has.
        owes = owes or (leading is not None and leading.commit_log.state is not committed.state)
        self.world.saw_commit(event, before, committed, owes)

    def _answered(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        if code is grpc.StatusCode.INTERNAL:
            self.world.finds("fault", f"{method} failed inside coordinator {self.name}")

    async def _serve(
        self, method: str, request: bytes, metadata: Sequence[tuple[str, str]], left_s: float | None
    ) -> bytes:
        handler = self._handlers.get(method)
        if handler is None:
            handler = await self._answers.intercept_service(self._found, cast(Any, _Details(method)))
            assert handler is not None
            self._handlers[method] = handler
        now = self.world.loop.time
        context = _Context(metadata, None if left_s is None else now() + left_s, now)
        handler = cast(Any, handler)
        reply = await handler.unary_unary(handler.request_deserializer(request), context)
        return bytes(handler.response_serializer(reply))

    async def _found(self, details: grpc.HandlerCallDetails) -> Any:
        return self.front.service(details)


async def _at_once(work: Any, *args: Any) -> Any:
    """What a thread does takes no time."""
    return work(*args)
