"""The demo's output while it runs: a live table on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from smb.tools.demo.fleet import DemoWorker
    from smb.tools.demo.run import DemoView

LINE_INTERVAL_SECONDS = 1.0
REFRESH_INTERVAL_SECONDS = 0.2
_STATUS_STYLES = {"working": "green", "done": "bold green", "killed": "bold red", "failed": "bold red"}


class Display(Protocol):
    """Shows a view of the running demo."""

    def __call__(self, view: DemoView) -> None:
        """Show the view. Called many times a second, so most calls do nothing."""


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """Yield the display that suits the console, and remove it from the screen at the end."""
    if not console.is_terminal:
        yield _PrintedLines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Table(live)


class _PrintedLines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._shown_at = 0.0
        self._events = 0

    def __call__(self, view: DemoView) -> None:
        if not self._phase:
            self._print(_page(view))
        if view.phase != self._phase:
            self._phase, self._events, self._shown_at = view.phase, 0, time.monotonic()
            self._print(f"{view.phase} ...")
        for event in view.events[self._events :]:
            self._print(f"{event.seconds:6.1f} s  {event.worker} {event.what}")
        self._events = len(view.events)
        if view.curve and time.monotonic() - self._shown_at >= LINE_INTERVAL_SECONDS:
            self._shown_at = time.monotonic()
            self._print(_line(view))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def _page(view: DemoView) -> str:
    return f"the cluster's page, while the demo runs: {view.page}"


def _line(view: DemoView) -> str:
    parts = [f"{view.seconds:6.1f} s  {view.share:4.0%}", f"test accuracy {view.curve[-1].accuracy:.3f}"]
    if view.generation:
        parts.append(f"by the reader with generation {view.generation}")
    working = [worker for worker in view.workers if worker.status == "working"]
    if working:
        parts.append(f"{sum(worker.rate for worker in working):,.0f} samples/s by {len(working)} working")
    return ", ".join(parts)


class _Table:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._shown_at = 0.0

    def __call__(self, view: DemoView) -> None:
        if not self._shown_at:
            self._live.console.print(_page(view))  # stays above the table, and after it
        if time.monotonic() - self._shown_at < REFRESH_INTERVAL_SECONDS:
            return
        self._shown_at = time.monotonic()
        self._live.update(_render(view), refresh=True)


def _render(view: DemoView) -> Group:
    accuracy = f"{view.curve[-1].accuracy:.3f}" if view.curve else "-"
    head = Text.assemble(
        (f"{view.phase}", "bold"), f"   {view.seconds:.1f} s   test accuracy ", (accuracy, "bold cyan")
    )
    if view.generation:
        head.append(f"   generation {view.generation}")
    news = Text("   ".join(f"{event.seconds:.1f} s {event.worker} {event.what}" for event in view.events[-4:]), "dim")
    return Group(head, _bar(view.share), "", _worker_table(view.workers), "", news)


def _bar(share: float) -> Table:
    # In a table, because a bare ProgressBar does not end its line.
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=1.0, completed=share, width=60), f"{share:4.0%} of the samples")
    return grid


def _worker_table(workers: Sequence[DemoWorker]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("process")
    table.add_column("status", min_width=8)
    for name, width in (("steps", 7), ("loss", 7), ("samples/s", 9)):
        table.add_column(name, justify="right", min_width=width)
    for worker in workers:
        table.add_row(*_worker_row(worker))
    return table


def _worker_row(worker: DemoWorker) -> tuple[Text, ...]:
    loss = worker.report.get("loss")
    return (
        Text(worker.name),
        Text(worker.status, _STATUS_STYLES.get(worker.status, "yellow")),
        Text(f"{worker.report.get('steps', 0):,}"),
        Text("-" if loss is None else f"{loss:.4f}"),
        Text(f"{worker.rate:,.0f}" if worker.status == "working" else "-"),
    )
