"""The table of a group: one row for the group, one for each member. Data before code: all that members tell each other.

An int64 buffer, (1 + SLOTS) x FIELDS, small enough for one chunk, so that one read shows everything. Words that decide
something are changed by compare_swap alone, and carry the incarnation of their owner. So a member that was stopped for
long, and whose slot has another owner now, changes nothing. Words that only inform are written plainly by their owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smb.buffer import Buffer

SLOTS = 48  # members at a time: a set of them and 16 bits of round fit one word
FIELDS = 32
ROUND_SHIFT = 24

# ---- the group's row, by column
ROUND = 0  # round << ROUND_SHIFT | attempt << 1 | built (rounds.py); 0 for ever in schemes without rounds
INCARNATIONS = 1  # given out so far
READY = 2  # 1 once the group is complete, DELETED once somebody deletes it
DELETED = 2
GROUP_EXTRA = 3  # to 15: the scheme's own
GROUP_EXTRA_END = 16
DECIDED = 16  # to 31: rounds.py, who counts in round r, in column DECIDED + r % DECIDED_KEPT
DECIDED_KEPT = 16

# ---- a member's row
INCARNATION = 0  # 0: the slot is free
MARK = 1  # incarnation << 32 | clock: how far this incarnation has come; in rounds: those contributed to lie below
WEIGHT = 2  # incarnation << 32 | bits of a float32: what the contribution marked last weighs
STATS = 3  # from here to HOST - 1: written by the owner alone
CONTRIBUTIONS = 3
REFUSED = 4
STALENESS = 5  # of the last contribution
STALENESS_MAX = 6
NORM = 7  # of the last contribution: bits of a float64
SAMPLES = 8
BYTES = 9  # sent and received as contributions and models
REJOINS = 10
JOINED_US = 11  # microseconds since 1970, by the member's clock; shown, compared with nothing
PID = 12  # negative once it has left by itself, 0 once it goes on in another slot, with its statistics
DROPPED = 13  # contributions that are in no round, or of which nobody knows
STEPS = 14  # optimizer steps of a member that was there from the start: who joins goes on from the greatest
SAMPLES_BEFORE = 15  # of those who had the slot before
STATS_END = 16
HOST = 16  # to 23: the host's name in UTF-8, zero-padded
HOST_END = 24
EXTRA = 24  # to 30: the scheme's own
RANKS = 31  # processes that are this member together; 0 or 1: one. Each but the speaker holds a lock (members.py)
EXTRA_END = 32

CLOCK_BITS = 32
CLOCK_MASK = (1 << CLOCK_BITS) - 1

Rows = NDArray[np.int64]


class Table:
    """The table's buffer, by row and column. `read` is one small read; the others one small call each."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def read(self) -> Rows:
        """Return all rows, (1 + SLOTS, FIELDS), in memory of their own: row 0 is the group's, 1 + slot a member's."""
        rows: Rows = np.empty(self.buffer.shape, np.int64)
        self.buffer.read(out=rows)
        return rows

    def raise_to(self, row: int, column: int, value: int) -> Rows:
        """Set one element to the larger of it and `value`, and return all rows as they are then. One call.

        For words that only grow, whatever their writer.
        """
        least = np.full(self.buffer.shape, np.iinfo(np.int64).min, np.int64)
        least[row, column] = value
        rows: Rows = np.asarray(self.buffer.accumulate(least, op="max", fetch=True)).reshape(self.buffer.shape)
        return rows

    def raise_all(self, rows: Sequence[int], column: int, value: int) -> None:
        """Set one element of each of these rows to the larger of it and `value`. One small call."""
        first = min(rows) * FIELDS + column
        least = np.full(max(rows) * FIELDS + column + 1 - first, np.iinfo(np.int64).min, np.int64)
        least[np.array(rows) * FIELDS + column - first] = value
        self.buffer.accumulate(least, first, op="max")

    def get(self, row: int, column: int) -> int:
        return int(self.buffer.read(row * FIELDS + column, 1)[0])

    def swap(self, row: int, column: int, expected: int, new: int) -> int:
        """Set one element if it is as expected; return what it was."""
        return self.buffer.compare_swap(row * FIELDS + column, expected, new)

    def add(self, row: int, column: int, value: int) -> int:
        """Add to one element; return what it was."""
        return self.buffer.fetch_add(row * FIELDS + column, value)

    def write(self, row: int, column: int, values: NDArray[np.int64]) -> None:
        """Replace elements of one row, from a column on."""
        self.buffer.write(values, row * FIELDS + column)


def mark(incarnation: int, clock: int) -> int:
    """Return the word that says so."""
    return incarnation << CLOCK_BITS | clock & CLOCK_MASK


def clock_of(word: int) -> int:
    return int(word) & CLOCK_MASK


def incarnation_of(word: int) -> int:
    """Return whose mark, or weight, a word is."""
    return int(word) >> CLOCK_BITS
