"""A signal handler's call in the middle of another call once changed that one's request: additions landed elsewhere."""

from __future__ import annotations

import signal
import time
from types import FrameType

from tests.conftest import Connect


def test_a_signal_handler_may_call(connect: Connect) -> None:
    """Every addition of the loop and of the handler lands where it was meant, and every old value is right."""
    client = connect()
    a, b = client.create("a", (4,), "int64"), client.create("b", (4,), "int64")
    assert (a.fetch_add(0, 0), b.fetch_add(1, 0)) == (0, 0)  # the way is found before: that has locks
    handled = 0

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal handled
        b.fetch_add(1, 10**6)
        handled += 1
        signal.setitimer(signal.ITIMER_REAL, 0.0003)  # armed again only now: on a slow machine it would never end

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        deadline, calls = time.monotonic() + 30, 0
        while handled < 1000 and time.monotonic() < deadline:
            assert a.fetch_add(0, 1) == calls
            calls += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled >= 100
    assert a.read().tolist() == [calls, 0, 0, 0]
    assert b.read().tolist() == [0, handled * 10**6, 0, 0]
