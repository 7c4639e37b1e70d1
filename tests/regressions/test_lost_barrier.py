"""A barrier's server came back without its memory: those in it were told to take another name, and so was everybody
after them, until the coordinator's end.
"""

from __future__ import annotations

import threading

import pytest

import smb
from tests.support.daemons import wait_for, waiting


def test_a_barrier_whose_memory_was_lost_is_made_anew() -> None:
    """Who waits in it is told that the round is broken; the next round is clean. A lock would lose its last token so:
    its name stays refused.
    """
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, timeout=20) as client,
        smb.connect(cluster.address, timeout=2) as other,
    ):
        found: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(smb.BrokenBarrierError, match=r"'step' of 2 parties.*or its memory was lost") as caught:
                client.barrier("step", 2, timeout=60)
            found.append(caught.value)

        client.lock("turn").acquire()
        waits = threading.Thread(target=wait)
        waits.start()
        wait_for(lambda: waiting(cluster) == 1, "it to wait")
        cluster.servers[0].kill()
        for path in cluster.memory_directory.glob("*.segment"):
            path.unlink()
        cluster.servers[0].start()
        waits.join(30)
        assert found
        indexes: list[int] = []
        meets = threading.Thread(target=lambda: indexes.append(client.barrier("step", 2, timeout=30)))
        meets.start()
        indexes.append(other.barrier("step", 2, timeout=30))
        meets.join(30)
        assert sorted(indexes) == [0, 1]
        with pytest.raises(smb.UnavailableError, match="use another name"):
            other.lock("turn").acquire()
