"""A handler that raised while an async call was made left the client waiting for a call that the engine did not have:
close() hung. And neither such a call nor a lock's had an outcome.

The handler's exception is raised at each place in turn that a signal hits by chance: the interpreter runs handlers
where a function of Python's begins, and where one of C's has returned.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
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


def _stopped(call: Callable[[], object], here: Callable[[], bool]) -> _StopError | None:
    """Make the call and raise at the first place of the library where `here` is true; None: it was at none."""

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if frame.f_code.co_name == "__del__":  # from which nothing can be raised
            return
        if event in ("call", "c_return") and "/smb/" in frame.f_code.co_filename and here():
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
    for place in itertools.count():
        places = itertools.count()
        if (error := _stopped(call, lambda places=places, place=place: next(places) == place)) is None:
            break
        yield error
    print(place, "places")
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

    outcomes = []

    def settle(error: Any) -> None:
        nonlocal wanted
        if hasattr(error, "outcome"):
            outcomes.append(error.outcome)
            wanted += 1
            for part in buffer.settle(error):
                wanted[part.start : part.stop] -= 1
        assert (buffer.read() == wanted).all(), error

    def count() -> None:
        nonlocal wanted
        wanted += 1
        wait_for(lambda: bool((buffer.read() == wanted).all()), "the sum of a call that was not stopped")

    for error in _stops(add):
        settle(error)
    count()
    # Whether the engine has begun a call that it has is left to chance above. Here it has time to.
    with smb.connect(client.address, transport="tcp") as other:
        sums = other.open("x")

        def begun() -> bool:
            deadline = time.monotonic() + 0.05
            while not (changed := bool((sums.read() != wanted).any())) and time.monotonic() < deadline:
                pass
            return changed

        for _ in range(50):  # on a machine that is busy it may take longer
            if (error := _stopped(add, begun)) is not None:
                settle(error)
                break
            count()
    assert set(outcomes) == {"not applied", "unknown"}


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
