"""smb.coordinator.metrics: what a scrape says of servers."""

from __future__ import annotations

from smb.coordinator.events import Restarted
from smb.coordinator.metrics import StateMetrics
from tests.support.decisions import Cluster, registration, server


def alive(cluster: Cluster) -> dict[str, float]:
    (found,) = (
        each
        for each in StateMetrics(lambda: (cluster.state, cluster.now), 0.0).collect()
        if each.name == "smb_coordinator_server_alive"
    )
    return {sample.labels["server"]: sample.value for sample in found.samples}


def test_a_new_leader_says_nothing_of_servers_that_it_has_not_heard_of() -> None:
    """With a 0 until each has registered, every change of the leader looked like servers that go and come back. One
    whose lease has run out is shown as gone.
    """
    cluster = Cluster()
    cluster.register("a", "b")
    assert alive(cluster) == {"a": 1, "b": 1}
    cluster.do(Restarted(2, None))
    assert alive(cluster) == {}
    cluster.do(registration(cluster.state, server("a")))
    assert alive(cluster) == {"a": 1}
    cluster.seconds += 60
    assert alive(cluster) == {"a": 0, "b": 0}
