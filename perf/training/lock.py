"""Where several measure on one machine: one at a time, by a file's lock (flock)."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

_file: Path | None = None


def hold_during_measurements(file: str | None) -> None:
    """Have `measuring` hold this file's exclusive lock; None: nothing is held."""
    global _file
    _file = Path(file) if file is not None else None


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Measure inside: keep it short, others may wait. Blocks until nobody else measures."""
    if _file is None:
        yield
        return
    with _file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
