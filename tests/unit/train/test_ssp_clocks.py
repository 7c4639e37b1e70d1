"""The arithmetic of stale synchronous clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import smb
from smb.train import SSP
from smb.train import member_table as t
from smb.train.ssp import clocks_of, lag, must_wake


def test_lag_is_behind_the_slowest() -> None:
    assert lag(5, {1: 3, 2: 7}) == 2
    assert lag(5, {1: 5, 2: 7}) == 0
    assert lag(5, {1: 8}) == 0
    assert lag(5, {}) == 0  # alone, nobody is behind


@given(st.integers(0, 5), st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 4))
def test_whoever_waited_is_woken(own: int, clocks: list[int], bound: int) -> None:
    """A step of ours to `own` + 1 lets exactly those go on who were too far ahead of us alone."""
    others = dict(enumerate(clocks))

    def waits(clock: int, all_clocks: list[int]) -> bool:
        return clock - min(all_clocks) > bound

    freed = any(waits(c, [*clocks, own]) and not waits(c, [*clocks, own + 1]) for c in clocks)
    woken = must_wake(own + 1, others, bound)
    assert woken or not freed
    if woken:
        assert min(clocks) > own  # nobody is woken for nothing: we were the last


def test_the_dead_have_no_clock() -> None:
    rows = np.zeros((1 + t.SLOTS, t.FIELDS), np.int64)
    rows[1 + 3][t.INCARNATION], rows[1 + 3][t.MARK] = 9, t.mark(9, 41)
    rows[1 + 5][t.MARK] = t.mark(8, 2)  # left
    assert clocks_of(rows) == {3: 41}
    assert SSP(2).first_clock(rows) == 41
    assert SSP(2).first_clock(np.zeros_like(rows)) == 0


@pytest.mark.parametrize("staleness", [-1, 1.5, True, None])
def test_bounds_that_are_none_are_refused(staleness: object) -> None:
    with pytest.raises(smb.InvalidArgumentError, match="staleness"):
        SSP(staleness)  # type: ignore[arg-type]
    assert SSP(0).staleness == 0
