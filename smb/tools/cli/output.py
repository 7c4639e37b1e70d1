"""The output of commands: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from smb.config.printable import printable
from smb.errors import Error

if TYPE_CHECKING:
    from rich.console import Console  # importing it takes a tenth of a command's start, and of a daemon's
    from rich.table import Table

# Wider than any table, so that nothing is wrapped or cut in a file or a pipe.
_WIDTH_WITHOUT_TERMINAL = 4096
_PADDING = re.compile(" +$", re.MULTILINE)


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps long cells on a terminal, and leaves them whole and unpadded elsewhere."""
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if out.is_terminal:
        return out
    file = cast(IO[str], _Unpadded(sys.stderr if stderr else sys.stdout))
    return Console(file=file, highlight=False, emoji=False, markup=False, width=_WIDTH_WITHOUT_TERMINAL)


class _Unpadded:
    """A file without the spaces with which rich pads lines to a table's width. rich writes whole lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def print_json(value: Any) -> None:
    """Write a value as one JSON document to stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_error(message: object) -> None:
    """Write one line to stderr, unless that is closed, as a terminal may be by now. Errors may hold others' names."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"smb: {printable(' '.join(str(message).split()))}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Raise Error if standard output cannot be written, in the block or in the final flush.

    Click handles a pipe whose reader has gone away. Streams that were closed from the start are replaced; otherwise the
    next opened file would become standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    out = sys.stdout
    sys.stdout = cast(TextIO, _CheckedOutput(out))
    try:
        try:
            yield
        finally:
            if out is not None:
                sys.stdout.flush()
    finally:
        sys.stdout = out


class _CheckedOutput:
    """A stream whose failure becomes one error line. The rest of its buffer is discarded.

    Later calls fail again, because Click writes to find out the kind of stream, and ignores the error of that.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._failure: Error | None = None

    def write(self, text: str) -> int:
        if self._file is None:
            raise Error("cannot write the output: standard output is closed")
        if self._failure is not None:
            raise self._failure
        try:
            return self._file.write(text)
        except UnicodeEncodeError as error:
            letters = " ".join(f"U+{ord(each):04X}" for each in dict.fromkeys(error.object[error.start : error.end]))
            raise Error(
                f"cannot write the output: {error.encoding} cannot encode {letters}; set PYTHONIOENCODING=utf-8, or a "
                f"locale with UTF-8"
            ) from None
        except OSError as error:
            raise self._failed(error) from None

    def flush(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> Exception:
        if error.errno == errno.EPIPE:
            return error
        assert self._file is not None
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())  # the interpreter flushes once more at exit
        os.close(nowhere)
        self._failure = Error(f"cannot write the output: {error.strerror}")
        return self._failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def counted(number: int, noun: str) -> str:
    """Return "1 buffer" or "2 buffers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these columns; those in `right` are numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def format_duration(seconds: float) -> str:
    """Return a time as text: "3.2 us", "41 ms", "2 min"."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:  # a value that rounds to 1000 belongs to the next unit
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_ago(unix_seconds: float) -> str:
    """Return how long ago a time was, as text; "never" for 0."""
    return "never" if unix_seconds <= 0 else f"{format_duration(max(0.0, time.time() - unix_seconds))} ago"
