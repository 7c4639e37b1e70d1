"""A client's async calls: the engine's operations, and calls that only Python can make, in one order.

The engine (csrc/client/async.h) keeps the order, the priorities and the windows, and carries out reads, writes and
additions on a thread of its own. Everything else, and what the engine could not finish, is a call of Python's. The
engine says when it is its turn, and it runs on a thread of the executor. One more of those threads, the watch, takes
what the engine tells and completes the futures, many at a time. It runs only while there are calls.

Threads: `_lock` guards which calls are left and whether there is a watch. It is held for no call of the engine, which
would hand Python's lock over, and no future is completed meanwhile.
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
    Switch,
    Window,
)
from smb.errors import (
    DeadlineError,
    Error,
    UnavailableError,
)

Result = TypeVar("Result")
_log = logging.getLogger("smb")

_RUNNING_MAX = 8  # calls of Python's at a time, each on a thread that is started when it is needed
_WATCH_MS = 1000  # so often the watch looks whether calls are left
_LINGER_MS = 5  # the watch's, after the last one: another may follow, and to start a watch takes as long as a call
_LOOK_S = 0.1  # so often a thread that waits for its turn looks for signals

_CLOSED = "the client is closed; call smb.connect again"
_QUEUE_CLOSED = "the queue was closed meanwhile; nothing was applied"

_tags = itertools.count(1)


class _Here(threading.local):
    """Of each thread."""

    inside = False  # it runs async calls, and must not wait for others of them
    last: _Call | None = None  # the async call that it made last, while that call's method has not returned

    def future(self) -> Future[Any] | None:
        """Return the future of `last`; None if the engine has no such call."""
        return self.last.future if self.last is not None and self.last.entered else None


here = _Here()


class Turns:
    """The order of a buffer's async calls. `quiet` is open while there are none: then nobody need ask."""

    __slots__ = ("__weakref__", "itemsize", "key", "quiet", "tags")

    def __init__(self, key: int = 0, itemsize: int = 1) -> None:
        """key: the engine's for the buffer, 0 for calls in no order."""
        self.key, self.itemsize = key, itemsize
        self.quiet = Switch()
        self.quiet.open = True
        self.tags: set[int] = set()  # of the calls that have not ended


class _Future(Future[Any]):
    """Of a call that the engine may begin at any time: only the engine knows whether it can be cancelled still."""

    def __init__(self, calls: AsyncCalls, tag: int) -> None:
        super().__init__()
        self._condition = condition()  # of who waits for it, and of the thread that ends it
        self._calls, self._tag = calls, tag

    def cancel(self) -> bool:
        if self.cancelled():
            return True
        if not self._calls.withdraw(self._tag):
            return False
        self.end_cancelled()
        return True

    def end_cancelled(self) -> None:
        """Tell those who wait that it was cancelled."""
        super().cancel()
        self.set_running_or_notify_cancel()


class _Call:
    """An async call that has not ended. `go_on` does it: in its turn, or with the outcome with which the engine has
    failed. `result` is the future's if the engine succeeds.
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
        self.keeps = keeps  # what the engine uses
        self.future = _Future(calls, self.tag)
        self.begun = False  # by a thread
        self.status: list[int] = []  # of its submission; empty before that

    @property
    def entered(self) -> bool:
        """Whether the engine has taken it."""
        return Status.OK in self.status


class AsyncCalls:
    def __init__(self, operations: AsyncOperations) -> None:
        self._operations = operations
        self._calls_window = Window(operations, _RUNNING_MAX, counts_calls=True)
        self._window = Window(operations, 0)  # of what no queue has asked for
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._watching: threading.Event | None = None  # the watch that there is; set at its end
        self._calls: dict[int, _Call] = {}  # of the engine, by tag
        self._running: set[_Call] = set()  # on the executor

    def window(self, credit: int | None) -> Window:
        """Return a queue's window, of so many bytes in flight; None: measured."""
        return Window(self._operations, credit or 0)

    def pending(self) -> int:
        """How many have not ended."""
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
        """Return the future of a call of Python's on the elements start to stop; it begins when it is its turn."""
        window = self._calls_window if window is None else window
        call = _Call(self, turns, window, lambda _: run(), None, None)
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
        """Return the future of the engine's operation: `result`, or what `go_on` does with the outcome if it fails.
        None if the engine leaves it to blocking calls.
        """
        window = self._window if window is None else window
        call = _Call(self, turns, window, go_on, result, (handle, request, keeps))

        def begin() -> None:
            self._operations.submit(window, handle, request, timeout_ms, turns.key, priority, call.tag, call.status)

        try:
            self._enter(call, begin)
        except EngineError as error:
            if error.status is Status.INVALID:
                return None
            raise
        return call.future

    def _enter(self, call: _Call, begin: Callable[[], None]) -> None:
        """Submit a call. If this raises, also what a signal's handler raised in here, `call.entered` says whether the
        engine has the call; where it has not, nothing is left of it.
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
                raise Error("too many async calls have not ended; wait for some of their futures first") from error
            raise

    def _register(self, call: _Call) -> None:
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
                    raise Error(f"{error}: nobody would tell of the end of async calls; nothing was done") from error

    def _forget(self, call: _Call) -> None:
        with self._lock:
            self._calls.pop(call.tag, None)
            self._leave(call)
        call.future.end_cancelled()  # a queue that was closed meanwhile may wait for it

    def _start_watch(self) -> None:
        watching = threading.Event()
        if not self._submit(self._watch, watching):
            watching = threading.Event()
            threading.Thread(target=self._watch, args=(watching,), name="smb-async").start()
        self._watching = watching

    def _submit(self, call: Callable[..., None], *arguments: object) -> bool:
        """Have a thread do it. False: none can be had, as at the process's end. With the lock held.

        The executor has taken it all the same. Its next thread would do it, and be taken for a free one ever after. So
        that executor goes: it ends with what its threads do.
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

    def _leave(self, call: _Call) -> None:
        """It is not in the engine's order any more; with the lock held."""
        call.turns.tags.discard(call.tag)
        call.turns.quiet.open = not call.turns.tags

    def withdraw(self, tag: int) -> bool:
        """Whether the engine had not begun a call, and does not any more."""
        if not self._operations.cancel(tag):
            return False
        with self._lock:
            self._leave(self._calls.pop(tag))
        return True

    def end(self, window: Window, *, cancel: bool) -> None:
        """Take no more calls of a queue, and wait for its calls; `cancel` those that have not begun."""
        with self._lock:
            window.closed = True
            futures = [call.future for call in (*self._calls.values(), *self._running) if call.window is window]
        left = [future for future in futures if not (cancel and future.cancel())]
        if not here.inside:
            wait_for(left)

    def wait(self, turns: Turns, start: int, stop: int, asked: str, timeout: float, *, changes: bool) -> None:
        """Block until the async calls that were made before one on these elements have ended. Raises TimeoutError.

        Inside an async call, or a callback of its future, it returns at once: what it would wait for may need this
        thread.
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
        """Cancel what has not begun, and refuse more."""
        with self._lock:
            self._closed = True
        self._operations.stop()

    def close(self) -> None:
        """Wait until what had begun has ended. The caller has stopped it, and failed what is on its way.

        Inside an async call, or a callback of its future, it does not wait: this thread is one of those.
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
            wait_for([call.future for call in list(self._running)])  # on an executor that has gone

    def _watch(self, watching: threading.Event) -> None:
        """Complete the futures of what the engine has done, until no call is left. One at a time: who is not the one
        that there is, as its start had failed, does nothing."""
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
                except BaseException:  # noqa: BLE001 - a callback's sys.exit(), say: it must not end this thread
                    _log.exception("a callback of an async call's future")
            events = taken = call = one = None  # type: ignore[assignment]  # what they hold is the futures' now

    def _take(self, one: AsyncEvent) -> _Call:
        """Take a call of which there is an event out of the engine's; with the lock held."""
        call = self._calls.pop(one.tag)
        if one.kind == AsyncEventKind.DONE:
            self._leave(call)
        else:
            self._running.add(call)
        return call

    def _hand_over(self, call: _Call, one: AsyncEvent) -> None:
        if one.kind == AsyncEventKind.CANCELLED:
            self._end(call, one)
            call.future.end_cancelled()
            return
        with self._lock:
            taken = self._submit(self._run, call, one)
        if not taken:
            self._run(call, one)  # before a thread of that executor

    def _run(self, call: _Call, one: AsyncEvent) -> None:
        with self._lock:
            if call.begun:
                return
            call.begun = True
        call.future.set_running_or_notify_cancel()
        result: Any = None
        error: BaseException | None = None
        try:
            result = call.go_on(one.outcome)
        except BaseException as raised:  # noqa: BLE001 - the future's to raise
            error = raised
        # Before its future is done: a thread that learns of the end by the future need not wait any more.
        self._end(call, one)
        if error is not None:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)
        del call, one, error  # the traceback of the one refers to this frame

    def _end(self, call: _Call, one: AsyncEvent) -> None:
        self._operations.end(one.operation)
        with self._lock:
            self._running.discard(call)
            self._leave(call)


def _enter() -> None:
    here.inside = True
