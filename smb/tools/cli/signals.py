"""Ends a command in the foreground in order, by Ctrl-C, by SIGTERM, or with its terminal (SIGHUP)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from smb.daemon.stop_signals import stop_signals


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread on the first stop signal inside the context, and ignore later ones.

    A second Ctrl-C while daemons are being stopped would leave some of them behind; the stop itself has a time limit.
    """
    ends = stop_signals()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        for each in ends:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in ends}
    try:
        yield
    finally:
        for each, disposition in before.items():
            signal.signal(each, disposition)
