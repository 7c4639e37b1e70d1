"""An event loop whose time is a number, and processes that can be killed and stopped between any two callbacks.

Invariant: whatever runs, runs as a callback of this loop, one at a time, in an order that the seed decides: callbacks
that are due go in the order in which they were scheduled, and time jumps to the next timer when nothing is due. Each
callback belongs to the process in whose context it was scheduled. Those of a dead process never run: no `finally` of
it does, as after SIGKILL. Those of a stopped one wait. What has no process belongs to the wire.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
WIRE = contextvars.Context()
_PRUNE = 512  # tasks of a process between two looks at which are done


class Handle:
    """One callback. As asyncio.TimerHandle, as far as asyncio uses it."""

    __slots__ = ("args", "callback", "context", "moment")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, moment: float
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args, self.context, self.moment = args, context, moment

    def cancel(self) -> None:
        """It does not run any more."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """The moment at which it is due."""
        return self.moment


class Process:
    """A process of the cluster, on a host. It runs until it is killed; a new one takes its place then."""

    def __init__(self, loop: Loop, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive, self.stopped = True, False
        self.held: list[Handle] = []  # while it is stopped
        self._loop = loop
        self._tasks: list[asyncio.Future[Any]] = []  # that nobody collects them, which would run their `finally`
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        loop.processes.append(self)

    def __repr__(self) -> str:
        return self.name

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Have it do something."""
        if _PROCESS.get() is self:
            return self._loop.create_task(work)
        return self.context.run(self._loop.create_task, work)

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Keep a task until the world ends, unless it is done."""
        self._tasks.append(task)
        if len(self._tasks) % _PRUNE == 0:
            self._tasks = [task for task in self._tasks if not task.done()]

    def stop(self) -> None:
        """As SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """As SIGCONT: what was due meanwhile runs now."""
        self.stopped = False
        self._loop.take_back(self.held)
        self.held = []

    def kill(self) -> None:
        """As SIGKILL."""
        self.alive, self.held = False, []


def _given(context: contextvars.Context | None) -> contextvars.Context:
    """Return that context, which may be empty, and is false then; None: a copy of the present one."""
    return contextvars.copy_context() if context is None else context


def this_process() -> Process | None:
    """Return the process that runs now; None: the wire, or the world outside."""
    return _PROCESS.get()


class Loop(asyncio.AbstractEventLoop):
    """As much of an event loop as asyncio's tasks, locks and timeouts use."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.events = 0
        self.faults: list[str] = []  # exceptions that nobody took
        self._now = 0.0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._closed = False

    # ---- what asyncio asks for

    def time(self) -> float:
        """Seconds since the world began: every host's monotonic clock."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it next."""
        handle = Handle(callback, args, _given(context), self._now)
        if not self._closed:
            self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it after so many seconds."""
        return self.call_at(self._now + max(delay, 0.0), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it at that moment."""
        handle = Handle(callback, args, _given(context), when)
        if not self._closed:
            self._count += 1
            heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result], *, name: object = None
    ) -> asyncio.Task[Result]:
        """Begin a task of the process that runs now."""
        task: asyncio.Task[Result] = asyncio.Task(coro, loop=self)  # type: ignore[arg-type]
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        process = _PROCESS.get()
        if process is not None:
            process.keep(task)
        return task

    def get_debug(self) -> bool:
        """It is not being debugged."""
        return False

    def is_running(self) -> bool:
        """It runs whenever somebody asks."""
        return True

    def is_closed(self) -> bool:
        """Whether the world has ended."""
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Take note of what nobody took."""
        error = context.get("exception")
        if error is not None and not self._closed:
            self.faults.append(f"{context.get('message')}: {error!r} of {context.get('task') or context.get('future')}")

    # ---- what the world does

    def take_back(self, handles: list[Handle]) -> None:
        """Have these run again, in their order."""
        self._ready.extend(handles)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Run until that moment, or until it is `done`, which is asked after each callback."""
        asyncio._set_running_loop(self)
        try:
            self._run(until, done)
        finally:
            asyncio._set_running_loop(None)

    def _run(self, until: float, done: Callable[[], bool]) -> None:
        ready, timers, process_of = self._ready, self._timers, _PROCESS
        while not done():
            if not ready:
                if not timers or timers[0][0] > until:
                    self._now = until
                    return
                self._now = timers[0][0]
                while timers and timers[0][0] <= self._now:
                    ready.append(heapq.heappop(timers)[2])
            handle = ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            process = handle.context.get(process_of)
            if process is not None and not process.alive:
                continue
            if process is not None and process.stopped:
                process.held.append(handle)
                continue
            self.events += 1
            try:
                handle.context.run(callback, *handle.args)
            except Exception as error:  # noqa: BLE001 - of the wire, or of a callback of asyncio's
                self.faults.append(f"{callback!r}: {error!r}")

    def close(self) -> None:
        """End the world: nothing runs any more, whatever is still collected."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
