"""What a worker adds to the shared weights by itself: its deltas, each exactly once, whatever calls fail in between."""

from __future__ import annotations

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error, InvalidArgumentError
from smb.train.scheme import Values


class Deltas:
    """What the local optimizer did to `values` since `base`, sent to the shared weights. For one thread.

    A delta whose sending failed is kept, with what is known of it: `finish` asks which parts were applied and sends the
    others. `base` moves on at once, so that what the optimizer does meanwhile is the next delta, and nothing counts
    twice.
    """

    def __init__(self, weights: Buffer, values: Values) -> None:
        self.values = values
        self._weights = weights
        self._base = values.copy()
        self._delta = np.empty_like(values)
        self._failure: Error | None = None

    def take(self) -> Values:
        """Return the delta, float32 (n,); valid until the next call. `finish` first."""
        np.subtract(self.values, self._base, out=self._delta)
        return self._delta

    def send(self, *, fetch: bool) -> None:
        """Add what `take` returned to the shared weights; with `fetch` the values become these, as in `adopt`.

        Raises UnavailableError, TimeoutError: `finish` it later.
        """
        try:
            fetched = self._weights.accumulate(self._delta, fetch=fetch)
        except Error as error:
            self._failure = error
            self._base[:] = self.values
            raise
        if fetched is not None:
            self.values[:] = fetched
        self._base[:] = self.values

    def read(self) -> None:
        """Make the values the shared weights. What was not sent is dropped."""
        self._weights.read(out=self.values)
        self.adopt()

    def adopt(self) -> None:
        """The values were overwritten with the shared weights: what is done from here on is the next delta."""
        self._base[:] = self.values

    def finish(self) -> bool:
        """Send what failed before, if anything did; True if so. Raises as `send`; call it again then."""
        failure = self._failure
        if failure is None:
            return False
        try:
            missing = self._weights.settle(failure)
        except InvalidArgumentError:
            missing = [range(self._delta.size)]  # nothing of it was applied
        while missing:
            part = missing.pop()
            try:
                self._weights.accumulate(self._delta[part.start : part.stop], part.start)
            except Error as error:
                # Of what is left this part alone is in doubt; the rest was not begun.
                self._failure = error
                self._delta = self._only(part, missing)
                raise
        self._failure = None
        return True

    def _only(self, doubtful: range, others: list[range]) -> Values:
        raise NotImplementedError
