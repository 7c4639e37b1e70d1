"""Client.close() has a bound, whatever does not answer and whatever is on its way."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import smb
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role
from tests.support.daemons import stopped

COUNT = 1 << 20
LATE_S = 5.0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_close_ends_beside_stopped_daemons(transport: str) -> None:
    """Both daemons are stopped (SIGSTOP), waits and a write are on their way: close ends within seconds, they fail."""
    with smb.LocalCluster(servers=1, capacity="64MiB") as cluster:
        client = smb.connect(cluster.address, transport=transport, timeout=60)
        buffer = client.create("w", COUNT)
        buffer.write(np.ones(COUNT, np.float32))
        buffer.wait(0)  # connects
        with stopped(cluster.servers[0].pid, cluster.coordinator.pid):

            def wait() -> None:
                with contextlib.suppress(smb.Error):
                    buffer.wait(5, timeout=60)

            waiting = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
            for thread in waiting:
                thread.start()
            writing = buffer.write_async(np.ones(COUNT, np.float32))
            begun = time.monotonic()
            client.close()
            assert time.monotonic() - begun < LATE_S
            for thread in waiting:
                thread.join(LATE_S)
                assert not thread.is_alive()
            with contextlib.suppress(smb.Error, CancelledError):  # it may not have begun
                writing.result(LATE_S)


@pytest.mark.parametrize("way", ["connect_tcp", "connect_unix", "connect_tls"])
def test_close_ends_calls_that_connect_for_the_first_time(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is stopped before anybody has connected to it: the kernel accepts, nobody says HELLO. The calls end
    with the client, not with their own timeout.
    """
    credentials = None
    if way == "connect_tls":
        credentials = tmp_path / "credentials"
        make_set(credentials, [Holder(Role.COORDINATOR, ""), Holder(Role.SERVER, "server-0"), Holder(Role.CLIENT, "")])
        credentials = credentials / "client"
    transport = "shm" if way == "connect_unix" else "tcp"
    with smb.LocalCluster(
        servers=1, capacity="64MiB", credentials=tmp_path / "credentials" if credentials else None
    ) as cluster:
        client = smb.connect(cluster.address, transport=transport, timeout=60, credentials=credentials)
        buffer = client.create("w", 1024)
        connecting, real = threading.Event(), getattr(client._session.engine, way)

        def connect(*given: object) -> object:
            connecting.set()
            return real(*given)

        monkeypatch.setattr(client._session.engine, way, connect)
        with stopped(cluster.servers[0].pid), ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(buffer.read), threads.submit(buffer.wait, 1, timeout=60)]
            assert connecting.wait(20)
            client.close()
            begun = time.monotonic()
            for call in calls:
                with pytest.raises(smb.Error):
                    call.result(LATE_S)
            assert time.monotonic() - begun < LATE_S
