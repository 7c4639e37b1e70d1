"""A deferred request once counted at every retry, a thousand times a second, and the gauge fell to 0 in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np

import smb
from tests.support.daemons import cluster_metric, wait_for

# Adds to one chunk without end, through shared memory.
_ADDER = """
import sys, numpy, smb
with smb.connect(sys.argv[1], transport="shm") as client:
    buffer, ones = client.open("weights"), numpy.ones(65536, numpy.float32)
    print("adding", flush=True)
    while True:
        buffer.accumulate(ones)
"""


def test_a_request_behind_a_stopped_process_is_deferred_once() -> None:
    """It counts as one while it waits, others of the same server are served, and it is answered after all."""
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, transport="tcp") as client:
        weights, other = client.create("weights", (65536,)), client.create("other", (4,))
        adder = subprocess.Popen([sys.executable, "-c", _ADDER, cluster.address], stdout=subprocess.PIPE)
        try:
            assert adder.stdout is not None
            assert adder.stdout.readline() == b"adding\n"
            pid = adder.pid

            def stopped_inside() -> bool:
                """Stop it; where it does not hold the lock, let it go on."""
                os.kill(pid, signal.SIGSTOP)
                future = weights.accumulate_async(np.ones(65536, np.float32))
                try:
                    wait_for(
                        lambda: future.done() or cluster_metric(cluster, "smb_server_deferred_requests") == 1,
                        "an outcome",
                    )
                    if future.done():
                        os.kill(pid, signal.SIGCONT)
                        return False
                    with smb.connect(cluster.address, transport="tcp") as third:
                        third.open("other").write(np.ones(4, np.float32))
                    retries_later = cluster_metric(cluster, "smb_server_chunk_waits_total")
                    assert cluster_metric(cluster, "smb_server_deferred_requests") == 1
                    assert cluster_metric(cluster, "smb_server_chunk_waits_total") == retries_later
                    return True
                finally:
                    os.kill(pid, signal.SIGCONT)
                    future.result(timeout=10)

            wait_for(stopped_inside, "a stop inside the lock")
            assert cluster_metric(cluster, "smb_server_deferred_requests") == 0
            assert other.read().tolist() == [1, 1, 1, 1]
        finally:
            adder.kill()
            adder.communicate()
