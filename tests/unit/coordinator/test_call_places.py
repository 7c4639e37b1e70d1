"""smb.coordinator.call_places: who may have how many calls in progress."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from smb.coordinator.call_places import BusyError, CallPlaces, without_place
from smb.coordinator.limits import CALLS_MAX, LARGE_REQUESTS_MAX
from smb.rpc import control_pb2 as pb
from smb.security import roles
from smb.security.roles import Caller, Role
from tests.unit.coordinator.test_what_changes_meanwhile import Servers, beside, register, service_of

OWN = CALLS_MAX * 3 // 4 // 4  # what one certificate gets while no other one asks: a quarter of what is not reserved
OPERATOR, SERVER = Caller(Role.OPERATOR, "op"), Caller(Role.SERVER, "s")


class Port:
    """A service whose calls are in progress until they are let go."""

    def __init__(self) -> None:
        self._places = CallPlaces()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self.service: Any = None  # answers in place of one that waits, if there is one

    async def call(
        self,
        who: Caller,
        method: str = "Overview",
        request: Any = None,
        *,
        waits: bool = False,
        busy_with: str = "calls",
    ) -> bool:
        """Begin a call. Return whether it is in progress now, and not refused: the error names `busy_with`. `waits`:
        for another call.
        """

        async def answer(request: Any, context: Any) -> None:
            if self.service is not None and request is not None:
                await getattr(self.service, method)(request, context)
            with without_place() if waits else nullcontext():
                await self._over.wait()

        async def found(_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

        async def calling() -> None:
            roles._caller.set(who)
            handler = await self._places.intercept_service(found, SimpleNamespace(method=f"/smb/{method}"))  # type: ignore[arg-type]
            await cast(Any, handler).unary_unary(request, SimpleNamespace(time_remaining=lambda: 60.0))

        task = asyncio.create_task(calling())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if task.done():
            with pytest.raises(
                BusyError, match=f"^{method}: the coordinator has [0-9]+ {busy_with}.* in progress already"
            ) as refused:
                task.result()
            assert refused.value.outcome == "not applied"
            return False
        self._tasks.append(task)
        return True

    async def fill(self, who: Caller, method: str = "Overview") -> int:
        """Begin calls until one is refused, and return how many are in progress."""
        count = 0
        while await self.call(who, method):
            count += 1
        return count

    def cancel(self) -> None:
        """End the last call, because its caller has gone."""
        self._tasks.pop().cancel()

    async def let_go(self) -> None:
        """End all calls."""
        self._over.set()
        await asyncio.gather(*self._tasks)
        self._over.clear()
        self._tasks.clear()


def test_a_certificate_has_its_share_and_sessions_a_part_of_it() -> None:
    """Renewals of sessions have some more places. Others have places, and so has it again once its calls have ended. An
    open that waits takes none: the service bounds those.
    """

    async def scenario() -> None:
        port, reader, other = Port(), Caller(Role.READER, "r"), Caller(Role.CLIENT, "c")
        assert await port.fill(reader) == OWN
        assert await port.fill(other) == (CALLS_MAX * 3 // 4 - OWN) // 4  # and yet the reader's sessions are renewed:
        assert await port.fill(reader, "RenewSession") == CALLS_MAX // 4 - OWN
        assert await port.call(reader, "OpenBuffer", pb.OpenBufferRequest(name="w", timeout_ms=1000))
        assert not await port.call(reader, "OpenBuffer", pb.OpenBufferRequest(name="w"))
        assert await port.call(Caller(Role.CLIENT, "d"))
        await port.let_go()
        assert await port.fill(reader) == OWN
        await port.let_go()

    asyncio.run(scenario())


def test_however_many_certificates_take_what_they_get_the_next_one_gets_some() -> None:
    """Four of them had all places. A quarter of all is for operators and servers, whatever clients do."""

    async def scenario() -> None:
        port = Port()
        taken = [await port.fill(Caller(Role.CLIENT, f"c{number}")) for number in range(12)]
        assert taken == sorted(taken, reverse=True)
        assert sum(taken[:4]) < 0.7 * CALLS_MAX * 3 // 4
        assert taken[-1] > 10
        for number in range(12, 100):
            taken.append(await port.fill(Caller(Role.CLIENT, f"c{number}")))
        assert sum(taken) == CALLS_MAX * 3 // 4
        assert await port.call(SERVER)
        assert await port.fill(OPERATOR) == CALLS_MAX // 4 - 1
        await port.let_go()

    asyncio.run(scenario())


def test_half_of_that_quarter_is_for_renewals_of_sessions_too() -> None:
    """Sessions live on though all other places are taken, and operators and servers still have places."""

    async def scenario() -> None:
        port, clients = Port(), [Caller(Role.CLIENT, f"c{number}") for number in range(100)]
        for client in clients:
            await port.fill(client)
        renewals = [await port.fill(client, "RenewSession") for client in clients]
        assert sum(renewals) == CALLS_MAX // 8
        assert await port.call(SERVER)
        assert await port.fill(OPERATOR) == CALLS_MAX // 8 - 1
        await port.let_go()

    asyncio.run(scenario())


def test_a_call_that_waits_gives_its_place_back() -> None:
    """Who goes on has a place again."""

    async def scenario() -> None:
        port, client = Port(), Caller(Role.CLIENT, "c")
        request = pb.CreateBufferRequest(name="w")
        for _ in range(2 * OWN):
            assert await port.call(client, "CreateBuffer", request, waits=True)
        assert await port.fill(client) == OWN
        await port.let_go()
        assert await port.fill(client) == OWN
        await port.let_go()

    asyncio.run(scenario())


def test_large_requests_have_places_of_their_own() -> None:
    """From their arrival to their end, also while their calls wait, since they stay in memory. They had places of all
    calls, so those of four certificates kept small calls of all others out.
    """

    async def scenario() -> None:
        port, clients = Port(), [Caller(Role.CLIENT, f"c{number}") for number in range(5)]

        async def large(who: Caller) -> bool:
            request = pb.CreateBufferRequest(name="w", packed_metadata=bytes(5000))
            return await port.call(who, "CreateBuffer", request, waits=True, busy_with="requests of more than 4096")

        taken = []
        for client in clients[:4]:
            taken.append(0)
            while await large(client):
                taken[-1] += 1
        assert taken[0] == LARGE_REQUESTS_MAX * 3 // 4 // 4
        assert sum(taken) < 0.7 * LARGE_REQUESTS_MAX * 3 // 4
        assert await large(clients[4])
        for client in clients[:4]:
            assert await port.call(client, "CreateBuffer", pb.CreateBufferRequest(name="w"))
        assert await port.fill(clients[4]) == (CALLS_MAX * 3 // 4 - 4 + 3) // 4
        await port.let_go()
        assert await large(clients[0])
        await port.let_go()

    asyncio.run(scenario())


def test_who_waits_for_a_creation_takes_no_place(tmp_path: Path) -> None:
    """Also not if its caller goes away, and what was begun for it goes on."""

    async def scenario() -> None:
        port, client, made = Port(), Caller(Role.CLIENT, "c"), asyncio.Event()
        servers = Servers(waits={"a": made.wait})
        async with beside(tmp_path) as log:
            await register(log, "a")
            port.service = service_of(log, servers)
            request = pb.CreateBufferRequest(name="w", shape=(8,), dtype="float32", exist_ok=True)
            assert await port.call(client, "CreateBuffer", request)
            while not log.state.buffers or servers.waits:
                await asyncio.sleep(0)
            for _ in range(OWN - 1):
                assert await port.call(client, "CreateBuffer", request)
            await asyncio.sleep(0)
            while not await port.call(client):  # once they wait, and have given their places back
                await asyncio.sleep(0)
            port.cancel()
            port.cancel()
            await asyncio.sleep(0)
            assert await port.fill(client) == OWN - 1
            made.set()
            await port.let_go()
            assert await port.fill(client) == OWN
            await port.let_go()

    asyncio.run(scenario())
