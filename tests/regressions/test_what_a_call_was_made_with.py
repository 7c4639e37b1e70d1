"""A call used what its lock, or its residual, had become: the token of a later holding of the lock, and the residual of
a buffer that was deleted since, whose name is another one's.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import smb
from tests.conftest import Connect
from tests.support.transports import SLOWNESS

_PATIENCE_S = 20.0 * SLOWNESS


@pytest.mark.parametrize("known", [True, False], ids=["paths are known", "paths are not known"])
@pytest.mark.parametrize("how", ["write", "accumulate", "feedback", "queue"])
def test_a_fenced_call_is_of_the_holding_in_which_it_was_made(connect: Connect, how: str, *, known: bool) -> None:
    """Its turn comes when the lock is held anew, after another client's change: it was applied over that."""
    client = connect()
    buffer, others = client.create("w", 10), connect().open("w")
    lock, residual = buffer.lock(), smb.ErrorFeedback(buffer)
    ones = np.ones(10, np.float32)
    if known:
        with lock:
            buffer.write(np.zeros(10, np.float32), fence=lock)
    gate = threading.Event()
    first = buffer.submit(lambda: gate.wait(_PATIENCE_S))
    with client.queue() as queue:
        with lock:
            late = (
                buffer.write_async(ones, fence=lock) if how == "write"
                else buffer.accumulate_async(ones, fence=lock) if how == "accumulate"
                else buffer.accumulate_async(ones, fence=lock, feedback=residual, wire="int8") if how == "feedback"
                else queue.write(buffer, ones, fence=lock)
            )  # fmt: skip
        with others.lock() as their:
            others.write(np.full(10, 2, np.float32), fence=their)
        with lock:
            gate.set()
            assert first.result(_PATIENCE_S)
            with pytest.raises(smb.LockLostError):
                late.result(_PATIENCE_S)
            assert buffer.read().tolist() == [2] * 10
            assert lock.held, "it is the former holding that was lost"
            buffer.accumulate_async(ones, fence=lock).result(_PATIENCE_S)
    assert buffer.read().tolist() == [3] * 10
    assert not residual.residual.any()


@pytest.mark.parametrize("known", [True, False], ids=["paths are known", "paths are not known"])
def test_a_lock_has_to_be_held_when_the_call_is_made(connect: Connect, *, known: bool) -> None:
    """To take it before the call's turn was enough."""
    buffer = connect().create("w", 10)
    lock, gate = buffer.lock(), threading.Event()
    if known:
        with lock:
            buffer.write(np.zeros(10, np.float32), fence=lock)
    first = buffer.submit(lambda: gate.wait(_PATIENCE_S))
    early = buffer.write_async(np.ones(10, np.float32), fence=lock)
    with lock:
        gate.set()
        assert first.result(_PATIENCE_S)
        with pytest.raises(smb.InvalidArgumentError, match="take it again" if known else "enter it first"):
            early.result(_PATIENCE_S)
    assert not buffer.read().any()


@pytest.mark.parametrize("size", [1000, 2000])
def test_a_residual_is_of_one_buffer_not_of_a_name(connect: Connect, size: int) -> None:
    """A buffer is deleted and made anew: what was left over of the old one went into the new one."""
    client = connect()
    residual = smb.ErrorFeedback(client.create("g", 1000, wire="int4"))
    residual.buffer.accumulate(np.linspace(0, 7, 1000, dtype=np.float32), feedback=residual)
    assert residual.residual.any()
    indices, values = residual.top_k(np.zeros(1000, np.float32), 3)
    client.delete("g")
    buffer = client.create("g", size)
    with pytest.raises(smb.InvalidArgumentError, match="feedback= belongs to another buffer, which had the name 'g'"):
        buffer.accumulate(np.zeros(size, np.float32), feedback=residual)
    with pytest.raises(smb.InvalidArgumentError, match="feedback= belongs to another buffer"):
        buffer.accumulate_sparse(indices, values, feedback=residual)
    assert not buffer.read().any()


def test_a_residual_goes_on_where_its_buffer_is_renamed(connect: Connect) -> None:
    """By the new name it was refused as another buffer's."""
    client = connect()
    residual = smb.ErrorFeedback(client.create("g", 10))
    client.rename("g", "h")
    buffer = client.open("h")
    buffer.accumulate(np.ones(10, np.float32), feedback=residual)
    assert (buffer.read() == 1).all()
