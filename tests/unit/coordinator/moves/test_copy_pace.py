"""smb.coordinator.moves.copy_pace: copies begin slowly, and few are made while a server is late."""

from __future__ import annotations

from dataclasses import replace

from smb.coordinator.events import ServerDied
from smb.coordinator.moves.copy_pace import FIRST, MOST, STRAINED, CopyPace
from smb.coordinator.moves.wanted_copies import wishes
from tests.support.decisions import Cluster, registration, returned, server


def test_copies_double_each_second_while_no_server_is_late() -> None:
    """Up to a limit, however often the pace is asked for; a late server makes them few, and they grow again from there.
    Once no copy is wanted, the next ones begin slowly again.
    """
    pace = CopyPace()
    assert [pace.most(at, strained=False) for at in (0.0, 0.1, 0.9)] == [FIRST] * 3
    assert [pace.most(at, strained=False) for at in (1.0, 1.9, 2.0)] == [2 * FIRST, 2 * FIRST, 4 * FIRST]
    assert pace.most(2.1, strained=True) == STRAINED
    assert [pace.most(at, strained=False) for at in (3.0, 3.5, 4.5)] == [STRAINED, 2 * STRAINED, 4 * STRAINED]
    assert max(pace.most(5.0 + 2 * at, strained=False) for at in range(40)) == MOST
    pace.rest()
    assert pace.most(100.0, strained=False) == FIRST


def test_no_more_copies_begin_than_the_pace_allows() -> None:
    """Those under way count; each server's own limit would allow more."""
    cluster = Cluster()
    cluster.register("a", "b", "c", "d")
    for number in range(6):
        cluster.create(f"w{number}", replicas=2, server_names=("a",))
    for name in ("b", "c", "d"):  # they come back empty
        cluster.do(ServerDied(name, 1))
        cluster.do(returned(cluster.state, name, 2))
        cluster.do(registration(cluster.state, replace(server(name), instance_id=2)))
    records, pool = list(cluster.state.buffers.values()), cluster.state.pool(cluster.now)
    assert len(wishes(records, pool)) == 6
    assert len(wishes(records, pool, most=4)) == 4
    assert wishes(records, pool, held=True) == []
