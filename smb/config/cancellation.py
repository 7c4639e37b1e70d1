"""Calls that block, awaited from asyncio: each runs in a thread of its own, and ends when its task is cancelled.

Each place where a call of this package may wait for longer than a moment calls `check` now and then. A request that
waits at a server can't be taken back: a lock could be granted to it later. So a call that may be cancelled lets it wait
there for TURN_S, receives the answer, and makes it again unless the call was cancelled. A lock's waiter keeps its
place, because a repeated request says its age; only if the lock is freed between two requests, the next waiter gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

TURN_S = 0.5


class _ThreadCancellation(threading.local):
    """Of this thread: set when its call is cancelled. None if it can't be cancelled."""

    event: threading.Event | None = None


_here = _ThreadCancellation()


class CallCancelledError(BaseException):
    """Ends a call whose task was cancelled. Users never see it. As KeyboardInterrupt, it is not an Exception."""


def check() -> None:
    """Raise CallCancelledError if the call of this thread was cancelled."""
    if _here.event is not None and _here.event.is_set():
        raise CallCancelledError


def turn_s(left: float | None) -> float | None:
    """Return for how long a request may wait at its server now, None if it may wait to the end of the call's `left`
    seconds (None: no end).
    """
    if _here.event is None or (left is not None and left <= TURN_S):
        return None
    return TURN_S


async def to_thread(call: Callable[..., Result], /, *arguments: Any, **named: Any) -> Result:
    """Await a call of this package that blocks, without holding up the event loop.

    ```python
    import asyncio

    async def serve():
        lock = client.lock("checkpoint")
        async with lock:
            return await smb.to_thread(client.barrier, "epoch", 1, timeout=60)

    asyncio.run(serve())  # 0
    ```

    As asyncio.to_thread, but each call has a thread of its own, so waits hold up no other call, and cancelling ends a
    wait: of Follower.wait, Buffer.wait, Client.barrier (for all parties), Client.open with timeout=, a lock, a
    training's exchange. The task goes on when its call is over and the server has forgotten it, 0.5 s later or sooner.
    A call that moves data finishes first, which takes at most the client's timeout. A server that does not answer is
    waited for as long; if it can't be reached, the task goes on, and a lock may stay taken until its ttl is over.

    Take a lock by `async with`, which releases it if the task is cancelled at the moment at which it is granted. Raises
    what the call raises.
    """
    return await _awaited(call, arguments, named, threading.Event())


async def finished(call: Callable[[], Result]) -> Result:
    """As to_thread, but if the task is cancelled, the call comes to its end first."""
    return await _awaited(call, (), {}, None)


async def _awaited(
    call: Callable[..., Result], arguments: tuple[Any, ...], named: dict[str, Any], event: threading.Event | None
) -> Result:
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[None] = loop.create_future()
    results: list[Result] = []
    errors: list[BaseException] = []

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        _here.event = event
        try:
            results.append(context.run(call, *arguments, **named))
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            errors.append(error)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="smb-awaited", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
            if event is not None:
                event.set()
        except BaseException:  # the coroutine was closed: nobody will take the result
            if event is not None:
                event.set()
            raise
    try:
        if cancelled is not None:
            raise cancelled
        if errors:
            raise errors[0]
        return results[0]
    finally:
        cancelled = None  # otherwise these errors and this frame would keep each other alive
        errors.clear()
