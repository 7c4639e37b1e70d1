"""When a round may be closed: when it waits for no member, or when its quorum has waited long enough for the others."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from smb.train import member_table as t
from smb.train.exchange.grace import Grace
from smb.train.exchange.round_closing import contributions
from smb.train.group import BUILT, Group
from smb.train.long_waits import LongWait

_LOOKED_AT = 4  # living members whose locks one member tries in a row
_random = random.SystemRandom()  # not the program's own, which it may have seeded


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
        self._long = LongWait(f"training {group.name!r}", group.table, group.lease, clock)

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
        """Free the slots of dead members that round `number` waits for.

        Every member that waits does this. In a large training each of them looks at a part of the others, another one
        each time, and stops where all are alive: as long as these live, the round waits for them anyway.
        """
        late = self.late(rows, number)
        _random.shuffle(late)
        for begin in range(0, len(late), _LOOKED_AT):
            dead = self._group.reap(late[begin : begin + _LOOKED_AT])
            for slot in dead:
                self._died(int(rows[1 + slot, t.INCARNATION]))
            if not dead:
                return

    def tell(self, rows: t.Rows, number: int) -> None:
        """After a lease, log once for which living members round `number` waits."""
        self._long.tell(rows, self.late(rows, number), number, f"without a contribution to round {number}")

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
