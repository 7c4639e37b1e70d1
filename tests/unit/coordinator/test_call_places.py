"""smb.coordinator.call_places: who may have how many calls in progress."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from smb.coordinator.call_places import BusyError, CallPlaces
from smb.coordinator.limits import CALLS_MAX, CALLS_PER_CERTIFICATE_MAX
from smb.rpc import control_pb2 as pb
from smb.security import roles
from smb.security.roles import Caller, Role

OPERATOR, SERVER = Caller(Role.OPERATOR, "op"), Caller(Role.SERVER, "s")


class Port:
    """A service whose calls are in progress until they are let go."""

    def __init__(self) -> None:
        self._places = CallPlaces()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def call(self, who: Caller, method: str = "Overview", request: Any = None) -> bool:
        """Begin a call. Return whether it is in progress now, and not refused."""

        async def answer(_request: Any, _context: Any) -> None:
            await self._over.wait()

        async def found(_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

        async def calling() -> None:
            roles._caller.set(who)
            handler = await self._places.intercept_service(found, SimpleNamespace(method=f"/smb/{method}"))  # type: ignore[arg-type]
            await handler.unary_unary(request, None)

        task = asyncio.create_task(calling())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if task.done():
            with pytest.raises(BusyError, match=f"^{method}: the coordinator has .* in progress already") as refused:
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

    async def let_go(self) -> None:
        """End all calls."""
        self._over.set()
        await asyncio.gather(*self._tasks)
        self._over.clear()
        self._tasks.clear()


def test_a_certificate_has_its_share_and_sessions_a_part_of_it() -> None:
    """Three quarters are for any calls, the rest for renewals of sessions. Others have places, and so has it again once
    its calls have ended. An open that waits takes none: the service bounds those.
    """

    async def scenario() -> None:
        port, reader, other = Port(), Caller(Role.READER, "r"), Caller(Role.CLIENT, "c")
        assert await port.fill(reader) == CALLS_PER_CERTIFICATE_MAX * 3 // 4
        assert await port.fill(reader, "RenewSession") == CALLS_PER_CERTIFICATE_MAX // 4
        assert await port.call(reader, "OpenBuffer", pb.OpenBufferRequest(name="w", timeout_ms=1000))
        assert not await port.call(reader, "OpenBuffer", pb.OpenBufferRequest(name="w"))
        assert await port.call(other)
        await port.let_go()
        assert await port.fill(reader) == CALLS_PER_CERTIFICATE_MAX * 3 // 4
        await port.let_go()

    asyncio.run(scenario())


def test_a_quarter_of_all_places_is_for_operators_and_servers() -> None:
    """However many certificates others have."""

    async def scenario() -> None:
        port = Port()
        taken = 0
        for number in range(10):
            taken += await port.fill(Caller(Role.CLIENT, f"c{number}"))
        assert taken == CALLS_MAX * 3 // 4
        assert await port.call(SERVER)
        assert await port.fill(OPERATOR) == CALLS_MAX // 4 - 1
        await port.let_go()

    asyncio.run(scenario())
