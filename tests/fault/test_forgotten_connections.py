"""Connections that somebody on the way has forgotten, as address translators do after minutes: what is sent is dropped
without a word, and a new connection works.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smb
from tests.support.daemons import wait_for
from tests.support.rights import may_filter

TABLE = "smbforgotten"
SILENT_S = 10.0  # csrc/client/dial.c


def connections(port: int) -> dict[int, int]:
    """Return the local ports that are connected to that one on this host, and the timer of each: 2 sends probes."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        if state == "01" and int(remote.rpartition(":")[2], 16) == port:
            found[int(local.rpartition(":")[2], 16)] = int(timer.partition(":")[0], 16)
    return found


@contextlib.contextmanager
def forgotten(ports: list[int]) -> Iterator[None]:
    """Nothing that goes over these connections arrives, either way."""
    each = ", ".join(map(str, ports))
    rules = f"add table inet {TABLE}; add chain inet {TABLE} in {{ type filter hook input priority 0; }}; "
    rules += "".join(f"add rule inet {TABLE} in tcp {end} {{ {each} }} drop; " for end in ("sport", "dport"))
    subprocess.run(["nft", rules], check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", TABLE], check=True)


@pytest.mark.skipif(not may_filter(), reason="not run: needs root, nft and the right to change nftables")
def test_a_call_goes_on_over_a_new_connection() -> None:
    """Once the old one is given up, not after the quarter of an hour that TCP takes. Each change counts
    once. While nothing is said, probes keep the connection from being forgotten.
    """
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=4 * SILENT_S) as client,
    ):
        buffer = client.create("w", 1000, "int64")
        buffer.accumulate(np.ones(1000, np.int64))
        port = int(buffer.layout.segments[0].address.rpartition(":")[2])
        before = connections(port)
        assert before
        wait_for(lambda: set(connections(port).values()) == {2}, "probes of an idle connection")
        with forgotten(list(before)):
            began = time.monotonic()
            for _ in range(3):
                buffer.accumulate(np.ones(1000, np.int64))
            took = time.monotonic() - began
            assert 0.5 * SILENT_S < took < 2 * SILENT_S
            assert not before.keys() & connections(port).keys()
        assert (buffer.read() == 4).all()
