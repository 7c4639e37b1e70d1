"""Pauses grow to their bound, are spread, and end at the deadline."""

from __future__ import annotations

import pytest

from smb.config.backoff import Backoff


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 1.0), (0.5, 0.75), (0.999, 0.5005)])
def test_they_double_up_to_the_bound(drawn: float, share: float) -> None:
    backoff = Backoff(0.02, 0.1, draw=lambda: drawn)
    assert [backoff.next_s() for _ in range(5)] == pytest.approx([share * s for s in (0.02, 0.04, 0.08, 0.1, 0.1)])
    assert not backoff.over()


def test_two_are_not_alike() -> None:
    """Who failed together does not come back together."""
    first, second = Backoff(1.0, 1.0), Backoff(1.0, 1.0)
    assert [first.next_s() for _ in range(4)] != [second.next_s() for _ in range(4)]


def test_none_passes_the_deadline() -> None:
    """A caller that does not want a shortened pause asks before whether the time is over."""
    left = iter([5.0, 5.0, 1.5, 1.5, -1.0])
    backoff = Backoff(1.0, 4.0, lambda: next(left), lambda: 0.0)
    assert (backoff.over(), backoff.next_s()) == (False, 1.0)
    assert (backoff.over(), backoff.next_s()) == (True, 1.5)
    assert backoff.next_s() == 0.0
