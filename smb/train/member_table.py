"""The table of a group: one row for the group and one for each member. Members tell each other everything through it.

The table is an int64 buffer, (1 + slots) x FIELDS, small enough for one chunk, so that one read shows everything. It
has SLOTS_MAX slots, or fewer if the scheme can't tell so many apart; trainings with rounds that were made before a
round could have more have SLOTS. Slots are taken from the lowest on, and a read leaves out the rows above the highest
slot that was ever taken.

Words that decide something are changed by compare_swap alone, and contain the incarnation of their owner. So a member
that was stopped for long, and whose slot has another owner now, changes nothing. Words that only inform are written
plainly by their owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smb.buffer import Buffer

SLOTS = 48  # so many slots, as a set, and 16 bits of a round's number fit one word
SLOTS_MAX = 512  # half of a chunk of the default size
FIELDS = 32
STRIPE = (
    256 << 10
)  # of a table's buffer, whatever the cluster's is: the whole table is one chunk, so a read is one moment
ROUND_SHIFT = 24

# ---- the group's row, by column
ROUND = 0  # round << ROUND_SHIFT | attempt << 1 | built (rounds.py); always 0 in schemes without rounds
INCARNATIONS = 1  # number of incarnations given out so far
READY = 2  # 1 once the group is complete, DELETED once its deletion has begun
DELETED = 2
GROUP_EXTRA = 3  # 3 to 15 belong to the scheme
GROUP_EXTRA_END = 16
# The members that count in a round (rounds.py), one word for each SLOTS slots. Table.decision says where they are.
DECIDED = 16  # to 31, in a table with at most SLOTS slots: the word of round r is in column DECIDED + r % DECIDED_KEPT
DECIDED_KEPT = 16
USED = 16  # in a table with more than SLOTS slots: the number of slots up to the highest that was ever taken
DECIDED_WIDE = 17  # to 27, there: each round's words take the place of those of the round before

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
            if self._all_read(rows):
                return rows

    def _all_read(self, rows: Rows) -> bool:
        """Return True if no slot that was ever taken is missing in these rows. Otherwise the next read includes it."""
        if self.slots <= SLOTS or rows[0, USED] <= self._shown:
            return True
        self._shown = min(int(rows[0, USED]), self.slots)
        return False

    def decision(self, number: int, rows: Rows) -> range:
        """Return the columns of the group's row with the members that count in a round: bit b of word i is slot
        SLOTS * i + b. There are words for all slots that were ever taken as of `rows`.
        """
        if self.slots <= SLOTS:
            column = DECIDED + number % DECIDED_KEPT
            return range(column, column + 1)
        used = max(1, min(int(rows[0, USED]), self.slots))
        return range(DECIDED_WIDE, DECIDED_WIDE + -(-used // SLOTS))

    def tag(self, number: int) -> int:
        """Return the fifteen bits by which a word of a decision shows its round. A word that was never written has 0,
        and in a large table it may be read in any round: its slots may be taken late.
        """
        return (number + 1) & 0x7FFF if self.slots <= SLOTS else number % 0x7FFF + 1

    def show(self, slot: int) -> None:
        """Let every read include this slot's row from now on. Call it before anything is written there. At most one
        small call.
        """
        if slot >= self._shown:
            self.raise_all([0], USED, slot + 1)
            self._shown = slot + 1

    def raise_to(self, row: int, column: int, value: int) -> Rows:
        """Set one element to the larger of its value and `value`, and return all rows as they are afterwards. One call,
        or two if slots beyond SLOTS were taken since the last read.

        For words that only grow, whoever writes them.
        """
        shown = 1 + max(row, self._shown)
        least = np.full((shown, FIELDS), np.iinfo(np.int64).min, np.int64)
        least[row, column] = value
        rows: Rows = np.zeros(self.buffer.shape, np.int64)
        rows[:shown] = np.asarray(self.buffer.accumulate(least.ravel(), 0, op="max", fetch=True)).reshape(shown, FIELDS)
        return rows if self._all_read(rows) else self.read()

    def raise_all(self, rows: Sequence[int], column: int, value: int) -> None:
        """Set one element of each of these rows to the larger of its value and `value`. One small call."""
        first = min(rows) * FIELDS + column
        least = np.full(max(rows) * FIELDS + column + 1 - first, np.iinfo(np.int64).min, np.int64)
        least[np.array(rows) * FIELDS + column - first] = value
        self.buffer.accumulate(least, first, op="max")

    def get(self, row: int, column: int) -> int:
        found = np.empty(1, np.int64)  # with out= a read is a direct call
        self.buffer.read(row * FIELDS + column, 1, out=found)
        return int(found[0])

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
