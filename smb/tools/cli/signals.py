"""How a command in the foreground ends: in order, whether by Ctrl-C or by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread on the first SIGINT or SIGTERM of the context, and ignore the rest.

    A second Ctrl-C in the middle of stopping daemons would leave some of them behind; the stop itself has a time limit.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, disposition in before.items():
            signal.signal(each, disposition)
