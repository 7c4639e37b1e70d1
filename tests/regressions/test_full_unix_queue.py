"""A memory server is stopped while so many connect to its Unix socket that the queue is full: who comes then waits
until the server goes on, as at a server that is away.
"""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import smb
from tests.support.daemons import stopped, wait_for

QUEUE_MAX = 10_000


def test_a_full_queue_is_waited_for() -> None:
    """Both the first call, which attaches the memory, and one on a connection of its own."""
    with (
        smb.LocalCluster(servers=1, capacity="64MiB") as cluster,
        smb.connect(cluster.address, transport="shm", timeout=60) as client,
        contextlib.ExitStack() as left,
        ThreadPoolExecutor(2) as threads,
    ):
        buffer = client.create("w", 1024)
        (path,) = cluster.memory_directory.glob("*.sock")
        with stopped(cluster.servers[0].pid):
            with contextlib.suppress(BlockingIOError):
                for _ in range(QUEUE_MAX):
                    one = left.enter_context(socket.socket(socket.AF_UNIX))
                    one.setblocking(False)
                    one.connect(str(path))
            calls = [threads.submit(buffer.fill, 3), threads.submit(buffer.wait, 0)]
            refused = socket.socket(socket.AF_UNIX)
            refused.setblocking(False)
            assert refused.connect_ex(str(path)) != 0
            refused.close()
            wait_for(lambda: all(call.running() for call in calls), "both calls")
            left.close()
        for call in calls:
            call.result(60)
        assert (buffer.read() == 3).all()
