"""smb.coordinator.beside_loop: what is computed in a thread, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from smb.coordinator.beside_loop import BesideLoop


def test_a_turn_that_has_not_begun_ends_with_its_caller() -> None:
    """It holds its caller's request, and no bound counts it any more. One that has begun goes on and keeps its turn."""

    async def scenario() -> None:
        made: list[int] = []
        go = asyncio.Event()

        async def in_thread(make: Callable[[], Any]) -> Any:
            await go.wait()
            return make()

        beside = BesideLoop(in_thread)
        calls = [asyncio.create_task(beside.run("certificate", partial(made.append, number))) for number in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)
        for call in calls[:-1]:
            call.cancel()
        await asyncio.wait(calls[:-1])
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(beside._under_way) == 2
        assert not calls[-1].done()
        go.set()
        await calls[-1]
        assert made == [0, 99]
        assert not beside._under_way

    asyncio.run(scenario())
