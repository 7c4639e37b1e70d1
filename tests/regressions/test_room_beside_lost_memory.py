"""A server that had lost a buffer's memory was not made to tell of what it held too much: the room of a copy that was
given up stayed there, in no list, as long as that buffer was not deleted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from smb import errors
from smb.coordinator.events import ServerRenewed
from smb.coordinator.records import Held
from tests.support.decisions import Cluster, registration, server


def test_lost_memory_does_not_account_for_other_memory() -> None:
    """It may hold nothing, not as much as it lost. Memory of before, which it still holds, is accounted for."""
    cluster = Cluster()
    cluster.register("a")
    (segment,) = cluster.create(server_names=("a",)).segments
    cluster.renew("a", used_bytes=segment.file_bytes)
    cluster.do(registration(cluster.state, server("a", 2)))
    assert cluster.state.missing["a"] == {segment.id}
    cluster.renew("a", 2)
    with pytest.raises(errors.NotFoundError, match="it holds more than the records say"):
        cluster.do(ServerRenewed("a", 2, 4096))
    (record,) = cluster.state.buffers.values()
    made = replace(record, segments=(replace(segment, epoch=5, made=5),))
    cluster.state = replace(cluster.state, buffers=cluster.state.buffers.changed((made,)))
    cluster.do(registration(cluster.state, server("a", 3), {segment.id}, as_held=Held(1)))
    assert cluster.state.missing["a"] == {segment.id}
    cluster.renew("a", 3, segment.file_bytes)
