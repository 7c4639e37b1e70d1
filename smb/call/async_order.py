"""The room of asynchronous calls: the engine's operations, and calls that only Python can make, in one order.

It uses the engine and `turns`. A client's session makes its `AsyncCalls`, and buffers reach that by the session. In the
engine the room is csrc/async, which smb/engine/async_operations.py gives types; for users it is smb.Queue.

The engine (csrc/async/async.h) keeps the order, the priorities and the windows. It runs reads, writes and additions on
a thread of its own. All other calls, and operations that the engine could not finish, are Python calls: the engine says
when the call's turn has come, and a thread of the executor runs it. One more thread of the executor, the watch,
receives the engine's events and completes the futures, many at a time. The watch runs only while there are calls.

Threads: `_lock` guards the table of calls and the reference to the watch. It is not held during a call of the engine,
which would hand over Python's lock, nor while a future is completed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from smb.call.turns import Turns, here
from smb.config.conditions import condition
from smb.engine import (
    AsyncEvent,
    AsyncEventKind,
    AsyncOperations,
    BufferHandle,
    EngineError,
    Outcome,
    Request,
    Status,
    Window,
)
from smb.errors import (
    DeadlineError,
    Error,
    UnavailableError,
)

Result = TypeVar("Result")
_log = logging.getLogger("smb")

_RUNNING_MAX = 8  # Python calls that run at a time, each on a thread that is started when it is needed
_WATCH_MS = 1000  # how often the watch checks whether calls are left
# the watch waits so long after the last call: another may follow, and starting a thread takes as long as a call
_LINGER_MS = 5
_LOOK_S = 0.1  # how often a thread that waits for its turn looks for signals

_CLOSED = "the client is closed; call smb.connect again"
_QUEUE_CLOSED = "the queue was closed before this call began; nothing was applied"

_tags = itertools.count(1)


class _Future(Future[Any]):
    """The future of a call that the engine may begin at any time. Only the engine knows whether it can still be
    cancelled.
    """

    def __init__(self, calls: AsyncCalls, tag: int) -> None:
        super().__init__()
        self._condition = condition()  # shared by the threads that wait for the future and the thread that completes it
        self._calls, self._tag = calls, tag

    def cancel(self) -> bool:
        if self.cancelled():
            return True
        if not self._calls.withdraw(self._tag):
            return False
        self.end_cancelled()
        return True

    def end_cancelled(self) -> None:
        """Wake the waiting threads: the call was cancelled."""
        super().cancel()
        self.set_running_or_notify_cancel()


class _AsyncCall:
    """An async call that has not ended.

    `go_on` does the call: with None when its turn has come, or with the outcome if the engine's operation failed.
    `result` is the future's result if the engine succeeds.
    """

    __slots__ = ("begun", "future", "go_on", "keeps", "result", "status", "tag", "turns", "window")

    def __init__(
        self,
        calls: AsyncCalls,
        turns: Turns,
        window: Window,
        go_on: Callable[[Outcome | None], Any],
        result: Any,
        keeps: object,
    ) -> None:
        self.tag = next(_tags)
        self.turns = turns
        self.window = window
        self.go_on = go_on
        self.result = result
        self.keeps = keeps  # objects that the engine uses until the call ends
        self.future = _Future(calls, self.tag)
        self.begun = False  # a thread has begun the call
        self.status: list[int] = []  # the status of its submission; empty before the submission

    @property
    def entered(self) -> bool:
        """True if the engine has accepted the call."""
        return Status.OK in self.status


class AsyncCalls:
    def __init__(self, operations: AsyncOperations) -> None:
        self._operations = operations
        self._calls_window = Window(operations, _RUNNING_MAX, counts_calls=True)
        self._window = Window(operations, 0)  # for calls that do not come from a queue
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        # the running watch, None if there is none; the event is set when the watch ends
        self._watching: threading.Event | None = None
        self._calls: dict[int, _AsyncCall] = {}  # calls that the engine has, by tag
        self._running: set[_AsyncCall] = set()  # calls on the executor

    def window(self, credit: int | None) -> Window:
        """Return a queue's window: `credit` bytes in flight, or a measured number of bytes for None."""
        return Window(self._operations, credit or 0)

    def pending(self) -> int:
        """Return the number of calls that have not ended."""
        return len(self._calls) + len(self._running)

    def submit(
        self,
        run: Callable[[], Result],
        turns: Turns,
        start: int,
        stop: int,
        *,
        changes: bool,
        window: Window | None = None,
        priority: int = 0,
    ) -> Future[Result]:
        """Return the future of a Python call on the elements `start` to `stop`. It begins in its turn."""
        window = self._calls_window if window is None else window
        call = _AsyncCall(self, turns, window, lambda _: run(), None, None)
        itemsize = turns.itemsize

        def begin() -> None:
            self._operations.submit_call(
                window, start * itemsize, (stop - start) * itemsize, turns.key, priority, call.tag, call.status,
                changes=changes,
            )  # fmt: skip

        self._enter(call, begin)
        return call.future

    def transfer(
        self,
        request: Request,
        handle: BufferHandle,
        turns: Turns,
        go_on: Callable[[Outcome | None], Any],
        timeout_ms: int,
        *,
        result: Any,
        keeps: object,
        window: Window | None,
        priority: int,
    ) -> Future[Any] | None:
        """Return the future of an operation of the engine, or None if only a blocking call can do the request.

        The future's result is `result`; if the operation fails, it is what `go_on` returns for the outcome.
        """
        window = self._window if window is None else window
        call = _AsyncCall(self, turns, window, go_on, result, (handle, request, keeps))

        def begin() -> None:
            self._operations.submit(window, handle, request, timeout_ms, turns.key, priority, call.tag, call.status)

        try:
            self._enter(call, begin)
        except EngineError as error:
            if error.status is Status.INVALID:
                return None
            raise
        return call.future

    def _enter(self, call: _AsyncCall, begin: Callable[[], None]) -> None:
        """Submit a call.

        If this raises (a signal handler may raise in here, too), `call.entered` says whether the engine has the call.
        If it has not, no trace of the call is left.
        """
        here.last = call
        try:
            self._register(call)
            begin()
        except BaseException as error:
            if not call.entered:
                self._forget(call)
            if not isinstance(error, EngineError):
                raise
            if error.status is Status.DISCONNECTED:
                raise UnavailableError(_CLOSED) from error
            if error.status is Status.BUSY:
                raise Error("too many async calls are in progress; wait for some of their futures first") from error
            raise

    def _register(self, call: _AsyncCall) -> None:
        with self._lock:
            if self._closed:
                raise UnavailableError(_CLOSED)
            if call.window.closed:
                raise UnavailableError(_QUEUE_CLOSED)
            call.turns.quiet.open = False
            call.turns.tags.add(call.tag)
            self._calls[call.tag] = call
            if self._watching is None:
                try:
                    self._start_watch()
                except RuntimeError as error:
                    raise Error(f"cannot start a thread for async calls ({error}); nothing was done") from error

    def _forget(self, call: _AsyncCall) -> None:
        with self._lock:
            self._calls.pop(call.tag, None)
            self._leave(call)
        call.future.end_cancelled()  # a queue that was closed in the meantime may wait for this future

    def _start_watch(self) -> None:
        watching = threading.Event()
        if not self._submit(self._watch, watching):
            watching = threading.Event()
            threading.Thread(target=self._watch, args=(watching,), name="smb-async").start()
        self._watching = watching

    def _submit(self, call: Callable[..., None], *arguments: object) -> bool:
        """Run `call` on a thread of the executor. False if no thread can be started, e.g. at the process's exit.

        The caller holds the lock. An executor that cannot start a thread has queued the task all the same: its next
        thread would run the task, and would count as idle ever after. So the executor is replaced; the old one ends
        with its running tasks.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_RUNNING_MAX + 1, "smb-async", _enter)
        try:
            self._executor.submit(call, *arguments)
        except RuntimeError:
            self._executor.shutdown(wait=False)
            self._executor = None
            return False
        return True

    def _leave(self, call: _AsyncCall) -> None:
        """Note that the engine no longer orders this call. The caller holds the lock."""
        call.turns.tags.discard(call.tag)
        call.turns.quiet.open = not call.turns.tags

    def withdraw(self, tag: int) -> bool:
        """Return True if the engine had not begun the call, and will not begin it any more."""
        if not self._operations.cancel(tag):
            return False
        with self._lock:
            self._leave(self._calls.pop(tag))
        return True

    def end(self, window: Window, *, cancel: bool) -> None:
        """Refuse further calls of a queue and wait for its calls. With `cancel`, drop those that have not begun."""
        with self._lock:
            window.closed = True
            futures = [call.future for call in (*self._calls.values(), *self._running) if call.window is window]
        left = [future for future in futures if not (cancel and future.cancel())]
        if not here.inside:
            wait_for(left)

    def wait(self, turns: Turns, start: int, stop: int, asked: str, timeout: float, *, changes: bool) -> None:
        """Block until this client's earlier async calls on the same elements have ended. Raises TimeoutError.

        Returns at once inside an async call or a callback of its future: the calls to wait for may need this thread.
        """
        if not turns.tags or here.inside:
            return
        end = time.monotonic() + timeout
        waited = turns.key, start * turns.itemsize, (stop - start) * turns.itemsize
        left, last = timeout, self._operations.no_last()
        while not self._operations.wait(*waited, max(0, round(1000 * min(left, _LOOK_S))), last, changes=changes):
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"{asked}: an earlier async call of this client on the same elements has not ended within "
                    f"{timeout:g} s; nothing was applied; wait for its future first"
                )

    def stop(self) -> None:
        """Cancel the calls that have not begun, and refuse new ones."""
        with self._lock:
            self._closed = True
        self._operations.stop()

    def close(self) -> None:
        """Wait until the calls that had begun have ended. The caller has stopped new calls and failed the requests in
        flight.

        Inside an async call, or a callback of its future, this does not wait: the thread itself runs one of those
        calls.
        """
        if here.inside:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
            return
        watching = self._watching
        if watching is not None:
            watching.wait()
        if self._executor is not None:
            self._executor.shutdown()
        if self._running:
            wait_for([call.future for call in list(self._running)])  # calls on an executor that was replaced

    def _watch(self, watching: threading.Event) -> None:
        """Complete the futures of the engine's events until no call is left.

        Only one watch runs at a time. A watch that is not the current one (its start was reported as failed) returns at
        once.
        """
        _enter()
        with self._lock:
            if self._watching is not watching:
                return
        while True:
            self._operations.await_event(_WATCH_MS if self._calls else _LINGER_MS)
            taken = self._operations.take()
            with self._lock:
                if not taken and not self._calls:
                    self._watching = None
                    watching.set()
                    return
                events = [(self._take(one), one) for one in taken]
            for call, one in events:
                try:
                    if one.kind == AsyncEventKind.DONE:
                        call.future.set_result(call.result)
                    else:
                        self._hand_over(call, one)
                except BaseException:  # noqa: BLE001 - e.g. sys.exit() in a callback: it must not end this thread
                    _log.exception("a callback of an async call's future raised")
            events = taken = call = one = None  # type: ignore[assignment]  # the futures own these objects now

    def _take(self, one: AsyncEvent) -> _AsyncCall:
        """Remove a call that has an event from the engine's calls. The caller holds the lock."""
        call = self._calls.pop(one.tag)
        if one.kind == AsyncEventKind.DONE:
            self._leave(call)
        else:
            self._running.add(call)
        return call

    def _hand_over(self, call: _AsyncCall, one: AsyncEvent) -> None:
        if one.kind == AsyncEventKind.CANCELLED:
            self._end(call, one)
            call.future.end_cancelled()
            return
        with self._lock:
            taken = self._submit(self._run, call, one)
        if not taken:
            self._run(call, one)  # no thread was available: the watch runs the call itself

    def _run(self, call: _AsyncCall, one: AsyncEvent) -> None:
        with self._lock:
            if call.begun:
                return
            call.begun = True
        call.future.set_running_or_notify_cancel()
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.go_on(one.outcome)
        except BaseException as raised:  # noqa: BLE001 - the future raises it
            error = raised
        # End the call before its future completes: a thread that sees the future done need not wait for its turn.
        self._end(call, one)
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
        del call, one, error  # the traceback in `error` refers to this frame

    def _end(self, call: _AsyncCall, one: AsyncEvent) -> None:
        self._operations.end(one.operation)
        with self._lock:
            self._running.discard(call)
            self._leave(call)


def _enter() -> None:
    here.inside = True
