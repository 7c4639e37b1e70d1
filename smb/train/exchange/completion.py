"""When a round may be closed: when it waits for no member, or when its quorum has waited long enough for the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from smb.config.log import TRAINING
from smb.train import member_table as t
from smb.train import members
from smb.train.exchange.closing import contributions
from smb.train.exchange.grace import Grace
from smb.train.group import BUILT, Group

_NAMES_MAX = 5
_news = logging.getLogger(TRAINING)


class RoundCompletion:
    """The members that one member's rounds wait for, and how long. `grace` measures the rounds
    that this member sees.
    """

    def __init__(
        self,
        group: Group,
        quorum: int | None,
        grace: Grace,
        died: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`died` is called with the incarnation of each member that was found dead while a round waited for it."""
        self.grace = grace
        self._group = group
        self._quorum = quorum
        self._died = died
        self._clock = clock
        self._waited = (-1, 0.0)  # the round of which the last wait ended without a change, and since when it waits
        self._told = -1  # the round of which it was logged for whom it waits

    def complete(self, rows: t.Rows, number: int) -> bool:
        """Return True if round `number`, which is open, may be closed."""
        if int(rows[0, t.ROUND]) & BUILT or not self.late(rows, number):
            return True
        if self._quorum is None or len(contributions(rows, number)) < self._quorum:
            return False
        self.grace.quorum(number, self._clock())
        return self.grace_left(number) <= 0

    def late(self, rows: t.Rows, number: int) -> list[int]:
        """Return the slots of the members that round `number` waits for."""
        return [slot for slot in self._group.live(rows) if t.clock_of(rows[1 + slot, t.MARK]) <= number]

    def reap(self, rows: t.Rows, number: int) -> None:
        """Free the slots of dead members that round `number` waits for."""
        for slot in self._group.reap(self.late(rows, number)):
            self._died(int(rows[1 + slot, t.INCARNATION]))

    def tell(self, rows: t.Rows, number: int) -> None:
        """After a lease, log once for which living members round `number` waits."""
        now = self._clock()
        if self._waited[0] != number:
            self._waited = (number, now)
        late = self.late(rows, number)
        waited_s = now - self._waited[1]
        if not late or number == self._told or waited_s < self._group.lease:
            return
        self._told = number
        names = [members.name_of(rows[1 + slot]) for slot in late]
        own = any(members.is_here(self._group.table, rows[1 + slot]) for slot in late)
        _news.warning(
            "training %r: for %.0f s this worker has waited for %s, alive and without a contribution to round %d%s",
            self._group.name,
            waited_s,
            _listed(names),
            number,
            "; this process has joined twice: close() or abandon() the other worker" if own else "",
        )

    def grace_left(self, number: int) -> float:
        """Return the seconds until round `number` may be closed by its quorum; infinity while no quorum was seen."""
        return self.grace.left(number, self._clock())

    def patience(self, number: int) -> float:
        """Return the seconds to wait for a change before this member looks for dead members, or closes by quorum."""
        return min(self._group.patience, max(0.0, self.grace_left(number)) or math.inf)

    def opened(self) -> None:
        """Note that this member has the weights of an open round."""
        self.grace.opened(self._clock())

    def ended(self, rows: t.Rows, number: int) -> None:
        """Note that round `number` was closed."""
        self.grace.ended(number, self._clock(), whole=not self.late(rows, number))


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
