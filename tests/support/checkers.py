"""Judges of what was seen: they find lost, doubled, torn and misplaced additions, and locks with two holders.

Pure: they look at numbers and times, and know nothing of how these came about. tests/unit/test_checkers.py tries them on
planted bad histories first.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERIOD = 251
Array = np.ndarray[Any, np.dtype[Any]]


class BadHistoryError(AssertionError):
    """What was seen can't have come about by the rules."""


class VoidRunError(AssertionError):
    """The run shows nothing: too little happened, or the fault did not."""


def delta(count: int, offset: int = 0) -> Array:
    """Return what every client adds: i mod 251 + 1 at element i. It differs from element to element, so that a misplaced
    addition can't hide."""
    return np.arange(offset, offset + count, dtype=np.int64) % PERIOD + 1


# ---- additions


def check_at_rest(lane: Array, acknowledged: int, name: str = "lane") -> None:
    """Every element is its delta times the acknowledged additions."""
    check_between(lane, acknowledged, acknowledged, name)


def check_between(lane: Array, acknowledged: int, attempted: int, name: str = "lane") -> None:
    """Every element is a whole multiple of its delta, of at least the acknowledged and at most the attempted additions."""
    unit = delta(lane.size)
    counts, rests = np.divmod(lane.reshape(-1).astype(np.int64), unit)
    for wrong, what in (
        (rests != 0, "misplaced or half an addition"),
        (counts < acknowledged, "lost"),
        (counts > attempted, "doubled"),
    ):
        if wrong.any():
            first = int(np.argmax(wrong))
            raise BadHistoryError(
                f"{name}: {int(wrong.sum())} of {lane.size} elements {what}; the first is {first}: {int(lane.reshape(-1)[first])} "
                f"= {int(counts[first])} x {int(unit[first])} + {int(rests[first])}, with {acknowledged} acknowledged and "
                f"{attempted} attempted"
            )


def check_untorn(chunk: Array, offset: int = 0, name: str = "chunk") -> None:
    """All elements of a chunk are the same multiple of their deltas: no addition was half there when it was read."""
    unit = delta(chunk.size, offset)
    counts, rests = np.divmod(chunk.astype(np.int64), unit)
    torn = (rests != 0) | (counts != counts[0])
    if torn.any():
        first = int(np.argmax(torn))
        raise BadHistoryError(
            f"{name}: torn at element {offset + first}: {int(chunk[first])} after {int(counts[0])} additions"
        )


def check_one_version(array: Array) -> int:
    """All elements are of one publication; returns which."""
    if not (array == array.flat[0]).all():
        raise BadHistoryError(f"a mix of the versions {sorted({int(v) for v in np.unique(array)})}")
    return int(array.flat[0])


# ---- counters


@dataclass(frozen=True, slots=True)
class Ticket:
    """One fetch_add(1): when it began and ended, and the old value; None where the outcome is unknown."""

    began: float
    ended: float
    value: int | None


def check_tickets(tickets: Sequence[Ticket], first: int, last: int) -> None:
    """A counter went from `first` to `last` by these: values are unique, and in the order of real time; those missing are no more
    than the ones whose outcome is unknown. O(n log n)."""
    known = sorted((t for t in tickets if t.value is not None), key=lambda t: t.value or 0)
    values = [t.value for t in known]
    for before, after in zip(values, values[1:], strict=False):
        if before == after:
            raise BadHistoryError(f"the value {before} was given twice")
    if values and not (first <= (values[0] or 0) and (values[-1] or 0) < last):
        raise BadHistoryError(f"values from {values[0]} to {values[-1]} of a counter that went from {first} to {last}")
    unknown = len(tickets) - len(known)
    missing = (last - first) - len(values)
    if not 0 <= missing <= unknown:
        raise BadHistoryError(f"{missing} values are missing, and {unknown} outcomes are unknown")
    # Whoever got a lower value must not have begun after another with a higher one had ended.
    latest_begin = float("-inf")
    for ticket in known:
        latest_begin = max(latest_begin, ticket.began)
        if ticket.ended < latest_begin:
            raise BadHistoryError(f"the value {ticket.value} came before a lower one was asked for")


# ---- locks


@dataclass(frozen=True, slots=True)
class Holding:
    """One client's time with a lock: its token, when it may have begun and ended at the earliest and latest."""

    client: int
    token: int
    granted: float
    released: float


@dataclass(frozen=True, slots=True)
class FencedWrite:
    """A change under a token, and whether it was accepted, and between when."""

    token: int
    began: float
    ended: float
    accepted: bool


def check_locks(holdings: Sequence[Holding], writes: Sequence[FencedWrite] = ()) -> None:
    """Tokens are unique and grow in the order of time; no two hold at once; no write is accepted after a later holder was
    granted."""
    ordered = sorted(holdings, key=lambda h: h.token)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.token == after.token:
            raise BadHistoryError(f"the token {after.token} was given to {before.client} and {after.client}")
        if after.granted < before.released:
            raise BadHistoryError(
                f"{after.client} was granted {after.token} at {after.granted} while {before.client} held until {before.released}"
            )
    tokens = [h.token for h in ordered]
    for write in writes:
        later = bisect.bisect_right(tokens, write.token)
        if write.accepted and any(h.granted < write.began for h in ordered[later:]):
            raise BadHistoryError(
                f"a write under the token {write.token} was accepted after a later holder was granted"
            )


@dataclass(frozen=True, slots=True)
class LockEvent:
    """A client's acquire or release, from its call to its return."""

    client: int
    kind: str  # "acquire" or "release"
    began: float
    ended: float


def search_lock_order(events: Sequence[LockEvent], seconds: float = 10.0) -> list[LockEvent]:
    """Return an order of the events, one after the other, that a lock allows and that does not contradict their times (Wing
    and Gong's search). Raises BadHistoryError where there is none, or none was found in time."""
    deadline = time.monotonic() + seconds
    pending = sorted(events, key=lambda e: e.began)
    seen: set[tuple[frozenset[int], int | None]] = set()
    order: list[LockEvent] = []

    def extend(left: frozenset[int], holder: int | None) -> bool:
        if not left:
            return True
        if (left, holder) in seen:
            return False
        seen.add((left, holder))
        if time.monotonic() > deadline:
            raise BadHistoryError(f"no order found within {seconds:g} s: that proves nothing, and so it is a failure")
        soonest_end = min(pending[i].ended for i in left)
        for i in sorted(left):
            event = pending[i]
            if event.began > soonest_end:
                break  # something else had ended before it began
            allowed = holder is None if event.kind == "acquire" else holder == event.client
            if allowed:
                order.append(event)
                if extend(left - {i}, event.client if event.kind == "acquire" else None):
                    return True
                order.pop()
        return False

    if not extend(frozenset(range(len(pending))), None):
        raise BadHistoryError("no order of these acquires and releases is one of a lock")
    return order


# ---- runs


@dataclass(slots=True)
class Run:
    """Whether a run shows anything."""

    operations_before_fault: int
    seconds_before_fault: float
    faults_armed: int
    faults_fired: int
    last_operation_succeeded: bool

    def check(self, rate_min: float) -> None:
        """Raise VoidRunError unless it did enough before the fault, every fault fired, and the end was good."""
        rate = self.operations_before_fault / max(self.seconds_before_fault, 1e-9)
        if rate < rate_min:
            raise VoidRunError(
                f"only {rate:.1f} operations a second before the fault; at least {rate_min:g} are needed"
            )
        if self.faults_fired < self.faults_armed:
            raise VoidRunError(f"{self.faults_fired} of {self.faults_armed} faults fired")
        if not self.last_operation_succeeded:
            raise VoidRunError("the last operation did not succeed")
