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
from typing import Any, TypeVar

from smb.engine import Switch
from smb.errors import (
    TimeoutError,  # noqa: A004 - the contract's name
    UnavailableError,
)

Result = TypeVar("Result")

_RUNNING_MAX = 8  # threads, started as they are needed; further calls wait for one

_here = threading.local()  # `inside`: this thread runs async calls, and must not wait for others of them


class _Call:
    """An async call that has not ended, on elements start to stop."""

    __slots__ = ("changes", "followers", "future", "run", "start", "stop", "turns", "waits_for")

    def __init__(
        self, turns: Turns, start: int, stop: int, changes: bool, run: Callable[[], Any], future: Future[Any]
    ) -> None:
        self.turns = turns
        self.start, self.stop, self.changes = start, stop, changes
        self.run = run
        self.future = future
        self.waits_for = 0  # earlier calls
        self.followers: list[_Call] = []


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

    def pending(self) -> int:
        """How many have not ended."""
        return len(self._calls)

    def submit(
        self, run: Callable[[], Result], turns: Turns, start: int, stop: int, *, changes: bool
    ) -> Future[Result]:
        """Return the future of a call on the elements start to stop; it begins when it is its turn."""
        future: Future[Result] = Future()
        call = _Call(turns, start, stop, changes, run, future)
        with self._changed:
            if self._closed:
                raise UnavailableError("the client is closed; call smb.connect again")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_RUNNING_MAX, "smb-async", _enter)
            earlier = turns.before(start, stop, changes)
            turns.calls[call] = None
            turns.quiet.open = False
            self._calls.add(call)
            call.waits_for = len(earlier)
            for other in earlier:
                other.followers.append(call)
            if not earlier:
                self._executor.submit(self._run, call)
        return future

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
            held = [call for call in self._calls if call.waits_for]
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
        """Begin those that come next; return those for which no thread can be had, as at the process's end."""
        left = []
        with self._changed:
            self._calls.discard(call)
            call.turns.calls.pop(call, None)
            call.turns.quiet.open = not call.turns.calls
            for follower in call.followers:
                follower.waits_for -= 1
                if follower.waits_for == 0 and not self._closed and self._executor is not None:
                    try:
                        self._executor.submit(self._run, follower)
                    except RuntimeError:
                        left.append(follower)
            call.followers = []
            self._changed.notify_all()
        return left


def _enter() -> None:
    _here.inside = True
