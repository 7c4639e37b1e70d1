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
    Run,
    Ticket,
    VoidRunError,
    check_at_rest,
    check_between,
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


@given(st.permutations(range(8)), st.data())
def test_counters_of_a_correct_object_are_good(order: list[int], data: st.DataObject) -> None:
    """Any history in which each operation takes effect at some instant of its own passes."""
    history = []
    for value, instant in enumerate(order):
        early, late = data.draw(st.floats(0, 3)), data.draw(st.floats(0, 3))
        history.append(Ticket(value - early, value + late, value))
        assert instant >= 0
    check_tickets(history, 0, 8)


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
    many = [LockEvent(i, "acquire", 0, 100) for i in range(40)]
    with pytest.raises(BadHistoryError):
        search_lock_order(many, seconds=0.2)


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
