"""The elastic force of EASGD, EAMSGD, SEASGD and HSGD: a worker and the shared model move towards each other.

    d = alpha * (W_local - W_global);  W_local -= d;  W_global += d        (Zhang, Choromanska, LeCun 2015)

The schemes differ in when W_local changes, and in what runs behind the computation. W_global gains exactly what W_local
loses, so only local steps change the sum over the workers and the shared model. If the group was made with a wire= of
fewer bits, both sides use d as it is rounded on the wire. W_global is always read exactly.
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

BETA = 0.9  # alpha = beta / p for p workers: the initial value that the authors propose
_ARRIVED = t.GROUP_EXTRA  # in the group's row: number of contributions so far


def check_settings(scheme: str, alpha: float | None, every: int) -> None:
    """Raise InvalidArgumentError unless 0 < alpha <= 1 (None: BETA / p) and every >= 1."""
    if alpha is not None and not (is_number(alpha) and 0 < alpha <= 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: alpha must be a number above 0 and at most 1, not {alpha!r}")
    if not is_whole(every, 1):
        raise InvalidArgumentError(f"scheme {scheme!r}: every must be a whole number of steps from 1 on, not {every!r}")


def moving_rate(alpha: float | None, workers: int) -> float:
    """Return alpha, or if it is None the rate for this number of workers: 0.9 / p."""
    return BETA / max(1, workers) if alpha is None else alpha


class Elastic:
    """One worker's differences with the shared model, one at a time: take(), send(), finish(); pay() applies the
    worker's own half.

    The staleness of a difference counts the contributions, of any member, that reached the shared model after the read
    for the difference and before the difference arrived. Chunks are read and added one by one, so the staleness says
    how far apart the read and the addition were, not what each chunk contained.
    """

    def __init__(self, group: Group, alpha: float | None, parameters: Parameters) -> None:
        self._group = group
        self._alpha = alpha
        self._mover = mover_of(group, parameters, ELASTIC, self._arrive)
        self._seen = 0  # number of contributions that had arrived before the read
        self._staleness = 0
        self._samples = 0
        self._look_at = 0.0
        self._rows_before: dict[int, bytes] = {}  # the members' rows at the last look for dead members

    @property
    def under_way(self) -> bool:
        """True if a difference was sent and finish() has not seen its end."""
        return self._mover.under_way

    def take(self) -> None:
        """Read the shared model, and compute d = alpha * (values - shared). Blocks for the read.

        Raises RefusedContributionError and MembershipLostError; then nothing was sent or changed.
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
        """Subtract the difference from the worker's values."""
        self._mover.pay()

    def restart(self) -> None:
        """Set the parameters to the shared model, when no difference is in flight. If it raises, the parameters are
        unchanged.
        """
        self._mover.fetch(self._group.weights)
        self._mover.adopt()

    def _workers(self) -> int:
        """Return the number of workers. In these schemes no worker waits for another and notices that it died. So once
        per lease this checks the members that have reported nothing since the last check.
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
        """Begin to add the difference, which rests on `samples` samples, to the shared model. Does not block."""
        self._samples = samples
        self._mover.start()

    def finish(self) -> None:
        """Wait until the difference has arrived, each element once: see Mover.wait. Blocks."""
        if not self._mover.under_way:
            return
        self._mover.wait()
        member = self._group.member
        member.set(t.STALENESS, self._staleness)
        member.set(t.STALENESS_MAX, max(self._staleness, member.get(t.STALENESS_MAX)))
        self._group.count(self._samples, self._group.sent_bytes + self._group.weights.nbytes)

    def abandon(self) -> None:
        """Wait until no call is in flight, and drop what could not be sent."""
        self._mover.abandon()

    def release(self) -> None:
        """Release the difference's memory, when no difference is in flight. take() must not be called afterwards."""
        self._mover.release()

    def _arrive(self) -> None:
        """Called in the background when the whole difference was acknowledged."""
        self._staleness = self._group.table.add(0, _ARRIVED, 1) - self._seen
