"""Which transports the transport-independent tests go over, and how slow the machine is.

The tests are written once. They go over shared memory and TCP; with SMB_TEST_FAR=verbs (make verbs) over verbs where
they went over TCP, and no more over shared memory alone, which does not change with it. With SMB_TEST_CONNECTIONS=4 as
many connections carry the data to each server, as to one that is far away.
"""

from __future__ import annotations

import os
import zlib

from smb.transport import reconnect

# How a client on another host reaches a server.
FAR = os.environ.get("SMB_TEST_FAR", "tcp")
# For tests that do the same over each way.
EACH_WAY = ("shm", "tcp") if FAR == "tcp" else (FAR,)
# For four processes on one buffer at once: every way, and one of them twice.
MIXED = ("shm", "tcp", "shm", "tcp") if FAR == "tcp" else ("shm", "tcp", FAR, FAR)
# Deadlines are as many times as long: an emulated machine is slow.
SLOWNESS = float(os.environ.get("SMB_TEST_SLOWNESS", "1"))

if CONNECTIONS := int(os.environ.get("SMB_TEST_CONNECTIONS", "0")):
    reconnect.connections_for = lambda _: CONNECTIONS


def way_of(test: str) -> str:
    """Return one of these ways, by the test's name: for tests of code that is the same over each."""
    return EACH_WAY[zlib.crc32(test.encode()) % len(EACH_WAY)]
