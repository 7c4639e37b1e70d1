"""Sends a worker's deltas to the shared weights, each exactly once, whatever calls fail in between."""

from __future__ import annotations

from collections import deque

import numpy as np

from smb.buffer import Buffer
from smb.feedback import as_sent
from smb.train.exchange.contribution import missed
from smb.train.guards import Check, Norm
from smb.train.parameters import Parameters, Run, Values


class Deltas:
    """The local optimizer's change since the shared weights were taken over, sent to them. For one thread.

    A delta whose sending failed is kept, with what is known of it: `finish` asks which parts of it were applied, and
    sends the others. Changes that the optimizer makes meanwhile are the next delta. If deltas travel in fewer bits, the
    rounding error of one is added to the next (error feedback). Two arrays of the model's size in host memory, three
    with fewer bits, and one more while it exchanges.
    """

    def __init__(self, weights: Buffer, parameters: Parameters, sent_bytes: int) -> None:
        """`sent_bytes`: what a delta takes on its way, in the weights' wire."""
        self._weights = weights
        self._parameters = parameters
        self._sent_bytes = sent_bytes
        self._moved_bytes = 0
        self._base: Values = np.zeros(parameters.size, np.float32)
        self._delta = np.empty(parameters.size, np.float32)
        self.landing: Values | None = None  # what was read, or came back, and is not taken over yet
        self._unsent: Values | None = None if weights.wire == "exact" else np.zeros(parameters.size, np.float32)
        self._failure: tuple[Run, BaseException] | None = None  # Ctrl-C, too
        self._left: deque[Run] = deque()  # known as not applied

    def restart(self) -> None:
        """Make the parameters the shared weights. Changes not sent are dropped. If it raises, the parameters stay."""
        self.forget()
        self.fetch()
        self.adopt()

    def exchange(self, check: Check, *, fetch: bool) -> None:
        """Make the present delta, `check` it, and send it. Blocks. Call `finish` before. Raises as both do."""
        check(self.take(), whole=True)
        self.send(fetch=fetch)

    @property
    def touched(self) -> bool:
        """Whether a part of a delta that was refused, or was given up, is in the shared weights."""
        return False

    def send(self, *, fetch: bool) -> None:
        """Add what `take` has made to the shared weights. Blocks. With `fetch` the parameters become these, which
        contain it.

        Raises UnavailableError, TimeoutError: `finish` it later.
        """
        self.add(fetch)
        self._moved_bytes += self._sent_bytes
        if fetch:
            self.adopt()
            self._moved_bytes += self._weights.nbytes

    def read(self) -> None:
        """Make the parameters the shared weights. Changes since the last `send` are dropped."""
        self.fetch()
        self.adopt()
        self._moved_bytes += self._weights.nbytes

    def finish(self) -> bool:
        """Send what failed before; False if nothing did. Blocks. Raises as `send`: call it again."""
        failed = self.add_missing()
        if failed:
            self._moved_bytes += self._sent_bytes
        return failed

    def moved_bytes(self) -> int:
        """Return what was sent and received since the last call."""
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    # ---- what each process does, where several are one worker

    def forget(self) -> None:
        """Drop what rounding has left out."""
        if self._unsent is not None:
            self._unsent[:] = 0

    def take(self) -> Norm:
        """Make the present delta; return what guards look at. Call `finish` before."""
        for begin, delta in self._parameters.deltas(self._base):
            piece = self._delta[begin : begin + delta.size]
            if self._unsent is None:
                piece[:] = delta
            else:
                np.add(delta, self._unsent[begin : begin + delta.size], out=piece)
        found = Norm()
        for run in self._parameters.runs:
            for part in run.cut():
                found.add(self._delta[part.place])
        return found

    def add(self, fetch: bool) -> None:
        """Add the delta to the shared weights; with `fetch` their new values are there for `adopt`."""
        left = deque(self._parameters.runs)
        # From here on the base is what the parameters are: what is done to them is the next delta. No call until all of
        # this one is left to be sent, as Ctrl-C comes at calls.
        self._base += self._delta
        if self._unsent is not None:
            self._base -= self._unsent
        self._left = left
        self._keep_rounding()
        self.landing = None
        self._add(fetch)
        if fetch and self.landing is None:  # nothing here is this process's to send
            self.landing = np.empty_like(self._base)

    def add_missing(self) -> bool:
        """Add what an addition that failed has left; False if none did."""
        if self._failure is None and not self._left:
            return False
        if self._failure is not None:
            run, error = self._failure
            left = deque([*missed(self._weights, run, error), *self._left])
            self._failure, self._left = None, left
        self._keep_rounding()  # Ctrl-C may have ended it
        self._add(fetch=False)
        return True

    def fetch(self) -> None:
        """Read the shared weights for `adopt`."""
        self.landing = np.empty_like(self._base)
        self._parameters.read(self._weights, self.landing)

    def adopt(self) -> None:
        """Make the parameters what was read, or what came back."""
        assert self.landing is not None
        landing, self.landing = self.landing, None
        self._parameters.fill(landing)
        self._base = landing

    def _keep_rounding(self) -> None:
        """Keep what rounding leaves out of the delta. A second time changes nothing."""
        if self._unsent is None:
            return
        for run in self._parameters.runs:
            for part in run.cut():
                piece = self._delta[part.place]
                np.subtract(piece, as_sent(self._weights, piece, part.there), out=self._unsent[part.place])

    def _add(self, fetch: bool) -> None:
        while self._left:
            run = self._left[0]
            try:
                fetched = self._weights.accumulate(self._delta[run.place], run.there, fetch=fetch)
            except BaseException as error:
                self._failure = run, error
                self._left.popleft()
                raise
            self._left.popleft()
            if fetched is None:
                continue
            if run.count == self._base.size:
                self.landing = fetched
                continue
            if self.landing is None:
                self.landing = np.empty_like(self._base)
            self.landing[run.place] = fetched


def deltas_of(weights: Buffer, parameters: Parameters, sent_bytes: int) -> Deltas:
    """Return what adds a worker's deltas: its parameters' own, if they bring it."""
    return parameters.deltas_to(weights, sent_bytes) or Deltas(weights, parameters, sent_bytes)
