"""The order of a client's async calls: those on overlapping elements take effect as they were made.

Invariant: of two calls on one buffer that are in `Turns.calls` and conflict, the later waits for the earlier. Calls
conflict where their ranges overlap and one of them changes the buffer. Threads: `AsyncCalls._changed` guards everything
here; calls themselves run without it, on the executor's threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any, TypeVar

from smb.engine import Switch
from smb.errors import (
    TimeoutError,  # noqa: A004 - the contract's name
    UnavailableError,
)

Result = TypeVar("Result")

_RUNNING_MAX = 8  # threads, started as they are needed; further calls wait for one
_CREDIT = 16 << 20  # bytes in flight where nobody says

_here = threading.local()  # `inside`: this thread runs async calls, and must not wait for others of them


class _Call:
    """An async call that has not ended, on elements start to stop."""

    __slots__ = (
        "changes", "followers", "future", "nbytes", "number", "priority", "run", "start", "stop", "turns", "waits_for",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        turns: Turns,
        start: int,
        stop: int,
        changes: bool,
        run: Callable[[], Any],
        future: Future[Any],
        window: Window | None,
        nbytes: int,
    ) -> None:
        self.turns = turns
        self.start, self.stop, self.changes = start, stop, changes
        self.run = run
        self.future = future
        self.window, self.nbytes = window, nbytes
        self.priority = self.number = 0
        self.waits_for = 0  # earlier calls
        self.followers: list[_Call] = []


class Window:
    """How many bytes of a queue's calls may be in flight; a larger call is alone. `AsyncCalls._changed` guards it."""

    def __init__(self, credit: int | None) -> None:
        self.credit = _CREDIT if credit is None else credit
        self.in_flight = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether a call of so many bytes may begin."""
        return self.in_flight == 0 or self.in_flight + nbytes <= self.credit


class Turns:
    """A buffer's async calls that have not ended. `quiet` is open while there are none: then nobody need ask."""

    __slots__ = ("__weakref__", "calls", "quiet")

    def __init__(self) -> None:
        self.quiet = Switch()
        self.quiet.open = True
        self.calls: dict[_Call, None] = {}  # in the order in which they were made

    def before(self, start: int, stop: int, changes: bool) -> list[_Call]:
        """Return the calls that one on these elements comes after: the last ones of each chain are enough."""
        found = []
        for call in reversed(self.calls):
            if call.start < stop and start < call.stop and (changes or call.changes):
                found.append(call)
                if call.changes and call.start <= start and stop <= call.stop:
                    break  # which itself comes after all that is left
        return found


class AsyncCalls:
    """Runs one client's async calls, on threads that start with the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._calls: set[_Call] = set()
        self._ready: list[tuple[int, int, _Call]] = []  # a heap of those whose turn it is, the most urgent first
        self._running = self._made = 0

    def pending(self) -> int:
        """How many have not ended."""
        return len(self._calls)

    def submit(
        self,
        run: Callable[[], Result],
        turns: Turns,
        start: int,
        stop: int,
        *,
        changes: bool,
        priority: int = 0,
        window: Window | None = None,
        nbytes: int = 0,
    ) -> Future[Result]:
        """Return the future of a call on the elements start to stop; it begins when it is its turn and the window has
        room for its bytes. Of those that may begin the one with the largest priority does, or the first made.
        """
        future: Future[Result] = Future()
        call = _Call(turns, start, stop, changes, run, future, window, nbytes)
        with self._changed:
            if self._closed:
                raise UnavailableError("the client is closed; call smb.connect again")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_RUNNING_MAX, "smb-async", _enter)
            self._made += 1
            call.priority, call.number = priority, self._made
            earlier = turns.before(start, stop, changes)
            turns.calls[call] = None
            turns.quiet.open = False
            self._calls.add(call)
            call.waits_for = len(earlier)
            for other in earlier:
                other.followers.append(call)
            self._hurry(call)
            if not earlier:
                heappush(self._ready, (-priority, call.number, call))
                self._begin()
        return future

    def _hurry(self, later: _Call) -> None:
        """Give those that a call waits for its priority. With the lock held."""
        hurried = [later]
        for call in reversed(later.turns.calls):
            if call.priority < later.priority and any(_conflict(call, other) for other in hurried):
                call.priority = later.priority
                hurried.append(call)
                if call.waits_for == 0:  # the heap's older entry for it is passed over
                    heappush(self._ready, (-call.priority, call.number, call))

    def _begin(self) -> list[_Call]:
        """Begin what may; with the lock held. Return those for which no thread can be had, as at the process's end."""
        left: list[_Call] = []
        waiting = []
        full: set[Window] = set()
        while self._ready and self._running < _RUNNING_MAX and self._executor is not None:
            entry = heappop(self._ready)
            call = entry[2]
            if call not in self._calls or call.waits_for < 0 or -entry[0] != call.priority:
                continue  # begun, or entered anew
            window = call.window
            if window is not None and (window in full or not window.has_room(call.nbytes)):
                full.add(window)
                waiting.append(entry)
                continue
            call.waits_for = -1
            self._running += 1
            if window is not None:
                window.in_flight += call.nbytes
            try:
                self._executor.submit(self._run, call)
            except RuntimeError:
                left.append(call)
        for entry in waiting:
            heappush(self._ready, entry)
        return left

    def cancel(self, window: Window) -> list[Future[Any]]:
        """Cancel a queue's calls that have not begun; return the futures of the others."""
        with self._changed:
            futures = [call.future for call in self._calls if call.window is window]
        return [future for future in futures if not future.cancel()]

    def wait(self, turns: Turns, start: int, stop: int, asked: str, timeout: float, *, changes: bool) -> None:
        """Block until the async calls that were made before one on these elements have ended. Raises TimeoutError.

        Inside an async call, or a callback of its future, it returns at once: what it would wait for may need this
        thread.
        """
        if getattr(_here, "inside", False):
            return
        end = time.monotonic() + timeout
        with self._changed:
            earlier = turns.before(start, stop, changes)
            while any(call in self._calls for call in earlier):
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{asked}: an earlier async call of this client on the same elements has not ended within "
                        f"{timeout:g} s; nothing was applied; wait for its future first"
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """Cancel what has not begun, and wait until the rest has ended. The caller has failed the rest."""
        with self._changed:
            self._closed = True
            held = [call for call in self._calls if call.waits_for >= 0]
            executor = self._executor
        for call in held:
            if call.future.cancel():
                call.future.set_running_or_notify_cancel()
            self._end(call)
        if executor is not None:
            for call in list(self._calls):
                call.future.cancel()
            executor.shutdown()

    def _run(self, call: _Call) -> None:
        calls = [call]
        while calls:
            calls += self._run_one(calls.pop(0))

    def _run_one(self, call: _Call) -> list[_Call]:
        """Run it; return those whose turn it is now, and for which no thread can be had."""
        result: Any = None
        error: BaseException | None = None
        begun = call.future.set_running_or_notify_cancel()
        if begun:
            try:
                result = call.run()
            except BaseException as raised:  # noqa: BLE001 - the future's to raise
                error = raised
        left = self._end(
            call
        )  # before its future is done: a thread that learns of the end by the future need not wait any more
        if error is not None:
            call.future.set_exception(error)
        elif begun:
            call.future.set_result(result)
        del call, error  # the traceback of the one refers to this frame
        return left

    def _end(self, call: _Call) -> list[_Call]:
        """Begin those that come next; return those for which no thread can be had."""
        with self._changed:
            if call.waits_for < 0:
                self._running -= 1
                if call.window is not None:
                    call.window.in_flight -= call.nbytes
            self._calls.discard(call)
            call.turns.calls.pop(call, None)
            call.turns.quiet.open = not call.turns.calls
            for follower in call.followers:
                follower.waits_for -= 1
                if follower.waits_for == 0:
                    heappush(self._ready, (-follower.priority, follower.number, follower))
            call.followers = []
            left = [] if self._closed else self._begin()
            self._changed.notify_all()
        return left


def _conflict(a: _Call, b: _Call) -> bool:
    return a.start < b.stop and b.start < a.stop and (a.changes or b.changes)


def _enter() -> None:
    _here.inside = True
