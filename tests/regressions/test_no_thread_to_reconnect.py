"""A process at its limit of threads, whose connection broke, never connected again, and its close() raised. One that
met the limit for a moment never completed an async call again, and never renewed a lock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import smb
from tests.support.daemons import DEADLINE_S, wait_for


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1 << 30) -> list[str]:
    """Have threads of that name not begin, so many times; return who was refused."""
    begun = threading.Thread.start
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and len(refused) < times:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begun(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return refused


def test_it_connects_again_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with smb.LocalCluster(servers=1) as cluster, smb.connect(cluster.address, transport="tcp", timeout=60) as client:
        buffer = client.create("w", 1000)
        buffer.write(np.ones(1000, np.float32))
        refused = refuse(monkeypatch, "smb-resume")
        for _ in range(2):
            cluster.servers[0].kill()
            cluster.servers[0].start()
            buffer.accumulate(np.ones(1000, np.float32))
        assert (buffer.read() == 3).all()
    assert refused


def test_async_calls_go_on_once_there_are_threads(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that found none is told, and is not made."""
    buffer = connect("tcp").create("w", 1000)
    buffer.read()
    refused = refuse(monkeypatch, "smb-async", 2)
    with pytest.raises(smb.Error, match="can't start new thread"):
        buffer.accumulate_async(np.ones(1000, np.float32))
    assert len(refused) == 2
    buffer.accumulate_async(np.ones(1000, np.float32)).result(DEADLINE_S)
    assert (buffer.read() == 1).all()


def test_a_callback_that_leaves_keeps_no_other_call(connect: Callable[..., smb.Client]) -> None:
    """sys.exit() in it ended the thread that tells of all calls."""
    buffer = connect("tcp").create("w", 1000)
    buffer.read()
    first = buffer.read_async()
    first.add_done_callback(lambda _: sys.exit(3))
    first.result(DEADLINE_S)
    for _ in range(3):
        buffer.read_async().result(DEADLINE_S)


def test_locks_are_renewed_without_a_thread_each(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect("tcp")
    buffer, other = client.create("w", 1000), connect("tcp")
    with buffer.lock(ttl=1.0) as lock:
        refused = refuse(monkeypatch, "smb-renewal")
        wait_for(lambda: len(refused) > 6, "renewals past the lock's time", DEADLINE_S)
        assert lock.held
        with pytest.raises(smb.TimeoutError):
            other.open("w").lock(ttl=1.0, timeout=0.0).acquire()
        buffer.write(np.ones(1000, np.float32), fence=lock)
