"""Calls with one ErrorFeedback: a blocking one held the residual while it waited for an earlier async call, which
waited for the residual; and a fence that was refused put back what the caller still had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import smb

SIZE = 1000


def test_a_blocking_call_follows_an_async_one(connect: Callable[..., smb.Client]) -> None:
    """The async one comes first, and both count."""
    client = connect("tcp", timeout=5)
    buffer = client.create("w", SIZE, wire="bfloat16")
    residual = smb.ErrorFeedback(buffer)
    gate = threading.Event()
    held = buffer.submit(gate.wait)
    first = buffer.accumulate_async(np.full(SIZE, 1.001, np.float32), feedback=residual)
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    buffer.accumulate(np.full(SIZE, 2.002, np.float32), feedback=residual)
    first.result(60)  # its future is completed a moment after its turn is over
    assert held.result()
    np.testing.assert_allclose(buffer.read() + residual.residual, 3.003, rtol=1e-6)
    opener.join()


def test_an_async_call_that_does_not_end(connect: Callable[..., smb.Client]) -> None:
    """The blocking one gives up, with nothing applied, and the residual as it was."""
    connect("tcp").create("w", SIZE)
    buffer = connect("tcp", timeout=3).open("w")
    residual, gate = smb.ErrorFeedback(buffer), threading.Event()
    stuck = buffer.submit(gate.wait)
    try:
        with pytest.raises(smb.TimeoutError, match="earlier async call") as caught:
            buffer.accumulate(np.ones(SIZE, np.float32), feedback=residual)
        assert caught.value.outcome == "not applied"
        assert buffer.settle(caught.value) == [range(SIZE)]
        assert not residual.residual.any()
    finally:
        gate.set()
    assert stuck.result(60)


def test_a_refused_fence_leaves_the_residual(connect: Callable[..., smb.Client]) -> None:
    """The caller has the values, and repeats the call under the lock: they count once."""
    buffer = connect("tcp").create("w", SIZE)
    residual = smb.ErrorFeedback(buffer)
    indices, values = residual.top_k(np.arange(SIZE, dtype=np.float32), 10)
    kept, lock = residual.residual, buffer.lock(ttl=10)
    with pytest.raises(smb.InvalidArgumentError, match="not held"):
        buffer.accumulate_sparse(indices, values, fence=lock, feedback=residual)
    np.testing.assert_array_equal(residual.residual, kept)
    with lock:
        buffer.accumulate_sparse(indices, values, fence=lock, feedback=residual)
    np.testing.assert_array_equal(buffer.read() + residual.residual, np.arange(SIZE, dtype=np.float32))


def test_nothing_to_send_of_a_closed_client(connect: Callable[..., smb.Client]) -> None:
    client = connect("tcp")
    buffer = client.create("w", SIZE)
    residual = smb.ErrorFeedback(buffer)
    client.close()
    with pytest.raises(smb.UnavailableError, match="closed"):
        buffer.accumulate_sparse([], np.zeros(0, np.float32), feedback=residual)
