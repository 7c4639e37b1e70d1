"""Objects that belong to one process's connections."""

from __future__ import annotations

from typing import NoReturn


def refuse_pickle(said: str, instead: str) -> NoReturn:
    """Raise the TypeError of an object that cannot be pickled or copied. `instead` says what to do."""
    raise TypeError(f"{said} belongs to this process and cannot be pickled or copied; in the other process {instead}")
