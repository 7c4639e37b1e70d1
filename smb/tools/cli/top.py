"""`smb top`: the coordinator's dashboard in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from smb.errors import Error
from smb.tools.cli.connection import coordinator_at
from smb.tools.cli.options import Coordinator, Json
from smb.tools.cli.output import console, print_json
from smb.tools.cli.signals import interrupted_once

_PATIENCE_S = 5.0
_QUIT = b"q"


def top(
    coordinator: Coordinator = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, as is done in a pipe.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600, metavar="SECONDS", help="How often to look.")
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Watch the cluster: trainings, servers, buffers, clients, locks.

    Shows their load and what is wrong, until q or Ctrl-C. The dashboard, at / of the coordinator's --metrics address,
    shows the same. Servers report their load every 2 s. With credentials this takes a certificate that is not limited
    to namespaces, for example an operator's.

    Example: smb top --interval 5
    """
    from smb.tools.cli.top_view import render

    with coordinator_at(coordinator) as asked:

        def look() -> dict[str, Any]:
            shown: dict[str, Any] = json.loads(asked.overview(_PATIENCE_S))
            return shown

        if as_json:
            print_json(look())
            return
        out = console()
        if once or not out.is_terminal:
            for part in render(look(), out.encoding, width=out.width if out.is_terminal else 0):
                out.print(part)
            return
        _watch(look, interval)


def _watch(look: Callable[[], dict[str, Any]], interval_s: float) -> None:
    """Draw the result of `look` until the user leaves. A failed request is shown, and repeated."""
    from rich.console import Group
    from rich.live import Live

    from smb.tools.cli.top_view import render

    out = console()
    shown = look()  # if there is no coordinator at all, its error ends the command
    lost = ""
    with interrupted_once(), contextlib.suppress(KeyboardInterrupt), _keys() as keys:

        def screen() -> Group:
            return Group(*render(shown, out.encoding, out.height, lost, out.width))

        with Live(screen(), console=out, screen=True, auto_refresh=False) as live, _pending(look, interval_s) as news:
            while True:
                ready, _, _ = select.select([news.fileno(), *keys], [], [])
                if news.fileno() in ready:
                    shown, lost = news.take(shown)
                    live.update(screen(), refresh=True)
                elif os.read(keys[0], 1) in (_QUIT, b""):
                    return


class _News:
    """A result that one thread finds and another waits for: its descriptor is readable once there is a new result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Any] | None = None
        self._error = ""
        self._out, self._in = os.pipe()

    def fileno(self) -> int:
        return self._out

    def put(self, found: dict[str, Any] | None, error: str) -> None:
        with self._lock:
            self._found, self._error = found, error
            os.write(self._in, b"!")

    def take(self, before: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the result to show from now on, and the reason why it is not new."""
        with self._lock:
            os.read(self._out, 4096)
            return self._found or before, self._error

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


@contextlib.contextmanager
def _pending(look: Callable[[], dict[str, Any]], interval_s: float) -> Iterator[_News]:
    """Poll in a thread, so that a coordinator that does not answer keeps nobody from leaving."""
    news, leaving = _News(), threading.Event()

    def ask() -> None:
        while not leaving.wait(interval_s):
            try:
                found, error = look(), ""
            except Error as failure:
                found, error = None, str(failure)
            if not leaving.is_set():
                news.put(found, error)

    thread = threading.Thread(target=ask, name="top", daemon=True)
    thread.start()
    try:
        yield news
    finally:
        leaving.set()
        thread.join(0.2)  # the thread may be waiting for an answer; it ends with the process, and so does the pipe
        if not thread.is_alive():
            news.close()


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield a list with the descriptor of unechoed single keys; an empty list if standard input is not a terminal."""
    if not sys.stdin.isatty():
        yield []
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield [descriptor]
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
