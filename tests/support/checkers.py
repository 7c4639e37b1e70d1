"""Judges of what was seen: they find lost, doubled, torn and misplaced additions, and locks with two holders.

Pure: they look at numbers and times, and know nothing of how these came about. tests/unit/support/test_checkers.py
tries them on planted bad histories first.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PERIOD = 251
Array = np.ndarray[Any, np.dtype[Any]]


class BadHistoryError(AssertionError):
    """The history breaks the rules."""


class VoidRunError(AssertionError):
    """The run shows nothing: too little happened, or the fault did not."""


def delta(count: int, offset: int = 0) -> Array:
    """Return what every client adds: i mod 251 + 1 at element i. It differs from element to element, so that a
    misplaced addition can't hide.
    """
    return np.arange(offset, offset + count, dtype=np.int64) % PERIOD + 1


# ---- additions


def check_at_rest(lane: Array, acknowledged: int, name: str = "lane") -> None:
    """Every element is its delta times the acknowledged additions."""
    check_between(lane, acknowledged, acknowledged, name)


def check_between(lane: Array, acknowledged: int, attempted: int, name: str = "lane") -> None:
    """Every element is a multiple of its delta, by at least the acknowledged and at most the attempted additions."""
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
                f"{name}: {int(wrong.sum())} of {lane.size} elements {what}; the first is {first}: "
                f"{int(counts[first])} x {int(unit[first])} + {int(rests[first])}, with {acknowledged} acknowledged "
                f"and {attempted} attempted"
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
    """A counter went from `first` to `last` by these: values are unique, and in the order of real time; each of those
    missing can be one whose outcome is unknown. O(n log n).
    """
    known = sorted((t for t in tickets if t.value is not None), key=lambda t: t.value or 0)
    values = [t.value or 0 for t in known]
    for before, after in itertools.pairwise(values):
        if before == after:
            raise BadHistoryError(f"the value {before} was given twice")
    if values and not (first <= values[0] and values[-1] < last):
        raise BadHistoryError(f"values from {values[0]} to {values[-1]} of a counter that went from {first} to {last}")
    # A call that got a lower value must not have begun after one with a higher value had ended.
    latest_begin = float("-inf")
    for ticket in known:
        latest_begin = max(latest_begin, ticket.began)
        if ticket.ended < latest_begin:
            raise BadHistoryError(f"the value {ticket.value} came before a lower one was asked for")
    _check_missing(known, sorted(t.began for t in tickets if t.value is None), first, last)


def _check_missing(known: Sequence[Ticket], unknown: Sequence[float], first: int, last: int) -> None:
    """Each missing value was taken by another one of unknown outcome, which had begun before a higher value was out.

    Without the times a value that was counted twice could be put down to a call that came much later, and never
    arrived. They end at no known time, so only when they began restricts what they can have taken; that the earliest
    takes the lowest is then the best choice.
    """
    missing = (last - first) - len(known)
    if not 0 <= missing <= len(unknown):
        raise BadHistoryError(f"{missing} values are missing, and {len(unknown)} outcomes are unknown")
    soonest_ends = list(itertools.accumulate((t.ended for t in reversed(known)), min, initial=float("inf")))
    soonest_ends.reverse()  # [k]: by then a value of known[k:] was out
    taken, begins, low = 0, iter(unknown), first
    for value in [*(t.value or 0 for t in known), last]:
        for gap in range(low, value):
            if next(begins) > soonest_ends[taken]:
                raise BadHistoryError(f"nobody can have taken the value {gap}: a higher one was out before")
        taken, low = taken + 1, value + 1


# ---- a single element


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on one element: its times (`ended` is infinite if its outcome is unknown), what it was given, and what
    it was told: of "read", "add" and "swap" the value that it found. "swap" has the expected and the new value.
    """

    began: float
    ended: float
    kind: str
    given: tuple[int, ...] = ()
    found: int | None = None

    def step(self, value: int) -> int | None:
        """Return the element's next value, None if the call was told something that does not fit this one."""
        if self.kind != "write" and self.found not in (None, value):
            return None
        match self.kind, self.given:
            case "read", ():
                return value
            case "write", (new,):
                return new
            case "add", (amount,):
                return value + amount
            case "swap", (expected, new):
                return new if value == expected else value
        raise AssertionError(self)


@dataclass(slots=True, eq=False)
class _Moment:
    """A call's begin, or its end, in a list by time."""

    operation: int
    end: _Moment | None = None
    before: _Moment | None = None
    after: _Moment | None = None

    def lift(self) -> None:
        """Take it out of the list; it remembers where it was."""
        assert self.before is not None
        self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before

    def put_back(self) -> None:
        """Undo the last lift."""
        assert self.before is not None
        self.before.after = self
        if self.after is not None:
            self.after.before = self


def _moments(operations: Sequence[Operation]) -> _Moment:
    """Return the head of the list of all begins, and of all ends that are known."""
    ends = [_Moment(number) for number in range(len(operations))]
    known = [(one.ended, 1, end) for one, end in zip(operations, ends, strict=True) if one.ended != float("inf")]
    begins = [(one.began, 0, _Moment(number, ends[number])) for number, one in enumerate(operations)]
    head = last = _Moment(-1)
    for _, _, moment in sorted([*begins, *known], key=lambda each: each[:2]):
        last.after, moment.before = moment, last
        last = moment
    return head


def check_linearizable(operations: Sequence[Operation], value: int) -> None:
    """There is one order of all calls, each between its two times, in which every call was told the truth, from that
    first value on. Wing and Gong, JPDC 17, 1993; with Lowe's memory of what was tried, CCPE 29(4), 2017.
    """
    operations = sorted(operations, key=lambda one: one.began)  # so that a few bits say which have no place yet
    head = _moments(operations)
    tried: set[tuple[int, int, int]] = set()  # how many calls are in order without a gap, the rest's bits, the value
    made, gapless, bits = [], 0, 0  # made: calls in the order that is tried, with the value before each
    moment = head.after
    while moment is not None:
        if moment.end is not None:
            bit, following = 1 << (moment.operation - gapless), operations[moment.operation].step(value)
            if following is not None:
                some, low = bits | bit, gapless
                while some & 1:
                    some, low = some >> 1, low + 1
                if (low, some, following) not in tried:
                    tried.add((low, some, following))
                    made.append((moment, value, gapless, bits))
                    value, gapless, bits = following, low, some
                    moment.lift()
                    if operations[moment.operation].ended != float("inf"):
                        moment.end.lift()
                    moment = head.after
                    continue
            moment = moment.after
        else:  # the end of a call that has no place yet: the last choice was wrong
            if not made:
                one = operations[moment.operation]
                raise BadHistoryError(f"no order of {len(operations)} calls explains what {one} was told")
            moment, value, gapless, bits = made.pop()
            if operations[moment.operation].ended != float("inf"):
                assert moment.end is not None
                moment.end.put_back()
            moment.put_back()
            moment = moment.after


# ---- locks


@dataclass(frozen=True, slots=True)
class Holding:
    """One client's time with a lock: its token, the latest time at which it can have begun, and the earliest at which
    it can have ended, which is before that where its lease may have run out before its grant was told.
    """

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
    """Tokens are unique and grow in the order of time; no two hold at once; no write is accepted after a later holder
    was granted.
    """
    ordered = sorted(holdings, key=lambda h: h.token)
    for before, after in itertools.pairwise(ordered):
        if before.token == after.token:
            raise BadHistoryError(f"the token {after.token} was given to {before.client} and {after.client}")
        if after.granted < before.released:
            raise BadHistoryError(
                f"{after.client} was granted {after.token} at {after.granted} while {before.client} held until "
                f"{before.released}"
            )
    tokens = [h.token for h in ordered]
    # When the first of this and all later holders was granted: an hour of a soak has as many writes as holders.
    granted = list(itertools.accumulate([math.inf, *(h.granted for h in reversed(ordered))], min))[::-1]
    for write in writes:
        later = bisect.bisect_right(tokens, write.token)
        if write.accepted and granted[later] < write.began:
            raise BadHistoryError(
                f"a write under the token {write.token} was accepted after a later holder was granted"
            )


@dataclass(frozen=True, slots=True)
class LockEvent:
    """A client's call on a lock, from its begin to its return; `ended` is infinite if it never returned.

    A holder that was killed has lost the lock, from when it was last heard of to no known end; one that was killed
    while it asked may have acquired it, and lost it, at any time from then on.
    """

    client: int
    kind: str  # "acquire", "release" or "lost"
    began: float
    ended: float
    token: int | None = None  # of an acquire, where it was told


class _LockState(NamedTuple):
    """Between two events: which are to come (a bit each), who holds it, the highest token so far."""

    left: int
    holder: int | None
    token: int


def search_lock_order(events: Sequence[LockEvent], seconds: float = 10.0) -> list[LockEvent]:
    """Return an order of the events, one after the other, that a lock allows and that does not contradict their times
    (Wing and Gong's search). Raises BadHistoryError where there is none, or none was found in time.
    """
    deadline = time.monotonic() + seconds
    pending = sorted(events, key=lambda e: e.began)
    state = _LockState((1 << len(pending)) - 1, None, 0)
    seen = {state}
    order: list[LockEvent] = []
    choices = [_next_events(pending, state)]
    while state.left:
        if time.monotonic() > deadline:
            raise BadHistoryError(f"no order found within {seconds:g} s: that proves nothing, and so it is a failure")
        event, state = next(choices[-1], (None, state))
        if event is None:
            choices.pop()
            if not order:
                raise BadHistoryError("no order of these acquires and releases is one of a lock")
            order.pop()
        elif state not in seen:
            seen.add(state)
            order.append(event)
            choices.append(_next_events(pending, state))
    return order


def _next_events(pending: Sequence[LockEvent], state: _LockState) -> Iterator[tuple[LockEvent, _LockState]]:
    """Give each event that may come next, and what is then. `pending` is in the order in which they began."""
    soonest_end, rest, places = float("inf"), state.left, []
    while rest:
        place = (rest & -rest).bit_length() - 1
        if pending[place].began > soonest_end:
            break
        soonest_end = min(soonest_end, pending[place].ended)
        places.append(place)
        rest &= rest - 1
    for place in places:
        event, left = pending[place], state.left & ~(1 << place)
        if event.began > soonest_end:
            continue  # another one had ended before it began
        if event.kind == "acquire":
            grows = event.token is None or event.token > state.token
            if state.holder is None and grows:
                yield event, _LockState(left, event.client, event.token or state.token)
        elif state.holder == event.client:
            yield event, _LockState(left, None, state.token)


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
