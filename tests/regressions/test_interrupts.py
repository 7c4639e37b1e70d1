"""Ctrl-C once was dead during a data call: signals were looked at only after it had timed out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import smb
from tests.support.daemons import stop, wait_for
from tests.support.transports import SLOWNESS

_SIZE = 1 << 18
_TIMEOUT_S = 60.0
_SOON_S = 5.0 * SLOWNESS  # far below a call's timeout
_QUIET_LOOKS = 20

# Adds to one chunk without end, through shared memory.
_ADDER = """
import sys, numpy, smb
with smb.connect(sys.argv[1], transport="shm") as client:
    buffer, ones = client.open("weights"), numpy.ones(65536, numpy.float32)
    print("adding", flush=True)
    while True:
        buffer.accumulate(ones)
"""


class _StopError(Exception):
    """What the handler raises; KeyboardInterrupt would end pytest."""


def _raise(_signal: int, _frame: object) -> None:
    raise _StopError


def _await_block(thread: int) -> None:
    """Return once a thread has been at one place of its code for some looks, while we hold the interpreter's lock: in
    a call that blocks. The kernel's word for it says less: who waits through shared memory wakes up each millisecond.
    """
    last, quiet = (0, 0), 0

    def blocks() -> bool:
        nonlocal last, quiet
        frame = sys._current_frames()[thread]
        place = (id(frame), frame.f_lasti)
        last, quiet = place, quiet + 1 if place == last else 0
        return quiet > _QUIET_LOOKS

    wait_for(blocks, "call in which the main thread blocks")


@contextmanager
def _interrupted() -> Iterator[None]:
    """The block blocks; then a signal comes, whose handler raises: soon it has ended with that."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers run on the main thread")
    before = signal.signal(signal.SIGUSR1, _raise)
    main, sent_at = threading.get_ident(), [0.0]

    def send() -> None:
        _await_block(main)
        sent_at[0] = time.monotonic()
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(_StopError):
            yield
        assert time.monotonic() - sent_at[0] < _SOON_S
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def _stopped(cluster: smb.LocalCluster) -> Iterator[None]:
    for server in cluster.servers:
        stop(server.pid)
    try:
        yield
    finally:
        for server in cluster.servers:
            os.kill(server.pid, signal.SIGCONT)


def test_data_calls_over_tcp() -> None:
    """Reads, writes, additions, by the short way and the long one; then settle tells, and all counts once."""
    with (
        smb.LocalCluster(servers=2, capacity="32MiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=_TIMEOUT_S) as client,
    ):
        buffer, ones = client.create("w", _SIZE), np.ones(_SIZE, np.float32)
        out = np.empty(_SIZE, np.float32)
        buffer.read(out=out)
        calls: tuple[Callable[[], object], ...] = (
            lambda: buffer.read(out=out),
            lambda: buffer.read(wire="bfloat16"),
            lambda: buffer.fill(0),
            lambda: buffer.write(np.zeros(_SIZE, np.float32), wire="float16"),
        )
        for call in calls:
            with _stopped(cluster), _interrupted():
                call()
        buffer.fill(0)
        caught: list[Any] = []
        with _stopped(cluster), _interrupted():
            try:
                buffer.accumulate(ones)
            except _StopError as error:
                caught.append(error)
                raise
        assert caught[0].outcome in ("unknown", "not applied")
        for part in buffer.settle(caught[0]):
            buffer.accumulate(ones[: len(part)], part.start)
        assert (buffer.read() == 1).all()


def test_a_handler_may_use_the_client() -> None:
    """A handler that raises nothing may make calls of its own; the call goes on, and ends as if nothing had been."""
    with (
        smb.LocalCluster(servers=2, capacity="32MiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=_TIMEOUT_S) as client,
    ):
        buffer, counter = (
            client.create("w", 1 << 16, servers=["server-0"]),
            client.create("n", 1, "int64", servers=["server-1"]),
        )
        buffer.read(0, 1)
        handled: list[int] = []
        counter.read(0, 1)
        before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(counter.fetch_add(0, 1)))
        main = threading.get_ident()

        def send() -> None:
            _await_block(main)
            signal.pthread_kill(main, signal.SIGUSR1)
            wait_for(lambda: bool(handled), "the handler")
            os.kill(cluster.servers[0].pid, signal.SIGCONT)

        thread = threading.Thread(target=send)
        stop(cluster.servers[0].pid)
        try:
            thread.start()
            buffer.accumulate(np.ones(1 << 16, np.float32))
        finally:
            os.kill(cluster.servers[0].pid, signal.SIGCONT)
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        assert handled == [0]
        assert (buffer.read() == 1).all()


def test_waits_and_connecting() -> None:
    """Locks, barriers, versions, and the first call to a server that does not answer."""
    with (
        smb.LocalCluster(servers=1, capacity="32MiB") as cluster,
        smb.connect(cluster.address, transport="tcp", timeout=_TIMEOUT_S) as client,
        smb.connect(cluster.address, transport="tcp", timeout=_TIMEOUT_S) as other,
    ):
        buffer = client.create("v", 1000, versions=2)
        with other.lock("turn"), _interrupted():
            client.lock("turn").acquire()
        with client.lock("turn", timeout=_TIMEOUT_S):  # what was given up holds nothing
            pass
        with _interrupted():
            buffer.wait(1)
        with _interrupted():
            client.barrier("round", 2)
        fresh = other.open("v")
        with _stopped(cluster), _interrupted():
            fresh.read()
        with pytest.raises(smb.NotFoundError, match="nothing is published yet"):
            fresh.read()


def test_a_chunk_that_a_stopped_process_holds() -> None:
    """A call through shared memory that waits for a chunk's lock ends, too, and nothing of it was applied."""
    with (
        smb.LocalCluster(servers=1, capacity="32MiB") as cluster,
        smb.connect(cluster.address, transport="shm", timeout=_TIMEOUT_S) as client,
        smb.connect(cluster.address, transport="shm", timeout=0.2) as hasty,
    ):
        weights = client.create("weights", (65536,))
        probe, zeros = hasty.open("weights"), np.zeros(65536, np.float32)
        weights.read(0, 1)
        adder = subprocess.Popen([sys.executable, "-c", _ADDER, cluster.address], stdout=subprocess.PIPE)
        try:
            assert adder.stdout is not None
            assert adder.stdout.readline() == b"adding\n"

            def stopped_inside() -> bool:
                os.kill(adder.pid, signal.SIGSTOP)
                try:
                    probe.accumulate(zeros)
                except smb.TimeoutError:
                    return True
                os.kill(adder.pid, signal.SIGCONT)
                return False

            wait_for(stopped_inside, "a stop inside the lock")
            caught: list[Any] = []
            with _interrupted():
                try:
                    weights.write(zeros)
                except _StopError as error:
                    caught.append(error)
                    raise
            assert caught[0].outcome == "not applied"
            assert weights.settle(caught[0]) == [range(65536)]
            os.kill(adder.pid, signal.SIGCONT)
        finally:
            adder.kill()
            adder.communicate()
