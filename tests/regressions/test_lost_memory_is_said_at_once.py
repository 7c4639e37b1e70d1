"""A call on a buffer whose memory was lost, as the coordinator knew, took its whole timeout, and settle another one: of
two copies, of one that had moved, and of one whose server came back without it and went away again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import smb
from smb.rpc import control_pb2 as pb
from tests.support.daemons import wait_for
from tests.support.memory_server import coordinator_stub
from tests.support.second_copy import lose
from tests.support.transports import FAR, SLOWNESS

TIMEOUT_S = 40.0  # of the clients: nothing here waits so long
AT_ONCE_S = 5.0 * SLOWNESS
COUNT = 100_000
ONES = np.ones(COUNT, np.int64)
LOST = "its memory was lost"


@contextmanager
def at_once() -> Iterator[None]:
    """The block fails as memory was lost, and soon."""
    began = time.monotonic()
    with pytest.raises(smb.UnavailableError, match=LOST):
        yield
    assert time.monotonic() - began < AT_ONCE_S


def moved(cluster: smb.LocalCluster, client: smb.Client) -> smb.Buffer:
    """Return a buffer with one copy that a drain has moved to server-0."""
    buffer = client.create("moved", COUNT, "int64", servers=["server-1"])
    buffer.fill(1)
    with coordinator_stub(cluster.address) as stub:
        stub.DrainServer(pb.DrainServerRequest(name="server-1"), timeout=20)
        wait_for(lambda: client.open("moved").layout.segments[0].server == "server-0", "move")
        stub.DrainServer(pb.DrainServerRequest(name="server-1", undo=True), timeout=20)
    assert (buffer.read() == 1).all()
    return buffer


def lose_all(cluster: smb.LocalCluster) -> None:
    """Both servers come back without their memory."""
    for server in cluster.servers:
        server.kill()
        lose(cluster.memory_directory, server.name)
    for server in cluster.servers:
        server.start()


@pytest.mark.parametrize("transport", ["auto", FAR])
def test_calls_and_settle_say_so(transport: str) -> None:
    """Both copies are lost beneath a call; and so is the one copy of a buffer that was moved. That call, settle, and
    all that come later fail at once."""
    with (
        smb.LocalCluster(servers=2, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=TIMEOUT_S, transport=transport) as client,
    ):
        buffers = [moved(cluster, client), client.create("two", COUNT, "int64", servers=["server-1"], replicas=2)]
        versions = client.create("v", 1000, versions=2, replicas=2)
        versions.publish(np.ones(1000, np.float32))
        with client.lock("named", replicas=2):
            pass
        for server in cluster.servers:
            os.kill(server.pid, signal.SIGSTOP)
        pending = [buffer.accumulate_async(ONES) for buffer in buffers]
        lose_all(cluster)
        wait_for(lambda: all(info.lost for info in client.list()), "notice of the loss")
        for buffer, future in zip(buffers, pending, strict=True):
            error = future.exception(AT_ONCE_S)  # it may have heard of it before the coordinator
            assert isinstance(error, smb.UnavailableError)
            if error.outcome == "unknown":
                with at_once():
                    buffer.settle(error)
            else:
                assert buffer.settle(error) == [range(COUNT)]
            asked: list[Callable[[], Any]] = [
                buffer.read,
                lambda buffer=buffer: buffer.accumulate(ONES),
                lambda buffer=buffer: buffer.fetch_add(0, 1),
                lambda buffer=buffer: buffer.accumulate_async(ONES).result(),
                lambda buffer=buffer: buffer.lock(timeout=TIMEOUT_S).__enter__(),
                lambda buffer=buffer: client.open(buffer.name).read(),
            ]
            for ask in asked:
                with at_once():
                    ask()
        for ask in (versions.read, lambda: versions.publish(np.ones(1000, np.float32)), lambda: versions.wait(9)):
            with at_once():
                ask()
        with at_once(), client.lock("named", replicas=2):
            pass


def test_a_server_that_lost_it_is_not_waited_for() -> None:
    """Servers came back without the memory, and went away again: it is not the servers that calls lack. The first call
    of a client that has not heard of it may wait for its server."""
    with (
        smb.LocalCluster(servers=2, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=TIMEOUT_S, transport=FAR) as client,
        smb.connect(cluster.address, timeout=0.5, transport=FAR) as hasty,
    ):
        client.create("one", COUNT, "int64").fill(1)
        versions = client.create("v", 1000, versions=2)
        versions.publish(np.ones(1000, np.float32))
        theirs = hasty.open("one")
        theirs.read()
        lose_all(cluster)
        for server in cluster.servers:
            server.kill()
        for ask in (theirs.read, lambda: theirs.accumulate(ONES)):
            with at_once():
                ask()
        for ask in (lambda: client.open("one").read(), lambda: versions.version, lambda: versions.lock().__enter__()):
            with at_once():
                ask()
