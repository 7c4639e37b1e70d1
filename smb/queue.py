"""A client's queue: async operations with priorities, and a window of bytes in flight."""

from __future__ import annotations

import operator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np

from smb.buffer import Buffer
from smb.call.session import Session
from smb.errors import InvalidArgumentError, UnavailableError
from smb.lock import Lock
from smb.spi import opened_by

Array = np.ndarray[Any, np.dtype[Any]]

CREDIT_MAX = 1 << 30  # bytes: more than the sockets and windows of a server and a client can use
PRIORITY_MAX = 2**31 - 1  # the limit in both directions


class Queue:
    """Async operations on a client's buffers, with priorities. Made by Client.queue.

    ```python
    with client.queue() as queue:
        future = queue.read(buffer, priority=1)
        queue.accumulate(other, gradient)
        values = future.result()
    ```

    The end of the `with` block waits for all operations; an exception closes the queue instead. At most `credit` bytes
    of operations are in flight. Of the waiting ones the one with the largest `priority` goes first, and of equal ones
    the earlier. Operations of one client on overlapping elements keep the order of the calls, also between queues,
    `*_async` and blocking calls (Buffer.read_async): an earlier one gets at least the priority of a later one that
    waits for it.

    Each call returns a future at once and does not block. The future raises what the blocking call would raise. Do not
    use arrays and `out` until it is done. Calls may come from any thread.
    """

    def __init__(self, session: Session, credit: int | None) -> None:
        if credit is not None:
            if isinstance(credit, bool) or not hasattr(credit, "__index__") or not 0 < credit <= CREDIT_MAX:
                raise InvalidArgumentError(
                    f"queue: credit must be a number of bytes from 1 to {CREDIT_MAX}, not {credit!r}"
                )
            credit = operator.index(credit)
        self._session = session
        self._window = session.calls.window(credit)

    @property
    def credit(self) -> int:
        """The number of bytes that may be in flight at present."""
        return self._window.credit()

    def read(
        self,
        buffer: Buffer,
        offset: int = 0,
        count: int | None = None,
        *,
        out: Any = None,
        wire: str | None = None,
        priority: int = 0,
    ) -> Future[Array]:
        """Start a Buffer.read and return a future.

        ```python
        with client.queue() as queue:
            future = queue.read(buffer, priority=1)
        values = future.result()
        ```
        """
        when = self._when(priority, "read")
        return self._of(buffer, "read")._read_later(offset, count, out=out, wire=wire, **when)

    def write(
        self,
        buffer: Buffer,
        array: Any,
        offset: int | None = None,
        *,
        wire: str | None = None,
        fence: Lock | None = None,
        priority: int = 0,
    ) -> Future[None]:
        """Start a Buffer.write and return a future.

        ```python
        with client.queue() as queue:
            queue.write(buffer, array, priority=1)
        ```
        """
        when = self._when(priority, "write")
        return self._of(buffer, "write")._write_later(array, offset, fence=fence, wire=wire, **when)

    def accumulate(
        self,
        buffer: Buffer,
        array: Any,
        offset: int | None = None,
        *,
        op: str = "sum",
        scale: float = 1.0,
        fetch: bool = False,
        out: Any = None,
        wire: str | None = None,
        fence: Lock | None = None,
        priority: int = 0,
    ) -> Future[Array | None]:
        """Start a Buffer.accumulate and return a future.

        ```python
        with client.queue() as queue:
            future = queue.accumulate(buffer, gradient, scale=-0.5, fetch=True)
        latest = future.result()
        ```
        """
        when = self._when(priority, "accumulate")
        return self._of(buffer, "accumulate")._accumulate_later(
            array, offset, op=op, scale=scale, fetch=fetch, out=out, fence=fence, wire=wire, **when
        )

    def close(self) -> None:
        """Cancel operations that have not begun, and wait for the others. A second call does nothing.

        ```python
        queue = client.queue()
        future = queue.read(buffer)
        queue.close()
        future.done()  # True: it has its result or was cancelled
        ```
        """
        self._session.calls.end(self._window, cancel=True)

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.calls.end(self._window, cancel=error is not None)

    def __repr__(self) -> str:
        return f"<smb.Queue of {self.credit} bytes{', closed' if self._window.closed else ''}>"

    def _of(self, buffer: Buffer, call: str) -> Buffer:
        if not isinstance(buffer, Buffer) or opened_by(buffer) is not self._session:
            raise InvalidArgumentError(
                f"{call} of a queue: the buffer must be one opened by the queue's client, not {buffer!r}"
            )
        if self._window.closed:
            raise UnavailableError(f"{call} of buffer {buffer.name!r}: the queue is closed; nothing was applied")
        return buffer

    def _when(self, priority: int, call: str) -> dict[str, Any]:
        if isinstance(priority, bool) or not isinstance(priority, int) or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
            raise InvalidArgumentError(
                f"{call} of a queue: priority must be an integer from -{PRIORITY_MAX} to {PRIORITY_MAX}, not "
                f"{priority!r}"
            )
        return {"priority": priority, "window": self._window}
