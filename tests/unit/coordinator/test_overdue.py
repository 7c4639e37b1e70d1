"""Servers that seem gone because the coordinator, or its network, is in trouble: it waits a lease more for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from smb.coordinator.commit_log import CommitLog
from smb.coordinator.dashboard.diagnosis import late_s
from smb.coordinator.events import (
    Event,
    HeldUp,
    Instant,
    LeaseShortened,
    Restarted,
    SaveServerLease,
    ServerRenewed,
    SessionRenewed,
    Ticked,
)
from smb.coordinator.options import CoordinatorOptions
from smb.coordinator.state import SERVER_LEASE_S, load
from smb.coordinator.steps.ticks import PROLONGED_MAX
from smb.errors import InvalidArgumentError
from tests.support.decisions import Cluster, registration, server


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.register("a", "b")
    return made


def test_most_servers_that_are_late_at_once_get_one_lease_more(cluster: Cluster) -> None:
    """Two of three renewed at different moments before they were cut off; a sign of life ends that. One of three that
    is late is believed to be gone at once, and so is one that stays silent for the second lease.
    """
    cluster.register("c")
    cluster.seconds += 2.0
    cluster.renew("b")
    cluster.seconds += 2.0
    cluster.renew("c")
    cluster.seconds += 2.0
    cluster.do(Ticked())  # the lease of a is out, and b has missed two renewals
    assert [cluster.state.alive(name, cluster.now) for name in "abc"] == [True] * 3
    assert cluster.state.overdue == {"a": 1, "b": 1}
    cluster.seconds += 2.0
    cluster.renew("c")
    cluster.do(Ticked())
    cluster.renew("b")
    assert cluster.state.overdue == {"a": 1}
    cluster.seconds += 4.0
    cluster.renew("c")
    cluster.renew("b")
    cluster.do(Ticked())
    assert [cluster.state.alive(name, cluster.now) for name in "abc"] == [False, True, True]
    assert not cluster.state.overdue


def test_one_of_two_servers_is_believed_to_be_gone(cluster: Cluster) -> None:
    """It is not more than half, as long as the other one renews."""
    for _ in range(3):
        cluster.seconds += SERVER_LEASE_S / 3
        cluster.renew("b")
        cluster.do(Ticked())
    assert [cluster.state.alive(name, cluster.now) for name in "ab"] == [False, True]


def test_leases_run_anew_after_the_coordinator_was_held_up(cluster: Cluster) -> None:
    """Of servers, and of sessions if it was long. A server that stays silent is gone at last, however often the
    coordinator is held up, and a short pause changes nothing."""
    cluster.do(SessionRenewed(7, "client"))
    cluster.do(HeldUp(1.5))
    assert not cluster.state.overdue
    cluster.seconds += 100.0
    cluster.do(HeldUp(100.0))
    cluster.do(Ticked())
    assert [cluster.state.alive(name, cluster.now) for name in "ab"] == [True, True]
    assert cluster.state.sessions
    cluster.renew("a")
    assert cluster.state.overdue == {"b": 1}
    for _ in range(PROLONGED_MAX):
        cluster.seconds += 3.0
        cluster.renew("a")
        cluster.do(HeldUp(3.0))
    cluster.renew("a")
    cluster.seconds += 3.0
    cluster.do(Ticked())
    assert [cluster.state.alive(name, cluster.now) for name in "ab"] == [True, False]


def test_a_shorter_lease_begins_when_the_former_leader_s_are_over() -> None:
    """A server of its own accord serves to the end of the lease that the former leader granted. That is stored: a
    longer lease before it is granted, a shorter one once no longer one can run.
    """
    before = load([], [server("a")], server_lease_s=20.0)
    cluster = Cluster(before)
    cluster.do(Restarted(1))
    assert cluster.only(SaveServerLease).seconds == 20.0
    cluster = Cluster(load([], [server("a")], server_lease_s=3.0, former_lease_s=20.0), cluster.seconds)
    cluster.do(Restarted(2))
    assert not [effect for effect in cluster.effects if isinstance(effect, SaveServerLease)]
    cluster.seconds += 19.0
    cluster.do(LeaseShortened())
    cluster.do(Ticked())
    assert cluster.state.alive("a", cluster.now)
    cluster.seconds += 2.0
    cluster.do(LeaseShortened())
    assert cluster.only(SaveServerLease).seconds == 3.0
    cluster.do(Ticked())
    assert not cluster.state.alive("a", cluster.now)


class _SlowStore:
    """Takes some seconds of the clock for each change."""

    changes_max = None

    def __init__(self, clock: list[float], takes_s: float) -> None:
        self._clock, self._takes_s = clock, takes_s
        self.texts: dict[str, str] = {}

    async def load(self) -> dict[str, str]:
        return dict(self.texts)

    async def change(self, changes: Mapping[str, str | None], *, urgent: bool = False) -> None:
        self._clock[0] += self._takes_s
        self.texts |= {key: text for key, text in changes.items() if text is not None}

    def free_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("slow", ["process", "store"])
def test_the_commit_log_notices_that_it_was_held_up(slow: str) -> None:
    """Before the next event, so that a server whose lease ran out meanwhile is not refused: the process stood still, or
    one change of the store took long. What was stored is read again with the lease of the former leader.
    """
    clock, seen = [100.0], list[Event]()

    async def scenario() -> None:
        store = _SlowStore(clock, 0.0)
        log = await CommitLog.open(store, 1, server_lease_s=8.0, clock=lambda: Instant(clock[0], 1e9))
        await log.commit(registration(log.state, server("a")))
        log.on_commit = lambda event, *_: seen.append(event)
        if slow == "process":
            clock[0] += 30.0
        else:
            store._takes_s = 30.0
            await log.commit(SessionRenewed(1, "client"))
        await log.commit(ServerRenewed("a", 1, 0))
        assert log.state.alive("a", log.now())
        assert store.texts["lease/server"] == "8"
        store._takes_s = 0.0
        again = await CommitLog.open(store, 2, clock=lambda: Instant(clock[0], 1e9))
        assert again.state.first_lease_s == 8.0
        assert again.state.server_leases.duration_s == SERVER_LEASE_S

    asyncio.run(scenario())
    (held_up,) = [event for event in seen if isinstance(event, HeldUp)]
    assert held_up.seconds == 30.0


@pytest.mark.parametrize(("lease_s", "fits"), [(2.0, True), (600.0, True), (1.9, False), (601.0, False)])
def test_the_lease_of_servers_has_bounds(lease_s: float, fits: bool) -> None:
    """The error names the option and both bounds."""
    options = CoordinatorOptions("127.0.0.1:0", "state", "127.0.0.1:0", server_lease_s=lease_s)
    if fits:
        options.check()
        return
    with pytest.raises(InvalidArgumentError, match="--server-lease must be from 2 to 600 seconds"):
        options.check()


def test_a_server_with_a_long_lease_is_not_late_after_seconds(cluster: Cluster) -> None:
    """It renews at a third of its lease, and is late on the page once one renewal was lost."""
    assert late_s(cluster.state) == 3.5
    assert late_s(load([], [], server_lease_s=60.0)) == 35.0
