"""A member that was killed inside of wake() kept all others from waking anybody for ten seconds: a publisher's turn
lasted that long, whatever the group's lease was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import smb
import smb.train
from smb.train import group as groups
from tests.conftest import Connect

LEASE_S = 0.5

DYING = """
import os, signal, sys
import smb
from smb.call.dispatcher import Dispatcher
from smb.train import group as groups

with smb.connect(sys.argv[1]) as client:
    group = groups.view(client, "run")
    Dispatcher.call = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    group.wake()
"""


def test_a_member_killed_while_it_wakes_others_holds_them_up_for_a_lease(
    cluster: smb.LocalCluster, connect: Connect
) -> None:
    """The next wake() gets through once the lease is over."""
    client = connect()
    with smb.train.join(client, "run", np.zeros(8, np.float32), smb.train.BSP(), lease=LEASE_S):
        killed = subprocess.run([sys.executable, "-c", DYING, cluster.address])
        assert killed.returncode == -signal.SIGKILL
        began = time.monotonic()
        groups.view(client, "run").wake()
        assert time.monotonic() - began < 5.0


def test_the_turn_of_a_publisher_is_a_time(connect: Connect) -> None:
    """ttl= is seconds, from a millisecond on; another publication goes through with it."""
    buffer = connect().create("published", 4)
    assert buffer.publish(np.ones(4, np.float32), ttl=0.2) == 1
    for ttl in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(smb.InvalidArgumentError, match="ttl must be between"):
            buffer.publish(np.ones(4, np.float32), ttl=ttl)
