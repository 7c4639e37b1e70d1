"""A copy in quarantine of a lock that nobody used was dropped with it. It stayed listed, and counted as taken."""

from __future__ import annotations

from dataclasses import replace

from smb.coordinator.events import BufferFailed, BufferMade, BufferWanted, DropSegments, NamesFreed
from smb.coordinator.records import Held, Kind
from smb.coordinator.validate import first_use
from tests.support.decisions import Cluster, registration, server


def with_a_copy_beside(cluster: Cluster) -> int:
    """A server that is not in the lock's record holds a copy of it, in quarantine; return the segment's id."""
    (segment,) = cluster.state.buffers["lock:w"].segments
    beside = Held(1, quarantined=True, nbytes=4096)
    event = registration(cluster.state, server("c"))
    cluster.do(replace(event, held={segment.id: beside}))
    assert cluster.state.unexplained["c"] == {segment.id: beside}
    return segment.id


def test_it_is_listed_no_more_once_it_is_dropped() -> None:
    """Whether the lock is freed, or its creation failed."""
    cluster = Cluster()
    cluster.register("a", "b")
    cluster.do(BufferWanted(first_use(Kind.LOCK, "w", 2), lambda: next(cluster.ids)))
    pending = cluster.state
    cluster.do(BufferMade("lock:w"))
    number = with_a_copy_beside(cluster)
    for state, event in (
        (cluster.state, NamesFreed(cluster.state.buffers["lock:w"].segments[0].server, {number: 2})),
        (replace(pending, unexplained=cluster.state.unexplained), BufferFailed("lock:w")),
    ):
        cluster.state = state
        cluster.do(event)
        drop = cluster.only(DropSegments)
        assert {segment.server for segment in drop.segments} == {"a", "b", "c"}
        assert cluster.state.unexplained["c"] == {}
        assert cluster.state.taken_bytes("c") == 0
