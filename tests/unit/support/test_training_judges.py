"""The judges of training histories find each planted fault, and pass what is good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.checkers import BadHistoryError, VoidRunError
from tests.support.training_judges import (
    Quadratic,
    Seen,
    check_bound,
    check_own,
    check_rotation,
    mark_of,
    reference,
    seen_in,
    staleness_of,
)

WORKERS = 3


def history_of(order: list[int], workers: int = WORKERS) -> list[Seen]:
    """What is seen where updates come in that order, one at a time."""
    counts = [0] * workers
    history = []
    for worker in order:
        counts[worker] += 1
        history.append(Seen(worker, counts[worker], tuple(counts)))
    return history


ROTATION = history_of([0, 1, 2] * 4)


def test_a_rotation_is_one() -> None:
    check_rotation(ROTATION, WORKERS)
    assert staleness_of(ROTATION) == [WORKERS - 1] * 9
    check_rotation(sorted(ROTATION, key=lambda read: (read.worker, read.clock)), WORKERS)  # as workers record it


@pytest.mark.parametrize(
    ("history", "told"),
    [
        (history_of([0, 1, 2, 0, 2, 1, 0, 1, 2]), "in rotation they are 2"),  # two swapped
        (history_of([0, 1, 2, 0, 1, 0, 1, 2]), "in rotation they are 2"),  # one skipped
        (history_of([0, 1, 0, 1, 0, 1]), "in rotation they are 2"),  # one never comes
        ([replace(r, seen=(r.seen[0], r.seen[1], r.seen[2] - (r.worker == 0 and r.clock == 3))) for r in ROTATION],
         "in rotation"),  # a read that misses one
        ([replace(r, seen=(1, 1, 0)) if (r.worker, r.clock) == (0, 1) else r for r in ROTATION], "in rotation"),
    ],
    ids=["swapped", "skipped", "absent", "missed", "read while another updates"],
)  # fmt: skip
def test_what_is_no_rotation_is_found(history: list[Seen], told: str) -> None:
    with pytest.raises(BadHistoryError, match=told):
        check_rotation(history, WORKERS)


def test_two_at_the_same_place_are_found() -> None:
    """Each by itself looks well: one update of the other between its own."""
    apart = [Seen(0, clock, (clock, clock - 1)) for clock in (1, 2, 3)]
    apart += [Seen(1, clock, (clock - 1, clock)) for clock in (1, 2, 3)]
    with pytest.raises(BadHistoryError, match="same place"):
        check_rotation(apart, 2)


def test_a_rotation_that_shows_nothing_is_void() -> None:
    with pytest.raises(VoidRunError):
        check_rotation(history_of([0, 1, 2]), WORKERS)
    with pytest.raises(VoidRunError):
        check_bound([], 1)


def test_the_bound_is_kept_up_to_it_and_not_beyond() -> None:
    ahead = history_of([0, 1, 2, 0, 0])  # worker 0 at clock 3, the others at 1
    check_bound(ahead, 2)
    with pytest.raises(BadHistoryError, match="the bound is 1"):
        check_bound(ahead, 1)
    check_bound(ahead, 1, left={1: 1, 2: 1})  # there are no more of theirs
    with pytest.raises(BadHistoryError, match="of worker 2: the bound is 1"):
        check_bound(ahead, 1, left={1: 1, 2: 2})
    with pytest.raises(BadHistoryError, match="the bound is 0"):
        check_bound(history_of([0, 1, 2, 0, 1, 2]), 0)  # nobody waited for the others before reading


def test_own_and_lost_updates_are_found() -> None:
    with pytest.raises(BadHistoryError, match="of its own"):
        check_own([Seen(0, 2, (1, 0, 0))])
    with pytest.raises(BadHistoryError, match="lost"):
        check_own([Seen(0, 1, (1, 2, 0)), Seen(0, 2, (2, 1, 0))])


def test_a_torn_read_is_found() -> None:
    values = 2 * mark_of(0, 12, WORKERS) + mark_of(2, 12, WORKERS)
    assert seen_in(values, 0, 2, WORKERS) == Seen(0, 2, (2, 0, 1))
    values[6:] += mark_of(1, 12, WORKERS)[6:]
    with pytest.raises(BadHistoryError, match="part of an update of worker 1"):
        seen_in(values, 0, 2, WORKERS)


def test_the_reference_is_one_process_where_there_is_one_worker() -> None:
    task, alone = Quadratic(50, seed=1), Quadratic(50, seed=1)
    shared, _ = reference([0] * 20, 1, task.start(), task)
    values = alone.start()
    for _ in range(20):
        alone(0, values)
    np.testing.assert_allclose(shared, values, rtol=1e-5, atol=1e-6)


def test_the_reference_by_hand() -> None:
    """Two workers that add 1 and 10 in turns: each sees the other's after its own update only."""

    def step(worker: int, values: np.ndarray) -> None:  # type: ignore[type-arg]
        values += values + (1 if worker == 0 else 10)

    shared, values = reference([0, 1, 0], 2, np.zeros(1, np.float32), step)
    # 0: 0 -> 1. 1 (knows 0): +10 -> 11. 0 (knows 1): 1 + 1 = +2 -> 13.
    assert (shared[0], values[0][0], values[1][0]) == (13.0, 13.0, 11.0)
