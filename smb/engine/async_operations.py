"""A client's async operations in the engine: their order, their windows, and the thread that does them."""

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
    """What has happened to an operation."""

    DONE = lib.SMB_ASYNC_DONE  # the operation has ended and is removed
    FAILED = lib.SMB_ASYNC_FAILED  # the operation's turn lasts until end()
    BEGIN = lib.SMB_ASYNC_BEGIN  # the turn of a call of the caller's has begun; it lasts until end()
    CANCELLED = lib.SMB_ASYNC_CANCELLED  # the operation had not begun; call end()


class AsyncEvent(NamedTuple):
    """An event of the operation with this tag, with its outcome if it failed. The receiver ends `operation`, unless
    DONE.
    """

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
        """Submit a read, write or addition, which begins in its turn.

        Its memory, handle and window must stay until its last event. Each part of it takes at most timeout_ms after it
        began. Its events have its tag. Raises EngineError: INVALID if smb_transfer has to do or refuse the request,
        DISCONNECTED after stop(), BUSY if there are too many operations. Appends the engine's status to `status`, even
        if a signal handler raises before this function returns.
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
        """Submit a call of the caller's: an event BEGIN comes when its turn has come. `status` is as for `submit`."""
        raw = raw_request(Request(Opcode.WRITE if changes else Opcode.READ, offset, nbytes), 0)
        self._submit(status, window.pointer, NOWHERE, raw, key, priority, tag)

    def _submit(self, status: list[int], *arguments: Any) -> None:
        # The interpreter runs signal handlers between its steps. C functions that call each other are one step, so the
        # status is recorded whenever the engine has the operation.
        status.extend(starmap(lib.smb_async_submit, ((self.pointer, *arguments),)))
        check(status[-1])

    def await_event(self, timeout_ms: int) -> None:
        """Wait until there is an event to take, at most timeout_ms."""
        lib.smb_async_await_event(self.pointer, timeout_ms)

    def take(self) -> list[AsyncEvent]:
        """Return events that have arrived, at most _TAKEN_MAX; does not block. One thread at a time."""
        events = self._events
        taken = []
        for index in range(lib.smb_async_take(self.pointer, events, _TAKEN_MAX)):
            one = events[index]
            what = one.what
            outcome = outcome_of(one.outcome) if what == AsyncEventKind.FAILED else None
            taken.append(AsyncEvent(one.tag, one.operation, what, outcome))
        return taken

    def end(self, operation: Operation) -> None:
        """End the turn of an operation whose event was taken, unless that was DONE."""
        lib.smb_async_end(self.pointer, operation)

    def cancel(self, tag: int) -> bool:
        """Return True if the operation of that tag had not begun, and is removed now."""
        return bool(lib.smb_async_cancel(self.pointer, tag))

    def wait(self, key: int, offset: int, nbytes: int, timeout_ms: int, last: Any, *, changes: bool) -> bool:
        """Wait until no earlier operation conflicts with a call on that range; False after timeout_ms.

        `last` is a new value of `no_last`. A repeated wait with the same value waits for the same operations.
        """
        return int(lib.smb_async_wait(self.pointer, key, offset, nbytes, changes, timeout_ms, last)) == 0

    @staticmethod
    def no_last() -> Any:
        """Return a value in which `wait` stores the operations that it waits for."""
        return ffi.new("uint64_t *")

    def stop(self) -> None:
        """Cancel the operations that have not begun, and refuse new ones."""
        lib.smb_async_stop(self.pointer)


class Window:
    """The limit of the bytes that its operations have in flight."""

    def __init__(self, operations: AsyncOperations, credit: int, *, counts_calls: bool = False) -> None:
        """`credit` is in bytes, 0 for a measured value; with counts_calls it is a number of operations."""
        made = ffi.new("struct smb_window **")
        check(lib.smb_window_create(operations.pointer, credit, counts_calls, made))
        self.pointer = ffi.gc(made[0], lib.smb_window_destroy)
        self.closed = False  # no operation may be submitted any more; AsyncCalls checks this

    def credit(self) -> int:
        return int(lib.smb_window_credit(self.pointer))
