"""Pauses grow to their bound, and are spread."""

from __future__ import annotations

import pytest

from smb.config.backoff import Backoff


@pytest.mark.parametrize(("drawn", "share"), [(0.0, 1.0), (0.5, 0.75), (0.999, 0.5005)])
def test_they_double_up_to_the_bound(drawn: float, share: float) -> None:
    backoff = Backoff(0.02, 0.1, lambda: drawn)
    assert [backoff.next_s() for _ in range(5)] == pytest.approx([share * s for s in (0.02, 0.04, 0.08, 0.1, 0.1)])


def test_two_are_not_alike() -> None:
    """Who failed together does not come back together."""
    first, second = Backoff(1.0, 1.0), Backoff(1.0, 1.0)
    assert [first.next_s() for _ in range(4)] != [second.next_s() for _ in range(4)]
