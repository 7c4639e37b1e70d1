"""Threads of the daemon that are started when they are first needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

# Starts a thread, as `begin` does.
Begin = Callable[[Callable[[], None], str], threading.Thread | None]

_log = logging.getLogger("memserver")


def begin(run: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a thread and return it; None, with a log line, if no thread is available now: the caller tries again."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _log.error("the thread %s: %s; it is tried again", name, error)
        return None
    return thread
