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
from tests.support.transports import SLOWNESS


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
    # What ran behind another watch, which waited for it, never ran.
    gate = threading.Event()
    held = [buffer.submit(gate.wait) for _ in range(2)]
    added = [buffer.accumulate_async(np.ones(1000, np.float32)) for _ in range(3)]
    gate.set()
    for each in (*held, *added):
        each.result(DEADLINE_S)
    assert (buffer.read() == 3).all()


def test_a_call_that_found_no_thread_keeps_no_later_one(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done where the ends of others are told. A later one had a thread that was taken for a free one."""
    client = connect("tcp")
    buffer = client.create("w", 1000)
    buffer.read()
    refused = refuse(monkeypatch, "smb-async_1", 1)
    assert buffer.submit(lambda: 7).result(DEADLINE_S) == 7
    assert refused
    wait_for(lambda: client._session.calls._watching is None, "the watch has ended", DEADLINE_S)
    gate = threading.Event()
    held, added = buffer.submit(gate.wait), buffer.accumulate_async(np.ones(1000, np.float32))
    gate.set()
    assert held.result(DEADLINE_S)
    added.result(DEADLINE_S)
    assert (buffer.read() == 1).all()


def test_a_callback_that_leaves_keeps_no_other_call(connect: Callable[..., smb.Client]) -> None:
    """sys.exit() in it ended the thread that tells of all calls."""
    buffer = connect("tcp").create("w", 1000)
    buffer.read()
    gate = threading.Event()
    buffer.submit(gate.wait)  # so that the callback is there before the read is done
    first = buffer.read_async()
    first.add_done_callback(lambda _: sys.exit(3))
    gate.set()
    first.result(DEADLINE_S)
    for _ in range(3):
        buffer.read_async().result(DEADLINE_S)


def test_locks_are_renewed_without_a_thread_each(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect("tcp")
    buffer, other = client.create("w", 1000), connect("tcp")
    with buffer.lock(ttl=3.0 * SLOWNESS) as lock:
        refused = refuse(monkeypatch, "smb-renewal")
        wait_for(lambda: len(refused) > 4, "renewals past the lock's time", 3 * DEADLINE_S)
        assert lock.held
        with pytest.raises(smb.TimeoutError):
            other.open("w").lock(ttl=1.0, timeout=0.0).acquire()
        buffer.write(np.ones(1000, np.float32), fence=lock)


def test_a_lock_that_nobody_would_renew_is_given_back(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held until its time was over, and this object could take it no more."""
    lock = connect("tcp").create("w", 1000).lock(ttl=30.0, timeout=0.0)
    refused = refuse(monkeypatch, "smb-locks", 1)
    with pytest.raises(smb.Error, match="cannot start a thread to renew the lock"):
        lock.acquire()
    assert refused
    with lock:
        assert lock.held
