"""The elastic force, which EASGD, EAMSGD, SEASGD and HSGD share: a worker and the shared model draw at each other.

    d = alpha * (W_local - W_global);  W_local -= d;  W_global += d        (Zhang, Choromanska, LeCun 2015)

They differ in when W_local takes its half, and in what is hidden behind computing. W_global takes exactly what W_local
gives: the sum over the workers and the shared model changes by local steps alone. If the group was made with wire= in
fewer bits, both take d as it arrives, rounded; W_global is read exact.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smb.errors import InvalidArgumentError
from smb.train import member_table as t
from smb.train.exchange.mover import mover_of
from smb.train.parameters import Parameters
from smb.train.scheme import is_number, is_whole
from smb.train.traits import ELASTIC

if TYPE_CHECKING:
    from smb.train.group import Group

BETA = 0.9  # alpha = beta / p for p workers: the start that its authors propose
_ARRIVED = t.GROUP_EXTRA  # in the group's row: contributions so far


def check_settings(scheme: str, alpha: float | None, every: int) -> None:
    """Raise InvalidArgumentError unless 0 < alpha <= 1 (None: BETA / p) and every >= 1."""
    if alpha is not None and not (is_number(alpha) and 0 < alpha <= 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: alpha={alpha!r} is no moving rate; it is in 0 < alpha <= 1")
    if not is_whole(every, 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: every={every!r} is no number of steps; it is at least 1")


def moving_rate(alpha: float | None, workers: int) -> float:
    """Return alpha, or where it is None the rate for so many workers: 0.9 / p."""
    return BETA / max(1, workers) if alpha is None else alpha


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
        self._mover = mover_of(group, parameters, ELASTIC, self._arrive)
        self._seen = 0  # contributions that had arrived before the read
        self._staleness = 0
        self._samples = 0
        self._look_at = 0.0
        self._rows_before: dict[int, bytes] = {}  # the members' rows when we looked last

    @property
    def under_way(self) -> bool:
        """Whether one was sent that finish() has not seen the end of."""
        return self._mover.under_way

    def take(self) -> None:
        """Read the shared model, and make d = alpha * (values - shared). Blocks for the read.

        Raises RefusedContributionError, MembershipLostError; nothing was sent then, and nothing is changed.
        """
        group = self._group
        alpha = self._alpha
        if alpha is None:
            alpha = moving_rate(None, self._workers())
        self._seen = group.table.get(0, _ARRIVED)
        self._mover.fetch(self._group.weights)
        found = self._mover.form(alpha)
        since = 0
        if group.guards.staleness_max is not None:
            since = group.table.get(0, _ARRIVED) - self._seen
        group.check(found, since)

    def pay(self) -> None:
        """Take the difference from the worker's values."""
        self._mover.pay()

    def restart(self) -> None:
        """Make the parameters the shared model; nothing is under way. If it raises, they are unchanged."""
        self._mover.fetch(self._group.weights)
        self._mover.adopt()

    def _workers(self) -> int:
        """Return how many there are. Nobody waits for anybody, so nobody finds the dead: once a lease we check the
        members that have reported nothing since the last time.
        """
        group, rows = self._group, self._group.table.read()
        live = group.live(rows)
        if time.monotonic() < self._look_at:
            return len(live)
        self._look_at = time.monotonic() + group.lease
        before, self._rows_before = self._rows_before, {slot: rows[1 + slot].tobytes() for slot in live}
        dead = group.reap(slot for slot in live if before.get(slot) == self._rows_before[slot])
        return len(live) - len(dead)

    def send(self, samples: int) -> None:
        """Begin to add the difference to the shared model; it rests on so many samples. Does not block."""
        self._samples = samples
        self._mover.start()

    def finish(self) -> None:
        """Wait until what was sent has arrived, each element once: see Mover.wait. Blocks."""
        if not self._mover.under_way:
            return
        self._mover.wait()
        member = self._group.member
        member.set(t.STALENESS, self._staleness)
        member.set(t.STALENESS_MAX, max(self._staleness, member.get(t.STALENESS_MAX)))
        self._group.count(self._samples, self._group.sent_bytes + self._group.weights.nbytes)

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget what could not be sent."""
        self._mover.abandon()

    def release(self) -> None:
        """Let go of the difference; nothing is taken any more. With nothing under way."""
        self._mover.release()

    def _arrive(self) -> None:
        """In the background, when all of a difference was acknowledged."""
        self._staleness = self._group.table.add(0, _ARRIVED, 1) - self._seen
