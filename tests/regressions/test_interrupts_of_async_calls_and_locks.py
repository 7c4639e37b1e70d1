"""A handler that raised while an async call was made left the client waiting for a call that the engine did not have:
close() hung. And neither such a call nor a lock's had an outcome.

The handler's exception is raised at each place in turn that a signal hits by chance: the interpreter runs handlers
where a function of Python's begins, and where one of C's has returned.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import smb
from tests.support.daemons import wait_for

_COUNT = 1 << 10
_TTL_S = 0.2


class _StopError(Exception):
    """What a signal's handler raises; KeyboardInterrupt would end pytest."""


def _stopped_at(place: int, call: Callable[[], object]) -> _StopError | None:
    """Make the call and raise at the given place of the library, counted from 1; None: it has not so many."""
    seen = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal seen
        if frame.f_code.co_name == "__del__":  # from which nothing can be raised
            return
        if event in ("call", "c_return") and "/smb/" in frame.f_code.co_filename:
            seen += 1
            if seen == place:
                raise _StopError

    before = sys.getprofile()
    gc.disable()  # a client that another test left would be collected here, and its finalizer swallow what is raised
    try:
        sys.setprofile(look)
        call()
    except _StopError as error:
        return error
    finally:
        sys.setprofile(before)
        gc.enable()
    return None


def _stops(call: Callable[[], object]) -> Iterator[Any]:
    """Stop the call at each of its places."""
    place = 1
    while (error := _stopped_at(place, call)) is not None:
        yield error
        place += 1
    print(place - 1, "places")
    assert place > 10


@pytest.fixture
def client() -> Iterator[smb.Client]:
    with smb.LocalCluster(servers=1, capacity="16MiB") as cluster:
        client = smb.connect(cluster.address, transport="tcp")
        yield client
        closing = threading.Thread(target=client.close, daemon=True)  # it hung
        closing.start()
        closing.join(20.0)
        assert not closing.is_alive()


@pytest.mark.parametrize("call", ["accumulate_async", "submit"])
def test_an_async_call_counts_as_settle_says(client: smb.Client, call: str) -> None:
    buffer, ones = client.create("x", _COUNT, "int64"), np.ones(_COUNT, np.int64)
    buffer.accumulate(ones)  # so that a path is known
    wanted = np.ones(_COUNT, np.int64)

    def add() -> None:
        if call == "submit":
            buffer.submit(lambda: buffer.accumulate(ones))
        else:
            buffer.accumulate_async(ones)

    outcomes = set()
    for error in _stops(add):
        if not hasattr(error, "outcome"):  # before the call began
            assert (buffer.read() == wanted).all()
            continue
        outcomes.add(error.outcome)
        wanted += 1
        for part in buffer.settle(error):
            wanted[part.start : part.stop] -= 1
        assert (buffer.read() == wanted).all(), error.outcome
    assert outcomes == {"not applied", "unknown"}
    wait_for(lambda: bool((buffer.read() == wanted + 1).all()), "the last sum")  # the one that was not stopped


def test_a_lock_is_free_within_its_ttl(client: smb.Client) -> None:
    locks = [client.lock("l", ttl=_TTL_S)]
    outcomes = set()
    for error in _stops(lambda: locks[-1].acquire().release()):
        outcomes.add(getattr(error, "outcome", None))
        if locks[-1].held:  # between the two calls
            locks[-1].release()
        with client.lock("l", ttl=_TTL_S, timeout=5.0):
            locks.append(client.lock("l", ttl=_TTL_S))
    assert "unknown" in outcomes
