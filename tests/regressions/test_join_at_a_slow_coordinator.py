"""A worker whose client has a long timeout failed to join a training for good if the coordinator needed more than 2 s
to make the lock of its slot. Of 50 workers that joined at once, 44 did.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import smb
import smb.train
from smb.rpc.coordinator_client import Coordinator
from tests.support.daemons import stop

SLOW_S = 3.0  # longer than the search for a lock without a waiting time, and shorter than a server's lease


def test_a_join_waits_for_a_slow_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the client's timeout says. It takes 3 s, in which the coordinator stands still."""
    slots: list[str] = []
    place = Coordinator.place

    def stopping(self: Coordinator, kind: Any, name: str, timeout: float, replicas: int = 1) -> Any:
        if "/member/" in name and not slots:
            slots.append(name)
            stop(cluster.coordinator.pid)
            threading.Timer(SLOW_S, os.kill, (cluster.coordinator.pid, signal.SIGCONT)).start()
        return place(self, kind, name, timeout, replicas)

    with (
        smb.LocalCluster(servers=1, capacity="16MiB") as cluster,
        smb.connect(cluster.address, timeout=60) as client,
    ):
        monkeypatch.setattr(Coordinator, "place", stopping)
        with smb.train.join(client, "run", np.zeros(10, np.float32), smb.train.LocalSGD(every=5)) as worker:
            assert worker.members == 1
    assert slots == ["run/member/0"]
