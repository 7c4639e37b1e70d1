"""A member's contribution to a round, from its inbox until it is known whether it counts. The protocol: rounds.py."""

from __future__ import annotations

import logging
import math
import struct

from smb.daemon.failpoint import failpoint
from smb.errors import Error
from smb.train import member_table as t
from smb.train.exchange.round_closing import COUNTED, contributions, round_of
from smb.train.group import Group
from smb.train.guards import RefusedContributionError

_log = logging.getLogger("smb")


class Contribution:
    """The contribution in one member's inbox.

    sent: whether it lies open in the inbox. origin: the round whose weights its delta starts from. target:
    the round that it is marked for. tokens: its weight before staleness reduces it; 0 if it was refused or is empty, so
    that nobody waits for it and it counts for nothing. refusal: the guard's error that is not raised yet. late_counts:
    whether a contribution that was too late for its round may be marked again for a later one. steps: its local steps.
    """

    def __init__(self, group: Group, *, late_counts: bool) -> None:
        """Raises NotFoundError if the training was deleted, and perhaps made anew, since this member joined it."""
        self.late_counts = late_counts
        self.sent = False
        self.tokens = 0.0
        self.origin = 0
        self.target = 0
        self.steps = 0
        self.refusal: RefusedContributionError | None = None
        self._group = group
        self._weight_word = group.table.get(group.member.row, t.WEIGHT)  # by the buffer's handle, not by its name

    def mark(self) -> t.Rows | None:
        """Tell all members that the inbox is ready for the target round: first the weight, then the mark. Returns the
        table as it is afterwards; None if the table already has both.
        """
        member = self._group.member
        weight = self.tokens / math.sqrt(1 + self.target - self.origin)
        word = member.incarnation << 32 | struct.unpack("<I", struct.pack("<f", weight))[0]
        if word != self._weight_word:
            if self._group.table.swap(member.row, t.WEIGHT, self._weight_word, word) not in (self._weight_word, word):
                raise member.lost()
            self._weight_word = word
        if member.clock != self.target + 1:
            rows = member.advance_and_look(self.target + 1)
            failpoint("train-marked")
            return rows
        return None

    def counted(self, rows: t.Rows) -> bool | None:
        """Return whether the contribution counted in its target round; None while that round is open. Updates the
        member's statistics.
        """
        if round_of(rows) == self.target:
            return None
        if self.tokens == 0.0:
            return True
        member = self._group.member
        if rows[member.row, COUNTED] != self.target + 1:
            return False
        staleness = self.target - self.origin
        member.add(t.CONTRIBUTIONS, 1)
        member.set(t.STALENESS, staleness)
        member.set(t.STALENESS_MAX, max(staleness, member.get(t.STALENESS_MAX)))
        return True

    def counted_at_last(self, rows: t.Rows) -> bool | None:
        """As `counted`, for a contribution that will not be marked again. Also returns False if it was never marked, or
        if another member has the slot by now, so that the outcome is unknown.
        """
        member = self._group.member
        if self.tokens == 0.0:
            return True
        if t.incarnation_of(rows[member.row, t.MARK]) != member.incarnation:
            return False
        if round_of(rows) == self.target and member.slot not in contributions(rows, self.target):
            return False
        return self.counted(rows)

    def retarget(self, rows: t.Rows) -> bool:
        """For a contribution that came too late: aim at the open round and return True. Returns False if it is dropped
        or refused instead.
        """
        member, staleness = self._group.member, round_of(rows) - self.origin
        limit = self._group.guards.staleness_max
        if not self.late_counts:
            member.add(t.DROPPED, 1)
            return False
        if limit is not None and staleness > limit:
            member.add(t.REFUSED, 1)
            self.refusal = RefusedContributionError(
                f"contribution refused: its staleness {staleness} exceeds staleness_max={limit}: it came {staleness} "
                f"rounds too late; the worker's values are the shared model's again"
            )
            return False
        self.target = round_of(rows)
        return True

    def raise_refusal(self) -> None:
        """Raise the refusal, once."""
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal

    def abandon(self) -> int:
        """Count the contribution as dropped if it did not count before this member lost its lease. Returns the number
        of local steps that are lost with it.
        """
        sent, self.sent = self.sent, False
        try:
            if not sent or self.counted_at_last(self._group.table.read()) is not False:
                return 0
            drop(self._group, "a contribution that was in no round, as far as is known, when it lost its lease")
        except Error as error:
            drop(self._group, f"a contribution; it is unknown whether it is in a round: {error}")
        return self.steps


def drop(group: Group, what: str) -> None:
    """Count and log a contribution of this member that is in no round, or may be in none. The next report has the
    count.
    """
    _log.warning("training %r: worker %d dropped %s", group.name, group.member.slot, what)
    group.member.add(t.DROPPED, 1)
