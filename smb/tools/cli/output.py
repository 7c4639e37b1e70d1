"""The output of commands: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console  # a tenth of the time that a command takes to start, daemons' too
    from rich.table import Table

# Wider than any table: into a file or a pipe, nothing is folded or cut.
_WIDTH_WITHOUT_TERMINAL = 4096
_PADDING = re.compile(" +$", re.MULTILINE)


def console(*, stderr: bool = False) -> Console:
    """Return a console that folds long cells on a terminal, and leaves them whole and unpadded elsewhere."""
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if out.is_terminal:
        return out
    file = cast(IO[str], _Unpadded(sys.stderr if stderr else sys.stdout))
    return Console(file=file, highlight=False, emoji=False, markup=False, width=_WIDTH_WITHOUT_TERMINAL)


class _Unpadded:
    """A file without the spaces by which rich fills lines up to a table's width; it writes whole lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def print_json(value: Any) -> None:
    """Write value as one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_error(message: object) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"smb: {' '.join(str(message).split())}\n")


def counted(number: int, noun: str) -> str:
    """Return "1 buffer" or "2 buffers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these columns; those named in right are numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def format_duration(seconds: float) -> str:
    """Return a time for people: "3.2 us", "41 ms", "2 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:  # what rounds to 1000 belongs to the next unit
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_ago(unix_seconds: float) -> str:
    """Return how long ago a time was; "never" for 0."""
    return "never" if unix_seconds <= 0 else f"{format_duration(max(0.0, time.time() - unix_seconds))} ago"
