"""Which signals end a daemon, or a command in the foreground, in order."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP, by which a terminal that is closed ends what it started. Under nohup SIGHUP
    is ignored, and stays so.
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ends, signal.SIGHUP)
