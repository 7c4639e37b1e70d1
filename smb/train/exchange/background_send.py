"""What a worker adds to the shared weights by itself: its deltas, each exactly once, whatever calls fail in between."""

from __future__ import annotations

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error
from smb.train.exchange.contribution import missed
from smb.train.scheme import Values


class Deltas:
    """What the local optimizer did to `values` since they were taken over, sent to the shared weights. For one thread.

    A delta whose sending failed is kept, with what is known of it: `finish` asks which parts of it were applied, and
    sends the others. What the optimizer does meanwhile is the next delta.
    """

    def __init__(self, weights: Buffer, values: Values, transfer_bytes: int) -> None:
        """`transfer_bytes`: what all values take on their way, as far as they travel in the weights' wire."""
        self.values = values
        self._weights = weights
        self._transfer_bytes = transfer_bytes
        self._moved_bytes = 0
        self._base = values.copy()
        self._delta = np.empty_like(values)
        self._failure: Error | None = None

    def take(self) -> Values:
        """Return the present delta, float32 (n,); valid until the next call. Call `finish` before."""
        np.subtract(self.values, self._base, out=self._delta)
        return self._delta

    def send(self, *, fetch: bool) -> None:
        """Add what `take` returned to the shared weights. Blocks. With `fetch` the values become these, which contain
        it.

        Raises UnavailableError, TimeoutError: `finish` it later.
        """
        self._base[:] = self.values
        self._add(fetch)

    def read(self) -> None:
        """Make the values the shared weights. What was not sent is dropped."""
        self._weights.read(out=self.values)
        self._moved_bytes += self._transfer_bytes
        self.adopt()

    def moved_bytes(self) -> int:
        """Return what was sent and received since the last call. A fetched sum is exact, whatever the wire."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    def adopt(self) -> None:
        """The values were overwritten with the shared weights: what is done from here on is the next delta."""
        self._base[:] = self.values

    def finish(self) -> bool:
        """Send what failed before; False if nothing did. Blocks. Raises as `send`: call it again."""
        failure = self._failure
        if failure is None:
            return False
        missing = missed(self._weights, range(self._delta.size), failure)
        left = np.zeros_like(self._delta)
        for part in missing:
            left[part.start : part.stop] = self._delta[part.start : part.stop]
        self._delta = left
        self._failure = None
        if missing:
            self._add(fetch=False)
        return True

    def _add(self, fetch: bool) -> None:
        try:
            fetched = self._weights.accumulate(self._delta, fetch=fetch)
        except Error as error:
            self._failure = error
            raise
        self._moved_bytes += self._transfer_bytes
        if fetched is not None:
            self._moved_bytes += self.values.nbytes
            self.values[:] = fetched
            self.adopt()
