"""Conditions and events that the main thread shares with our other threads.

A signal's handler runs on the main thread, between two steps of Python's code, and may raise (Ctrl-C). `with` enters a
threading.Condition by a method in Python: if the exception is raised inside that method, the lock stays taken, and all
other threads wait forever. threading.Event contains such a condition. The classes here are entered by one call of C,
as a plain Lock is.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, cast

_RLock: Any = type(threading.RLock())


class _Condition(_RLock):  # type: ignore[misc]
    """A threading.Condition that is its own lock."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[Any] = deque()

    wait = threading.Condition.wait
    wait_for = threading.Condition.wait_for
    notify = threading.Condition.notify
    notify_all = threading.Condition.notify_all


def condition() -> threading.Condition:
    return cast(threading.Condition, _Condition())


def event() -> threading.Event:
    made: Any = threading.Event()
    made._cond = condition()
    return cast(threading.Event, made)
