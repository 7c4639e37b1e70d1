"""A client that does nothing takes no processor time: its session's thread sleeps between renewals."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from smb.call import cluster_session
from smb.call.published_states import PublishedStates
from smb.rpc import control_pb2 as pb

LEASE_S = 30.0


class Clock:
    """A clock that only waiting moves on, and the stop event that is waited for. It stops at the end of an hour."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        assert self.waits < 10_000, "the thread does not sleep"
        self.now += seconds
        return self.now >= 4600


class Coordinator:
    """It grants the lease, and notes when it was asked."""

    def __init__(self, clock: Clock) -> None:
        self.tokens = SimpleNamespace(next_s=lambda: float("inf"), renew=lambda: None)
        self.clock = clock
        self.asked: list[float] = []

    def renew_session(self, *_: object) -> float:
        self.asked.append(self.clock.now)
        return LEASE_S


class Session:
    def __init__(self, *reports: Any) -> None:
        self.reports = dict(enumerate(reports))
        self.published = PublishedStates()


@pytest.mark.parametrize(("reports", "every_s"), [((), 10.0), ((pb.TrainingReport,), 2.0)], ids=["idle", "trains"])
def test_the_session_sleeps_between_renewals(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[Any, ...], every_s: float
) -> None:
    """In an hour it wakes every 2 s; it renews at a third of the lease, with something to report each 2 s."""
    clock, session = Clock(), Session(*reports)
    coordinator = Coordinator(clock)
    monkeypatch.setattr(cluster_session, "time", clock)
    given: Any = (weakref.ref(session), clock, coordinator, 1, "idle", LEASE_S)
    thread = threading.Thread(target=cluster_session._renew, args=given)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert clock.now >= 4600
    assert clock.waits <= 1 + 3600 / 2
    gaps = {later - earlier for earlier, later in zip(coordinator.asked, coordinator.asked[1:], strict=False)}
    assert gaps == {every_s}
