"""One addition at a time to a buffer, made in a thread of the client's while the caller computes, counted exactly once.

What is sent is in one of two states, and only finish() moves it: a *call* in flight (or failed, and not looked into
yet), or *left*, ranges of which it is known that they were not applied. A call's future is kept until what became of it
is known, so that an error, or Ctrl-C while waiting, makes no range count twice or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error, InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    from smb.train.scheme import Values

_log = logging.getLogger("smb")


class Contribution:
    """A worker's additions to one float32 buffer: start() sends one, finish() waits for it. For one thread at a time.

    `arrived` is called in the background once all of a contribution was acknowledged; what it raises is logged.
    """

    def __init__(self, buffer: Buffer, arrived: Callable[[], object] | None = None) -> None:
        self._buffer = buffer
        self._arrived = arrived
        self._array: Values = np.empty(0, np.float32)
        self._call: tuple[range, Future[None]] | None = None
        self._left: list[range] = []

    @property
    def under_way(self) -> bool:
        """Whether something was started that finish() has not seen the end of."""
        return self._call is not None or bool(self._left)

    def start(self, array: Values) -> None:
        """Begin to add the array, float32 (n,) with n the buffer's size, and return at once.

        Leave the array alone until finish() has returned. Raises InvalidArgumentError where the one before is not
        finished.
        """
        if self.under_way:
            raise InvalidArgumentError(
                f"a contribution to buffer {self._buffer.name!r}: the one before is not finished; call finish() first"
            )
        self._array = array
        self._left = [range(array.size)]
        self._send()

    def finish(self) -> None:
        """Wait until what was started is acknowledged, each element once. Blocks. Does nothing where nothing was.

        A call that failed is settled, and what it missed is sent again, once. Where that fails too the error is raised
        (TimeoutError, UnavailableError, NotFoundError, ...), and the rest stays: finish() again goes on from there, and
        still counts each element once.
        """
        repeated = False
        while self.under_way:
            if self._call is None:
                self._send()
                repeated = True
            assert self._call is not None
            part, future = self._call
            error = _wait(future)
            if error is not None:
                self._left[:0] = missed(self._buffer, part, error)
            self._call = None
            if error is not None:
                if repeated:
                    raise error
                _log.warning("%s; what it missed is sent again", error)

    def abandon(self) -> None:
        """Forget what is not acknowledged: it counts at most once for each element, and is not sent again.

        Blocks until the call in flight has ended.
        """
        if self._call is not None:
            _wait(self._call[1])
        self._call, self._left = None, []

    def _send(self) -> None:
        part = self._left[0]
        last = len(self._left) == 1
        self._call = part, self._buffer.submit(lambda: self._add(part, last))
        del self._left[0]

    def _add(self, part: range, last: bool) -> None:
        self._buffer.accumulate(self._array[part.start : part.stop], part.start)
        if last and self._arrived is not None:
            try:
                self._arrived()
            except Error as error:
                _log.warning("after a contribution to buffer %r: %s", self._buffer.name, error)


def missed(buffer: Buffer, part: range, error: Error) -> list[range]:
    """Return what of a change of this part was not applied, and never will be. Blocks. Raises TimeoutError.

    Where that can't be known any more it is nothing: an element counts at most once then.
    """
    try:
        return buffer.settle(error)
    except InvalidArgumentError:
        return [part]  # it was refused, or never sent: no outcome is of unknown outcome
    except UnavailableError as unknown:
        _log.warning("a contribution may have been lost in part: %s", unknown)
        return []


def _wait(future: Future[None]) -> Error | None:
    """Return how a call failed, None where it did not. Blocks."""
    try:
        error = future.exception()
    except CancelledError:
        return UnavailableError("the client was closed before the contribution was sent; nothing was applied")
    if error is not None and not isinstance(error, Error):
        raise error
    return error
