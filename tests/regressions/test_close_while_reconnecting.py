"""A client that was closed while threads of its made new connections left them at work: over RDMA they used what close
had freed, and the process crashed."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.fault.long import times
from tests.support.daemons import wait_for

ROUNDS = times(40, 500)
COUNT = 40_000  # two chunks of int64


def socket_at(entry: Path) -> socket.socket | None:
    """Return another handle of the socket that has this descriptor; None for what is none, or was closed meanwhile."""
    try:
        own = os.dup(int(entry.name)) if str(entry.readlink()).startswith("socket:") else -1
    except OSError:
        return None
    try:
        return socket.socket(fileno=own) if own >= 0 else None
    except OSError:  # closed by another thread, and something else was there
        os.close(own)
        return None


def break_connections(port: int, path: str) -> int:
    """Shut every connection of this process to the server; return how many there were."""
    broken = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        one = socket_at(entry)
        if one is None:
            continue
        with contextlib.suppress(OSError), one:
            peer = one.getpeername()
            # A Unix socket keeps the name that it was bound to, before its file took the place of an older one.
            if (isinstance(peer, tuple) and peer[1] == port) or peer in (path, f"{path[:-1]}~"):
                one.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def at_work(before: Collection[threading.Thread]) -> list[str]:
    """Names of threads that make connections, but for those of clients from `before`, which others have in use."""
    named = ("smb-links", "smb-resume", "smb-rdma")
    return [t.name for t in threading.enumerate() if t.name in named and t not in before]


def call_until_closed(buffer: smb.Buffer, lock: smb.Lock | None, failures: list[BaseException]) -> None:
    """Calls over links: under a lock, and waiting for a version, also where the memory is mapped."""
    ones = np.ones(COUNT, np.int64)
    while True:
        try:
            buffer.accumulate(ones, fence=lock)
        except smb.TransportError:
            continue  # broken while it was greeted, which is how a socket shuts out who may not
        except (smb.UnavailableError, smb.TimeoutError):
            return
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)
            return


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_nothing_is_at_work_once_close_returns(transport: str) -> None:
    """Closed at any moment of a reconnection, again and again: calls in progress fail, its threads have ended, and
    the next client works."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, failures, begun = random.Random(seed), [], 0
    before = threading.enumerate()
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, transport=transport) as first,
        contextlib.ExitStack() as failed,  # a client that stays would disturb other tests
    ):
        place = first.create("w", COUNT, "int64").layout.segments[0]
        port = int(place.address.rpartition(":")[2])
        first.close()
        for _ in range(ROUNDS):
            client = smb.connect(cluster.address, transport=transport, timeout=20)
            failed.callback(client.close)
            buffer = client.open("w")
            lock = buffer.lock(ttl=60).acquire() if transport == "shm" else None
            caller = threading.Thread(target=call_until_closed, args=(buffer, lock, failures))
            caller.start()

            def breaks(caller: threading.Thread = caller) -> int:
                assert caller.is_alive(), failures
                return break_connections(port, place.unix_path)

            wait_for(breaks, "connection")
            for _ in range(draw.randrange(3)):
                break_connections(port, place.unix_path)
            if draw.random() < 0.5:

                def reconnects(client: smb.Client = client, caller: threading.Thread = caller) -> int:
                    assert caller.is_alive(), failures
                    break_connections(port, place.unix_path)
                    return client._session.outages().begun

                wait_for(reconnects, "reconnection")
            closer = threading.Thread(target=client.close)
            closer.start()
            while closer.is_alive():  # what it makes anew meanwhile breaks, too
                break_connections(port, place.unix_path)
            closer.join()
            assert at_work(before) == []
            begun += client._session.outages().begun
            caller.join(20)
            assert not caller.is_alive()
        with smb.connect(cluster.address, transport=transport) as client:
            assert client.open("w").read().min() >= 0
    assert failures == []
    assert begun > ROUNDS // 4
