"""Where several measure on one machine: one at a time, by a file's lock (flock)."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HOLD_S = 85.0  # once it is ours, measurements follow one another for so long before others have their turn

_file: Path | None = None
_held: IO[str] | None = None
_since = 0.0


def hold_during_measurements(file: str | None) -> None:
    """Have `measuring` hold this file's exclusive lock; None: nothing is held."""
    global _file
    _file = Path(file) if file is not None else None


@contextlib.contextmanager
def measuring(seconds: float | None = None) -> Iterator[None]:
    """Measure inside, for about so many seconds, and keep the lock for what follows. Blocks until nobody else measures.

    Without `seconds` others have their turn as soon as it is left.
    """
    global _held, _since
    if _file is not None and _held is not None and time.monotonic() - _since + (seconds or 0.0) > HOLD_S:
        release()
    if _file is not None and _held is None:
        _held = _file.open("a")
        fcntl.flock(_held, fcntl.LOCK_EX)
        _since = time.monotonic()
    try:
        yield
    finally:
        if seconds is None:
            release()


def release() -> None:
    """Let others measure."""
    global _held
    if _held is not None:
        _held.close()
        _held = None
