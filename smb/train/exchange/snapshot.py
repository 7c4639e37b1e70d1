"""The values that a worker took over last, and its changes since: one array of the model's size in host memory.

If contributions travel in fewer bits, a second array holds the changes not sent yet. The rounding error of one
contribution is added to the next (error feedback: Seide et al. 2014; Karimireddy et al. 2019).
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from smb.buffer import Buffer
from smb.errors import Error
from smb.feedback import as_sent
from smb.train.guards import Norm
from smb.train.parameters import Parameters, Values


class Snapshot:
    """The base of a worker's next contribution. `base`, float32 (n,), is what the parameters were filled with last."""

    def __init__(self, parameters: Parameters, wire: str) -> None:
        """`wire` is how contributions travel."""
        self.base: Values = np.empty(parameters.size, np.float32)
        parameters.hold(self.base)
        self._parameters = parameters
        self._unsent: Values | None = None if wire == "exact" else np.zeros(parameters.size, np.float32)
        self._written: list[tuple[Buffer, Values, int]] = []  # of that, what an inbox has, and where

    @property
    def by_parts(self) -> bool:
        """Whether what is fetched now is taken over by parts, as each comes."""
        return False

    def fetch(self, weights: Buffer) -> None:
        """Read the group's values as the next base, exact. The parameters stay as they are."""
        self._parameters.read(weights, self.base)

    def fetch_step(self, step: Buffer, room: Values, wire: str) -> None:
        """Read what the group's values have changed by since `base`, rounded as they were, into `room`, (n,)."""
        step.read(self._parameters.origin, self.base.size, out=room, wire=wire)

    def adopt(self) -> None:
        """Make the parameters what was fetched. The values that `send` has written are not unsent any more."""
        while self._written:
            inbox, part, there = self._written[-1]
            part -= as_sent(inbox, part, there)  # rounded as the calls were
            self._written.pop()  # one by one: Ctrl-C in between takes nothing off twice
        self._parameters.fill(self.base)

    def forget(self) -> None:
        """Drop what was left of earlier contributions."""
        self._written = []
        if self._unsent is not None:
            self._unsent[:] = 0

    def send(self, inbox: Buffer) -> Norm:
        """Write what was done since the parameters were filled into an inbox, by pieces: one travels while the next is
        made. Blocks until all is there. Until `adopt` it may be called again after any failure: it writes all of it.
        """
        found = Norm()
        written: list[tuple[Buffer, Values, int]] = []  # what is this process's to write
        under_way: deque[list[Future[Any]]] = deque()
        try:
            for begin, delta in self._parameters.deltas(self.base):
                piece = delta if self._unsent is None else self._gather(begin, delta, self._unsent)
                for part, there in self._parameters.parts(piece, begin):
                    found.add(part)
                    written.append((inbox, part, there))
                if written and piece.size == inbox.size == written[0][1].size:
                    inbox.write(piece)
                    break
                under_way.append(self._parameters.write(inbox, piece, begin))
                if len(under_way) > 1:
                    _end(under_way)
            while under_way:
                _end(under_way)
        finally:
            _wait(under_way)  # the memory is in use until then
        if self._unsent is not None:
            self._written = written  # and unsent still: only the caller knows when it is sure to count
        return found

    # ---- in two halves, for an exchange in the background

    def take(self, out: Values) -> Norm:
        """Make what was done since the parameters were filled, and what rounding has left, in `out`, (n,)."""
        found = Norm()
        for begin, delta in self._parameters.deltas(self.base):
            piece = out[begin : begin + delta.size]
            if self._unsent is None:
                piece[:] = delta
            else:
                np.add(delta, self._unsent[begin : begin + delta.size], out=piece)
            found.add(piece)
        return found

    def put(self, inbox: Buffer, taken: Values) -> None:
        """Write what `take` has made into an inbox. Blocks. If it raises, call it again. Touches no parameters."""
        origin = self._parameters.origin
        inbox.write(taken, origin)
        if self._unsent is not None:
            np.subtract(taken, as_sent(inbox, taken, origin), out=self._unsent)

    def merge(self, mix: float, room: Values) -> None:
        """Make the parameters mix * theirs + (1 - mix) * what was fetched. `room`, (n,), is overwritten."""
        if mix == 0.0:
            self.adopt()
            return
        np.multiply(self.base, np.float32(1 - mix), out=room)
        for begin, piece in self._parameters.pieces():
            room[begin : begin + piece.size] += np.float32(mix) * piece
        self._parameters.fill(room)

    def _gather(self, begin: int, delta: Values, unsent: Values) -> Values:
        """Move a delta from the base's account to what is unsent: whatever fails from here on, it is counted there."""
        base, piece = self.base[begin : begin + delta.size], unsent[begin : begin + delta.size]
        base += delta
        piece += delta
        return piece


def _end(under_way: deque[list[Future[Any]]]) -> None:
    for call in under_way[0]:
        call.result()
    under_way.popleft()


def _wait(under_way: deque[list[Future[Any]]]) -> None:
    for calls in under_way:
        for call in calls:
            with contextlib.suppress(Error):
                call.result()


def snapshot_of(parameters: Parameters, wire: str) -> Snapshot:
    """Return a worker's snapshot: its parameters' own, if they bring it."""
    return parameters.snapshot(wire) or Snapshot(parameters, wire)
