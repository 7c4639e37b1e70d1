"""Long computations, made in another thread so that the event loop goes on: it has to renew servers' leases.

One computation runs at a time, since threads of Python share one processor and the loop has to get its part. Each
certificate has one place in the common queue, so its calls wait for each other and not in front of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

Result = TypeVar("Result")


class BesideLoop:
    """Used in the loop's thread only."""

    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        """`in_thread` runs a function with its arguments in another thread."""
        self.in_thread = in_thread
        self._one_at_a_time = asyncio.Lock()
        self._by_certificate: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._under_way: set[asyncio.Task[Any]] = set()

    async def run(self, key: str, make: Callable[[], Result]) -> Result:
        """Return `make()`, called in another thread once it is this call's turn. `key`: of the caller's certificate."""

        async def turn() -> Result:
            result: Result = await self.in_thread(make)
            return result

        return await self.in_turn(key, turn)

    async def in_turn(self, key: str, turn: Callable[[], Awaitable[Result]]) -> Result:
        """Return what `turn` returns, which uses `in_thread` once it is this call's turn. A turn that has begun goes on
        if its caller is cancelled, and is kept, because a thread cannot be stopped. One that has not begun is given up:
        it would hold its request, and callers that go away at once would leave more of these than any bound allows.
        """
        begun = asyncio.Event()
        task = asyncio.create_task(self._run(key, turn, begun))
        self._under_way.add(task)
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not begun.is_set():
                task.cancel()
            raise
        finally:
            del task  # an error's traceback has this frame: with the task it would be a cycle that keeps the request

    async def _run(self, key: str, turn: Callable[[], Awaitable[Result]], begun: asyncio.Event) -> Result:
        async with self._by_certificate.setdefault(key, asyncio.Lock()), self._one_at_a_time:
            begun.set()
            return await turn()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case the caller was cancelled
