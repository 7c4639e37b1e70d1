"""Threads of the daemon that begin with the first need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

# Begins a thread, as `begin` does.
Begin = Callable[[Callable[[], None], str], threading.Thread | None]

_log = logging.getLogger("memserver")


def begin(run: Callable[[], None], name: str) -> threading.Thread | None:
    """Return a thread that has begun; None, and it is logged, where none can be had now: who needs it asks again."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        _log.error("the thread %s: %s; it is tried again", name, error)
        return None
    return thread
