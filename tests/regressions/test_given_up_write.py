"""Requests of a connection that its client had given up were once carried out after the client's later writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

import smb
from tests.support.daemons import wait_for

CHUNK = 65536  # float32 elements of 256 KiB
# Adds to the first chunk without end, through shared memory.
_ADDER = """
import sys, numpy, smb
with smb.connect(sys.argv[1], transport="shm") as client:
    buffer, zeros = client.open("weights"), numpy.zeros(65536, numpy.float32)
    rounds = client.open("rounds")
    print("adding", flush=True)
    while True:
        buffer.accumulate(zeros, 0)
        rounds.fetch_add(0, 1)
"""


def test_a_write_that_timed_out_does_not_come_after_a_later_one() -> None:
    """The first chunk's lock is held by a stopped process; a large write times out; a later small one stays."""
    with (
        smb.LocalCluster(servers=1) as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=1.0) as client,
    ):
        weights, rounds = client.create("weights", (128 * CHUNK,)), client.create("rounds", (1,), "int64")
        adder = subprocess.Popen([sys.executable, "-c", _ADDER, cluster.address], stdout=subprocess.PIPE)
        try:
            assert adder.stdout is not None
            assert adder.stdout.readline() == b"adding\n"
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                os.kill(adder.pid, signal.SIGSTOP)
                try:
                    weights.write(np.ones(128 * CHUNK, np.float32))
                except (smb.TimeoutError, smb.UnavailableError):
                    break  # it was stopped inside the lock
                before = rounds.read()[0]
                os.kill(adder.pid, signal.SIGCONT)
                # Stopped again at once, it would stand where it stood.
                wait_for(lambda before=before: rounds.read()[0] > before, "round of the adder")
            else:
                raise AssertionError("the adder was never stopped inside the lock")
            later = np.full(CHUNK, 2, np.float32)
            weights.write(later, offset=4 * CHUNK)
            os.kill(adder.pid, signal.SIGCONT)
            # The chunk's lock is free again: whatever was to come has come once this is answered.
            weights.accumulate(np.zeros(CHUNK, np.float32), 0)
            np.testing.assert_array_equal(weights.read(4 * CHUNK, CHUNK), later)
        finally:
            adder.kill()
            adder.communicate()
