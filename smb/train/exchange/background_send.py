"""Sends a worker's deltas to the shared weights, each exactly once, whatever calls fail in between."""

from __future__ import annotations

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error
from smb.feedback import as_sent
from smb.train.exchange.contribution import missed
from smb.train.guards import Norm
from smb.train.parameters import PIECE_ELEMENTS, Parameters, Values


class Deltas:
    """What the local optimizer did since the shared weights were taken over, sent to them. For one thread.

    A delta whose sending failed is kept, with what is known of it: `finish` asks which parts of it were applied, and
    sends the others. What the optimizer does meanwhile is the next delta. Where deltas travel in fewer bits, what
    rounding leaves out of one goes along with the next (error feedback). Two arrays of the model's size in host memory,
    three with fewer bits.
    """

    def __init__(self, weights: Buffer, parameters: Parameters, sent_bytes: int) -> None:
        """`sent_bytes`: what a delta takes on its way, in the weights' wire."""
        self._weights = weights
        self._parameters = parameters
        self._sent_bytes = sent_bytes
        self._moved_bytes = 0
        self._base = np.zeros(parameters.size, np.float32)
        self._delta = np.empty(parameters.size, np.float32)
        self._unsent: Values | None = None if weights.wire == "exact" else np.zeros(parameters.size, np.float32)
        self._failure: Error | None = None

    def restart(self) -> None:
        """Make the parameters the shared weights. What was not sent is dropped. Where it raises they stay."""
        if self._unsent is not None:
            self._unsent[:] = 0
        self._read()

    def take(self) -> Norm:
        """Make the present delta; return what guards look at. Call `finish` before."""
        found = Norm()
        for begin, delta in self._parameters.deltas(self._base):
            piece = self._delta[begin : begin + delta.size]
            if self._unsent is None:
                piece[:] = delta
            else:
                np.add(delta, self._unsent[begin : begin + delta.size], out=piece)
            found.add(piece)
        return found

    def send(self, *, fetch: bool) -> None:
        """Add what `take` has made to the shared weights. Blocks. With `fetch` the parameters become these, which
        contain it.

        Raises UnavailableError, TimeoutError: `finish` it later.
        """
        # From here on the base is what the parameters are: what is done to them is the next delta.
        self._base += self._delta
        if self._unsent is not None:
            self._base -= self._unsent
            for begin in range(0, self._delta.size, PIECE_ELEMENTS):
                piece = self._delta[begin : begin + PIECE_ELEMENTS]
                np.subtract(piece, as_sent(self._weights, piece, begin), out=self._unsent[begin : begin + piece.size])
        self._add(fetch)

    def read(self) -> None:
        """Make the parameters the shared weights. What was done since the last `send` is dropped."""
        self._read()
        self._moved_bytes += self._weights.nbytes

    def moved_bytes(self) -> int:
        """Return what was sent and received since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

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

    def _read(self) -> None:
        landing = np.empty_like(self._base)
        self._weights.read(out=landing, wire="exact")
        self._adopt(landing)

    def _add(self, fetch: bool) -> None:
        try:
            fetched = self._weights.accumulate(self._delta, fetch=fetch)
        except Error as error:
            self._failure = error
            raise
        self._moved_bytes += self._sent_bytes
        if fetched is not None:
            self._moved_bytes += fetched.nbytes
            self._adopt(fetched)

    def _adopt(self, values: Values) -> None:
        self._parameters.fill(values)
        self._base = values
