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
    FAILED = lib.SMB_ASYNC_FAILED  # the caller may finish the operation by other means; its turn lasts until end()
    BEGIN = lib.SMB_ASYNC_BEGIN  # the turn of a submit_call() has begun; it lasts until end()
    CANCELLED = lib.SMB_ASYNC_CANCELLED  # stop() came before the operation had begun; call end()


class AsyncEvent(NamedTuple):
    """An event of the operation with this tag. `outcome` is set if the operation failed. Unless `kind` is DONE, the
    receiver calls end(operation).
    """

    tag: int
    operation: Operation
    kind: AsyncEventKind
    outcome: Outcome | None


class AsyncOperations:
    """The async operations of one client; csrc/async/async.h. One thread takes the events."""

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
        """Submit a read, write or addition. It begins once no earlier operation conflicts with it.

        The caller keeps the request's memory, `handle` and `window` alive until the operation has ended: its event is
        DONE, or end() or cancel() was called. The operation runs in parts; each part may take at most `timeout_ms` from
        its own begin. `key` is the buffer's number. Operations of a larger `priority` go first. Events about the
        operation have `tag`.

        Raises EngineError: INVALID if the request can't run asynchronously (call smb_transfer, which does or refuses
        it), DISCONNECTED after stop(), BUSY if there are too many operations. Appends the engine's status to `status`,
        even if a signal handler raises before this function returns.
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
        """Submit a call that the caller makes itself, when its event BEGIN arrives. The engine only orders it among the
        other operations, by its range of the buffer and by whether it `changes` that range. `status` is as in submit.
        """
        raw = raw_request(Request(Opcode.WRITE if changes else Opcode.READ, offset, nbytes), 0)
        self._submit(status, window.pointer, NOWHERE, raw, key, priority, tag)

    def _submit(self, status: list[int], *arguments: Any) -> None:
        # A signal handler may run between two steps of the interpreter. The C functions below call each other in one
        # step, so whenever the engine has accepted the operation, its status is in `status`.
        status.extend(starmap(lib.smb_async_submit, ((self.pointer, *arguments),)))
        check(status[-1])

    def await_event(self, timeout_ms: int) -> None:
        """Wait until there is an event to take, at most timeout_ms."""
        lib.smb_async_await_event(self.pointer, timeout_ms)

    def take(self) -> list[AsyncEvent]:
        """Return events that have arrived, at most _TAKEN_MAX. Does not block. Only one thread may call this."""
        events = self._events
        taken = []
        for index in range(lib.smb_async_take(self.pointer, events, _TAKEN_MAX)):
            one = events[index]
            what = one.what
            outcome = outcome_of(one.outcome) if what == AsyncEventKind.FAILED else None
            taken.append(AsyncEvent(one.tag, one.operation, what, outcome))
        return taken

    def end(self, operation: Operation) -> None:
        """End the turn of an operation whose event was taken. An operation with the event DONE has ended already."""
        lib.smb_async_end(self.pointer, operation)

    def cancel(self, tag: int) -> bool:
        """Remove the operation with that tag if it has not begun. Return True if it was removed."""
        return bool(lib.smb_async_cancel(self.pointer, tag))

    def wait(self, key: int, offset: int, nbytes: int, timeout_ms: int, last: Any, *, changes: bool) -> bool:
        """Wait until no earlier operation conflicts with a call on that range. Return False after timeout_ms.

        `last` comes from no_last(). Pass the same value again to go on waiting for the same operations.
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
    """Limits how many bytes of its operations are in flight at once."""

    def __init__(self, operations: AsyncOperations, credit: int, *, counts_calls: bool = False) -> None:
        """`credit` is the limit in bytes; 0: the engine measures a good one. With `counts_calls` it is a number of
        operations.
        """
        made = ffi.new("struct smb_window **")
        check(lib.smb_window_create(operations.pointer, credit, counts_calls, made))
        self.pointer = ffi.gc(made[0], lib.smb_window_destroy)
        self.closed = False  # if True, AsyncCalls submits no further operation to this window

    def credit(self) -> int:
        return int(lib.smb_window_credit(self.pointer))
