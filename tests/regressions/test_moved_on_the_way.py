"""A server was killed with a change on its way, came back and was drained before the client was back: the client was
told that the memory was lost, and to delete the buffer. The buffer was whole, on another server.
"""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import smb
from smb.errors import UNKNOWN
from smb.rpc.coordinator_client import Coordinator
from tests.support.clients import in_process
from tests.support.daemons import stop, wait_for

COUNT = 1 << 20
LONG_S = 300.0  # longer than this test


def _write_until_it_fails(messages: Any, address: str) -> None:
    """Tells that it has begun, then of the first error and whether the next calls are made."""
    with smb.connect(address, transport="tcp", timeout=LONG_S) as client:
        buffer, values = client.open("weights"), np.zeros(COUNT, np.float32)
        buffer.write(values)
        messages.put("begun")
        try:
            while True:
                buffer.write(values)
        except smb.Error as error:
            messages.put((type(error), str(error), error.outcome))
        buffer.write(values + 2)
        messages.put(float(buffer.read().sum()))


def _has_unread(port: int) -> bool:
    """Whether some connection to that port of this host has bytes that the server has not taken."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        sending, received = (int(queue, 16) for queue in queues.split(":"))
        at, to = (int(end.split(":")[1], 16) for end in (local, remote))
        if (at == port and received) or (to == port and sending):
            return True
    return False


def test_a_change_on_its_way_to_a_server_that_is_emptied() -> None:
    with (
        smb.LocalCluster(servers=2, session_lease=LONG_S) as cluster,
        smb.connect(cluster.address) as client,
        closing(Coordinator(cluster.address, None)) as coordinator,
    ):
        client.create("weights", COUNT, servers=["server-0"])
        with in_process(_write_until_it_fails, cluster.address) as (process, messages):
            assert messages.get(timeout=60) == "begun"
            port = int(next(each.address for each in client.servers() if each.name == "server-0").rsplit(":")[-1])

            def is_on_its_way() -> bool:
                """A server that has taken all of a write and not answered has nothing unread: it goes on then."""
                stop(cluster.servers[0].pid)
                if _has_unread(port):
                    return True
                os.kill(cluster.servers[0].pid, signal.SIGCONT)
                return False

            wait_for(is_on_its_way, "a write on its way")
            stop(process.pid)
            cluster.servers[0].kill()
            cluster.servers[0].start()

            def is_empty() -> bool:
                left = coordinator.drain_server("server-0", 10.0)
                # As long as the file is there the server says what of the change was made.
                files = list(cluster.memory_directory.glob("smb.server-0.*.segment"))
                return not left.segment_count and not left.copying and not files

            wait_for(is_empty, "the server empty")
            os.kill(process.pid, signal.SIGCONT)
            kind, told, outcome = messages.get(timeout=60)
            assert kind is smb.UnavailableError, told
            assert "so the segment has moved" in told
            assert "memory was lost" not in told
            assert outcome == UNKNOWN
            assert messages.get(timeout=60) == 2 * COUNT
