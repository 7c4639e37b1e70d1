"""A client's async operations in the engine: their order, their windows, the thread that carries them out."""

from __future__ import annotations

from enum import IntEnum
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias

from smb._engine import ffi, lib
from smb.engine.buffers import BufferHandle
from smb.engine.calls import NOWHERE, Outcome, Request, outcome_of, raw_request
from smb.engine.enums import Opcode, check
from smb.engine.links import EngineClient

Operation: TypeAlias = Any

_TAKEN_MAX = 64


class AsyncEventKind(IntEnum):
    """An operation has come so far."""

    DONE = lib.SMB_ASYNC_DONE  # it is no more
    FAILED = lib.SMB_ASYNC_FAILED  # its turn lasts until end()
    BEGIN = lib.SMB_ASYNC_BEGIN  # a call of the caller's, likewise
    CANCELLED = lib.SMB_ASYNC_CANCELLED  # it had not begun; end() it


class AsyncEvent(NamedTuple):
    """How far the operation of a tag has come; its outcome if it failed. `operation` is to be ended, unless DONE."""

    tag: int
    operation: Operation
    kind: AsyncEventKind
    outcome: Outcome | None


class AsyncOperations:
    """The async operations of one client; csrc/client/async.h. One thread takes the events."""

    def __init__(self, client: EngineClient) -> None:
        made = ffi.new("struct smb_async **")
        check(lib.smb_async_create(client.pointer, made))
        self.pointer = ffi.gc(made[0], lib.smb_async_destroy)
        self._events = ffi.new("struct smb_async_event[]", _TAKEN_MAX)

    def submit(
        self,
        window: Window,
        handle: BufferHandle,
        request: Request,
        timeout_ms: int,
        key: int,
        priority: int,
        tag: int,
        status: list[int],
    ) -> None:
        """Begin a read, write or addition in its turn; its memory, handle and window stay until its last event, at most
        timeout_ms for each part after it began. EngineError INVALID where smb_transfer is to do or refuse it,
        DISCONNECTED once stopped, BUSY if there are too many. Its events have its tag. Appends the engine's status to
        `status`, also if a signal's handler raises before this function returns.
        """
        raw = raw_request(request, timeout_ms)
        self._submit(status, window.pointer, handle.pointer, raw, key, priority, tag)

    def submit_call(
        self,
        window: Window,
        offset: int,
        nbytes: int,
        key: int,
        priority: int,
        tag: int,
        status: list[int],
        *,
        changes: bool,
    ) -> None:
        """Have an event BEGIN for a call of the caller's, in its turn. `status`: as `submit`."""
        raw = raw_request(Request(Opcode.WRITE if changes else Opcode.READ, offset, nbytes), 0)
        self._submit(status, window.pointer, NOWHERE, raw, key, priority, tag)

    def _submit(self, status: list[int], *arguments: Any) -> None:
        # The interpreter runs handlers between its steps. These are C functions that call each other: one step, so the
        # status is noted whenever the engine has the operation.
        status.extend(starmap(lib.smb_async_submit, ((self.pointer, *arguments),)))
        check(status[-1])

    def await_event(self, timeout_ms: int) -> None:
        """Wait until there is something to take, at most so long."""
        lib.smb_async_await_event(self.pointer, timeout_ms)

    def take(self) -> list[AsyncEvent]:
        """Return the events so far, some of them; does not block. One thread at a time."""
        events = self._events
        taken = []
        for index in range(lib.smb_async_take(self.pointer, events, _TAKEN_MAX)):
            one = events[index]
            what = one.what
            outcome = outcome_of(one.outcome) if what == AsyncEventKind.FAILED else None
            taken.append(AsyncEvent(one.tag, one.operation, what, outcome))
        return taken

    def end(self, operation: Operation) -> None:
        """Its turn is over: one that was taken, but not as DONE."""
        lib.smb_async_end(self.pointer, operation)

    def cancel(self, tag: int) -> bool:
        """Whether the operation of that tag had not begun, and is no more."""
        return bool(lib.smb_async_cancel(self.pointer, tag))

    def wait(self, key: int, offset: int, nbytes: int, timeout_ms: int, last: Any, *, changes: bool) -> bool:
        """Wait until no earlier operation conflicts with a call on that range; False after timeout_ms. `last` is a new
        one of `no_last`; who waits again with it waits for the same operations.
        """
        return int(lib.smb_async_wait(self.pointer, key, offset, nbytes, changes, timeout_ms, last)) == 0

    @staticmethod
    def no_last() -> Any:
        """Return what `wait` notes in which operations it waits for."""
        return ffi.new("uint64_t *")

    def stop(self) -> None:
        """Cancel what has not begun; nothing is submitted any more."""
        lib.smb_async_stop(self.pointer)


class Window:
    """How many bytes of its operations may be in flight."""

    def __init__(self, operations: AsyncOperations, credit: int, *, counts_calls: bool = False) -> None:
        """credit: bytes, 0 for measured; with counts_calls a number of operations."""
        made = ffi.new("struct smb_window **")
        check(lib.smb_window_create(operations.pointer, credit, counts_calls, made))
        self.pointer = ffi.gc(made[0], lib.smb_window_destroy)
        self.closed = False  # no operation is to be submitted any more; AsyncCalls sees to that

    def credit(self) -> int:
        return int(lib.smb_window_credit(self.pointer))
