"""The first fenced change after a restart once failed at once: the way through the server was looked for where its
former run had been, and nobody asked the coordinator."""

from __future__ import annotations

import numpy as np
import pytest

import smb
from tests.support.transports import EACH_WAY, SLOWNESS


@pytest.mark.parametrize("transport", EACH_WAY)
def test_a_fenced_change_finds_the_server_that_was_restarted(transport: str) -> None:
    with (
        smb.LocalCluster(servers=2, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport=transport, timeout=10 * SLOWNESS) as client,
    ):
        buffer = client.create("weights", 40_000, stripe="64KiB")
        buffer.fill(1)
        with buffer.lock(ttl=60 * SLOWNESS) as lock:
            for server in cluster.servers:
                server.kill()
                server.start()
            buffer.accumulate(np.ones(40_000, np.float32), fence=lock)
        assert (buffer.read() == 2).all()
