"""Planned work: lost copies are not made anew for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.commit_log import CommitLog
from smb.coordinator.events import (
    Instant,
    MaintenanceEnded,
    MaintenancePlanned,
    Report,
    SaveMaintenance,
    ServerDied,
    ServerLeft,
    Ticked,
)
from smb.coordinator.messages import server_message
from smb.coordinator.state import ALL_SERVERS
from smb.coordinator.steps.maintenance import LASTS_S_MAX
from tests.support.decisions import Cluster, registration, server


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.register("a", "b", "c")
    return made


def held(cluster: Cluster) -> bool:
    return cluster.state.copies_held(cluster.now)


def test_copies_are_held_while_that_server_is_away(cluster: Cluster) -> None:
    """Not while it is there, nor once it is back, nor after the maintenance's end."""
    cluster.do(MaintenancePlanned("a", 600.0))
    assert list(cluster.only(SaveMaintenance).until) == ["a"]
    assert not held(cluster)
    cluster.do(ServerDied("b", 1))
    assert not held(cluster)
    cluster.do(ServerLeft("a", 1))
    assert "a" not in cluster.state.servers
    assert not held(cluster)  # it has been forgotten, as it holds nothing, and nobody knows whether it comes back
    cluster.do(registration(cluster.state, server("b")))
    cluster.do(registration(cluster.state, server("a")))
    cluster.create(replicas=2, server_names=("a",))
    cluster.do(ServerLeft("a", 1))
    assert held(cluster)
    assert server_message(cluster.state, cluster.state.servers["a"], cluster.now).maintenance_until > cluster.now.wall
    cluster.do(MaintenanceEnded("a"))
    assert not held(cluster)
    assert not cluster.only(SaveMaintenance).until
    cluster.do(MaintenanceEnded("a"))
    assert not cluster.only(SaveMaintenance).until


def test_maintenance_of_all_servers_ends_by_itself(cluster: Cluster) -> None:
    """It holds copies whichever server is away. A second call sets a new end."""
    cluster.do(MaintenancePlanned(ALL_SERVERS, 60.0))
    assert held(cluster)
    cluster.do(MaintenancePlanned(ALL_SERVERS, 10.0))
    cluster.seconds += 9.0
    cluster.do(Ticked())
    assert held(cluster)
    assert server_message(cluster.state, cluster.state.servers["b"], cluster.now).maintenance_until
    cluster.seconds += 1.0
    assert not held(cluster)
    cluster.do(Ticked())
    assert not cluster.state.maintenance
    assert "maintenance of all memory servers is over" in cluster.only(Report).text
    cluster.do(MaintenanceEnded(ALL_SERVERS))
    assert cluster.only(SaveMaintenance).until == {}  # a leader whose wall clock is behind would go on with it


@pytest.mark.parametrize(
    ("name", "seconds", "error", "text"),
    [
        ("x", 60.0, errors.NotFoundError, "no memory server has that name; there are: a, b, c"),
        ("a", 0.5, errors.InvalidArgumentError, "must last from 1 to 604800 seconds, not 0.5"),
        ("", LASTS_S_MAX + 1, errors.InvalidArgumentError, "maintenance of all memory servers must last"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    cluster: Cluster, name: str, seconds: float, error: type[errors.Error], text: str
) -> None:
    """By name and bounds; nothing has changed."""
    before = cluster.state
    with pytest.raises(error, match=text):
        cluster.do(MaintenancePlanned(name, seconds))
    assert cluster.state is before


class _Store:
    """Texts in memory."""

    changes_max = None

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    async def load(self) -> dict[str, str]:
        return dict(self.texts)

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        for key, text in changes.items():
            self.texts.pop(key, None)
            if text is not None:
                self.texts[key] = text

    def free_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


def test_maintenance_survives_a_new_leader() -> None:
    """With the time that is left on the wall clock, and for at most a week if somebody has set that clock."""
    store, clock = _Store(), Instant(50.0, 1_000_000.0)

    async def scenario() -> None:
        log = await CommitLog.open(store, 1, clock=lambda: clock)
        await log.commit(registration(log.state, server("a")))
        await log.commit(MaintenancePlanned("a", 100.0))
        later = replace(clock, monotonic=7.0, wall=clock.wall + 60.0)
        again = await CommitLog.open(store, 2, clock=lambda: later)
        assert again.state.maintenance["a"].until == 47.0
        set_back = replace(clock, monotonic=7.0, wall=0.0)
        again = await CommitLog.open(store, 3, clock=lambda: set_back)
        assert again.state.maintenance["a"].until == 7.0 + LASTS_S_MAX
        await again.commit(MaintenanceEnded("a"))
        assert not [key for key in store.texts if "maintenance" in key]

    asyncio.run(scenario())
