"""What a handler raised in a call that ended within 100 ms had no outcome, though the call had been applied."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import smb
from smb.engine.calls import Attempt
from tests.conftest import Connect

_COUNT = 1 << 18
_CAUGHT = 4
_TRIES = 400  # some of them end before the signal comes
_SEED = 20261129


class _StopError(Exception):
    """What the handler raises; KeyboardInterrupt would end pytest."""


def _raise(_signal: int, _frame: object) -> None:
    raise _StopError


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _calls(client: smb.Client, buffer: smb.Buffer, ones: np.ndarray[Any, Any]) -> dict[str, Callable[[], object]]:
    """Return calls, each of which adds 1 to every element."""
    source = client.create("ones", like=buffer)
    source.fill(1)
    indices = np.arange(_COUNT, dtype=np.int64)
    return {
        "accumulate": lambda: buffer.accumulate(ones),
        "accumulate(fetch=True)": lambda: buffer.accumulate(ones, fetch=True),
        "accumulate_from": lambda: buffer.accumulate_from(source),
        "accumulate_sparse": lambda: buffer.accumulate_sparse(indices, ones),
    }


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_it_has_the_calls_outcome_and_is_settled(connect: Connect, transport: str) -> None:
    """Adds under a timer whose handler raises, by each way of adding: what settle leaves out counts, once."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers run on the main thread")
    print("seed", _SEED)
    draws = random.Random(_SEED)
    client = connect(transport)
    buffer, ones = client.create("x", _COUNT, "int64"), np.ones(_COUNT, np.int64)
    before = signal.signal(signal.SIGALRM, _raise)
    try:
        for name, call in _calls(client, buffer, ones).items():
            lasts = min(_seconds(call) for _ in range(5))  # of this machine: the handler is to come in between
            buffer.fill(0)
            wanted, caught = np.zeros(_COUNT, np.int64), 0
            for _ in range(_TRIES):
                error: Any = None
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 1e-6 + draws.random() * lasts)
                        call()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except _StopError as raised:
                    error = raised
                wanted += 1
                if error is None:
                    continue
                found = buffer.read()
                if not hasattr(error, "outcome"):  # raised before the call, or after it had returned
                    wanted = found.copy()
                    continue
                for part in buffer.settle(error):
                    wanted[part.start : part.stop] -= 1
                assert (found == wanted).all(), (name, error.outcome)
                caught += 1
                if caught == _CAUGHT:
                    break
            assert caught == _CAUGHT, (name, caught)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_attempt_whose_making_was_interrupted_goes_silently() -> None:
    """A handler may raise before the attempt has anything of its own; Python then warned that it could not be freed."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is Attempt.__init__.__code__:
            raise _StopError(event)

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(_StopError, match="call"):
            Attempt()
    finally:
        sys.settrace(before)
    gc.collect()


def test_what_a_handler_raises_is_raised_wherever_it_comes(connect: Connect) -> None:
    """An attempt freed its outcome in __del__, from which nothing can be raised: a Ctrl-C that came there was lost."""
    buffer = connect("tcp").create("x", 16)
    column = np.ones((16, 2), np.float32)[:, 0]
    _check_every_place(lambda: buffer.accumulate(column))


def test_what_a_handler_raises_in_a_request_that_may_wait_is_raised(connect: Connect) -> None:
    """Likewise the requests of locks, barriers and versions had a __del__."""
    published = connect("tcp").create("x", 16, versions=2)
    published.publish(np.ones(16, np.float32))
    _check_every_place(lambda: published.wait(1))


def _check_every_place(call: Callable[[], object]) -> None:
    """Check that what is raised at any function of ours that a call enters or returns to ends the call."""
    call()  # finds the paths
    places = 0

    def raised_at(place: int) -> bool:
        seen = 0

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal seen, places
            if event in ("call", "c_return") and "/smb/" in frame.f_code.co_filename:
                seen, places = seen + 1, max(places, seen + 1)
                if seen == place:
                    raise _StopError

        before = sys.getprofile()
        gc.disable()  # a client that another test left would be collected, and its finalizer swallow what is raised
        sys.setprofile(look)
        try:
            call()
        except _StopError:
            return True
        finally:
            sys.setprofile(before)
            gc.enable()
        return False

    assert not raised_at(0)
    total = places
    assert total > 20
    for place in range(1, total + 1):
        assert raised_at(place), f"{place} of {total}"
