"""With credentials, a memory server is killed and started again while a client holds a connection over which it gets
memory. What that client maps next is not asked for on the dead connection until the call's time is over.
"""

from __future__ import annotations

import time
from pathlib import Path

import smb
from smb.security.lab_ca import Holder, make_set
from smb.security.roles import Role

TIMEOUT_S = 120.0
LATE_S = 40.0


def test_memory_is_attached_after_a_restart(tmp_path: Path) -> None:
    """Both buffers are known from before the kill; the second is first used after it."""
    place = tmp_path / "credentials"
    make_set(place, [Holder(Role.COORDINATOR, ""), Holder(Role.SERVER, "server-0"), Holder(Role.CLIENT, "")])
    with (
        smb.LocalCluster(servers=1, capacity="64MiB", credentials=place) as cluster,
        smb.connect(cluster.address, transport="shm", timeout=TIMEOUT_S, credentials=place / "client") as client,
    ):
        used, unused = client.create("used", 1024), client.create("unused", 1024)
        used.fill(1)
        cluster.servers[0].kill()
        cluster.servers[0].start()
        begun = time.monotonic()
        unused.fill(2)
        assert time.monotonic() - begun < LATE_S
        assert (unused.read() == 2).all()
        assert (used.read() == 1).all()
