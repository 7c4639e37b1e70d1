"""The checkers are tried on planted bad histories before anything is judged by them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkers import (
    BadHistoryError,
    FencedWrite,
    Holding,
    LockEvent,
    Operation,
    Run,
    Ticket,
    VoidRunError,
    check_at_rest,
    check_between,
    check_linearizable,
    check_locks,
    check_one_version,
    check_tickets,
    check_untorn,
    delta,
    search_lock_order,
)

SIZE = 4096


def test_additions_that_count_once_are_good() -> None:
    check_at_rest(7 * delta(SIZE), 7)
    check_between(7 * delta(SIZE), 5, 8)
    check_at_rest(np.zeros(SIZE, np.int64), 0)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda lane: lane - delta(SIZE), "lost"),
        (lambda lane: lane + delta(SIZE), "doubled"),
        (lambda lane: np.concatenate([lane[:2048], lane[2048:] - delta(SIZE)[2048:]]), "lost"),  # torn in the middle
        (lambda lane: np.roll(lane, 512), "misplaced"),
        (lambda lane: np.concatenate([lane[512:1024], lane[512:]]), "misplaced"),  # a block put back in the wrong place
        (lambda lane: lane + (np.arange(SIZE) == 77), "misplaced"),
    ],
    ids=["lost", "doubled", "torn", "rolled", "block", "one element"],
)
def test_each_planted_fault_of_a_lane_is_found(fault: object, told: str) -> None:
    with pytest.raises(BadHistoryError, match=told):
        check_at_rest(fault(7 * delta(SIZE)), 7)  # type: ignore[operator]


def test_a_constant_would_hide_what_the_delta_shows() -> None:
    """Why deltas depend on the position: of equal elements a misplaced block can't be told."""
    constant = np.full(SIZE, 7)
    assert (np.concatenate([constant[512:1024], constant[512:]]) == constant).all()


def test_before_rest_bounds_hold() -> None:
    check_between(np.where(np.arange(SIZE) < 100, 6, 5) * delta(SIZE), 5, 6)
    for counts in (4, 7):
        with pytest.raises(BadHistoryError):
            check_between(counts * delta(SIZE), 5, 6)


def test_a_torn_chunk_is_found() -> None:
    check_untorn(3 * delta(SIZE, 100), 100)
    torn = 3 * delta(SIZE)
    torn[1000:] += delta(SIZE)[1000:]
    with pytest.raises(BadHistoryError, match="torn at element 1000"):
        check_untorn(torn)


def test_a_mix_of_versions_is_found() -> None:
    assert check_one_version(np.full(9, 4)) == 4
    with pytest.raises(BadHistoryError, match=r"\[4, 5\]"):
        check_one_version(np.array([4, 4, 5]))


def tickets(*values: int | None) -> list[Ticket]:
    return [Ticket(float(i), i + 0.5, value) for i, value in enumerate(values)]


def test_counters() -> None:
    check_tickets(tickets(0, 1, 2, 3), 0, 4)
    check_tickets(tickets(0, None, 2, 3), 0, 4)  # the unknown one counted
    check_tickets(tickets(0, None, 1, 2), 0, 3)  # and here it did not
    overlapping = [Ticket(0.0, 5.0, 1), Ticket(1.0, 2.0, 0)]
    check_tickets(overlapping, 0, 2)
    for bad, last, told in (
        (tickets(0, 1, 1, 2), 3, "twice"),
        (tickets(0, 1, 3), 4, "missing"),
        (tickets(0, 1, 2), 4, "missing"),
        (tickets(1, 0, 2), 3, "came before"),
        (tickets(0, 1, 2), 2, "went from"),
    ):
        with pytest.raises(BadHistoryError, match=told):
            check_tickets(bad, 0, last)


def test_a_missing_value_needs_somebody_who_can_have_taken_it() -> None:
    """One that counts twice is not put down to a call of unknown outcome that came later."""
    doubled = [Ticket(0, 1, 0), Ticket(1, 2, 2)]
    check_tickets([*doubled, Ticket(1.5, 9, None)], 0, 3)
    check_tickets([*doubled, Ticket(1.5, 9, None), Ticket(5, 9, None)], 0, 4)  # the last one took what came last
    with pytest.raises(BadHistoryError, match="nobody can have taken the value 1"):
        check_tickets([*doubled, Ticket(5, 9, None)], 0, 3)
    with pytest.raises(BadHistoryError, match="nobody can have taken the value 2"):
        check_tickets([Ticket(0, 1, 0), Ticket(1, 2, 3), Ticket(0, 9, None), Ticket(5, 9, None)], 0, 4)


@given(st.data())
def test_counters_of_a_correct_object_are_good(data: st.DataObject) -> None:
    """Any history in which each operation takes effect at some instant of its own passes; of some the outcome is not
    known, and some of these never took effect.
    """
    history, value = [], 0
    for instant in range(data.draw(st.integers(0, 12))):
        began, ended = instant - data.draw(st.floats(0, 3)), instant + data.draw(st.floats(0, 3))
        known, counted = data.draw(st.sampled_from([(True, True), (True, True), (False, True), (False, False)]))
        history.append(Ticket(began, ended, value if known else None))
        value += counted
    check_tickets(data.draw(st.permutations(history)), 0, value)


@given(st.integers(2, 12), st.data())
def test_a_counter_that_gives_a_value_twice_or_skips_one_is_found(count: int, data: st.DataObject) -> None:
    """A fault at any place of a history whose outcomes are all known."""
    at = data.draw(st.integers(0, count - 1))
    for values in ([*range(at), *range(at, count), at], [*range(at), *range(at + 1, count + 1)]):
        with pytest.raises(BadHistoryError):
            check_tickets([Ticket(i, i + 10, value) for i, value in enumerate(values)], 0, max(values) + 1)


HOLDINGS = [Holding(0, 2, 0.0, 1.0), Holding(1, 4, 1.5, 2.0), Holding(0, 6, 2.0, 3.0)]


def test_locks() -> None:
    check_locks(HOLDINGS, [FencedWrite(2, 0.1, 0.2, True), FencedWrite(2, 1.7, 1.8, False)])
    for holdings, writes, told in (
        ([*HOLDINGS, Holding(2, 8, 2.5, 4.0)], (), "while"),
        ([*HOLDINGS, replace(HOLDINGS[2], client=5)], (), "given to"),
        ([HOLDINGS[0], replace(HOLDINGS[1], token=1)], (), "while"),
        (HOLDINGS, [FencedWrite(2, 1.7, 1.8, True)], "accepted after"),
    ):
        with pytest.raises(BadHistoryError, match=told):
            check_locks(holdings, writes)


def test_the_search_finds_an_order_where_there_is_one() -> None:
    good = [
        LockEvent(0, "acquire", 0, 5),
        LockEvent(1, "acquire", 1, 3),
        LockEvent(1, "release", 3.5, 4),
        LockEvent(0, "release", 6, 7),
    ]
    assert [e.client for e in search_lock_order(good)] == [1, 1, 0, 0]


def test_the_search_finds_two_holders_and_admits_defeat() -> None:
    two = [
        LockEvent(0, "acquire", 0, 1),
        LockEvent(1, "acquire", 2, 3),
        LockEvent(0, "release", 4, 5),
        LockEvent(1, "release", 4, 5),
    ]
    with pytest.raises(BadHistoryError, match="no order"):
        search_lock_order(two)
    unheld = [LockEvent(0, "release", 0, 1)]
    with pytest.raises(BadHistoryError, match="no order"):
        search_lock_order(unheld)
    # Forty who overlap, and one release too many at the end: every subset of the forty is a state of its own.
    many = [LockEvent(i, kind, 0, 100) for i in range(40) for kind in ("acquire", "release")]
    with pytest.raises(BadHistoryError, match="within"):
        search_lock_order([*many, LockEvent(0, "release", 200, 201)], seconds=0.2)


def in_turn(count: int) -> list[LockEvent]:
    """Clients that take the lock one after the other."""
    return [
        LockEvent(turn % 3, kind, 4 * turn + late, 4 * turn + late + 1, 2 * turn + 2 if kind == "acquire" else None)
        for turn in range(count)
        for kind, late in (("acquire", 0), ("release", 2))
    ]


def test_the_search_is_quick_where_nobody_overlaps() -> None:
    assert len(search_lock_order(in_turn(2000), seconds=5)) == 4000


def test_the_search_knows_leases_that_ran_out_and_tokens() -> None:
    events = in_turn(3)
    events[1] = LockEvent(0, "lost", 1.0, float("inf"))  # it was killed; the next one got the lock
    search_lock_order(events)
    for bad in (
        [replace(events[1], began=6.0), *events[:1], *events[2:]],  # heard of as the holder when another had it
        [*events, LockEvent(4, "acquire", 20, 21, 4)],  # a token that was given before
        [*events, LockEvent(4, "acquire", 20, 21, 3)],  # and one that went back
        [*events[:1], *events[2:]],  # it never lost it
    ):
        with pytest.raises(BadHistoryError, match="no order"):
            search_lock_order(bad)
    # Killed while it asked: it may have had the lock in between, or not.
    pending = [LockEvent(9, "acquire", 3.0, float("inf")), LockEvent(9, "lost", 3.0, float("inf"))]
    search_lock_order([*events, *pending])


@given(st.data())
def test_histories_of_a_correct_lock_are_good(data: st.DataObject) -> None:
    """Every call takes effect at an instant of its own; each client's own calls don't overlap."""
    instant, token, holder = 0.0, 0, None
    instants: dict[int, list[tuple[str, float, int | None]]] = {0: [], 1: [], 2: []}
    for _ in range(data.draw(st.integers(0, 24))):
        instant += 1.0
        if holder is None:
            holder, token = data.draw(st.integers(0, 2)), token + data.draw(st.integers(1, 3))
            instants[holder].append(("acquire", instant, token))
        else:
            instants[holder].append((data.draw(st.sampled_from(["release", "lost"])), instant, None))
            holder = None
    events = []
    for client, own in instants.items():
        ended = -1.0
        for place, (kind, at, told) in enumerate(own):
            until = own[place + 1][1] if place + 1 < len(own) else at + 3.0
            began = data.draw(st.floats(ended, at))
            ended = data.draw(st.floats(at, (at + until) / 2))
            events.append(LockEvent(client, kind, began, ended, told))
    search_lock_order(data.draw(st.permutations(events)))


def test_void_runs_show_nothing() -> None:
    run = Run(100, 1.0, 3, 3, True)
    run.check(50)
    for bad, told in (
        (replace(run, operations_before_fault=10), "a second"),
        (replace(run, faults_fired=2), "2 of 3"),
        (replace(run, last_operation_succeeded=False), "last operation"),
    ):
        with pytest.raises(VoidRunError, match=told):
            bad.check(50)


# ---- a single element


def test_calls_that_fit_one_order_are_good() -> None:
    """Those that overlap have any order that explains what all of them were told."""
    check_linearizable([], 0)
    written = Operation(0, 10, "write", (5,))
    check_linearizable([written, Operation(1, 2, "read", (), 0), Operation(3, 4, "read", (), 5)], 0)
    swapped = Operation(5, 6, "swap", (5, 7), 5)
    check_linearizable([written, swapped, Operation(7, 8, "add", (1,), 7), Operation(11, 12, "read", (), 8)], 0)
    unknown = Operation(0, float("inf"), "write", (9,))
    check_linearizable([unknown, Operation(1, 2, "read", (), 0), Operation(3, 4, "read", (), 9)], 0)
    check_linearizable([unknown, Operation(1, 2, "read", (), 0), Operation(3, 4, "read", (), 0)], 0)


@pytest.mark.parametrize(
    "operations",
    [
        [Operation(0, 1, "write", (5,)), Operation(2, 3, "read", (), 0)],  # lost, or a stale read
        [Operation(0, 1, "add", (1,), 0), Operation(0, 1, "add", (1,), 0)],  # the same ticket twice
        [Operation(0, 9, "write", (5,)), Operation(1, 2, "read", (), 5), Operation(3, 4, "read", (), 0)],  # back
        [Operation(0, 1, "swap", (0, 5), 0), Operation(2, 3, "swap", (0, 6), 0)],  # two swaps of one value
        [Operation(0, 1, "swap", (3, 5), 0), Operation(2, 3, "read", (), 5)],  # one that was told it had not been made
        [Operation(5, float("inf"), "write", (5,)), Operation(1, 2, "read", (), 5)],  # seen before it was asked for
    ],
)
def test_each_planted_fault_of_an_element_is_found(operations: list[Operation]) -> None:
    with pytest.raises(BadHistoryError, match="no order"):
        check_linearizable(operations, 0)


_CALLS = st.one_of(
    st.tuples(st.just("read"), st.just(()), st.integers(0, 2)),
    st.tuples(st.just("write"), st.tuples(st.integers(0, 2)), st.none()),
    st.tuples(st.just("add"), st.just((1,)), st.one_of(st.none(), st.integers(0, 2))),
    st.tuples(st.just("swap"), st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(0, 2)),
)


@given(st.lists(st.tuples(_CALLS, st.integers(0, 9), st.one_of(st.integers(1, 6), st.just(float("inf")))), max_size=5))
def test_an_element_is_judged_as_by_trying_all_orders(
    drawn: list[tuple[tuple[str, tuple[int, ...], int | None], int, float]],
) -> None:
    operations = [
        Operation(began, began + took, kind, given, found if took != float("inf") else None)
        for (kind, given, found), began, took in drawn
    ]
    if _has_an_order(operations, 0):
        check_linearizable(operations, 0)
    else:
        with pytest.raises(BadHistoryError):
            check_linearizable(operations, 0)


def _has_an_order(left: list[Operation], value: int) -> bool:
    if all(one.ended == float("inf") for one in left):
        return True
    for one in left:
        following = one.step(value)
        others = [other for other in left if other is not one]
        if (
            following is not None
            and all(one.began <= other.ended for other in others)
            and _has_an_order(others, following)
        ):
            return True
    return False
