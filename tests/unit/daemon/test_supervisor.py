"""smb.cluster.Supervisor: when a daemon that has ended is started again."""

from __future__ import annotations

import itertools

import pytest

from smb.cluster import Daemon, Supervisor
from smb.errors import UnavailableError


class _Daemon(Daemon):
    """Without a process. `failures` are what the next starts raise."""

    def __init__(self) -> None:
        self.name, self.starts, self.failures, self.alive = "server-0", 0, list[Exception](), False

    @property
    def pid(self) -> int:
        return 100 + self.starts

    @property
    def running(self) -> bool:
        return self.alive

    def start(self) -> None:
        self.starts += 1
        if self.failures:
            raise self.failures.pop(0)
        self.alive = True


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


def test_a_daemon_that_had_run_is_back_at_once(clock: list[float]) -> None:
    """One that runs is left alone; each end and each start is said."""
    daemon, said = _Daemon(), list[str]()
    supervisor = Supervisor(daemon, said.append, lambda: clock[0])
    for _ in range(3):
        clock[0] += 3600
        supervisor.look()
        supervisor.look()
        daemon.alive = False
    assert daemon.starts == 3
    assert said[:2] == ["server-0 (pid 100) has ended; restarting it with its data", "server-0 is back, pid 101"]


@pytest.mark.parametrize("fails", [True, False], ids=["at its start", "after it"])
def test_a_daemon_that_keeps_ending_is_started_with_pauses(clock: list[float], fails: bool) -> None:
    """Of a watcher that looks each 10 ms for a minute it gets 30 to 65 starts, and none is further than 2 s from the
    one before, so it is back soon after it can start. No error of a start ends the watcher.
    """
    daemon, said, starts = _Daemon(), list[str](), list[float]()
    supervisor = Supervisor(daemon, said.append, lambda: clock[0])
    for look in range(6000):
        clock[0] = 1000 + look / 100
        daemon.failures = [UnavailableError("no port")] if look % 2 else [OSError("no process")]
        if not fails:
            daemon.failures = []
        before = daemon.starts
        supervisor.look()
        if daemon.starts > before:
            starts.append(clock[0])
        daemon.alive = False
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert 30 <= len(starts) <= 65
    assert max(gaps) <= 2.02
    assert min(gaps[2:]) >= 0.99
    assert len({round(gap, 2) for gap in gaps[2:]}) > 1  # daemons that failed together do not start together
    if fails:
        assert "no port; the start will be tried again" in said
        assert "no process; the start will be tried again" in said
