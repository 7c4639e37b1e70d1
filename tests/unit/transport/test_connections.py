"""How many connections carry the data to a server."""

from __future__ import annotations

import pytest

from smb.transport.reconnect import connections_for


@pytest.mark.parametrize(
    ("round_trip_s", "connections"),
    [(0.0, 1), (0.0001, 1), (0.0099, 1), (0.0101, 2), (0.04, 5), (0.0699, 7), (0.1, 8), (0.5, 8)],
)
def test_one_for_each_10_ms_and_at_most_8(round_trip_s: float, connections: int) -> None:
    """A path within a house has one."""
    assert connections_for(round_trip_s) == connections
