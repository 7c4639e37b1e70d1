"""The grace of a round: fixed, or what the others were seen to need."""

from __future__ import annotations

import math

import pytest

from smb.train.exchange.grace import AUTO, Grace


def _round(grace: Grace, number: int, quorum_after: float, rest: float, *, whole: bool = True) -> None:
    """A round that opens at 100 * number."""
    now = 100.0 * number
    grace.opened(now)
    grace.quorum(number, now + quorum_after)
    grace.ended(number, now + quorum_after + rest, whole=whole)


def test_fixed() -> None:
    """It begins with the quorum, is the same for ever, and says nothing of a round whose quorum was not seen."""
    grace = Grace(3.0, 10.0)
    assert grace.left(0, 50.0) == math.inf
    grace.quorum(0, 50.0)
    grace.quorum(0, 52.0)
    assert (grace.left(0, 51.0), grace.left(1, 51.0)) == (2.0, math.inf)
    for number in range(1, 9):
        _round(grace, number, 20.0, 9.0)
    assert grace.seconds() == 3.0


def test_the_lease_at_first() -> None:
    """As long as nothing was measured: who comes later than that is dead."""
    grace = Grace(AUTO, 10.0)
    assert grace.seconds() == 10.0
    _round(grace, 0, 4.0, 0.5)
    assert grace.seconds() == 4.0  # the quorum's own time bounds it
    _round(grace, 1, 60.0, 0.5)
    assert grace.seconds() == 10.0


def test_a_quantile_of_what_the_others_need() -> None:
    """Of twenty rounds one that took much longer does not count, three do."""
    grace = Grace(AUTO, 100.0)
    for number in range(20):
        _round(grace, number, 50.0, 30.0 if number == 7 else 1.0 + number / 20)
    assert grace.seconds() == pytest.approx(1.9)
    for number in range(20, 23):
        _round(grace, number, 50.0, 30.0)
    assert grace.seconds() == 30.0
    for number in range(23, 23 + 32):  # these are the last ones
        _round(grace, number, 50.0, 2.0)
    assert grace.seconds() == 2.0


def test_it_grows_when_somebody_is_left_out_and_is_bounded() -> None:
    """A slow one that the grace has just missed is waited for longer, but never longer than the quorum itself takes."""
    grace = Grace(AUTO, 100.0)
    for number in range(8):
        _round(grace, number, 8.0, 1.0)
    seen = []
    for number in range(8, 60):
        _round(grace, number, 8.0, grace.seconds(), whole=False)
        seen.append(grace.seconds())
    assert seen == sorted(seen)
    assert seen[0] >= 1.0
    assert seen[-1] == 8.0
