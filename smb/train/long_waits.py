"""Who waits longer than a lease for living members says once for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from smb.config.log import TRAINING
from smb.train import member_table as t
from smb.train import members

_NAMES_MAX = 5
_news = logging.getLogger(TRAINING)


class LongWait:
    """The waits of one worker, one after the other. `what` begins the line of the log: the training's name."""

    def __init__(self, what: str, table: t.Table, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._table = table
        self._lease = lease
        self._clock = clock
        self._waited = (-1, 0.0)  # the number of the last wait, and since when it was seen
        self._logged = -1  # the number of the wait that was logged

    def tell(self, rows: t.Rows, slots: Collection[int], number: int, lacking: str) -> None:
        """Log once, a lease after the first call with this number, for which members the worker waits. `lacking` says
        what they have not done. Call it when a wait has ended without a change. Makes no call.
        """
        now = self._clock()
        if self._waited[0] != number:
            self._waited = (number, now)
        waited_s = now - self._waited[1]
        if not slots or number == self._logged or waited_s < self._lease:
            return
        self._logged = number
        names = [members.name_of(rows[1 + slot]) for slot in slots]
        own = any(members.is_here(self._table, rows[1 + slot]) for slot in slots)
        more = len(names) - _NAMES_MAX
        _news.warning(
            "%s: for %.0f s this worker has waited for %s, alive and %s%s",
            self._what,
            waited_s,
            ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else ""),
            lacking,
            "; this process has joined twice: close() or abandon() the other worker"
            if own
            else "; one that trains no more, as in a notebook's interrupted cell, must call close(), or end",
        )
