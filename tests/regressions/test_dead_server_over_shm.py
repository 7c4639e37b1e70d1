"""First use over shm of a buffer whose server was killed once failed at once, with TransportError, restart or not.

So it did after a clean stop, and in the moment in which a restarted server had removed the socket of its earlier run.
"""

from __future__ import annotations

import time

import pytest

import smb

TIMEOUT_S = 0.5


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_dead_server_is_waited_for(end: str) -> None:
    """UnavailableError comes after the timeout and names the server; within it, its return makes the call succeed."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, transport="shm", timeout=TIMEOUT_S) as hasty,
        smb.connect(cluster.address, transport="shm", timeout=20) as patient,
    ):
        waiting = patient.create("w", 10)
        waiting.fill(3)
        buffer = hasty.open("w")
        getattr(cluster.servers[0], end)()
        start = time.monotonic()
        with pytest.raises(smb.UnavailableError, match=r"buffer 'w'.*server-0 .*over shm: nobody answers at .*\.sock"):
            hasty.open("w").read()
        with pytest.raises(smb.UnavailableError, match="nobody answers"):
            buffer.view()
        assert time.monotonic() - start < 10 * TIMEOUT_S
        later = waiting.read_async()
        cluster.servers[0].start()
        assert later.result().sum() == 30
        assert waiting.transports == ("shm",)
