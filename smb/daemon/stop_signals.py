"""The signals that end a daemon, or a command in the foreground, in order."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP, with which a closed terminal ends its programs. SIGHUP is left out where it
    is ignored, as under nohup.
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*ends, signal.SIGHUP)
