"""A process at its limit of threads, whose connection broke, never connected again, and its close() raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import smb


def test_it_connects_again_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Thread.start
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        if thread.name == "smb-resume":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begun(thread)

    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, transport="tcp", timeout=60) as client:
        buffer = client.create("w", 1000)
        buffer.write(np.ones(1000, np.float32))
        monkeypatch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            cluster.servers[0].kill()
            cluster.servers[0].start()
            buffer.accumulate(np.ones(1000, np.float32))
        assert (buffer.read() == 3).all()
    assert refused
