"""Async calls on the same elements once took effect in any order: another write than the last one stayed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import smb
from tests.conftest import Connect

_BATCHES, _WRITES, _ELEMENTS = 60, 20, 65536
_PATIENCE_S = 60.0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_last_write_stays_and_reads_see_it(connect: Callable[..., smb.Client], transport: str) -> None:
    """Of 60 batches of writes to one range each ends with its last; what was asked after it, either way, sees it."""
    buffer = connect(transport).create("w", _ELEMENTS)
    for batch in range(_BATCHES):
        for number in range(_WRITES):
            buffer.write_async(np.full(_ELEMENTS, batch * _WRITES + number, np.float32))
        seen = buffer.read_async()
        last = batch * _WRITES + _WRITES - 1
        assert (buffer.read(_ELEMENTS - 1, 1) == last).all()
        assert (seen.result(_PATIENCE_S) == last).all()
        assert (buffer.read() == last).all()


def test_every_pair_that_overlaps_keeps_its_order(connect: Callable[..., smb.Client]) -> None:
    """Random ranges, written, added to and read: the end, and all that was read, is as if made one after the other."""
    seed = 20
    random = np.random.default_rng(seed)
    client = connect("tcp")
    buffer, expected = client.create("w", 1000, "int64"), np.zeros(1000, np.int64)
    reads: list[tuple[Future[Any], np.ndarray[Any, Any]]] = []
    for _ in range(600):
        start, stop = sorted(int(x) for x in random.integers(0, 1001, 2))
        if start == stop:
            continue
        values = random.integers(-1000, 1000, stop - start)
        kind = random.integers(3)
        if kind == 0:
            buffer.write_async(values, start)
            expected[start:stop] = values
        elif kind == 1:
            other = client.open("w")  # another object of the same buffer
            other.accumulate_async(values, start, op="max")
            np.maximum(expected[start:stop], values, out=expected[start:stop])
        else:
            reads.append((buffer.read_async(start, stop - start), expected[start:stop].copy()))
    for future, then in reads:
        np.testing.assert_array_equal(future.result(_PATIENCE_S), then, err_msg=f"seed {seed}")
    np.testing.assert_array_equal(buffer.read(), expected, err_msg=f"seed {seed}")


def test_calls_that_do_not_overlap_run_side_by_side(connect: Callable[..., smb.Client]) -> None:
    """Two of disjoint ranges, and two reads of one range, are under way at the same time."""
    client = connect("tcp")
    buffer = client.create("w", 1000)
    for ranges, changes in (((0, 500, 500, 1000), True), ((0, 1000, 0, 1000), False)):
        meeting = threading.Barrier(2, timeout=_PATIENCE_S)
        a, b, c, d = ranges
        calls = [
            client._session.calls.submit(meeting.wait, buffer._dispatcher.turns, start, stop, changes=changes)
            for start, stop in ((a, b), (c, d))
        ]
        assert sorted(call.result(_PATIENCE_S) for call in calls) == [0, 1]


def test_a_blocking_call_of_others_elements_does_not_wait(connect: Callable[..., smb.Client]) -> None:
    """While an async call on the first half has not ended, the second half is read; the first after it has."""
    client = connect("tcp")
    buffer, gate = client.create("w", 1000), threading.Event()
    held = client._session.calls.submit(lambda: gate.wait(_PATIENCE_S), buffer._dispatcher.turns, 0, 500, changes=True)
    behind = buffer.write_async(np.ones(10, np.float32), 490)
    try:
        assert buffer.read(500, 500).sum() == 0
        assert not held.done()
        assert not behind.done()
    finally:
        gate.set()
    assert buffer.read(490, 10).sum() == 10
    behind.result(10)  # a read may find what was written before the writer is told


def test_a_blocking_call_waits_for_no_later_one(
    connect: Callable[..., smb.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits looks again and again whether it may go on: async calls of others meanwhile don't hold it up."""
    client = connect("tcp")
    buffer = client.create("w", 1000)
    buffer.fill(0)
    operations, first, later, looks = client._session.calls._operations, threading.Event(), threading.Event(), 0
    looked = threading.Condition()
    wait = operations.wait

    def counted(*place: Any, **how: Any) -> bool:
        nonlocal looks
        with looked:
            looks += 1
            looked.notify_all()
        return wait(*place, **how)

    monkeypatch.setattr(operations, "wait", counted)
    futures = [buffer.submit(lambda: first.wait(_PATIENCE_S))]
    blocked = threading.Thread(target=buffer.fill, args=(1,))
    blocked.start()
    try:
        with looked:
            assert looked.wait_for(lambda: looks > 1, _PATIENCE_S)  # it has its place once the first look is over
        futures.append(buffer.submit(lambda: later.wait(_PATIENCE_S)))
        with looked:
            before = looks
            assert looked.wait_for(lambda: looks >= before + 2, _PATIENCE_S)
        first.set()
        blocked.join(20)
        assert not blocked.is_alive()
    finally:
        first.set()
        later.set()
        blocked.join()
    assert all(future.result(_PATIENCE_S) for future in futures)


def test_one_that_is_too_late_says_so(connect: Callable[..., smb.Client]) -> None:
    """A blocking call waits for its turn as long as the client's timeout, and nothing was applied then."""
    client = connect("shm", timeout=0.2)
    buffer, gate = client.create("w", 1000), threading.Event()
    held = client._session.calls.submit(lambda: gate.wait(_PATIENCE_S), buffer._dispatcher.turns, 0, 500, changes=True)
    try:
        with pytest.raises(smb.TimeoutError, match="earlier async call"):
            buffer.write(np.ones(1000, np.float32))
    finally:
        gate.set()
    assert held.result(_PATIENCE_S)
    assert buffer.read().sum() == 0


def test_closing_cancels_those_whose_turn_did_not_come(connect: Callable[..., smb.Client]) -> None:
    """close() ends those that wait for their turn, and nobody who waits for them hangs."""
    client = connect("tcp")
    buffer, begun, gate = client.create("w", 1000), threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return gate.wait(_PATIENCE_S)

    held = client._session.calls.submit(hold, buffer._dispatcher.turns, 0, 500, changes=True)
    behind = [buffer.write_async(np.ones(10, np.float32)) for _ in range(20)]
    assert begun.wait(_PATIENCE_S)
    behind[-1].add_done_callback(lambda _: gate.set())
    client.close()
    assert held.result(_PATIENCE_S)
    assert all(future.cancelled() for future in behind)


_ENDS_AT_ONCE = """
import sys, numpy, smb
client = smb.connect(sys.argv[1], transport="tcp", timeout=60)
buffer = client.open("w")
values = [numpy.full(buffer.size, value, numpy.int64) for value in range(20)]
futures = [buffer.write_async(value) for value in values]
"""


def test_a_program_that_ends_has_its_calls_done(cluster: smb.LocalCluster, connect: Connect) -> None:
    """Those that waited for their turn, too: no thread can be started for them any more."""
    buffer = connect(timeout=60).create("w", 1 << 21, "int64")
    command = [sys.executable, "-c", _ENDS_AT_ONCE, cluster.address]
    subprocess.run(command, check=True, timeout=60)
    assert (buffer.read() == 19).all()
