"""One addition at a time to a buffer, made in a thread of the client's while the caller computes, counted exactly once.

A contribution is in one of two states, and only finish() changes it. The first is a *call* in flight, or failed and not
resolved yet. The second is *left*: ranges known as not applied. A call's future is kept until its outcome is known. So
neither an error nor Ctrl-C while waiting makes a range count twice or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error, InvalidArgumentError, UnavailableError
from smb.train.parameters import Run

if TYPE_CHECKING:
    from smb.train.scheme import Values

_NOTHING = np.empty(0, np.float32)
_log = logging.getLogger("smb")


class Contribution:
    """A worker's additions to one float32 buffer: start() sends one, finish() waits for it. For one thread at a time.

    `arrived` is called in the background once all of a contribution was acknowledged; what it raises is logged. `runs`
    say where its elements go (default: to the places that they have).
    """

    def __init__(
        self, buffer: Buffer, arrived: Callable[[], object] | None = None, runs: Sequence[Run] | None = None
    ) -> None:
        self._buffer = buffer
        self._arrived = arrived
        self._runs = runs
        self._array: Values = _NOTHING
        self._call: tuple[list[Run], Future[None]] | None = None
        self._at = 0  # which run of the call is being sent; read when the call has ended
        self._left: list[Run] = []

    @property
    def under_way(self) -> bool:
        """Whether something was started that finish() has not seen the end of."""
        return self._call is not None or bool(self._left)

    def start(self, array: Values) -> None:
        """Begin to add the array, float32 (n,), and return at once.

        Leave the array alone until finish() has returned. Raises InvalidArgumentError if the one before is not
        finished.
        """
        if self.under_way:
            raise InvalidArgumentError(
                f"a contribution to buffer {self._buffer.name!r}: the one before is not finished; call finish() first"
            )
        self._array = array
        self._left = [Run(0, 0, array.size)] if self._runs is None else list(self._runs)
        self._send()

    def finish(self) -> None:
        """Wait until what was started is acknowledged, each element once. Blocks. Does nothing where nothing was.

        A call that failed is settled, and what it missed is sent again, once. If that fails too, the error is raised
        (TimeoutError, UnavailableError, NotFoundError, ...), and the rest stays: finish() again goes on from there, and
        still counts each element once.
        """
        repeated = False
        while self.under_way:
            if self._call is None:
                self._send()
                repeated = True
            assert self._call is not None
            runs, future = self._call
            error = _wait(future)
            if error is not None:
                self._left = [*missed(self._buffer, runs[self._at], error), *runs[self._at + 1 :]]
            self._call = None
            if error is not None:
                if repeated:
                    raise error
                _log.warning("%s; what it missed is sent again", error)
        self._array = _NOTHING

    def abandon(self) -> None:
        """Forget what is not acknowledged: it counts at most once for each element, and is not sent again.

        Blocks until the call in flight has ended.
        """
        if self._call is not None:
            _wait(self._call[1])
        self._call, self._left = None, []

    def _send(self) -> None:
        runs, self._at = self._left, 0
        self._call = runs, self._buffer.submit(lambda: self._add(runs))
        self._left = []

    def _add(self, runs: list[Run]) -> None:
        for self._at, run in enumerate(runs):
            self._buffer.accumulate(self._array[run.place], run.there)
        if self._arrived is not None:
            try:
                self._arrived()
            except Error as error:
                _log.warning("after a contribution to buffer %r: %s", self._buffer.name, error)


def missed(buffer: Buffer, run: Run, error: BaseException) -> list[Run]:
    """Return what of a change by this run was not applied, and never will be. Blocks. Raises TimeoutError.

    `error`, or Ctrl-C, ended it. If that can't be known any more, nothing is sent: an element counts at most once.
    """
    try:
        missing = buffer.settle(error)
        return [Run(run.here + part.start - run.there, part.start, len(part)) for part in missing]
    except InvalidArgumentError:
        # An error: it was refused, or never sent: nothing is unknown. Ctrl-C: most likely it came as the call returned.
        return [run] if isinstance(error, Error) else []
    except UnavailableError as unknown:
        _log.warning("a contribution may have been lost in part: %s", unknown)
        return []


def _wait(future: Future[None]) -> Error | None:
    """Return how a call failed, None if it did not. Blocks."""
    try:
        error = future.exception()
    except CancelledError:
        return UnavailableError("the client was closed before the contribution was sent; nothing was applied")
    if error is not None and not isinstance(error, Error):
        raise error
    return error
