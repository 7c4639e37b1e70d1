"""A handler that raised on the main thread left locks taken, at which threads that resume connections stood."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from smb.config.conditions import condition, event
from tests.conftest import Connect
from tests.support.transports import SLOWNESS

_INTERRUPTS = 200  # gRPC left one taken after some tens
_SEED = 20261129


class _StopError(Exception):
    """What the handler raises; KeyboardInterrupt would end pytest."""


def _raise(_signal: int, _frame: object) -> None:
    raise _StopError


@contextmanager
def _handler() -> Iterator[random.Random]:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers run on the main thread")
    print("seed", _SEED)
    before = signal.signal(signal.SIGALRM, _raise)
    try:
        yield random.Random(_SEED)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(call: Callable[[], object], seconds: float) -> None:
    """Call it again and again until the handler raises."""
    end = time.monotonic() + 10.0 * SLOWNESS
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while time.monotonic() < end:
            call()
    except _StopError:
        return
    raise AssertionError("no signal came")


def _done_by_another(call: Callable[[], object]) -> bool:
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(10.0 * SLOWNESS)
    return bool(done)


def test_another_thread_still_reaches_the_coordinator(connect: Connect) -> None:
    """Interrupts questions of the main thread to the coordinator; then another thread asks one."""
    client = connect()
    with _handler() as draws:
        for _ in range(_INTERRUPTS):
            _interrupt(client.servers, 1e-5 + draws.random() * 0.0015)
        assert _done_by_another(client.servers)


def test_conditions_and_events_are_left_free() -> None:
    """Interrupts entering a condition, and setting an event: no lock stays taken."""
    shared, told = condition(), event()

    def enter() -> bool:
        with shared:
            return True

    with _handler() as draws:
        for call in (enter, told.set):
            for _ in range(_INTERRUPTS):
                _interrupt(call, 2e-6 + draws.random() * 5e-5)
        assert _done_by_another(enter)
        assert _done_by_another(told.wait)
