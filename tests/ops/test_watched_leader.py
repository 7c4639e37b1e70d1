"""A real Prometheus on two coordinators with a real etcd, while the leader is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ops.test_prometheus import Prometheus, needs_prometheus
from tests.support.commands import run_smb
from tests.support.daemons import running_daemons, wait_for
from tests.support.etcd import Coordinators, needs_etcd, running_etcd
from tests.support.transports import SLOWNESS

pytestmark = [needs_etcd, needs_prometheus]

LEASE_S = 3
SOONER = 4  # the alerts' times are divided by this
LOOK_S = 0.25
RUNBOOKS = "https://docs.example.com/repair.html"


@dataclass
class Watched:
    """What was seen while somebody looked each quarter of a second."""

    looks: int = 0
    blind: list[str] = field(default_factory=list)  # looks at which a server's own figures were missing
    fired: set[str] = field(default_factory=set)
    known_at: float = 0.0  # when the leader's word on a server was last seen
    gap_s: float = 0.0  # the longest time without it


@contextmanager
def watching(prometheus: Prometheus) -> Iterator[Watched]:
    seen, stop = Watched(known_at=time.monotonic()), threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_S):
            there = prometheus.query('up{server=~"a|b"} == 1')
            if len(there) != 2:
                seen.blind.append(str(there))
            if prometheus.query('smb_coordinator_server_alive{server="a"} == 1'):
                seen.known_at = time.monotonic()
            seen.gap_s = max(seen.gap_s, time.monotonic() - seen.known_at)
            seen.fired |= prometheus.firing().keys()
            seen.looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(60)


def pending(prometheus: Prometheus, name: str) -> dict[str, Any] | None:
    """Return an alert whose condition holds, though perhaps not for long enough yet."""
    found = [each for each in prometheus.ask("alerts")["alerts"] if each["labels"]["alertname"] == name]
    return found[0] if found else None


def test_a_killed_leader_blinds_nobody_and_raises_no_false_alert(tmp_path: Path) -> None:
    """The leader is killed; then a server is emptied and stopped for good. At each look the servers' own figures are
    there, the new leader's come within its lease and some scrapes, and no alert fires: the list of the killed
    coordinator, which still has the stopped server, is not believed. What is true is about to fire, with the cluster's
    name and a link. Takes half a minute: alerts wait for a quarter of their time.
    """
    with running_etcd() as etcd, running_daemons(tmp_path) as daemons:
        etcd.wait_ready()
        two = Coordinators(daemons, f"etcd://{etcd.addresses}/watched", 2, "--leader-lease", str(LEASE_S))
        servers = {name: daemons.memory_server(two.address, name) for name in "abc"}
        assert all(server.address for server in servers.values())
        place = tmp_path / "prometheus"
        place.mkdir()
        coordinators = [each.metrics for each in two.running]
        with closing(two), closing(Prometheus(place, *coordinators, runbooks=RUNBOOKS, sooner=SOONER)) as prometheus:
            wait_for(lambda: len(prometheus.query('up{smb_cluster="smb"} == 1')) == 5, "all targets, each once")
            wait_for(lambda: len(prometheus.query("smb_coordinator_server_alive == 1")) == 3, "the leader's word")
            leader = two.leader()
            killed = coordinators[leader]
            with watching(prometheus) as seen:
                two.running[leader].kill()
                two.leader(but=leader)
                wait_for(lambda: prometheus.query(f'up{{instance="{killed}"}} == 0'), "the loss to be seen")
                wait_for(
                    lambda: len(prometheus.query("smb_coordinator_server_alive == 1")) == 3, "the new leader's word"
                )
                run_smb("drain", "c", "--wait", coordinator=two.address)
                assert servers["c"].stop() == 0
                wait_for(lambda: not prometheus.query('smb_coordinator_server_alive{server="c"}'), "its end")
                down_for_s = 2 * 30 / SOONER  # twice what SmbServerDown waits for
                for_long = f'count_over_time((up{{server="c"}} == 0)[1m:1s]) > {down_for_s}'
                wait_for(lambda: prometheus.query(for_long), "its place in the old list", 60)
            assert seen.looks > 20
            assert seen.blind == []
            assert seen.fired == set()
            assert seen.gap_s < (LEASE_S + 5) * SLOWNESS + 5
            alert = wait_for(lambda: pending(prometheus, "SmbStandbyLost"), "the alert of a lost standby")
            assert (alert["labels"]["instance"], alert["labels"]["smb_cluster"]) == (killed, "smb")
            assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#smbstandbylost"
            assert pending(prometheus, "SmbServerDown") is None
            servers["b"].kill()  # this one the leader knows
            alert = wait_for(lambda: pending(prometheus, "SmbServerDown"), "the alert of a lost server")
            assert alert["labels"]["server"] == "b"
            daemons.kill_all()
