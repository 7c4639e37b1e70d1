"""The arithmetic of round-robin synchronisation: whose turn it is, when it is passed on, and how many samples each
worker takes.

Pure: times are passed in, in seconds of the caller's own clock. r2sp.py acts on the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smb.errors import InvalidArgumentError

SLACK = (
    1.2  # the gaps of a rotation add up to the iteration divided by this, so a slightly slow worker holds up no other
)
_SMOOTHING = 0.2  # weight of the latest measured speed

_SLOT_BITS, _TAKEN_BITS, _INCARNATION_BITS = 7, 1, 15
_INCARNATION_SHIFT = _SLOT_BITS + _TAKEN_BITS
_UPDATES_SHIFT = _INCARNATION_SHIFT + _INCARNATION_BITS
_UPDATES_BITS = 63 - _UPDATES_SHIFT
MEMBERS_MAX = 1 << _SLOT_BITS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate for a turn: a slot and the incarnation of its owner."""

    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The current turn: its owner, the number of updates before it, and whether the owner is updating (`taken`)."""

    updates: int = 0
    slot: int = 0
    incarnation: int = 0  # lowest 15 bits, so that an earlier owner of the slot has no part in the turn
    taken: bool = False

    def word(self) -> int:
        """Return the turn as one non-negative int64, so that compare_swap changes all of it."""
        return (
            (self.updates % (1 << _UPDATES_BITS)) << _UPDATES_SHIFT
            | (self.incarnation % (1 << _INCARNATION_BITS)) << _INCARNATION_SHIFT
            | self.taken << _SLOT_BITS
            | self.slot
        )

    @classmethod
    def of(cls, word: int) -> Turn:
        return cls(
            word >> _UPDATES_SHIFT,
            word & (1 << _SLOT_BITS) - 1,
            word >> _INCARNATION_SHIFT & (1 << _INCARNATION_BITS) - 1,
            bool(word >> _SLOT_BITS & 1),
        )

    def is_of(self, member: Candidate) -> bool:
        return (self.slot, self.incarnation) == (member.slot, member.incarnation % (1 << _INCARNATION_BITS))

    def take(self) -> Turn:
        """Return this turn, taken by its owner."""
        return Turn(self.updates, self.slot, self.incarnation, True)

    def passed(self, live: Sequence[Candidate], updated: bool) -> Turn:
        """Return the turn of the next live member, in a circle of slots. `live` is not empty."""
        later = [member for member in live if member.slot > self.slot]
        following = min(later or live, key=lambda member: member.slot)
        incarnation = following.incarnation % (1 << _INCARNATION_BITS)
        return Turn(self.updates + updated, following.slot, incarnation)

    def away(self, slot: int, live: Sequence[Candidate]) -> int:
        """Return how many turns come before the turn of `slot`; 0 if it has the turn."""
        if slot == self.slot:
            return 0
        return 1 + sum(
            (self.slot < member.slot < slot) if self.slot < slot else (member.slot > self.slot or member.slot < slot)
            for member in live
        )


def gap_s(iteration_s: float, workers: int) -> float:
    """Return the seconds between the starts of two workers' updates, for iterations of
    `iteration_s` without waiting.
    """
    return iteration_s / (SLACK * workers)


def batch_sizes(speeds: Sequence[float], batch_size: int) -> list[int]:
    """Return each worker's number of samples in an iteration: `batch_size` on average, in proportion to `speeds`
    (samples per second; 0: not known, taken as the mean of the others), so that all workers need the same time.

    The numbers add up to len(speeds) * batch_size, and none is less than 1. Rounding down leaves some samples over; the
    workers with the largest remainders get one each, the first ones among equals.
    """
    known = [speed for speed in speeds if speed > 0]
    if not speeds or batch_size < 1:
        raise InvalidArgumentError(
            f"batch sizes: need at least 1 sample for each of at least 1 worker, not {batch_size} for {len(speeds)}"
        )
    mean = sum(known) / len(known) if known else 1.0
    whole = [speed if speed > 0 else mean for speed in speeds]
    samples, speed_sum = batch_size * len(speeds), sum(whole)
    shares = [samples * (speed / speed_sum) for speed in whole]
    sizes = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: sizes[i] - shares[i])
    for i in by_remainder[: max(0, samples - sum(sizes))]:
        sizes[i] += 1
    while sum(sizes) > samples:  # the largest give what raising others to 1 has added
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


class Pace:
    """A worker's measurements of its own iterations, each from the end of one step to the end of the next."""

    def __init__(self, warmup: int) -> None:
        self._window = warmup
        self._iterations = 0
        self._busy_s = 0.0
        self.iteration_s = 0.0  # mean of the last window without waiting for turns; 0 before the first window has ended
        self.speed = 0.0  # samples per second of computing, smoothed; 0 before the first step

    def count(self, samples: int, computing_s: float, exchanging_s: float) -> bool:
        """Add an iteration, without its waiting time. Returns True if a window has ended, so that
        iteration_s is new.
        """
        if samples > 0 and computing_s > 0:
            now = samples / computing_s
            self.speed = self.speed + _SMOOTHING * (now - self.speed) if self.speed else now
        self._iterations += 1
        self._busy_s += computing_s + exchanging_s
        if self._iterations < self._window:
            return False
        self.iteration_s = self._busy_s / self._iterations
        self._iterations, self._busy_s = 0, 0.0
        return True


def may_skip(seen_late_s: float, skip_after_s: float | None, skipped: int, skips: int) -> bool:
    """Return True if a late worker's turn may be passed on: it is late by `skip_after_s` (None: never), and fewer than
    `skips` of its turns in a row were passed on.
    """
    return skip_after_s is not None and seen_late_s >= skip_after_s and skipped < skips


def staleness_max(workers: int, skips: int) -> int:
    """Return the largest number of updates by others between a worker's read and its next update, if up to `skips` of
    its turns in a row may be passed on.
    """
    return (skips + 1) * (workers - 1)
