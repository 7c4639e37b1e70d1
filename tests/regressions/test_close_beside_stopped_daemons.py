"""Client.close() has a bound, whatever does not answer and whatever is on its way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import smb

COUNT = 1 << 20


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_close_ends_beside_stopped_daemons(transport: str) -> None:
    """Both daemons are stopped (SIGSTOP), waits and a write are on their way: close ends within seconds, they fail."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        client = smb.connect(cluster.address, transport=transport, timeout=60)
        buffer = client.create("w", COUNT)
        buffer.write(np.ones(COUNT, np.float32))
        buffer.wait(0)  # connects
        pids = [cluster.servers[0].pid, cluster.coordinator.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:

            def wait() -> None:
                with contextlib.suppress(smb.Error):
                    buffer.wait(5, timeout=60)

            waiting = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
            for thread in waiting:
                thread.start()
            writing = buffer.write_async(np.ones(COUNT, np.float32))
            begun = time.monotonic()
            client.close()
            assert time.monotonic() - begun < 5
            for thread in waiting:
                thread.join(5)
                assert not thread.is_alive()
            with contextlib.suppress(smb.Error):
                writing.result(5)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
