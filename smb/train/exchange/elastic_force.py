"""The elastic force, which EASGD, EAMSGD, SEASGD and HSGD share: a worker and the shared model draw at each other.

    d = alpha * (W_local - W_global);  W_local -= d;  W_global += d        (Zhang, Choromanska, LeCun 2015)

They differ in when W_local takes its half, and in what is hidden behind computing. W_global takes exactly what W_local
gives: the sum over the workers and the shared model changes by local steps alone. If the group was made with wire= in
fewer bits, both take d as it arrives, rounded; W_global is read exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from smb.errors import InvalidArgumentError
from smb.feedback import as_sent
from smb.train import member_table as t
from smb.train.exchange.contribution import Contribution
from smb.train.guards import Norm
from smb.train.parameters import Parameters, Values
from smb.train.scheme import is_number, is_whole

if TYPE_CHECKING:
    from smb.buffer import Buffer
    from smb.train.group import Group

BETA = 0.9  # alpha = beta / p for p workers: the start that its authors propose
_ARRIVED = t.GROUP_EXTRA  # in the group's row: contributions so far
_BLOCK = 1 << 16  # elements: two arrays of them stay in a core's cache between two operations


def check_settings(scheme: str, alpha: float | None, every: int) -> None:
    """Raise InvalidArgumentError unless 0 < alpha <= 1 (None: BETA / p) and every >= 1."""
    if alpha is not None and not (is_number(alpha) and 0 < alpha <= 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: alpha={alpha!r} is no moving rate; it is in 0 < alpha <= 1")
    if not is_whole(every, 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: every={every!r} is no number of steps; it is at least 1")


def moving_rate(alpha: float | None, workers: int) -> float:
    """Return alpha, or where it is None the rate for so many workers: 0.9 / p."""
    return BETA / max(1, workers) if alpha is None else alpha


def take_difference(values: Values, shared: Values, alpha: float) -> None:
    """Replace `shared`, float32 (n,), by d = alpha * (values - shared), rounded to float32 after each operation."""
    rate = np.float32(alpha)
    for at in range(0, values.size, _BLOCK):
        block = shared[at : at + _BLOCK]
        np.subtract(values[at : at + _BLOCK], block, out=block)
        block *= rate


class Difference:
    """A process's differences with the shared model, and its part in sending them. `values`, float32 (n,)."""

    def __init__(self, weights: Buffer, parameters: Parameters, arrived: Callable[[], object]) -> None:
        """`arrived` is called in the background when all of one was acknowledged."""
        self.values: Values = np.empty(parameters.size, np.float32)
        parameters.hold(self.values)
        self._weights = weights
        self._parameters = parameters
        self._contribution = Contribution(weights, arrived, parameters.runs)

    @property
    def under_way(self) -> bool:
        """Whether one was sent that finish() has not seen the end of."""
        return self._contribution.under_way

    def fetch(self) -> None:
        """Read the shared model into `values`."""
        self._parameters.read(self._weights, self.values)

    def form(self, alpha: float) -> Norm:
        """Make the difference of what was fetched; return what guards look at, of what is this process's to send."""
        for begin, values in self._parameters.pieces():
            take_difference(values, self.values[begin : begin + values.size], alpha)
        if self._weights.wire != "exact":
            for run in self._parameters.all_runs:
                for part in run.cut():
                    piece = self.values[part.place]
                    piece[:] = as_sent(self._weights, piece, part.there)
        found = Norm()
        for run in self._parameters.runs:
            for part in run.cut():
                found.add(self.values[part.place])
        return found

    def start(self) -> None:
        """Begin to add the difference to the shared model. Does not block."""
        self._contribution.start(self.values)

    def finish(self) -> None:
        """Wait until it has arrived: see Contribution.finish."""
        self._contribution.finish()

    def pay(self) -> None:
        """Take the difference from the parameters."""
        self._parameters.subtract(self.values)

    def adopt(self) -> None:
        """Make the parameters what was fetched."""
        self._parameters.fill(self.values)

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget what could not be sent."""
        self._contribution.abandon()

    def release(self) -> None:
        """Let go of the memory; nothing is taken any more. With nothing under way."""
        self.values = np.empty(0, np.float32)


def _difference_of(weights: Buffer, parameters: Parameters, arrived: Callable[[], object]) -> Difference:
    return parameters.difference(weights, arrived) or Difference(weights, parameters, arrived)


class Elastic:
    """One worker's differences with the shared model, one at a time: take() it, send() it, finish() it; pay() is the
    worker's own half.

    Its staleness counts the contributions, of any member, that reached the shared model after the read for the
    difference and before the difference arrived. Chunks are read and added one by one, so it says how far apart the two
    were, not what each chunk had seen.
    """

    def __init__(self, group: Group, alpha: float | None, parameters: Parameters) -> None:
        self._group = group
        self._alpha = alpha
        self._difference = _difference_of(group.weights, parameters, self._arrive)
        self._seen = 0  # contributions that had arrived before the read
        self._staleness = 0
        self._samples = 0
        self._look_at = 0.0
        self._told: dict[int, bytes] = {}  # the members' rows when we looked last

    @property
    def under_way(self) -> bool:
        """Whether one was sent that finish() has not seen the end of."""
        return self._difference.under_way

    def take(self) -> None:
        """Read the shared model, and make d = alpha * (values - shared). Blocks for the read.

        Raises RefusedContributionError, MembershipLostError; nothing was sent then, and nothing is changed.
        """
        group = self._group
        alpha = self._alpha
        if alpha is None:
            alpha = moving_rate(None, self._workers())
        self._seen = group.table.get(0, _ARRIVED)
        self._difference.fetch()
        found = self._difference.form(alpha)
        since = 0
        if group.guards.staleness_max is not None:
            since = group.table.get(0, _ARRIVED) - self._seen
        group.check(found, since)

    def pay(self) -> None:
        """Take the difference from the worker's values."""
        self._difference.pay()

    def restart(self) -> None:
        """Make the parameters the shared model; nothing is under way. If it raises, they are unchanged."""
        self._difference.fetch()
        self._difference.adopt()

    def _workers(self) -> int:
        """Return how many there are. Nobody waits for anybody, so nobody finds the dead: once a lease we check the
        members that have reported nothing since the last time.
        """
        group, rows = self._group, self._group.table.read()
        live = group.live(rows)
        if time.monotonic() < self._look_at:
            return len(live)
        self._look_at = time.monotonic() + group.lease
        before, self._told = self._told, {slot: rows[1 + slot].tobytes() for slot in live}
        dead = group.reap(slot for slot in live if before.get(slot) == self._told[slot])
        return len(live) - len(dead)

    def send(self, samples: int) -> None:
        """Begin to add the difference to the shared model; it rests on so many samples. Does not block."""
        self._samples = samples
        self._difference.start()

    def finish(self) -> None:
        """Wait until what was sent has arrived, each element once: see Contribution.finish. Blocks."""
        if not self._difference.under_way:
            return
        self._difference.finish()
        member = self._group.member
        member.set(t.STALENESS, self._staleness)
        member.set(t.STALENESS_MAX, max(self._staleness, member.get(t.STALENESS_MAX)))
        self._group.count(self._samples, self._group.sent_bytes + self._group.weights.nbytes)

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget what could not be sent."""
        self._difference.abandon()

    def release(self) -> None:
        """Let go of the difference; nothing is taken any more. With nothing under way."""
        self._difference.release()

    def _arrive(self) -> None:
        """In the background, when all of a difference was acknowledged."""
        self._staleness = self._group.table.add(0, _ARRIVED, 1) - self._seen
