"""The table of a group: one row for the group and one for each member. Members tell each other everything through it.

The table is an int64 buffer, (1 + slots) x FIELDS, small enough for one chunk, so that one read shows everything. How
many slots there are depends on the scheme: SLOTS with rounds, whose members are a set in one word, up to SLOTS_MAX
without. Slots are taken from the lowest on, and a read leaves out the rows above the highest slot that was ever taken.

Words that decide something are changed by compare_swap alone, and contain the incarnation of their owner. So a member
that was stopped for long, and whose slot has another owner now, changes nothing. Words that only inform are written
plainly by their owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smb.buffer import Buffer

SLOTS = 48  # members at a time with rounds; a set of slots and 16 bits of a round's number fit one word
SLOTS_MAX = 512  # without rounds: half of a chunk of the default size
FIELDS = 32
ROUND_SHIFT = 24

# ---- the group's row, by column
ROUND = 0  # round << ROUND_SHIFT | attempt << 1 | built (rounds.py); always 0 in schemes without rounds
INCARNATIONS = 1  # number of incarnations given out so far
READY = 2  # 1 once the group is complete, DELETED once its deletion has begun
DELETED = 2
GROUP_EXTRA = 3  # 3 to 15 belong to the scheme
GROUP_EXTRA_END = 16
DECIDED = 16  # 16 to 31 (rounds.py): the members that count in round r, in column DECIDED + r % DECIDED_KEPT
DECIDED_KEPT = 16
USED = DECIDED  # in a table with more than SLOTS slots: the number of slots up to the highest that was ever taken

# ---- a member's row
INCARNATION = 0  # 0: the slot is free
MARK = 1  # incarnation << 32 | clock: how far it has come; in rounds, it has contributed to all below its clock
WEIGHT = 2  # incarnation << 32 | bits of a float32: the weight of the contribution marked last
STATS = 3  # columns 3 to 15 are written by the owner alone
CONTRIBUTIONS = 3
REFUSED = 4
STALENESS = 5  # staleness of the last contribution
STALENESS_MAX = 6
NORM = 7  # norm of the last contribution: bits of a float64
SAMPLES = 8
BYTES = 9  # bytes sent and received as contributions and models
REJOINS = 10
JOINED_US = 11  # microseconds since 1970 by the member's clock; only shown, never compared
PID = 12  # negative once the member has left by itself; 0 once it goes on in another slot, with its statistics
DROPPED = 13  # contributions that are in no round, or whose outcome is unknown
STEPS = 14  # optimizer steps of a member that was there from the start; a joiner goes on from the largest number
SAMPLES_BEFORE = 15  # samples of earlier members in this slot
STATS_END = 16
HOST = 16  # to 23: the host's name in UTF-8, zero-padded
HOST_END = 24
EXTRA = 24  # 24 and 25 belong to the scheme
RULE = 26  # to 28: the name of the optimizer's class in UTF-8, zero-padded; 0: not said
RATE = 29  # bits of a float64: the optimizer's learning rate
RANKS = 31  # processes that are this member together (0 or 1: one); each except the speaker holds a lock (members.py)
EXTRA_END = 32

CLOCK_BITS = 32
CLOCK_MASK = (1 << CLOCK_BITS) - 1

Rows = NDArray[np.int64]


class Table:
    """The table's buffer, by row and column. `read` is one small read; each other method is one small call."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.slots = int(buffer.shape[0]) - 1
        self._shown = min(self.slots, SLOTS)  # slots whose rows are read

    def read(self) -> Rows:
        """Return a new array of all rows, (1 + slots, FIELDS): row 0 is the group's, row 1 + slot a member's. One call,
        or two if slots beyond SLOTS were taken since the last read.
        """
        rows: Rows = np.zeros(self.buffer.shape, np.int64)
        while True:
            self.buffer.read(0, (1 + self._shown) * FIELDS, out=rows[: 1 + self._shown])
            if self.slots <= SLOTS or rows[0, USED] <= self._shown:
                return rows
            self._shown = min(int(rows[0, USED]), self.slots)

    def show(self, slot: int) -> None:
        """Let every read include this slot's row from now on. Call it before anything is written there. At most one
        small call.
        """
        if slot >= self._shown:
            self.raise_all([0], USED, slot + 1)
            self._shown = slot + 1

    def raise_to(self, row: int, column: int, value: int) -> Rows:
        """Set one element to the larger of its value and `value`, and return all rows as they are afterwards. One call.

        For words that only grow, whoever writes them.
        """
        least = np.full(self.buffer.shape, np.iinfo(np.int64).min, np.int64)
        least[row, column] = value
        rows: Rows = np.asarray(self.buffer.accumulate(least, op="max", fetch=True)).reshape(self.buffer.shape)
        return rows

    def raise_all(self, rows: Sequence[int], column: int, value: int) -> None:
        """Set one element of each of these rows to the larger of its value and `value`. One small call."""
        first = min(rows) * FIELDS + column
        least = np.full(max(rows) * FIELDS + column + 1 - first, np.iinfo(np.int64).min, np.int64)
        least[np.array(rows) * FIELDS + column - first] = value
        self.buffer.accumulate(least, first, op="max")

    def get(self, row: int, column: int) -> int:
        return int(self.buffer.read(row * FIELDS + column, 1)[0])

    def swap(self, row: int, column: int, expected: int, new: int) -> int:
        """Set one element if it is as expected. Return its former value."""
        return self.buffer.compare_swap(row * FIELDS + column, expected, new)

    def add(self, row: int, column: int, value: int) -> int:
        """Add to one element. Return its former value."""
        return self.buffer.fetch_add(row * FIELDS + column, value)

    def write(self, row: int, column: int, values: NDArray[np.int64]) -> None:
        """Replace elements of one row, beginning at a column."""
        self.buffer.write(values, row * FIELDS + column)


def mark(incarnation: int, clock: int) -> int:
    """Return the word that marks this clock of this incarnation."""
    return incarnation << CLOCK_BITS | clock & CLOCK_MASK


def clock_of(word: int) -> int:
    return int(word) & CLOCK_MASK


def incarnation_of(word: int) -> int:
    """Return the incarnation in a mark or a weight."""
    return int(word) >> CLOCK_BITS
